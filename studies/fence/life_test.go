package fence

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// What a reader says of an owner, on each kind of disk, for each state of its slots and its lock.
func TestLifeOfAnOwner(t *testing.T) {
	const fresh, old = 5 * time.Second, 3 * time.Minute
	for _, c := range []struct {
		name  string
		locks Locks
		kind  Kind // of the newest slot; "" is no slot at all
		held  bool
		age   time.Duration
		want  Life // Silent is true or false only: not 0 stands for the age
	}{
		{"this host's disk: a held lock proves the owner alive, however long it is silent", CertainLocks, Heartbeat, true, old, Life{Alive: true}},
		{"this host's disk: a free lock proves it gone at once", CertainLocks, Commit, false, fresh, Life{Gone: true}},
		{"this host's disk: an owner that gave the study up is gone", CertainLocks, Released, true, fresh, Life{Gone: true}},
		{"no slot: nobody ever owned it here", SharedLocks, "", false, fresh, Life{Gone: true}},
		{"a shared disk: a fresh slot is a sign of life, and nothing is opened", SharedLocks, Heartbeat, false, fresh, Life{Silent: fresh}},
		{"a shared disk: a free lock proves a silent owner gone", SharedLocks, Heartbeat, false, old, Life{Gone: true, Silent: old}},
		{"a shared disk: a held lock proves nothing, for its host may be cut off", SharedLocks, Heartbeat, true, old, Life{Silent: old}},
		{"a shared disk: a slot says that it was given up", SharedLocks, Released, true, old, Life{Gone: true, Silent: old}},
		{"a disk without locks: silence alone proves nothing to a reader", NoLocks, Heartbeat, false, old, Life{Silent: old}},
		{"a disk without locks: a slot says that it was given up", NoLocks, Released, false, old, Life{Gone: true, Silent: old}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			folder, lock := ownedFolder(t, c.locks, c.kind, c.age)
			if !c.held {
				if err := lock.Close(); err != nil {
					t.Fatal(err)
				}
			}
			got, err := LifeOf(t.Context(), folder)
			if err != nil {
				t.Fatal(err)
			}
			if off := got.Silent - c.want.Silent; off < 0 || off > time.Minute { // a busy machine
				t.Errorf("it is silent for %s, want %s", got.Silent, c.want.Silent)
			}
			if got.Alive != c.want.Alive || got.Gone != c.want.Gone {
				t.Errorf("alive %t, gone %t; want %t, %t", got.Alive, got.Gone, c.want.Alive, c.want.Gone)
			}
		})
	}
}

// A reader that looks again and again neither takes an owner's lock away nor keeps a successor from the study.
func TestLifeDisturbsNobody(t *testing.T) {
	folder, _ := ownedFolder(t, CertainLocks, Heartbeat, 0)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			_, err = LifeOf(ctx, folder)
		}
		ended <- err
	}()
	for range 20 { // each opens, owns and releases the study of the one before
		lastOwner := Owner{ID: "successor", Host: "h", PID: 1, Since: time.Now()}
		if err := os.RemoveAll(filepath.Join(folder.root.Name(), OwnerDir, "first")); err != nil { // it is dead
			t.Fatal(err)
		}
		hold, err := Take(ctx, folder, lastOwner, time.Minute, func(string, int64) (int64, error) { return 0, nil })
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(hold.Acknowledge(0), hold.Release()); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("the reader ended with %v", err)
	}
}

// ownedFolder is a study's directory with one slot of such an age, and the lock of its owner.
func ownedFolder(t *testing.T, locks Locks, kind Kind, age time.Duration) (*Folder, io.Closer) {
	t.Helper()
	dir := t.TempDir()
	f, err := OpenFolder(dir, locks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	me := Owner{ID: "first", Host: "h", PID: 1, Since: time.Now()}
	lock, err := prepare(f, me)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if kind == "" {
		return f, lock
	}
	if err := errors.Join(create(f, 1, Slot{Claim, 0, 0, me, time.Now()}), create(f, 2, Slot{kind, 1, 0, me, time.Now()})); err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-age)
	if err := os.Chtimes(filepath.Join(dir, slotName(2)), at, at); err != nil {
		t.Fatal(err)
	}
	return f, lock
}
