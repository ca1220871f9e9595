package fence

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"time"
)

// A takeover makes the study that is on a disk the new owner's.
type takeover struct {
	disk        Disk
	me          Owner
	ttl         time.Duration
	recoverCopy RecoverCopy

	at      Position // the end of what was before
	slot    int64    // the newest slot of mine
	epoch   int64
	opened  bool // or it is not known: whoever comes next may go on from my epoch
	copied  [2]digest
	commits int64 // in my copy of the study
}

// A step of a takeover returns errAgain when others have gone on meanwhile and all must be looked at anew.
type step struct {
	name string
	do   func(*takeover, context.Context) error
}

// steps are in this order; none can be left out.
var steps = []step{
	{"look", (*takeover).readPosition},
	{"wait", (*takeover).wait},
	{"claim", (*takeover).claim},
	{"list again", (*takeover).listAgain},
	{"copy", (*takeover).copy},
	{"copy again", (*takeover).copyAgain},
	{"recover", (*takeover).recover},
	{"check", (*takeover).check},
	{"open", (*takeover).open},
}

var errAgain = errors.New("others have gone on meanwhile")

// maxAttempts are how often a takeover begins anew. Each time another owner has got further.
const maxAttempts = 5

// A RecoverCopy recovers the copy of a study in an epoch's directory, looks whether it is whole, and says how many commits it has. So many were
// acknowledged.
type RecoverCopy func(dir string, acknowledged int64) (commits int64, err error)

// Take takes the study over, or begins it if there is none.
//
// An owner that lives is not disturbed: the error wraps ErrOwned and says who it is. Whether it lives is told by its lock where that is
// certain; else it is dead when it has done nothing for ttl.
func Take(ctx context.Context, d Disk, me Owner, ttl time.Duration, recoverCopy RecoverCopy) (*Lease, error) {
	lock, err := prepare(d, me)
	if err != nil {
		return nil, err
	}
	t := &takeover{disk: d, me: me, ttl: ttl, recoverCopy: recoverCopy}
	if err := t.run(ctx, steps); err != nil {
		if t.epoch != 0 && !t.opened { // nobody will ever go on from there
			err = errors.Join(err, d.Remove(EpochDir(t.epoch)))
		}
		return nil, errors.Join(err, lock.Close(), d.Remove(me.lockName()))
	}
	h := newLease(t, lock).keep()
	if err := t.tidy(); err != nil {
		return nil, errors.Join(err, h.Release())
	}
	return h, nil
}

// untilMine are the steps after which the owner before can acknowledge nothing.
const untilMine = 4

// Stop sees to it that a study's owner acknowledges nothing more, without taking its place. One that lives is not disturbed, as with Take. To others
// the study is this owner's until release, which is never nil.
func Stop(ctx context.Context, d Disk, me Owner, ttl time.Duration) (release func() error, err error) {
	lock, err := prepare(d, me)
	if err != nil {
		return func() error { return nil }, err
	}
	t := &takeover{disk: d, me: me, ttl: ttl}
	return func() error { return errors.Join(lock.Close(), d.Remove(me.lockName())) }, t.run(ctx, steps[:untilMine])
}

// keepEpochs is how many epochs before the own one stay, as a backup of the study as it was before.
const keepEpochs = 2

// tidy removes what the owners before have left and nobody needs: epochs but for the last ones, and locks.
func (t *takeover) tidy() error {
	names, err := t.disk.List(".")
	if err != nil {
		return err
	}
	var older []int64
	for _, name := range names {
		if epoch, ok := epochOf(name); ok && epoch < t.epoch && epoch != t.at.Slot.Epoch {
			older = append(older, epoch)
		}
	}
	slices.Sort(older)
	slices.Reverse(older)
	keep := keepEpochs - 1 // one is what this owner goes on from
	for _, epoch := range older {
		unopened := neverOpened(t.disk, epoch)
		if unopened && epoch == t.epoch-1 { // whose owner may not know yet that its claim was overtaken
			continue
		}
		if keep > 0 && !unopened {
			keep--
			continue
		}
		if err := t.disk.Remove(EpochDir(epoch)); err != nil {
			return err
		}
	}
	if last := t.at.Slot.Owner; last.ID != "" {
		if err := t.disk.Remove(last.lockName()); err != nil {
			return err
		}
	}
	return t.pruneLast()
}

// neverOpened reports whether an epoch is of a takeover that came no further than its claim, by the slot after that: a backup of nothing.
func neverOpened(d Disk, epoch int64) bool {
	next, err := readSlot(d, epoch+1)
	return err == nil && (next.Kind != Opened || next.Epoch != epoch)
}

// pruneLast removes the slots of the last owner that it would have removed itself, had it not been killed: see the package's comment. What those before it
// have left, it has removed when it came.
func (t *takeover) pruneLast() error {
	numbers, err := slotNumbers(t.disk)
	if err != nil {
		return err
	}
	for _, n := range numbers {
		if n <= t.at.Slot.Epoch || n >= t.epoch-1 {
			continue
		}
		s, err := readSlot(t.disk, n)
		switch {
		case errors.Is(err, errUnwritten), errors.Is(err, fs.ErrNotExist): // perhaps a claim; gone
		case err != nil:
			return err
		case s.Kind == Commit || s.Kind == Heartbeat:
			if err := t.disk.Remove(slotName(n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// prepare makes the directories, and takes the lock by which others see that this owner lives.
func prepare(d Disk, me Owner) (io.Closer, error) {
	for _, dir := range []string{SlotDir, OwnerDir} {
		if err := d.Make(dir); err != nil {
			return nil, err
		}
	}
	return d.Lock(me.lockName())
}

func (t *takeover) run(ctx context.Context, steps []step) (err error) {
	for range maxAttempts {
		if err = t.once(ctx, steps); !errors.Is(err, errAgain) {
			return err
		}
	}
	return fmt.Errorf("%w: %w, %d times", ErrOwned, err, maxAttempts)
}

func (t *takeover) once(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if err := s.do(t, ctx); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// readPosition finds the end of what was before.
func (t *takeover) readPosition(context.Context) (err error) {
	if err = t.refresh(SlotDir); err != nil {
		return err
	}
	epoch, err := newestEpoch(t.disk) // first: whoever makes an epoch has a slot of its number
	if err != nil {
		return err
	}
	t.at, err = ReadPosition(t.disk)
	if errors.Is(err, fs.ErrNotExist) { // its owner has removed it since it was listed
		return errAgain
	}
	if err == nil && epoch > t.at.Top {
		return DamagedError(fmt.Sprintf("slots are missing in %s: the newest is %d, and %s is there; without them it is not known which copy of the study is the last, "+
			"or whether it has an owner: bring them back, or begin a study under another name with what this one has (tuner import)", SlotDir, t.at.Top, EpochDir(epoch)))
	}
	t.slot = t.at.Top
	return err
}

// newestEpoch is the number of the newest epoch; 0 where there is none.
func newestEpoch(d Disk) (newest int64, err error) {
	names, err := d.List(".")
	for _, name := range names {
		if epoch, ok := epochOf(name); ok {
			newest = max(newest, epoch)
		}
	}
	return newest, err
}

// refresh makes the disk list a directory as it is now.
func (t *takeover) refresh(dir string) error {
	name := path.Join(dir, "look-"+t.me.ID)
	if err := t.disk.Create(name, nil); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return t.disk.Remove(name)
}

// lockPause is how far apart two looks at a lock are that is found free: a client that lost its server takes a moment to get it back.
const lockPause = time.Second

// wait waits until the owner is known to be gone, or returns ErrOwned.
func (t *takeover) wait(ctx context.Context) error {
	last := t.at.Slot
	if t.at.Top == 0 || last.Kind == Released {
		return nil
	}
	locks := t.disk.Locks()
	if locks == NoLocks {
		return t.waitQuiet(ctx, t.ttl)
	}
	switch held, err := t.disk.Locked(last.Owner.lockName()); {
	case err != nil:
		return err
	case held && locks == CertainLocks:
		return owned(last.Owner)
	case held:
		return t.waitQuiet(ctx, t.ttl)
	case locks == CertainLocks:
		return nil
	}
	if err := t.waitQuiet(ctx, lockPause); err != nil {
		return err
	}
	held, err := t.disk.Locked(last.Owner.lockName())
	if err == nil && held {
		return errAgain
	}
	return err
}

// waitQuiet returns nil if nobody takes a slot for so long.
func (t *takeover) waitQuiet(ctx context.Context, quiet time.Duration) error {
	for began := time.Now(); time.Since(began) < quiet; {
		if err := sleep(ctx, quiet/20); err != nil {
			return err
		}
		was := t.at
		if err := t.readPosition(ctx); err != nil {
			return err
		}
		if t.at.Top != was.Top {
			return owned(t.at.Slot.Owner)
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func owned(by Owner) error { return fmt.Errorf("%w: %s", ErrOwned, by) }

// claim ends the time of the owner before: it can acknowledge nothing from here on.
func (t *takeover) claim(context.Context) error {
	err := t.put(Claim, t.at.Slot.Epoch, t.at.Slot.Commits)
	switch {
	case err == nil:
		t.epoch = t.slot
	case errors.Is(err, fs.ErrExist):
		return errAgain
	}
	return err
}

// put takes the next slot.
func (t *takeover) put(kind Kind, epoch, commits int64) error {
	if err := create(t.disk, t.slot+1, Slot{kind, epoch, commits, t.me, time.Now()}); err != nil {
		return err
	}
	t.slot++
	return nil
}

// listAgain sees to it that the claim is the newest slot of all: it may fill a gap that its owner left far below.
func (t *takeover) listAgain(context.Context) error {
	numbers, err := slotNumbers(t.disk)
	if err == nil && (len(numbers) == 0 || numbers[0] != t.slot) {
		return errAgain
	}
	return err
}

// copy copies the study.
func (t *takeover) copy(context.Context) (err error) {
	if err = t.disk.Make(EpochDir(t.epoch)); err == nil {
		t.copied, err = t.copyRound()
	}
	return err
}

// Reads of a study that is still being written are repeated.
const (
	maxCopyRounds = 100
	copyPause     = 20 * time.Millisecond
)

// copyAgain copies the study until two rounds have read the same. The journal comes first in each: when it was the same twice, a
// transaction that wrote into what was read of the database between is either in that journal, or was complete before.
func (t *takeover) copyAgain(ctx context.Context) error {
	for range maxCopyRounds {
		if err := sleep(ctx, copyPause); err != nil {
			return err
		}
		before := t.copied
		var err error
		if t.copied, err = t.copyRound(); err != nil {
			return err
		}
		if t.copied == before {
			return errors.Join(t.disk.Sync(EpochDir(t.epoch)), t.disk.Sync("."))
		}
	}
	return fmt.Errorf("copy %s: it changed %d times while it was read; is its owner, %s, still at work?", t.source(), maxCopyRounds, t.at.Slot.Owner)
}

// copyRound copies the files of the study, and returns what they were.
func (t *takeover) copyRound() (copied [2]digest, err error) {
	for i, name := range [...]string{Journal, Database} {
		if copied[i], err = t.copyFile(t.source(), EpochDir(t.epoch), name); err != nil {
			return copied, fmt.Errorf("copy %s: %w", path.Join(t.source(), name), err)
		}
	}
	return copied, nil
}

// source is where the study is. Before there were epochs it was in the study's directory itself.
func (t *takeover) source() string {
	if t.at.Slot.Epoch == 0 {
		return "."
	}
	return EpochDir(t.at.Slot.Epoch)
}

// A digest tells contents apart; the zero one is that of no file.
type digest [sha256.Size]byte

// copyFile copies one file, if there is one.
func (t *takeover) copyFile(from, into, name string) (d digest, err error) {
	f, err := t.disk.Open(path.Join(from, name))
	if errors.Is(err, fs.ErrNotExist) { // perhaps it was so when this host looked last: a journal that is not seen is not rolled back
		if err := t.refresh(from); err != nil && !errors.Is(err, fs.ErrNotExist) { // the whole epoch may be lost
			return d, err
		}
		f, err = t.disk.Open(path.Join(from, name))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return d, t.disk.Remove(path.Join(into, name))
	}
	if err != nil {
		return d, err
	}
	hash := sha256.New()
	err = t.disk.Write(path.Join(into, name), io.TeeReader(f, hash))
	return digest(hash.Sum(nil)), errors.Join(err, f.Close())
}

// recover has what was being written when it was copied taken back.
func (t *takeover) recover(context.Context) (err error) {
	if t.commits, err = t.recoverCopy(EpochDir(t.epoch), t.at.Slot.Commits); err != nil {
		return fmt.Errorf("%s: %w", path.Join(t.source(), Database), err)
	}
	return nil
}

// check sees to it that all is there that was ever acknowledged. There may be more: what was stored but not yet acknowledged.
func (t *takeover) check(context.Context) error {
	if t.commits < t.at.Slot.Commits {
		return fmt.Errorf("%w: %s has %d commits, and %d were acknowledged", ErrLost, t.source(), t.commits, t.at.Slot.Commits)
	}
	return nil
}

// open says that the epoch has all of the study: whoever comes next goes on from here.
func (t *takeover) open(context.Context) error {
	err := t.put(Opened, t.epoch, t.commits)
	t.opened = !errors.Is(err, fs.ErrExist) // after any other error the slot may be there
	if !t.opened {
		return supersededBy(t.disk, t.slot+1)
	}
	return err
}
