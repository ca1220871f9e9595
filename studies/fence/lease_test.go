package fence

import (
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

// A server keeps files and their locks in memory.
type server struct {
	mu     sync.Mutex
	files  map[string]string
	locked map[string]bool
}

// A client implements Disk on a server. While it is cut off, its calls wait.
type client struct {
	*server
	locks Locks
	cut   chan struct{} // nil while the client is connected; closed by heal
	full  bool          // nothing can be written
	lies  Kind          // Create stores slots of this kind, and then returns an error
}

func newServer() *server { return &server{files: map[string]string{}, locked: map[string]bool{}} }

// ask waits while the client is cut off, and then locks the server until the returned function is called.
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
	return closeFunc(func() { c.unlock(name) }), nil
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

type closeFunc func()

func (c closeFunc) Close() error { c(); return nil }

const ttl = 20 * time.Second

// take takes the study for an owner. The copied database has as many commits as were acknowledged.
func take(c *client, name string) (*Lease, time.Duration, error) {
	began := time.Now()
	lease, err := takeAfter(c, name, ttl)
	return lease, time.Since(began), err
}

// takeAfter is like take, with another TTL.
func takeAfter(c *client, name string, ttl time.Duration) (*Lease, error) {
	return Take(context.Background(), c, Owner{ID: name, Host: "host-" + name, PID: 7, Since: time.Now()}, ttl,
		func(_ string, acknowledged int64) (int64, error) { return acknowledged, nil })
}

func mustTake(t *testing.T, c *client, name string) *Lease {
	t.Helper()
	lease, _, err := take(c, name)
	try(t, err)
	return lease
}

func try(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// A living owner keeps the study on any kind of disk, even if it stores nothing for a long time.
func TestALivingOwnerStays(t *testing.T) {
	for _, locks := range []Locks{NoLocks, SharedLocks, CertainLocks} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			a := mustTake(t, &client{server: s, locks: locks}, "a")
			for range 10 {
				time.Sleep(ttl)
				_, took, err := take(&client{server: s, locks: locks}, "b")
				if !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "pid 7 on host-a since 2000-01-01T") || took > ttl {
					t.Fatalf("locks %d: take = %v after %s, want ErrOwned that names host-a", locks, err, took)
				}
			}
			try(t, a.Err(), a.Acknowledge(1), a.Release())
		})
	}
}

// An owner with a longer TTL than DefaultTTL keeps the study too. Others do not know its TTL.
func TestAPatientOwnerStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		a, err := takeAfter(&client{server: s}, "a", 10*DefaultTTL)
		try(t, err)
		for range 3 {
			if _, err := takeAfter(&client{server: s}, "b", DefaultTTL); !errors.Is(err, ErrOwned) {
				t.Fatalf("take = %v while an owner with a long TTL lives, want ErrOwned", err)
			}
		}
		try(t, a.Acknowledge(1), a.Release())
	})
}

// The time of a takeover depends on how the last owner ended, and on the disk's locks.
func TestTakeoverTime(t *testing.T) {
	for _, row := range []struct {
		name       string
		locks      Locks
		released   bool
		lockIsHeld bool // the lock is still held: its host is cut off
		min        time.Duration
		max        time.Duration
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
					close(a.stop) // as if the owner was killed
					a.work.Wait()
					if !row.lockIsHeld {
						try(t, a.lock.Close())
					}
				}
				b, took, err := take(&client{server: s, locks: row.locks}, "b")
				try(t, err)
				if took < row.min || took > row.max {
					t.Errorf("the takeover took %s, want %s to %s", took, row.min, row.max)
				}
				if b.commits != 1 {
					t.Errorf("b begins with %d commits, want 1", b.commits)
				}
				try(t, b.Release())
			})
		})
	}
}

// An owner whose disk does not answer gives up before its TTL ends. When the disk is back, it cannot acknowledge any
// more.
func TestAnOwnerThatIsCutOffGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		ca := &client{server: s}
		a := mustTake(t, ca, "a")
		try(t, a.Acknowledge(1))
		ca.partition()
		began := time.Now()
		acknowledged := make(chan error)
		go func() { acknowledged <- a.Acknowledge(2) }()
		<-a.Lost()
		if took := time.Since(began); took > ttl*3/4 || !errors.Is(a.Err(), ErrSilent) {
			t.Errorf("a gave up after %s with %v, want ErrSilent within %s", took, a.Err(), ttl*3/4)
		}
		b := mustTake(t, &client{server: s}, "b")
		if took := time.Since(began); took < ttl/2 {
			t.Errorf("b took the study over after %s", took)
		}
		ca.heal()
		if err := <-acknowledged; err == nil {
			t.Error("a acknowledged a commit that b does not have")
		}
		try(t, b.Acknowledge(2), a.Release(), b.Release())
	})
}

// The next acknowledgement of a superseded owner fails. The error names the new owner.
func TestASupersededOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		a := mustTake(t, &client{server: s, locks: CertainLocks}, "a")
		s.locked = map[string]bool{} // the server lost all locks
		b := mustTake(t, &client{server: s, locks: CertainLocks}, "b")
		err := a.Acknowledge(1)
		if !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "host-b") {
			t.Errorf("Acknowledge = %v, want ErrOwned that names host-b", err)
		}
		<-a.Lost()
		if again := a.Acknowledge(1); !errors.Is(again, ErrOwned) {
			t.Errorf("the second Acknowledge = %v, want ErrOwned", again)
		}
		try(t, a.Release(), b.Acknowledge(1), b.Release())
	})
}

// When ten tuners begin a study at once, one gets it. The errors of the others name an owner.
func TestManyBeginAtOnce(t *testing.T) {
	for _, locks := range []Locks{NoLocks, SharedLocks, CertainLocks} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			var mu sync.Mutex
			var leases []*Lease
			var work sync.WaitGroup
			for i := range 10 {
				work.Go(func() {
					lease, _, err := take(&client{server: s, locks: locks}, fmt.Sprint("tuner", i))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err == nil:
						leases = append(leases, lease)
					case !errors.Is(err, ErrOwned) || !strings.Contains(err.Error(), "host-tuner"):
						t.Errorf("locks %d: take = %v, want ErrOwned that names the owner", locks, err)
					}
				})
			}
			work.Wait()
			if len(leases) != 1 {
				t.Fatalf("locks %d: %d tuners own the study, want one", locks, len(leases))
			}
			try(t, leases[0].Acknowledge(1), leases[0].Release())
		})
	}
}

// A long study leaves at most five slots for each of its owners.
func TestSlotsDoNotGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		const owners = 5
		for owner := range owners {
			lease := mustTake(t, &client{server: s}, fmt.Sprint("tuner", owner))
			for commit := range 200 {
				time.Sleep(time.Second)
				try(t, lease.Acknowledge(int64(200*owner+commit+1)))
			}
			if owner%2 == 1 { // as if this owner was killed: it makes no more calls
				lease.lose(errBroken)
				delete(s.locked, "owners/"+fmt.Sprint("tuner", owner))
				continue
			}
			time.Sleep(time.Hour)
			try(t, lease.Release())
		}
		c := &client{server: s}
		numbers, err := slotNumbers(c)
		try(t, err)
		if len(numbers) > 5*owners {
			t.Errorf("%d owners left %d of %d slots, want at most %d", owners, len(numbers), numbers[0], 5*owners)
		}
		left, err := c.List(OwnerDir)
		try(t, err)
		if len(left) > 0 {
			t.Errorf("the lock files %v are left, want none", left)
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
			t.Errorf("Acknowledge = %v on a full disk, want %v", err, errFull)
		}
		c.full = false
		if err := a.Acknowledge(2); !errors.Is(err, errFull) {
			t.Errorf("Acknowledge = %v after an error, want the same error", err)
		}
		try(t, a.Release())
		b := mustTake(t, c, "b")
		if b.commits != 1 {
			t.Errorf("b has %d commits, want 1: the slot of the second commit is empty", b.commits)
		}
		try(t, b.Release())
	})
}

// A failed takeover does not know whether its last slot is on the disk. The next owner must find the whole study in
// either case.
func TestAFailedTakeoverLosesNothing(t *testing.T) {
	for _, kind := range []Kind{Claim, Opened} {
		synctest.Test(t, func(t *testing.T) {
			c := &client{server: newServer(), locks: CertainLocks}
			a := mustTake(t, c, "a")
			try(t, c.Write(a.Dir()+"/"+Database, strings.NewReader("all of it")), a.Acknowledge(1), a.Release())
			c.lies = kind
			if _, _, err := take(c, "b"); !errors.Is(err, errBroken) {
				t.Fatalf("%s: take = %v, want %v", kind, err, errBroken)
			}
			c.lies = ""
			lease := mustTake(t, c, "c")
			if got := c.files[lease.Dir()+"/"+Database]; got != "all of it" || lease.commits != 1 {
				t.Errorf("%s: the next owner has %q with %d commits, want all of it with 1", kind, got, lease.commits)
			}
			try(t, lease.Release())
		})
	}
}

// The last two earlier epochs are kept as backups. If a takeover was killed before it opened its epoch, this epoch does
// not count as a backup. The newest epoch of a killed takeover may still be in use, so the next owner keeps it, and
// only the owner after that removes it.
func TestOldEpochsAreRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{server: newServer(), locks: CertainLocks}
		var whole []string
		for owner := range 3 {
			lease := mustTake(t, c, fmt.Sprint("tuner", owner))
			whole = append(whole, lease.Dir())
			try(t, c.Write(lease.Dir()+"/"+Database, strings.NewReader(lease.Dir())), lease.Release())
		}
		for n := range 3 {
			at, err := ReadPosition(c)
			try(t, err, create(c, at.Top+1, Slot{Claim, at.Slot.Epoch, at.Slot.Commits, Owner{ID: fmt.Sprint("killed", n)}, time.Now()}),
				c.Write(EpochDir(at.Top+1)+"/"+Database, strings.NewReader("half")))
		}
		lease := mustTake(t, c, "last")
		defer func() { try(t, lease.Release()) }()
		names, err := c.List(".")
		try(t, err)
		names = slices.DeleteFunc(names, func(name string) bool { return !IsEpoch(name) })
		slices.Sort(names)
		if want := append(whole[1:], EpochDir(lease.Epoch()-1), lease.Dir()); !slices.Equal(names, want) {
			t.Errorf("the epochs %v are left, want %v", names, want)
		}
	})
}

// An owner's ID becomes the name of a file that its successor removes. An ID with a path in it must not remove other
// files.
func TestAnIDIsNoPath(t *testing.T) {
	for _, id := range []string{"../logs", "..", ".", "a/b", ""} {
		synctest.Test(t, func(t *testing.T) {
			c := &client{server: newServer(), locks: CertainLocks}
			lease := mustTake(t, c, "a")
			try(t, c.Write("logs/trial-0001.log", strings.NewReader("precious")), lease.Release())
			for name, text := range c.files {
				c.files[name] = strings.ReplaceAll(text, `"id":"a"`, `"id":"`+id+`"`)
			}
			_, _, err := take(c, "b")
			if _, ok := errors.AsType[DamagedError](err); !ok || c.files["logs/trial-0001.log"] == "" {
				t.Errorf("id %q: take = %v, want a DamagedError; the files are %v", id, err, c.files)
			}
		})
	}
}

// Stop ends an owner that is cut off: that owner can acknowledge nothing more. A stopped study can be taken again.
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
			t.Errorf("Stop = %v while the owner lives, want ErrOwned", err)
		}
		a.partition()
		try(t, stop())
		a.heal()
		if err := owner.Acknowledge(1); err == nil {
			t.Error("the old owner acknowledged a commit after Stop")
		}
		_ = owner.Release() // may fail, because its lease is lost
		next := mustTake(t, &client{server: s, locks: NoLocks}, "c")
		try(t, next.Acknowledge(1), next.Release())
	})
}

// On a disk with CertainLocks nobody can take a study between Stop and release.
func TestStopLastsUntilRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{server: newServer(), locks: CertainLocks}
		try(t, mustTake(t, c, "a").Release())
		release, err := Stop(t.Context(), c, Owner{ID: "b"}, ttl)
		try(t, err)
		if _, _, err := take(c, "c"); !errors.Is(err, ErrOwned) {
			t.Errorf("take = %v between Stop and release, want ErrOwned", err)
		}
		try(t, release(), mustTake(t, c, "c").Release())
	})
}

// If slots are missing or damaged, an existing study is not begun again, and no file changes.
func TestMissingSlots(t *testing.T) {
	for name, harm := range map[string]struct {
		do   func(files map[string]string, slots []string)
		want string
	}{
		"all are missing":        {func(files map[string]string, slots []string) { deleteAll(files, slots) }, "slots are missing in fence: the newest is 0, and e000000000001 exists"},
		"the newest are missing": {func(files map[string]string, slots []string) { deleteAll(files, slots[2:]) }, "slots are missing in fence: the newest is 2, and e00000000000"},
		"a slot in between is missing": {func(files map[string]string, slots []string) {
			files[slots[len(slots)-1]] = ""
			delete(files, slots[len(slots)-2])
		}, "in fence is damaged"},
		"none can be read": {func(files map[string]string, slots []string) {
			deleteAll(files, slots[:len(slots)-1])
			files[slots[len(slots)-1]] = "no JSON"
		}, "no slot in fence can be read"},
		"the newest has no values": {func(files map[string]string, slots []string) { files[slots[len(slots)-1]] = "{}" }, "in fence is damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &client{server: newServer(), locks: CertainLocks}
				for range 2 {
					lease := mustTake(t, c, "a")
					try(t, c.Write(lease.Dir()+"/"+Database, strings.NewReader("all of it")), lease.Acknowledge(1), lease.Release())
				}
				var slots []string
				for file := range c.files {
					if strings.HasPrefix(file, SlotDir+"/0") {
						slots = append(slots, file)
					}
				}
				slices.Sort(slots)
				if name == "all are missing" {
					for file := range c.files {
						if strings.HasPrefix(file, "e") && !strings.HasPrefix(file, "e000000000001/") {
							delete(c.files, file)
						}
					}
				}
				harm.do(c.files, slots)
				before := maps.Clone(c.files)
				if _, _, err := take(c, "b"); err == nil || !strings.Contains(err.Error(), harm.want) {
					t.Errorf("take = %v, want %q", err, harm.want)
				}
				if !maps.Equal(before, c.files) {
					t.Errorf("the files are %v, want %v as before", c.files, before)
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
