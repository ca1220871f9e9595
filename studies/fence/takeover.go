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

	"vllmtuner/render"
)

// A takeover makes this process the new owner of the study on a disk.
type takeover struct {
	disk        Disk
	me          Owner
	ttl         time.Duration
	recoverCopy RecoverCopy

	at      Position // where the slots before my claim end
	slot    int64    // number of my newest slot
	epoch   int64
	opened  bool // the next owner may go on from my epoch; also true if I do not know whether it may
	copied  [2]digest
	commits int64 // number of commits in my copy of the study
}

// A step is one part of a takeover. It returns errAgain when another owner has made a slot meanwhile, so that the
// takeover must begin again.
type step struct {
	name string
	do   func(*takeover, context.Context) error
}

// steps are the steps of a takeover, in order. TestNothingCanBeLeftOut shows what goes wrong when a step is left out.
var steps = []step{
	{"read position", (*takeover).readPosition},
	{"wait", (*takeover).wait},
	{"claim", (*takeover).claim},
	{"list again", (*takeover).listAgain},
	{"copy", (*takeover).copy},
	{"copy again", (*takeover).copyAgain},
	{"recover", (*takeover).recover},
	{"check", (*takeover).check},
	{"open", (*takeover).open},
}

var errAgain = errors.New("another tuner made progress meanwhile")

// maxAttempts is how often a takeover may begin. It begins again only if another owner has made progress in the
// meantime.
const maxAttempts = 5

// A RecoverCopy rolls back an incomplete transaction in the copy of a study in an epoch's directory. It checks that
// the copy is whole, and returns its number of commits. acknowledged is the number of commits in the last slot.
type RecoverCopy func(dir string, acknowledged int64) (commits int64, err error)

// Take takes the study over, or begins it if there is none.
//
// It does not disturb a living owner: then the error wraps ErrOwned and names the owner. On a disk with CertainLocks an
// owner lives while its lock is held. On other disks an owner is dead when it has made no slot for ttl. On a disk with
// SharedLocks it is also dead when its lock stays free for lockPause.
func Take(ctx context.Context, d Disk, me Owner, ttl time.Duration, recoverCopy RecoverCopy) (*Lease, error) {
	lock, err := prepare(d, me)
	if err != nil {
		return nil, err
	}
	t := &takeover{disk: d, me: me, ttl: ttl, recoverCopy: recoverCopy}
	if err := t.run(ctx, steps); err != nil {
		if t.epoch != 0 && !t.opened { // no later owner goes on from this epoch
			err = errors.Join(err, d.Remove(EpochDir(t.epoch)))
		}
		return nil, errors.Join(err, lock.Close(), d.Remove(me.lockName()))
	}
	lease := newLease(t, lock).keep()
	if err := t.tidy(); err != nil {
		return nil, errors.Join(err, lease.Release())
	}
	return lease, nil
}

// untilMine is the number of steps after which this takeover has the study: the old owner can acknowledge nothing more.
const untilMine = 4

// Stop ends a study's owner without a successor: the old owner can acknowledge nothing more. Like Take it does not
// disturb a living owner. Until release is called, others see the study as owned. release is never nil.
func Stop(ctx context.Context, d Disk, me Owner, ttl time.Duration) (release func() error, err error) {
	lock, err := prepare(d, me)
	if err != nil {
		return func() error { return nil }, err
	}
	t := &takeover{disk: d, me: me, ttl: ttl}
	return func() error { return errors.Join(lock.Close(), d.Remove(me.lockName())) }, t.run(ctx, steps[:untilMine])
}

// keepEpochs is how many earlier epochs stay as backups.
const keepEpochs = 2

// tidy removes old epochs, except the last ones. It also removes the last owner's lock and slots.
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
	keep := keepEpochs - 1 // the epoch that this owner copied is kept too
	for _, epoch := range older {
		unopened := neverOpened(t.disk, epoch)
		if unopened && epoch == t.epoch-1 { // the owner of that epoch may still be at work on it
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

// neverOpened reports whether a takeover claimed an epoch and ended before it opened it. The slot after the claim shows
// that. Such an epoch is no backup.
func neverOpened(d Disk, epoch int64) bool {
	next, err := readSlot(d, epoch+1)
	return err == nil && (next.Kind != Opened || next.Epoch != epoch)
}

// pruneLast removes the slots that the last owner would have removed if it had not been killed. The slots of earlier
// owners are gone already.
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
		case errors.Is(err, errUnwritten), errors.Is(err, fs.ErrNotExist): // the slot may be a claim, or another tuner has removed it
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

// prepare makes the directories, and takes the lock that shows others that this owner lives.
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

// readPosition finds where the slots before this takeover end.
func (t *takeover) readPosition(context.Context) (err error) {
	if err = t.refresh(SlotDir); err != nil {
		return err
	}
	epoch, err := newestEpoch(t.disk) // read before the slots, because an owner makes its slot before its epoch
	if err != nil {
		return err
	}
	t.at, err = ReadPosition(t.disk)
	if errors.Is(err, fs.ErrNotExist) { // the owner has removed a slot since the listing
		return errAgain
	}
	if err == nil && epoch > t.at.Top {
		return DamagedError(fmt.Sprintf("slots are missing in %s: the newest is %d, and %s exists, so the study's newest copy and its owner are unknown; "+
			"restore the slots from a backup, or import this study into a new one (tuner import)", SlotDir, t.at.Top, EpochDir(epoch)))
	}
	t.slot = t.at.Top
	return err
}

// newestEpoch returns the number of the newest epoch, or 0 if there is none.
func newestEpoch(d Disk) (newest int64, err error) {
	names, err := d.List(".")
	for _, name := range names {
		if epoch, ok := epochOf(name); ok {
			newest = max(newest, epoch)
		}
	}
	return newest, err
}

// refresh makes and removes a file in a directory. After this change the disk lists the directory as it is now.
func (t *takeover) refresh(dir string) error {
	name := path.Join(dir, "look-"+t.me.ID)
	if err := t.disk.Create(name, nil); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return t.disk.Remove(name)
}

// lockPause is the time between two checks that a lock is free. A client that lost its NFS server needs a moment to get
// its lock back.
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

// waitQuiet waits for the given duration. If an owner makes a slot in that time, it returns ErrOwned.
func (t *takeover) waitQuiet(ctx context.Context, duration time.Duration) error {
	for began := time.Now(); time.Since(began) < duration; {
		if err := Sleep(ctx, duration/20); err != nil {
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

// Sleep waits for d. If the context ends first, it returns the error of the context.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func owned(by Owner) error { return fmt.Errorf("%w: %s", ErrOwned, by) }

// claim makes the next slot, a claim. From then on the old owner can acknowledge nothing.
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

// put makes the next slot, of the given kind.
func (t *takeover) put(kind Kind, epoch, commits int64) error {
	if err := create(t.disk, t.slot+1, Slot{kind, epoch, commits, t.me, time.Now()}); err != nil {
		return err
	}
	t.slot++
	return nil
}

// listAgain checks that the claim is the newest slot. If the first listing was old, the claim may have filled a gap
// where slots were removed.
func (t *takeover) listAgain(context.Context) error {
	numbers, err := slotNumbers(t.disk)
	if err == nil && (len(numbers) == 0 || numbers[0] != t.slot) {
		return errAgain
	}
	return err
}

// copy copies the study into the new epoch's directory.
func (t *takeover) copy(context.Context) (err error) {
	if err = t.disk.Make(EpochDir(t.epoch)); err == nil {
		t.copied, err = t.copyRound()
	}
	return err
}

// These constants limit how long copyAgain tries when the old owner still writes the study.
const (
	maxCopyRounds = 100
	copyPause     = 20 * time.Millisecond
)

// copyAgain copies the study until two successive rounds read the same bytes. Each round reads the journal before the
// database. A transaction of the old owner cannot be in such a copy in part. If it is open when the second round reads
// the journal, both journals are the same, so they have what undoes it. If it has ended by then, both databases have
// all of it. If it begins later, both databases have nothing of it.
func (t *takeover) copyAgain(ctx context.Context) error {
	for range maxCopyRounds {
		if err := Sleep(ctx, copyPause); err != nil {
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
	return fmt.Errorf("copy %s: it changed %d times while it was read; check whether its owner, %s, still runs", t.source(), maxCopyRounds, t.at.Slot.Owner)
}

// copyRound copies the files of the study, and returns their digests.
func (t *takeover) copyRound() (copied [2]digest, err error) {
	for i, name := range [...]string{Journal, Database} {
		if copied[i], err = t.copyFile(t.source(), EpochDir(t.epoch), name); err != nil {
			return copied, fmt.Errorf("copy %s: %w", path.Join(t.source(), name), err)
		}
	}
	return copied, nil
}

// source is the directory of the old study. In schema 1, which had no epochs, it is the study's directory itself.
func (t *takeover) source() string {
	if t.at.Slot.Epoch == 0 {
		return "."
	}
	return EpochDir(t.at.Slot.Epoch)
}

// A digest identifies content. The zero digest means no file.
type digest [sha256.Size]byte

// copyFile copies one file, if there is one.
func (t *takeover) copyFile(from, into, name string) (d digest, err error) {
	f, err := t.disk.Open(path.Join(from, name))
	// Look again with a fresh cache. An old cache may hide a journal, which then would not be rolled back.
	if errors.Is(err, fs.ErrNotExist) {
		if err := t.refresh(from); err != nil && !errors.Is(err, fs.ErrNotExist) { // the whole epoch may be missing
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

// recover rolls back an incomplete transaction in the copy of the study.
func (t *takeover) recover(context.Context) (err error) {
	if t.commits, err = t.recoverCopy(EpochDir(t.epoch), t.at.Slot.Commits); err != nil {
		return fmt.Errorf("%s: %w", path.Join(t.source(), Database), err)
	}
	return nil
}

// check requires every acknowledged commit. The copy may have one more, which was stored but not yet acknowledged.
func (t *takeover) check(context.Context) error {
	if t.commits < t.at.Slot.Commits {
		return fmt.Errorf("%w: %s has %s, and %d were acknowledged", ErrLost, t.source(), render.Count(int(t.commits), "commit"), t.at.Slot.Commits)
	}
	return nil
}

// open makes the slot that says that the new epoch has the whole study. The next owner goes on from this epoch.
func (t *takeover) open(context.Context) error {
	err := t.put(Opened, t.epoch, t.commits)
	t.opened = !errors.Is(err, fs.ErrExist) // after any other error the slot may exist
	if !t.opened {
		return supersededBy(t.disk, t.slot+1)
	}
	return err
}
