package fence

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync"
	"time"

	"vllmtuner/render"
)

// A Lease is an owner's right to the study. Its methods may be called from several goroutines.
//
// After an error it can acknowledge nothing more, and every call returns that error.
type Lease struct {
	disk  Disk
	me    Owner
	ttl   time.Duration
	epoch int64
	last  Slot // the newest slot before this owner's claim
	lock  io.Closer

	putting sync.Mutex // guards the fields slot, commits and old; held during calls of the disk
	slot    int64
	commits int64
	old     []int64 // numbers of this owner's slots, ascending; the method prune removes these slots, except the newest two

	mu    sync.Mutex // guards the fields err and alive; never held during calls of the disk
	err   error
	alive time.Time // when the newest slot was taken

	lost chan struct{} // closed when the field err is set
	stop chan struct{}
	work sync.WaitGroup
}

func newLease(t *takeover, lock io.Closer) *Lease {
	return &Lease{
		disk: t.disk, me: t.me, ttl: t.ttl, epoch: t.epoch, last: t.at.Slot, lock: lock, slot: t.slot, commits: t.commits,
		alive: time.Now(), lost: make(chan struct{}), stop: make(chan struct{}),
	}
}

// keep starts the heartbeat and checkExpiry. Both run until Release, or until the study is lost.
func (l *Lease) keep() *Lease {
	l.work.Go(func() { l.every(min(l.ttl, DefaultTTL)/heartbeatsPerTTL, l.heartbeat) })
	if l.disk.Locks() != CertainLocks {
		l.work.Go(func() { l.every(l.ttl/40, l.checkExpiry) })
	}
	return l
}

// Dir is the directory of this owner's epoch.
func (l *Lease) Dir() string { return EpochDir(l.epoch) }

// Epoch is the number of the owner's epoch.
func (l *Lease) Epoch() int64 { return l.epoch }

// PreviousSlot returns the slot that was the newest one before this owner claimed the study; the zero Slot if there was
// none.
func (l *Lease) PreviousSlot() Slot { return l.last }

// Lost returns a channel. It is closed when the owner has lost the study, or cannot know whether it has the study. Err
// says why.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Err returns why the study is lost. It returns nil while the study is not lost.
func (l *Lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Acknowledge records that the study has this number of commits, all on the disk. Nobody may rely on the commits before
// Acknowledge returns nil.
func (l *Lease) Acknowledge(commits int64) error {
	l.putting.Lock()
	defer l.putting.Unlock()
	return l.put(Commit, commits)
}

// put takes the next slot. The caller holds the mutex putting.
func (l *Lease) put(kind Kind, commits int64) error {
	if err := l.Err(); err != nil {
		return err
	}
	err := create(l.disk, l.slot+1, Slot{kind, l.epoch, commits, l.me, time.Now()})
	if errors.Is(err, fs.ErrExist) {
		err = supersededBy(l.disk, l.slot+1)
	}
	if err != nil {
		return l.lose(err)
	}
	l.slot, l.commits = l.slot+1, commits
	l.old = append(l.old, l.slot)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alive = time.Now()
	return l.err // checkExpiry may have given up meanwhile
}

// lose ends the lease, and returns the first reason for it.
func (l *Lease) lose(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
		close(l.lost)
	}
	return l.err
}

// heartbeatsPerTTL is how often per TTL an idle owner makes a slot. An owner with a TTL above DefaultTTL makes slots as
// often as with DefaultTTL, because another tuner may use DefaultTTL.
const heartbeatsPerTTL = 4

// every runs a loop that calls action once per interval. The loop ends when the study is released or lost.
func (l *Lease) every(interval time.Duration, action func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-l.lost:
			return
		case <-tick.C:
			action()
		}
	}
}

// heartbeat makes a slot to show that the owner lives, and removes old slots.
func (l *Lease) heartbeat() {
	if !l.putting.TryLock() { // an acknowledgement in progress also shows that the owner lives
		return
	}
	defer l.putting.Unlock()
	if l.put(Heartbeat, l.commits) == nil { // after an error, the method Err returns that error
		l.prune()
	}
}

// prune removes old slots. If a removal fails, the next heartbeat tries it again. The caller holds the mutex putting.
func (l *Lease) prune() {
	l.old = slices.DeleteFunc(l.old, func(n int64) bool { return n < l.slot-1 && l.disk.Remove(slotName(n)) == nil })
}

// checkExpiry gives the study up when the disk has been silent for half the TTL. Others take over only after the whole
// TTL, so two owners are never at work. It does not call the disk, because the disk may not answer.
func (l *Lease) checkExpiry() {
	l.mu.Lock()
	silent := time.Since(l.alive)
	l.mu.Unlock()
	if silent > l.ttl/2 {
		l.lose(fmt.Errorf("%w for %s; another tuner may have taken the study over", ErrSilent, render.Took(silent)))
	}
}

// Release gives the study up, so that the next owner need not wait. It returns when the goroutines and the lock of the
// Lease are gone. It waits at most DefaultTTL for a silent disk. After that the next owner has to wait.
func (l *Lease) Release() error {
	close(l.stop)
	done := make(chan error, 1)
	go func() { // in a goroutine, because the disk may not answer
		l.work.Wait()
		l.putting.Lock()
		defer l.putting.Unlock()
		if l.Err() != nil { // the study is lost; Err has the reason
			done <- nil
			return
		}
		err := l.put(Released, l.commits)
		if err == nil {
			l.prune()
		}
		done <- err
	}()
	patience := min(l.ttl, DefaultTTL)
	select {
	case err := <-done:
		return errors.Join(err, l.lock.Close(), l.disk.Remove(l.me.lockName()))
	case <-time.After(patience):
		return fmt.Errorf("give up the study: %w for %s", ErrSilent, render.Took(patience))
	}
}

// create makes a slot. fs.ErrExist means that another owner has it.
func create(d Disk, n int64, s Slot) error {
	content, err := s.seal()
	if err == nil {
		err = d.Create(slotName(n), content)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("take slot %d: %w", n, err)
	}
	return err
}

// supersededBy returns ErrOwned for a slot that this owner wanted, and names the owner that has it.
func supersededBy(d Disk, n int64) error {
	s, err := readSlot(d, n)
	return errors.Join(owned(s.Owner), err)
}
