package studyfile

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"vllmtuner/tuner/space"
)

const (
	// maxBytes is the longest study file; a usual one has about a hundred lines. For some texts, the YAML library needs
	// time that grows with the square of the length: one second at this length.
	maxBytes = 64 << 10
	// maxRead is the largest number of bytes to read. A file between maxBytes and maxRead is reported as too long; a
	// larger one is probably no study file, so it is not read.
	maxRead = 1 << 20
	// maxNesting is the largest number of open brackets. A study file needs four. The YAML library takes half a minute
	// for 65,000 open brackets.
	maxNesting = 64
)

// A decoder reads the nodes of a file and collects problems.
type decoder struct {
	problems
	nodes map[string]ast.Node // values by path, such as "slo.ttft_p99"
	keys  map[string]ast.Node // keys of these values, by the same path
}

// document parses the text and returns the root of its only document. If that fails, it adds a problem and returns nil.
func (d *decoder) document(text []byte) (root ast.Node) {
	if what := unreadable(text); what != "" {
		d.add(1, 1, what)
		return nil
	}
	// The library panics for some bytes, and users should not see the stack.
	defer func() {
		if r := recover(); r != nil {
			d.add(1, 1, fmt.Sprintf("this is not YAML (%v); compare it with the file that `tuner init` writes", r))
			root = nil
		}
	}()
	file, err := parser.ParseBytes(text, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		d.syntax(err)
		return nil
	}
	bodies := slices.DeleteFunc(file.Docs, func(doc *ast.DocumentNode) bool { return doc.Body == nil })
	switch {
	case len(bodies) == 0:
		d.add(1, 1, "the file is empty; `tuner init` writes one to start from")
		return nil
	case len(bodies) > 1:
		d.fail(bodies[1].Body, "a study file is one document; remove the second --- and all after it")
		return nil
	}
	return bodies[0].Body
}

// unreadable says why the YAML library must not parse a text; "" if it may.
func unreadable(text []byte) string {
	switch {
	case len(text) > maxBytes:
		return fmt.Sprintf("the file is longer than %d KiB; a study file has about a hundred lines", maxBytes>>10)
	case !utf8.Valid(text):
		return "the file is not UTF-8; save it as UTF-8"
	case bytes.IndexByte(text, 0) >= 0:
		return "the file is binary; a study file is YAML"
	}
	open, deepest := 0, 0
	for _, c := range text {
		switch c {
		case '[', '{':
			open++
		case ']', '}':
			open--
		}
		deepest = max(deepest, open)
	}
	if deepest > maxNesting {
		return fmt.Sprintf("more than %d brackets are open at once; close them", maxNesting)
	}
	return ""
}

func (d *decoder) syntax(err error) {
	message, at := err.Error(), &token.Position{Line: 1, Column: 1}
	if where, ok := errors.AsType[yaml.Error](err); ok {
		message = where.GetMessage()
		if t := where.GetToken(); t != nil && t.Position != nil {
			at = t.Position
		}
	}
	remedy := "check the indentation, the space after each colon, and the quotes around texts with a colon"
	if strings.ContainsAny(message, "\t") {
		message, remedy = "a tab stands where a word should begin", "indent with spaces"
	}
	d.add(at.Line, at.Column, "this is not YAML: "+message+"; "+remedy)
}

// fail adds a problem at a node.
func (d *decoder) fail(n ast.Node, format string, args ...any) {
	line, column := position(n)
	d.add(line, column, fmt.Sprintf(format, args...))
}

// failHidden adds a problem at a node without the line of the file, because the line holds a secret.
func (d *decoder) failHidden(n ast.Node, format string, args ...any) {
	line, column := position(n)
	d.found = append(d.found, Problem{Line: max(line, 1), Column: max(column, 1), What: printable(fmt.Sprintf(format, args...))})
}

// failAt adds a problem at the value of a path. If the file does not have that path, it uses the nearest parent.
func (d *decoder) failAt(path, format string, args ...any) {
	for {
		if n := d.nodes[path]; n != nil {
			d.fail(n, format, args...)
			return
		}
		if path == "" {
			d.add(1, 1, fmt.Sprintf(format, args...))
			return
		}
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
}

// failAtKey adds a problem at the key of a path.
func (d *decoder) failAtKey(path, format string, args ...any) {
	if n := d.keys[path]; n != nil {
		d.fail(n, format, args...)
		return
	}
	d.failAt(path, format, args...)
}

// position returns the line and column where a node begins.
func position(n ast.Node) (line, column int) {
	if m, ok := n.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		n = m.Values[0].Key
	} else if m, ok := n.(*ast.MappingValueNode); ok {
		n = m.Key
	}
	if n == nil {
		return 1, 1
	}
	t := n.GetToken()
	if t == nil || t.Position == nil {
		return 1, 1
	}
	return t.Position.Line, t.Position.Column
}

// An entry is one key of a mapping, with its value.
type entry struct {
	key   string
	at    ast.Node // node of the key
	value ast.Node
}

// entries returns the entries of a mapping, and stores their nodes by path. If a key is given twice, entries adds a
// problem, and only the first entry with the key counts.
func (d *decoder) entries(path string, n ast.Node) []entry {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	default:
		d.fail(n, "%s is %s; write keys with values below it", pathName(path), kindOf(n))
		return nil
	}
	var all []entry
	for _, v := range values {
		key, ok := scalarText(v.Key)
		switch {
		case !ok:
			d.fail(v.Key, "%s has a key that is not a plain word; write a word", pathName(path))
			continue
		case slices.ContainsFunc(all, func(e entry) bool { return e.key == key }):
			d.fail(v.Key, "%q is given twice; remove one", key)
			continue
		}
		all = append(all, entry{key, v.Key, v.Value})
		d.nodes[keyPath(path, key)], d.keys[keyPath(path, key)] = v.Value, v.Key
	}
	return all
}

// A reader reads the value at a path, and adds problems with it.
type reader func(path string, n ast.Node)

// mapping returns a reader of a mapping. A key without a reader is a problem.
func (d *decoder) mapping(readers table) reader {
	return func(path string, n ast.Node) {
		known := slices.Sorted(maps.Keys(readers))
		for _, e := range d.entries(path, n) {
			if read := readers[e.key]; read != nil {
				read(keyPath(path, e.key), e.value)
				continue
			}
			remedy := space.DidYouMean(e.key, known)
			if path == "" && space.Nearest(e.key, known) == "" {
				remedy = "`tuner init` writes a file with every key"
			}
			d.fail(e.at, "unknown key %q%s; %s", e.key, under(path), remedy)
		}
	}
}

// list returns the values of a list, and stores their nodes by path.
func (d *decoder) list(path string, n ast.Node) []ast.Node {
	s, ok := n.(*ast.SequenceNode)
	if !ok {
		d.fail(n, "%s is %s; write a list such as [a, b]", pathName(path), kindOf(n))
		return nil
	}
	for i, v := range s.Values {
		d.nodes[itemPath(path, i)] = v
	}
	return s.Values
}

// scalar returns the text of one value as it is in the file.
func (d *decoder) scalar(path string, n ast.Node) (string, bool) {
	text, ok := scalarText(n)
	if !ok {
		d.fail(n, "%s is %s; write one value", pathName(path), kindOf(n))
	}
	return text, ok
}

func scalarText(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	}
	return "", false
}

// kindOf returns a name for the form of a node, for messages.
func kindOf(n ast.Node) string {
	switch n.(type) {
	case nil, *ast.NullNode:
		return "empty"
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.AnchorNode, *ast.AliasNode, *ast.MergeKeyNode, *ast.TagNode:
		return "an anchor, alias or tag, which a study file cannot have"
	}
	return "a single value"
}

func pathName(path string) string {
	if path == "" {
		return "the file"
	}
	return path
}

func under(path string) string {
	if path == "" {
		return ""
	}
	return " under " + path
}

func keyPath(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func itemPath(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
