package fence

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// A world simulates a file server and its clients. Each client is one process on a host of its own. The world does one
// call at a time. The test chooses the next call, so that it can try all orders.
type world struct {
	files   map[string]content
	actors  []*actor
	pending []effect // changes that clients sent before they crashed, and that the server has not done yet
	crashes int      // number of crashes that may still happen
	loses   bool     // the server loses data that it reported as synced
	coarse  bool     // a database is read or written in one call, not page by page
	log     []string // what has happened so far, as text for people
	acks    []ack
	wrong   string // the first violation of the protocol; "" while there is none
}

// A content is a file as a list of pages. Pages are read and written one at a time.
type content []string

// An effect is a change of the files.
type effect struct {
	what string
	do   func() error // makes the change, and returns the error that the sender gets
}

// An actor is one process that takes the study over and writes it.
type actor struct {
	w       *world
	name    string
	calls   chan call
	waiting *call
	gone    bool // the process has returned or crashed
	crashed bool
	heard   [sha256.Size]byte // digest of all answers so far; nothing else decides what the actor does next

	listed  map[string][]string // directory listings in this client's cache
	missing map[string]bool     // files that do not exist according to this client's cache
	empty   string              // the file that this actor last found empty
	prunes  bool                // the actor removes slots that a killed owner left

	staleCache  bool // a fault: creating a file whose name begins with look- does not refresh the cache of an epoch's directory
	ignoresExcl bool // a fault: Create succeeds for a file that exists
}

// A call is an actor's next request. It can be answered in one or two ways.
type call struct {
	effect
	ways  int // number of ways to answer; way 0 asks the server, way 1 answers from the cache
	do    func(way int) (answer string)
	fails func() // called instead of do when the actor crashes
	lasts bool   // the server may still do the call after the actor's crash
	done  chan struct{}
}

var errCrashed = errors.New("crashed")

func newWorld(names ...string) *world {
	w := &world{files: map[string]content{}}
	for _, name := range names {
		w.actors = append(w.actors, &actor{
			w: w, name: name, calls: make(chan call), listed: map[string][]string{}, missing: map[string]bool{},
		})
	}
	return w
}

// ask waits until it is this actor's turn and the call is done.
func (a *actor) ask(c call) {
	if a.crashed {
		c.fails()
		return
	}
	c.done = make(chan struct{})
	c.ways = max(c.ways, 1)
	a.calls <- c
	<-c.done
}

// change asks the server to change its files.
func (a *actor) change(what string, do func() error) (err error) {
	a.ask(call{
		effect: effect{a.name + " " + what, do}, lasts: true,
		do:    func(int) string { err = do(); return fmt.Sprint(err) },
		fails: func() { err = errCrashed },
	})
	return err
}

// Create and the methods below implement Disk.
func (a *actor) Create(name string, text []byte) error {
	if strings.HasPrefix(path.Base(name), "look-") { // the file is made only to refresh the cache
		if !a.staleCache || strings.HasPrefix(name, SlotDir) {
			a.refreshed(name)
		}
		return nil
	}
	err := a.change("takes "+name, func() error {
		if _, ok := a.w.files[name]; ok && !a.ignoresExcl {
			return fs.ErrExist
		}
		a.w.files[name] = content{""}
		a.refreshed(name)
		return nil
	})
	if err != nil {
		return err
	}
	var s Slot
	if json.Unmarshal(text, &s) == nil {
		s.Time = s.Owner.Since // real times would make each state unique, so that no two orders could lead to the same state
		text, _ = json.Marshal(s)
	}
	return a.change("writes "+name+" "+string(s.Kind), func() error {
		if _, ok := a.w.files[name]; ok {
			a.w.files[name] = content{string(text)}
		}
		return nil
	})
}

// refreshed removes a file's directory from this client's cache.
func (a *actor) refreshed(name string) {
	dir := path.Dir(name)
	delete(a.listed, dir)
	maps.DeleteFunc(a.missing, func(n string, _ bool) bool { return path.Dir(n) == dir })
}

func (a *actor) Open(name string) (r io.ReadCloser, err error) {
	if a.empty == name && a.w.isEmpty(name) { // the file is still empty, so this read needs no call: the actor learns nothing new
		return &pages{a: a, name: name, next: 1}, nil
	}
	ways := 1
	if a.missing[name] {
		ways = 2
	}
	a.ask(call{
		effect: effect{what: a.name + " opens " + name}, ways: ways,
		do: func(way int) string {
			_, ok := a.w.files[name]
			if !ok || way == 1 {
				a.missing[name] = true
				err = fs.ErrNotExist
			} else {
				delete(a.missing, name)
				r = &pages{a: a, name: name}
			}
			return fmt.Sprint(err)
		},
		fails: func() { err = errCrashed },
	})
	return r, err
}

// pages is a reader that reads a file one page at a time. The method Lock returns a zero pages value, because it needs
// a Closer that does nothing.
type pages struct {
	a    *actor
	name string
	next int
	rest string
}

func (p *pages) Read(into []byte) (n int, err error) {
	if p.rest == "" {
		if file := p.a.w.files[p.name]; p.next > 0 && p.next >= len(file) {
			return 0, io.EOF
		}
		p.a.ask(call{
			effect: effect{what: fmt.Sprintf("%s reads %s[%d]", p.a.name, p.name, p.next)},
			do: func(int) string {
				if file := p.a.w.files[p.name]; p.next < len(file) {
					p.rest = file[p.next]
					if p.a.w.coarse {
						p.rest, p.next = strings.Join(file, ""), len(file)
					}
					if p.rest == "" {
						p.a.empty = p.name
					}
				} else {
					err = io.EOF
				}
				return p.rest
			},
			fails: func() { err = errCrashed },
		})
		p.next++
		if err != nil || p.rest == "" {
			return 0, cmp.Or(err, io.EOF)
		}
	}
	n = copy(into, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

func (w *world) isEmpty(name string) bool {
	file, ok := w.files[name]
	return ok && strings.Join(file, "") == ""
}

func (p *pages) Close() error { return nil }

// Write needs no call: no other actor reads the files that it writes, so the moment does not matter.
func (a *actor) Write(name string, r io.Reader) error {
	text, err := io.ReadAll(r)
	if err != nil || a.crashed {
		return cmp.Or(err, errCrashed)
	}
	a.w.files[name] = splitPages(string(text))
	return nil
}

func (a *actor) List(dir string) (names []string, err error) {
	known, ok := a.listed[dir]
	ways := 1
	if ok && !slices.Equal(known, a.w.names(dir)) {
		ways = 2
	}
	a.ask(call{
		effect: effect{what: a.name + " lists " + dir}, ways: ways,
		do: func(way int) string {
			if way == 0 {
				a.listed[dir] = a.w.names(dir)
			}
			names = a.listed[dir]
			return fmt.Sprint(names)
		},
		fails: func() { err = errCrashed },
	})
	return names, err
}

func (w *world) names(dir string) []string {
	var names []string
	for name := range w.files {
		if rest, ok := strings.CutPrefix(name, dir+"/"); ok || dir == "." {
			if dir == "." {
				rest = name
			}
			first, _, _ := strings.Cut(rest, "/")
			names = append(names, first)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (a *actor) Remove(name string) error {
	if strings.Contains(name, "look-") || !strings.HasPrefix(name, SlotDir) {
		return nil
	}
	return a.change("removes "+name, func() error {
		delete(a.w.files, name)
		a.refreshed(name)
		return nil
	})
}

func (a *actor) Make(string) error              { return nil }
func (a *actor) Sync(string) error              { return nil }
func (a *actor) Lock(string) (io.Closer, error) { return &pages{}, nil }
func (a *actor) Locked(string) (bool, error)    { return false, nil }
func (a *actor) Locks() Locks                   { return SharedLocks }

// The actors' study has a database of two pages. Each page has all values stored so far. The journal begins with one of
// these words.
const (
	hot  = "hot:" // the old pages follow, and a rollback restores them
	cold = "cold" // there is nothing to roll back
)

func splitPages(text string) content {
	if first, second, ok := strings.Cut(text, "|"); ok {
		return content{first + "|", second}
	}
	return content{text}
}

// store commits a value as SQLite does.
func (a *actor) store(dir, value string) error {
	db, journal := path.Join(dir, Database), path.Join(dir, Journal)
	was := strings.Join(a.w.files[db], "")
	before, second, _ := strings.Cut(was, "|")
	if before != second {
		a.w.fail("%s writes into a study whose pages differ: %q and %q", a.name, before, second)
	}
	now := strings.TrimPrefix(before+" "+value, " ")
	write := func(what, name string, do func(content) content) error {
		return a.change(what, func() error {
			a.w.files[name] = do(slices.Clone(a.w.files[name]))
			return nil
		})
	}
	two := func(c content) content {
		for len(c) < 2 {
			c = append(c, "")
		}
		return c
	}
	if a.w.coarse {
		return write("stores "+value+" in "+dir, db, func(content) content { return content{now + "|", now} })
	}
	return errors.Join(
		write("keeps the old pages of "+db, journal, func(content) content { return content{hot + before} }),
		write("writes the first page of "+db, db, func(c content) content { c = two(c); c[0] = now + "|"; return c }),
		write("writes the second page of "+db, db, func(c content) content { c = two(c); c[1] = now; return c }),
		write("ends its journal in "+dir, journal, func(content) content { return content{cold + " after " + now} }),
	)
}

// recoverCopy rolls a copy back as SQLite does, and counts its values. No other actor sees the copy.
func (a *actor) recoverCopy(dir string, _ int64) (commits int64, err error) {
	db, journal := path.Join(dir, Database), path.Join(dir, Journal)
	if before, ok := strings.CutPrefix(strings.Join(a.w.files[journal], ""), hot); ok {
		a.w.files[db] = content{before + "|", before}
		a.w.files[journal] = content{cold}
	}
	first, second, _ := strings.Cut(strings.Join(a.w.files[db], ""), "|")
	if first != second {
		a.w.fail("%s recovers a study whose pages differ: %q and %q", a.name, first, second)
	}
	return int64(len(strings.Fields(first))), nil
}

// fail records a violation of the protocol, unless one is recorded already.
func (w *world) fail(format string, args ...any) {
	if w.wrong == "" {
		w.wrong = fmt.Sprintf(format, args...)
	}
}

// An ack is an acknowledged value. It counts from the moment when its slot was made, even if its owner learns of the
// slot later.
type ack struct {
	value       string
	slot, epoch int64
}

// acknowledged records an acknowledged value. It fails if the slots show two owners at the same time.
func (w *world) acknowledged(value string, l *Lease) {
	is := ack{value, l.slot, l.epoch}
	for _, was := range w.acks {
		if was.slot == is.slot || (was.slot < is.slot) != (was.epoch <= is.epoch) {
			w.fail("two owners at the same time acknowledged %+v and %+v", was, is)
		}
	}
	w.acks = append(w.acks, is)
}

// state returns a digest of everything that decides what can happen next. Two worlds with the same digest have the same
// future.
func (w *world) state() [sha256.Size]byte {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(w.files)) {
		fmt.Fprintf(&b, "%s=%q\n", name, w.files[name])
	}
	for _, a := range w.actors {
		fmt.Fprintf(&b, "%s %x %v %v\n", a.name, a.heard, a.gone, a.crashed)
		if a.gone {
			continue
		}
		for _, dir := range slices.Sorted(maps.Keys(a.listed)) {
			fmt.Fprintf(&b, " %s:%q", dir, a.listed[dir])
		}
		fmt.Fprintf(&b, " %q\n", slices.Sorted(maps.Keys(a.missing)))
	}
	for _, p := range w.pending {
		fmt.Fprintln(&b, p.what)
	}
	fmt.Fprintln(&b, w.crashes, w.acks)
	return sha256.Sum256([]byte(b.String()))
}
