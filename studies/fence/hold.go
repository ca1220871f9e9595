package fence

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync"
	"time"
)

// A Hold is the study in the hands of its owner. Its methods may be called from several goroutines.
//
// After an error nothing can be acknowledged any more, and all calls return it.
type Hold struct {
	disk  Disk
	me    Owner
	ttl   time.Duration
	epoch int64
	lock  io.Closer

	putting sync.Mutex // of slot, commits and old, for as long as the disk takes
	slot    int64
	commits int64
	old     []int64 // my slots that may be removed, but for the newest two; ascending

	mu    sync.Mutex // of err and alive; never held while the disk is asked
	err   error
	alive time.Time // when the newest slot was taken

	lost chan struct{} // closed when err is set
	stop chan struct{}
	work sync.WaitGroup
}

func newHold(t *takeover, lock io.Closer) *Hold {
	return &Hold{
		disk: t.disk, me: t.me, ttl: t.ttl, epoch: t.epoch, lock: lock, slot: t.slot, commits: t.commits,
		alive: time.Now(), lost: make(chan struct{}), stop: make(chan struct{}),
	}
}

// keep has the owner show that it lives, and watched, until Release.
func (h *Hold) keep() *Hold {
	h.work.Go(func() { h.every(min(h.ttl, UsualSilence)/beatsPerTTL, h.beat) })
	if h.disk.Locks() != CertainLocks {
		h.work.Go(func() { h.every(h.ttl/40, h.watch) })
	}
	return h
}

// Dir is the directory of this owner's epoch.
func (h *Hold) Dir() string { return EpochDir(h.epoch) }

// Epoch is the number of the owner's epoch.
func (h *Hold) Epoch() int64 { return h.epoch }

// Lost is closed when the study is not this owner's any more, or when it cannot be known; Err says why.
func (h *Hold) Lost() <-chan struct{} { return h.lost }

// Err is why the study is lost.
func (h *Hold) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Acknowledge says that the study has so many commits, all of which are on the disk. Only when it returns nil may anyone rely on them.
func (h *Hold) Acknowledge(commits int64) error {
	h.putting.Lock()
	defer h.putting.Unlock()
	return h.put(Commit, commits)
}

// put takes the next slot. The caller holds putting.
func (h *Hold) put(kind Kind, commits int64) error {
	if err := h.Err(); err != nil {
		return err
	}
	err := create(h.disk, h.slot+1, Slot{kind, h.epoch, commits, h.me, time.Now()})
	if errors.Is(err, fs.ErrExist) {
		err = supersededBy(h.disk, h.slot+1)
	}
	if err != nil {
		return h.lose(err)
	}
	h.slot, h.commits = h.slot+1, commits
	h.old = append(h.old, h.slot)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.alive = time.Now()
	return h.err // the watchdog may have given up meanwhile
}

// lose ends the ownership, and returns the first reason for it.
func (h *Hold) lose(err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		h.err = err
		close(h.lost)
	}
	return h.err
}

// beatsPerTTL is how often an owner that has nothing to store shows that it lives. It does not know after what silence others take it for dead, so one that
// is itself more patient than usual shows it no less often.
const beatsPerTTL = 4

// every does something again and again until the study is given up or lost.
func (h *Hold) every(interval time.Duration, do func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-h.lost:
			return
		case <-tick.C:
			do()
		}
	}
}

// beat shows that the owner lives, and removes old slots.
func (h *Hold) beat() {
	if !h.putting.TryLock() { // something is being acknowledged, which shows it as well
		return
	}
	defer h.putting.Unlock()
	if h.put(Beat, h.commits) == nil { // otherwise Err says it
		h.prune()
	}
}

// prune removes old slots. One that cannot be removed now is tried again with the next beat. The caller holds putting.
func (h *Hold) prune() {
	h.old = slices.DeleteFunc(h.old, func(n int64) bool { return n < h.slot-1 && h.disk.Remove(slotName(n)) == nil })
}

// watch gives the study up when the disk has been silent for half of the time after which others take it over, so that no two
// owners are at work. It does not ask the disk, which may not answer.
func (h *Hold) watch() {
	h.mu.Lock()
	silent := time.Since(h.alive)
	h.mu.Unlock()
	if silent > h.ttl/2 {
		h.lose(fmt.Errorf("%w for %s; another tuner may have taken the study over", ErrSilent, silent.Round(time.Millisecond)))
	}
}

// Release gives the study up, so that the next owner need not wait, and returns when nothing of the Hold is left. It does not wait for a silent disk
// longer than UsualSilence: the next owner then waits instead.
func (h *Hold) Release() error {
	close(h.stop)
	done := make(chan error, 1)
	go func() { // the disk may not answer
		h.work.Wait()
		h.putting.Lock()
		defer h.putting.Unlock()
		if h.Err() != nil { // it is another's, and whoever asked for more was told
			done <- nil
			return
		}
		err := h.put(Released, h.commits)
		if err == nil {
			h.prune()
		}
		done <- err
	}()
	patience := min(h.ttl, UsualSilence)
	select {
	case err := <-done:
		return errors.Join(err, h.lock.Close(), h.disk.Remove(h.me.lockName()))
	case <-time.After(patience):
		return fmt.Errorf("give the study up: %w for %s", ErrSilent, patience)
	}
}

// create takes a slot. fs.ErrExist means that another has it.
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

// supersededBy says who has taken a slot that was to be this owner's.
func supersededBy(d Disk, n int64) error {
	s, err := readSlot(d, n)
	return errors.Join(owned(s.Owner), err)
}
