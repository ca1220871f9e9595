package fence

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"
)

// A Life says whether a study's owner lives, as far as a reader can tell.
type Life struct {
	Owner  Owner         // the last owner; zero if its slot was not read
	Alive  bool          // the owner's lock proves that it lives
	Gone   bool          // the owner released the study, its lock is free, or there never was an owner
	Silent time.Duration // time since the last slot, by the disk's clock; 0 when a lock decides
}

// quiet is the longest normal time without a slot. A heartbeat comes every 15 s, and one heartbeat may be missing.
const quiet = 2 * DefaultTTL / heartbeatsPerTTL

// Doubtful reports whether the owner has been silent for longer than a living owner would be.
func (l Life) Doubtful() bool { return l.Silent >= quiet }

// LifeOf says whether a study's owner lives. It is for readers: it writes nothing and never delays the owner.
//
// On a shared disk it opens no file while the slots are fresh. The reason is that an NFS server may promise a reader
// that an open file does not change. If that reader is cut off, the owner cannot remove its slots until the promise
// ends. If a lock is free, LifeOf takes it for a moment, as a shared lock. This disturbs nobody, because each owner has
// a lock of its own, and takes it before its first slot.
func LifeOf(ctx context.Context, f *Folder) (life Life, err error) {
	for range maxAttempts {
		// ErrNotExist means that the owner has removed a slot since the listing. Then the slots are listed again.
		if life, err = lifeOf(ctx, f); !errors.Is(err, fs.ErrNotExist) {
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
		if silent = max(0, time.Since(at)); silent < quiet { // silent must not be below 0, because the server's clock may be ahead
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

// byLock adds to the Life what the last owner's lock proves, by the rules of a takeover.
func (l Life) byLock(ctx context.Context, f *Folder, at Position) (Life, error) {
	if at.Slot.Kind == Released || at.Slot.Owner.ID == "" {
		l.Gone = true
		return l, nil
	}
	held, err := f.Locked(at.Slot.Owner.lockName())
	if err == nil && !held && f.Locks() == SharedLocks {
		if err = Sleep(ctx, lockPause); err == nil {
			held, err = f.Locked(at.Slot.Owner.lockName())
		}
	}
	if err != nil {
		return l, err
	}
	now, err := slotNumbers(f)
	if err == nil && now[0] != at.Top { // an owner has made a slot meanwhile
		return Life{Owner: at.Slot.Owner, Alive: f.Locks() == CertainLocks}, nil
	}
	l.Gone, l.Alive = !held, held && f.Locks() == CertainLocks
	return l, err
}

// changed returns the time of the last change of a file or directory, by the disk's clock. It refreshes this host's
// cache, so the next listing of that directory is up to date.
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
