package fence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A server keeps files in memory, and locks with them.
type server struct {
	mu     sync.Mutex
	files  map[string]string
	locked map[string]bool
}

// A client of the server may be cut off: what it asks for then waits until it is not.
type client struct {
	*server
	locks Locks
	cut   chan struct{} // nil while it is not; closed when it is healed
	full  bool          // nothing can be written
	lies  Kind          // slots of this kind are taken, and said to have failed
}

func newServer() *server { return &server{files: map[string]string{}, locked: map[string]bool{}} }

// ask waits for the network, and then has the server to itself until done is called.
func (c *client) ask() (done func()) {
	c.mu.Lock()
	for c.cut != nil {
		cut := c.cut
		c.mu.Unlock()
		<-cut
		c.mu.Lock()
	}
	return c.mu.Unlock
}

func (c *client) partition() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = make(chan struct{})
}

func (c *client) heal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.cut)
	c.cut = nil
}

var (
	errFull   = errors.New("no space left on device")
	errBroken = errors.New("input/output error")
)

func (c *client) Create(name string, content []byte) error {
	defer c.ask()()
	if _, ok := c.files[name]; ok {
		return fs.ErrExist
	}
	c.files[name] = ""
	if c.full {
		return errFull
	}
	c.files[name] = string(content)
	if c.lies != "" && strings.Contains(string(content), `"kind":"`+string(c.lies)+`"`) {
		return errBroken
	}
	return nil
}

func (c *client) Open(name string) (io.ReadCloser, error) {
	defer c.ask()()
	content, ok := c.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(strings.NewReader(content)), nil
}

func (c *client) Write(name string, r io.Reader) error {
	content, err := io.ReadAll(r)
	defer c.ask()()
	c.files[name] = string(content)
	return err
}

func (c *client) List(dir string) (names []string, err error) {
	defer c.ask()()
	for name := range c.files {
		if dir == "." {
			first, _, _ := strings.Cut(name, "/")
			names = append(names, first)
		} else if path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (c *client) Make(string) error { return nil }
func (c *client) Sync(string) error { return nil }
func (c *client) Locks() Locks      { return c.locks }

func (c *client) Remove(name string) error {
	defer c.ask()()
	for known := range c.files {
		if known == name || strings.HasPrefix(known, name+"/") {
			delete(c.files, known)
		}
	}
	return nil
}

func (c *client) Lock(name string) (io.Closer, error) {
	defer c.ask()()
	c.files[name], c.locked[name] = "", true
	return closing(func() { c.unlock(name) }), nil
}

func (c *client) unlock(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.locked, name)
}

func (c *client) Locked(name string) (bool, error) {
	defer c.ask()()
	return c.locked[name], nil
}

type closing func()

func (c closing) Close() error { c(); return nil }

const ttl = 20 * time.Second

// take takes the study for an owner. Its database has as many commits as were acknowledged.
func take(c *client, name string) (*Lease, time.Duration, error) {
	began := time.Now()
	h, err := takeAfter(c, name, ttl)
	return h, time.Since(began), err
}

// takeAfter is take by somebody of another patience.
func takeAfter(c *client, name string, silence time.Duration) (*Lease, error) {
	return Take(context.Background(), c, Owner{ID: name, Host: "host-" + name, PID: 7, Since: time.Now()}, silence,
		func(_ string, acknowledged int64) (int64, error) { return acknowledged, nil })
}

func mustTake(t *testing.T, c *client, name string) *Lease {
	t.Helper()
	h, _, err := take(c, name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func try(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// A living owner is not displaced, however long it has nothing to store, on any kind of disk.
func TestALivingOwnerStays(t *testing.T) {
	for _, locks := range []Locks{NoLocks, SharedLocks, CertainLocks} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			a := mustTake(t, &client{server: s, locks: locks}, "a")
			for range 10 {
				time.Sleep(ttl)
				_, took, err := take(&client{server: s, locks: locks}, "b")
				if !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "pid 7 on host-a since 2000-01-01T") || took > ttl {
					t.Fatalf("locks %d: after %s: %v; want that host-a owns it", locks, took, err)
				}
			}
			try(t, a.Err(), a.Acknowledge(1), a.Release())
		})
	}
}

// Nor is one that is more patient than the usual, which others cannot know.
func TestAPatientOwnerStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		a, err := takeAfter(&client{server: s}, "a", 10*DefaultTTL)
		try(t, err)
		for range 3 {
			if _, err := takeAfter(&client{server: s}, "b", DefaultTTL); !errors.Is(err, ErrOwned) {
				t.Fatalf("a patient owner was taken for dead: %v", err)
			}
		}
		try(t, a.Acknowledge(1), a.Release())
	})
}

// How long a takeover takes, by how the owner went.
func TestHowLongATakeoverTakes(t *testing.T) {
	for _, row := range []struct {
		name       string
		locks      Locks
		released   bool
		lockIsHeld bool // that of a host that is lost
		least      time.Duration
		most       time.Duration
	}{
		{"released", NoLocks, true, false, 0, time.Second},
		{"killed, on a disk of this host", CertainLocks, false, false, 0, time.Second},
		{"killed, with locks", SharedLocks, false, false, lockPause, 2 * lockPause},
		{"cut off, with locks", SharedLocks, false, true, ttl, ttl + 2*time.Second},
		{"killed, without locks", NoLocks, false, false, ttl, ttl + 2*time.Second},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer()
				c := &client{server: s, locks: row.locks}
				a := mustTake(t, c, "a")
				try(t, a.Acknowledge(1))
				if row.released {
					try(t, a.Release())
				} else {
					close(a.stop) // it is killed
					a.work.Wait()
					if !row.lockIsHeld {
						try(t, a.lock.Close())
					}
				}
				b, took, err := take(&client{server: s, locks: row.locks}, "b")
				try(t, err)
				if took < row.least || took > row.most {
					t.Errorf("it took %s, want %s to %s", took, row.least, row.most)
				}
				if b.commits != 1 {
					t.Errorf("b begins with %d commits, want 1", b.commits)
				}
				try(t, b.Release())
			})
		})
	}
}

// An owner whose disk does not answer gives up before anybody takes it for dead. When the disk is back, it cannot acknowledge any more.
func TestAnOwnerThatIsCutOffGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		ca := &client{server: s}
		a := mustTake(t, ca, "a")
		try(t, a.Acknowledge(1))
		ca.partition()
		began := time.Now()
		told := make(chan error)
		go func() { told <- a.Acknowledge(2) }()
		<-a.Lost()
		if took := time.Since(began); took > ttl*3/4 || !errors.Is(a.Err(), ErrSilent) {
			t.Errorf("after %s: %v; want ErrSilent before anybody else begins", took, a.Err())
		}
		b := mustTake(t, &client{server: s}, "b")
		if took := time.Since(began); took < ttl/2 {
			t.Errorf("b took the study over after %s", took)
		}
		ca.heal()
		if err := <-told; err == nil {
			t.Error("a acknowledges what b does not have")
		}
		try(t, b.Acknowledge(2), a.Release(), b.Release())
	})
}

// An owner that was superseded without its knowledge is told by whom.
func TestASupersededOwnerIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		a := mustTake(t, &client{server: s, locks: CertainLocks}, "a")
		s.locked = map[string]bool{} // as when a server forgets
		b := mustTake(t, &client{server: s, locks: CertainLocks}, "b")
		err := a.Acknowledge(1)
		if !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "host-b") {
			t.Errorf("a is told %v", err)
		}
		<-a.Lost()
		if again := a.Acknowledge(1); !errors.Is(again, ErrOwned) {
			t.Errorf("the second time it is told %v", again)
		}
		try(t, a.Release(), b.Acknowledge(1), b.Release())
	})
}

// Of many that begin a study at once one has it, and the others say who.
func TestManyBeginAtOnce(t *testing.T) {
	for _, locks := range []Locks{NoLocks, SharedLocks, CertainLocks} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			var mu sync.Mutex
			var holds []*Lease
			var work sync.WaitGroup
			for i := range 10 {
				work.Go(func() {
					h, _, err := take(&client{server: s, locks: locks}, fmt.Sprint("tuner", i))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						holds = append(holds, h)
					case !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "host-tuner"):
						t.Errorf("locks %d: %v, want who owns it", locks, err)
					}
				})
			}
			work.Wait()
			if len(holds) != 1 {
				t.Fatalf("locks %d: %d own the study, want one", locks, len(holds))
			}
			try(t, holds[0].Acknowledge(1), holds[0].Release())
		})
	}
}

// A long study leaves a handful of slots for each owner that it had.
func TestSlotsDoNotGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		const owners = 5
		for owner := range owners {
			h := mustTake(t, &client{server: s}, fmt.Sprint("tuner", owner))
			for commit := range 200 {
				time.Sleep(time.Second)
				try(t, h.Acknowledge(int64(200*owner+commit+1)))
			}
			if owner%2 == 1 { // killed: nothing more is asked of the disk
				h.lose(errBroken)
				delete(s.locked, "owners/"+fmt.Sprint("tuner", owner))
				continue
			}
			time.Sleep(time.Hour)
			try(t, h.Release())
		}
		c := &client{server: s}
		numbers, err := slotNumbers(c)
		try(t, err)
		if len(numbers) > 5*owners {
			t.Errorf("%d slots are left of %d owners and %d slots in all", len(numbers), owners, numbers[0])
		}
		left, err := c.List(OwnerDir)
		try(t, err)
		if len(left) > 0 {
			t.Errorf("owners %v are left", left)
		}
		last, err := ReadPosition(c)
		if err != nil || last.Slot.Commits != 200*owners {
			t.Errorf("the newest slot is %+v, %v; want %d commits", last, err, 200*owners)
		}
	})
}

// A slot that cannot be written acknowledges nothing and ends the lease. The next owner goes on from the slot before.
func TestAFullDiskEndsTheOwnership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		c := &client{server: s, locks: CertainLocks}
		a := mustTake(t, c, "a")
		try(t, a.Acknowledge(1))
		c.full = true
		if err := a.Acknowledge(2); !errors.Is(err, errFull) {
			t.Errorf("error %v, want that the disk is full", err)
		}
		c.full = false
		if err := a.Acknowledge(2); !errors.Is(err, errFull) {
			t.Errorf("after an error it goes on: %v", err)
		}
		try(t, a.Release())
		b := mustTake(t, c, "b")
		if b.commits != 1 {
			t.Errorf("b has %d commits, want 1: the slot of the second is empty", b.commits)
		}
		try(t, b.Release())
	})
}

// A failed takeover does not know whether its last slot is on the disk. If it is, what it says must be true.
func TestAFailedTakeoverLeavesWhatItsSlotsSay(t *testing.T) {
	for _, kind := range []Kind{Claim, Opened} {
		synctest.Test(t, func(t *testing.T) {
			c := &client{server: newServer(), locks: CertainLocks}
			a := mustTake(t, c, "a")
			try(t, c.Write(a.Dir()+"/"+Database, strings.NewReader("all of it")), a.Acknowledge(1), a.Release())
			c.lies = kind
			if _, _, err := take(c, "b"); !errors.Is(err, errBroken) {
				t.Fatalf("%s: error %v, want that the disk failed", kind, err)
			}
			c.lies = ""
			h := mustTake(t, c, "c")
			if got := c.files[h.Dir()+"/"+Database]; got != "all of it" || h.commits != 1 {
				t.Errorf("%s: the next owner has %q with %d commits", kind, got, h.commits)
			}
			try(t, h.Release())
		})
	}
}

// Epochs of the past are kept as a backup, but not all of them.
func TestOldEpochsAreRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		c := &client{server: s, locks: CertainLocks}
		for owner := range 6 {
			h := mustTake(t, c, fmt.Sprint("tuner", owner))
			try(t, c.Write(h.Dir()+"/"+Database, bytes.NewReader([]byte(h.Dir()))), h.Release())
		}
		names, err := c.List(".")
		try(t, err)
		names = slices.DeleteFunc(names, func(name string) bool { _, ok := epochOf(name); return !ok })
		if len(names) != keepEpochs+1 {
			t.Errorf("epochs %v are left, want %d", names, keepEpochs+1)
		}
	})
}

// A takeover that was killed early leaves an epoch that is no backup, and displaces no backup. The newest such epoch may still be in use, so
// the owner after the next removes it.
func TestAnEpochThatWasNeverOpenedIsNoBackup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{server: newServer(), locks: CertainLocks}
		var whole []string
		for owner := range 3 {
			h := mustTake(t, c, fmt.Sprint("tuner", owner))
			whole = append(whole, h.Dir())
			try(t, c.Write(h.Dir()+"/"+Database, strings.NewReader(h.Dir())), h.Release())
		}
		for n := range 3 {
			at, err := ReadPosition(c)
			try(t, err, create(c, at.Top+1, Slot{Claim, at.Slot.Epoch, at.Slot.Commits, Owner{ID: fmt.Sprint("killed", n)}, time.Now()}),
				c.Write(EpochDir(at.Top+1)+"/"+Database, strings.NewReader("half")))
		}
		h := mustTake(t, c, "last")
		defer func() { try(t, h.Release()) }()
		names, err := c.List(".")
		try(t, err)
		names = slices.DeleteFunc(names, func(name string) bool { return !IsEpoch(name) })
		slices.Sort(names)
		if want := append(whole[1:], EpochDir(h.Epoch()-1), h.Dir()); !slices.Equal(names, want) {
			t.Errorf("epochs %v are left, want %v", names, want)
		}
	})
}

// An owner's ID becomes the name of a file that is removed.
func TestAnIDLeadsNowhere(t *testing.T) {
	for _, id := range []string{"../logs", "..", ".", "a/b", ""} {
		synctest.Test(t, func(t *testing.T) {
			c := &client{server: newServer(), locks: CertainLocks}
			h := mustTake(t, c, "a")
			try(t, c.Write("logs/trial-0001.log", strings.NewReader("precious")), h.Release())
			for name, text := range c.files {
				c.files[name] = strings.ReplaceAll(text, `"id":"a"`, `"id":"`+id+`"`)
			}
			_, _, err := take(c, "b")
			if _, ok := errors.AsType[DamagedError](err); !ok || c.files["logs/trial-0001.log"] == "" {
				t.Errorf("id %q: error %v; files %v", id, err, c.files)
			}
		})
	}
}

// Where no slot can be read a study that is there is not begun anew.
func TestNothingReadableIsNotNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{server: newServer(), locks: CertainLocks}
		h := mustTake(t, c, "a")
		try(t, c.Write(h.Dir()+"/"+Database, bytes.NewReader([]byte("all of it"))), h.Release())
		for name := range c.files {
			if strings.HasPrefix(name, SlotDir+"/") {
				c.files[name] = "no JSON"
			}
		}
		before := len(c.files)
		if _, _, err := take(c, "b"); err == nil || !strings.Contains(err.Error(), "no slot in fence can be read") {
			t.Errorf("error %v, want that no slot can be read", err)
		}
		if len(c.files) != before {
			t.Errorf("%d files, there were %d", len(c.files), before)
		}
	})
}

// An owner that was cut off and taken for dead acknowledges nothing after Stop. A stopped study can be taken again.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		a, b := &client{server: s, locks: NoLocks}, &client{server: s, locks: NoLocks}
		owner := mustTake(t, a, "a")
		stop := func() error {
			release, err := Stop(t.Context(), b, Owner{ID: "b"}, ttl)
			return errors.Join(err, release())
		}
		if err := stop(); !errors.Is(err, ErrOwned) {
			t.Errorf("of an owner that lives: %v, want ErrOwned", err)
		}
		a.partition()
		try(t, stop())
		a.heal()
		if err := owner.Acknowledge(1); err == nil {
			t.Error("it acknowledges after the study was stopped")
		}
		_ = owner.Release() // it is lost
		next := mustTake(t, &client{server: s, locks: NoLocks}, "c")
		try(t, next.Acknowledge(1), next.Release())
	})
}

// On a disk with certain locks nobody takes a study between Stop and release.
func TestStopIsUntilItsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{server: newServer(), locks: CertainLocks}
		try(t, mustTake(t, c, "a").Release())
		release, err := Stop(t.Context(), c, Owner{ID: "b"}, ttl)
		try(t, err)
		if _, _, err := take(c, "c"); !errors.Is(err, ErrOwned) {
			t.Errorf("a study that is stopped is taken: %v", err)
		}
		try(t, release(), mustTake(t, c, "c").Release())
	})
}

// A study whose slots are gone, or damaged, is not begun anew over what is there.
func TestSlotsThatAreGone(t *testing.T) {
	for name, harm := range map[string]struct {
		do   func(files map[string]string, slots []string)
		want string
	}{
		"all gone":        {func(files map[string]string, slots []string) { deleteAll(files, slots) }, "slots are missing in fence: the newest is 0, and e000000000001 is there"},
		"the newest gone": {func(files map[string]string, slots []string) { deleteAll(files, slots[2:]) }, "slots are missing in fence: the newest is 2, and e00000000000"},
		"with a gap": {func(files map[string]string, slots []string) {
			files[slots[len(slots)-1]] = ""
			delete(files, slots[len(slots)-2])
		}, "in fence is damaged"},
		"says nothing": {func(files map[string]string, slots []string) { files[slots[len(slots)-1]] = "{}" }, "in fence is damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &client{server: newServer(), locks: CertainLocks}
				for range 2 {
					h := mustTake(t, c, "a")
					try(t, c.Write(h.Dir()+"/"+Database, strings.NewReader("all of it")), h.Acknowledge(1), h.Release())
				}
				var slots []string
				for file := range c.files {
					if strings.HasPrefix(file, SlotDir+"/0") {
						slots = append(slots, file)
					}
				}
				slices.Sort(slots)
				if name == "all gone" {
					for file := range c.files {
						if strings.HasPrefix(file, "e") && !strings.HasPrefix(file, "e000000000001/") {
							delete(c.files, file)
						}
					}
				}
				harm.do(c.files, slots)
				before := maps.Clone(c.files)
				if _, _, err := take(c, "b"); err == nil || !strings.Contains(err.Error(), harm.want) {
					t.Errorf("error %v, want %q", err, harm.want)
				}
				if !maps.Equal(before, c.files) {
					t.Errorf("the files were %v and are %v", before, c.files)
				}
			})
		})
	}
}

func deleteAll(files map[string]string, names []string) {
	for _, name := range names {
		delete(files, name)
	}
}
