package faultfs

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// A node is a file or directory, and what a power cut would leave of it.
type node struct {
	parent *node
	name   string // for the root, the path of the mounted directory
	isDir  bool
	names  map[string]*node // entries of a directory
	synced map[string]*node // entries of a directory at its last sync
	text   []byte           // content of a file at its last sync
}

// A Loss says what a power cut destroys. Synced content always stays.
type Loss struct {
	Names bool // new, changed and removed names in directories since their last sync
	Text  bool // content written to files since their last sync
}

// PowerCut writes into a directory what a power cut would leave of the mounted directory.
func (m *Mount) PowerCut(into string, loss Loss) error {
	m.disk.mu.Lock()
	defer m.disk.mu.Unlock()
	return m.disk.nodes[1].writeLeft(into, m.disk.base(), loss)
}

// load reads a directory. Its content counts as synced.
func load(dir string) (*node, error) {
	root := &node{name: dir, isDir: true, names: map[string]*node{}}
	err := filepath.WalkDir(dir, func(at string, entry fs.DirEntry, err error) error {
		if err != nil || at == dir {
			return err
		}
		root.find(strings.TrimPrefix(filepath.Dir(at), dir)).add(entry.Name(), entry.IsDir())
		return nil
	})
	if err == nil {
		err = root.keepAll(dir)
	}
	return root, err
}

func (n *node) find(below string) *node {
	for _, name := range strings.FieldsFunc(below, func(r rune) bool { return r == '/' }) {
		n = n.names[name]
	}
	return n
}

func (n *node) keepAll(base string) error {
	if err := n.keep(base); err != nil {
		return err
	}
	for _, child := range n.names {
		if err := child.keepAll(base); err != nil {
			return err
		}
	}
	return nil
}

// path returns the node's path below the root.
func (n *node) path() string {
	if n.parent == nil {
		return ""
	}
	return path.Join(n.parent.path(), n.name)
}

func (n *node) add(name string, isDir bool) {
	if was := n.names[name]; was != nil && !isDir { // Create of an existing file only opens it
		return
	}
	child := &node{parent: n, name: name, isDir: isDir}
	if isDir {
		child.names = map[string]*node{}
	}
	n.names[name] = child
}

func (n *node) move(name string, into *node, newName string) {
	child := n.names[name]
	delete(n.names, name)
	child.parent, child.name = into, newName
	into.names[newName] = child
}

// keep records the entries or the content of a node that was just synced.
func (n *node) keep(base string) (err error) {
	if n.isDir {
		n.synced = maps.Clone(n.names)
		return nil
	}
	if n.parent.names[n.name] != n { // the file was removed while it was open
		return nil
	}
	n.text, err = os.ReadFile(filepath.Join(base, n.path()))
	return err
}

// writeLeft writes what a power cut would leave of the node.
func (n *node) writeLeft(at, base string, loss Loss) error {
	if !n.isDir {
		text := n.text
		if !loss.Text && n.parent.names[n.name] == n {
			var err error
			if text, err = os.ReadFile(filepath.Join(base, n.path())); err != nil {
				return err
			}
		}
		return os.WriteFile(at, text, 0o644)
	}
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	names := n.names
	if loss.Names {
		names = n.synced
	}
	for name, child := range names {
		if err := child.writeLeft(filepath.Join(at, name), base, loss); err != nil {
			return err
		}
	}
	return nil
}
