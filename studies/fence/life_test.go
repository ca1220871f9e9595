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

// LifeOf returns the right Life on each kind of disk, for each state of the owner's slots and lock.
func TestLifeOf(t *testing.T) {
	const fresh, old = 5 * time.Second, 3 * time.Minute
	for _, c := range []struct {
		name  string
		locks Locks
		kind  Kind // kind of the newest slot; "" means that there is no slot
		held  bool
		age   time.Duration
		want  Life
	}{
		{"this host's disk: a held lock proves the owner alive, even after a long silence", CertainLocks, Heartbeat, true, old, Life{Alive: true}},
		{"this host's disk: a free lock proves it gone at once", CertainLocks, Commit, false, fresh, Life{Gone: true}},
		{"this host's disk: a Released slot proves the owner gone", CertainLocks, Released, true, fresh, Life{Gone: true}},
		{"no slot: the study never had an owner", SharedLocks, "", false, fresh, Life{Gone: true}},
		{"a shared disk: a fresh slot is a sign of life, and nothing is opened", SharedLocks, Heartbeat, false, fresh, Life{Silent: fresh}},
		{"a shared disk: a free lock proves a silent owner gone", SharedLocks, Heartbeat, false, old, Life{Gone: true, Silent: old}},
		{"a shared disk: a held lock proves nothing, because its host may be cut off", SharedLocks, Heartbeat, true, old, Life{Silent: old}},
		{"a shared disk: a Released slot proves the owner gone", SharedLocks, Released, true, old, Life{Gone: true, Silent: old}},
		{"a disk without locks: silence proves nothing to a reader", NoLocks, Heartbeat, false, old, Life{Silent: old}},
		{"a disk without locks: a Released slot proves the owner gone", NoLocks, Released, false, old, Life{Gone: true, Silent: old}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			folder, lock := ownedFolder(t, c.locks, c.kind, c.age)
			if !c.held {
				try(t, lock.Close())
			}
			got, err := LifeOf(t.Context(), folder)
			try(t, err)
			// A minute is allowed, because the machine may be busy.
			if off := got.Silent - c.want.Silent; off < 0 || off > time.Minute {
				t.Errorf("Silent = %s, want %s", got.Silent, c.want.Silent)
			}
			if got.Alive != c.want.Alive || got.Gone != c.want.Gone {
				t.Errorf("LifeOf = %+v, want Alive %t and Gone %t", got, c.want.Alive, c.want.Gone)
			}
		})
	}
}

// A reader calls LifeOf all the time. It neither takes away the lock of an owner nor keeps a successor from the study.
func TestLifeOfDisturbsNoOwner(t *testing.T) {
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
	for range 20 { // each owner takes the study after the last one has ended
		next := Owner{ID: "successor", Host: "h", PID: 1, Since: time.Now()}
		try(t, os.RemoveAll(filepath.Join(folder.root.Name(), OwnerDir, "first"))) // the first owner is dead
		lease, err := Take(ctx, folder, next, time.Minute, func(string, int64) (int64, error) { return 0, nil })
		try(t, err)
		try(t, lease.Acknowledge(0), lease.Release())
	}
	stop()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("LifeOf = %v", err)
	}
}

// ownedFolder returns a study's directory and the lock of its owner. The newest slot has the given kind and age. If
// kind is "", there is no slot.
func ownedFolder(t *testing.T, locks Locks, kind Kind, age time.Duration) (*Folder, io.Closer) {
	t.Helper()
	dir := t.TempDir()
	f, err := OpenFolder(dir, locks)
	try(t, err)
	t.Cleanup(func() { f.Close() })
	me := Owner{ID: "first", Host: "h", PID: 1, Since: time.Now()}
	lock, err := prepare(f, me)
	try(t, err)
	t.Cleanup(func() { lock.Close() })
	if kind == "" {
		return f, lock
	}
	try(t, create(f, 1, Slot{Claim, 0, 0, me, time.Now()}), create(f, 2, Slot{kind, 1, 0, me, time.Now()}))
	at := time.Now().Add(-age)
	try(t, os.Chtimes(filepath.Join(dir, slotName(2)), at, at))
	return f, lock
}
