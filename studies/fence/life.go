package fence

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"
)

// A Life is what a reader knows of a study's owner.
type Life struct {
	Owner  Owner         // the last one; the zero Owner where nobody asked for its name
	Alive  bool          // its lock proves it
	Gone   bool          // it gave the study up, its lock proves it, or there never was one
	Silent time.Duration // neither is known: so long ago the disk saw its last slot
}

// quiet is how long an owner's silence means nothing: it takes a slot every 15 s, and one of them may come late.
const quiet = 2 * DefaultTTL / heartbeatsPerTTL

// Doubtful reports whether the owner has been silent for longer than one that lives.
func (l Life) Doubtful() bool { return l.Silent >= quiet }

// LifeOf says whether a study's owner lives. It is for readers: it writes nothing, and cannot hold the owner up.
//
// On a disk that hosts share it opens nothing while the slots are fresh. Of an open file an NFS server may promise the reader that it does not
// change, and the owner, which removes its slots, would have to wait for a reader that is cut off. A lock that is free is taken as a shared
// one for a moment. No owner wants that lock any more: each has a lock of its own, and takes it before its first slot.
func LifeOf(ctx context.Context, f *Folder) (life Life, err error) {
	for range maxAttempts {
		if life, err = lifeOf(ctx, f); !errors.Is(err, fs.ErrNotExist) { // the owner has removed a slot since it was listed
			break
		}
	}
	return life, err
}

func lifeOf(ctx context.Context, f *Folder) (Life, error) {
	if _, err := f.changed(SlotDir); errors.Is(err, fs.ErrNotExist) {
		return Life{Gone: true}, nil
	}
	numbers, err := slotNumbers(f)
	if err != nil || len(numbers) == 0 {
		return Life{Gone: err == nil}, err
	}
	var silent time.Duration
	if f.Locks() != CertainLocks {
		at, err := f.changed(slotName(numbers[0]))
		if err != nil {
			return Life{}, err
		}
		if silent = max(0, time.Since(at)); silent < quiet { // the server's clock may be ahead
			return Life{Silent: silent}, nil
		}
	}
	at, err := ReadPosition(f)
	life := Life{Owner: at.Slot.Owner, Silent: silent}
	if err != nil || f.Locks() == NoLocks {
		life.Gone = err == nil && at.Slot.Kind == Released
		return life, err
	}
	return life.byLock(ctx, f, at)
}

// byLock says what the lock of the last owner proves, by the rules of a takeover.
func (l Life) byLock(ctx context.Context, f *Folder, at Position) (Life, error) {
	if at.Slot.Kind == Released || at.Slot.Owner.ID == "" {
		l.Gone = true
		return l, nil
	}
	held, err := f.Locked(at.Slot.Owner.lockName())
	if err == nil && !held && f.Locks() == SharedLocks {
		if err = sleep(ctx, lockPause); err == nil {
			held, err = f.Locked(at.Slot.Owner.lockName())
		}
	}
	if err != nil {
		return l, err
	}
	now, err := slotNumbers(f)
	if err == nil && now[0] != at.Top { // somebody is at work
		return Life{Owner: at.Slot.Owner, Alive: f.Locks() == CertainLocks}, nil
	}
	l.Gone, l.Alive = !held, held && f.Locks() == CertainLocks
	return l, err
}

// changed says when a file or directory was changed last, by the clock of the disk. What this host remembers of it does not count: a
// directory that is listed after this is listed as it is.
func (f *Folder) changed(name string) (time.Time, error) {
	dir, err := f.root.Open(".")
	if err != nil {
		return time.Time{}, err
	}
	var s unix.Statx_t
	err = unix.Statx(int(dir.Fd()), name, unix.AT_STATX_FORCE_SYNC|unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MTIME, &s)
	if err = errors.Join(err, dir.Close()); err != nil {
		return time.Time{}, &fs.PathError{Op: "statx", Path: name, Err: err}
	}
	return time.Unix(s.Mtime.Sec, int64(s.Mtime.Nsec)), nil
}
