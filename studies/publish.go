package studies

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vllmtuner/studies/rights"
)

// publishEvery is the shortest time between two snapshots, unless a caller waits for one.
const publishEvery = time.Second

// publishWait is how long a caller waits for a snapshot. An NFS server may promise a reader that a file will not change
// (a delegation). If the connection to that reader breaks, the server keeps its promise until the NFS lease ends,
// usually for 90 s. A writer must not wait so long.
const publishWait = 2 * time.Second

// minRebase is a size in bytes. A new base is written only when the deltas since the last base are larger in total.
const minRebase = 1 << 20

// maxFailedBases is a number of attempts to write a base. If so many attempts fail in a row, the Store breaks. Fewer
// failures do not break it, because the disk may be full only for a moment.
const maxFailedBases = 3

// keepSnapshots is how many of the newest snapshots are kept, with their bases. A reader can then still open the
// snapshot that it has chosen.
const keepSnapshots = 3

// publishSoon asks the publisher for a snapshot, and does not wait for it.
func (s *Store) publishSoon() {
	select {
	case s.dirty <- struct{}{}:
	default: // somebody has asked for a snapshot already
	}
}

// publishNow asks for a snapshot and waits for it, for at most publishWait. If the snapshot fails later, the next
// commit returns the error.
func (s *Store) publishNow() error {
	err := s.publishWithin(publishWait)
	if errors.Is(err, errLate) {
		s.publishSoon()
		return nil
	}
	return err
}

var errLate = errors.New("the snapshot is not written yet")

// publishWithin asks for a snapshot and waits for it, for at most the given time. After that time it returns errLate.
func (s *Store) publishWithin(wait time.Duration) error {
	done := make(chan error, 1)
	late := time.After(wait)
	select {
	case s.asked <- done:
	case <-late:
		return errLate
	}
	select {
	case err := <-done:
		return err
	case <-late:
		return errLate
	}
}

// A publisher writes all snapshots of a Store. It writes the first base (a full copy of the study) from the database.
// Later bases are written in the background, from the previous base and a delta (the rows that came after it). So
// neither the study nor its readers wait while a large base is written.
type publisher struct {
	store *Store
	base  mark  // where the base ends
	last  mark  // where the newest snapshot ends; zero before the first one
	size  int64 // size of the base in bytes
	since int64 // bytes of all deltas since the base

	rebasing   chan error // gets the error of the base that is being written; nil while no base is being written
	rebaseFrom snapshot   // the snapshot from which the new base is written
	end        mark       // where the snapshot rebaseFrom ends
	failed     int        // number of failed bases in a row
}

// publishLater publishes after commits and on request, until s.stop is closed. An error breaks the Store, and the next
// call of a method returns it.
func (s *Store) publishLater() {
	defer close(s.gone)
	ctx, cancel := context.WithCancel(context.Background())
	p := &publisher{store: s}
	defer func() { // if a base is being written, cancel that and wait for its end
		cancel()
		if p.rebasing != nil {
			<-p.rebasing
		}
	}()
	dirty, rest := s.dirty, (<-chan time.Time)(nil)
	for {
		select {
		case <-s.stop:
			return
		case done := <-s.asked:
			done <- p.publish(ctx)
		case <-dirty:
			p.publish(ctx)
			dirty, rest = nil, time.After(publishEvery)
		case <-rest:
			dirty, rest = s.dirty, nil
		}
	}
}

// publish writes the committed study to a new file. Readers read that file, so they never delay the writer. An error
// breaks the Store.
func (p *publisher) publish(ctx context.Context) error {
	err := p.once(ctx)
	if err != nil {
		err = fmt.Errorf("publish in %s: %w", filepath.Join(p.store.dir, snapshotDir), err)
		p.store.mu.Lock()
		defer p.store.mu.Unlock()
		if p.store.broken == nil {
			p.store.broken, p.store.untold = err, err
		}
	}
	return err
}

func (p *publisher) once(ctx context.Context) error {
	if err := p.adopt(); err != nil {
		return err
	}
	n, err := p.next()
	if err != nil || n == (snapshot{}) {
		return err
	}
	if err := p.store.folder.Write(currentFile, strings.NewReader(n.file()+"\n")); err != nil {
		return err
	}
	if p.rebasing == nil && p.since > max(p.size, minRebase) {
		p.rebasing, p.rebaseFrom, p.end = make(chan error, 1), n, p.last
		go p.rebase(ctx, n, p.rebasing)
	}
	return p.removeOld(n.epoch)
}

// next writes the next snapshot. If nothing is new, it returns the zero snapshot.
func (p *publisher) next() (snapshot, error) {
	s := p.store
	s.mu.Lock()
	select {
	case <-s.dirty: // removes the request, because this snapshot will include the commit
	default:
	}
	if s.broken != nil {
		defer s.mu.Unlock()
		return snapshot{}, s.broken
	}
	if p.last == (mark{}) || s.rebase {
		defer s.mu.Unlock()
		return p.first()
	}
	n := snapshot{s.lease.Epoch(), s.commits, p.base.commits}
	if n.commits == p.last.commits {
		s.mu.Unlock()
		return snapshot{}, nil
	}
	content, err := deltaSince(s.db, p.base)
	if err == nil {
		p.last, err = markOf(s.db, s.commits)
	}
	s.mu.Unlock() // writing the file may take long
	if err != nil {
		return snapshot{}, err
	}
	p.since += int64(len(content))
	return n, s.put(n.file(), func(path string) error { return os.WriteFile(path, content, rights.File(s.dir)) })
}

// first writes a base from the live database. The caller holds the Store's lock.
func (p *publisher) first() (n snapshot, err error) {
	s := p.store
	n = snapshot{s.lease.Epoch(), s.commits, -1}
	if err := s.folder.Make(snapshotDir); err != nil {
		return n, err
	}
	if err := s.put(n.file(), s.writeWhole); err != nil {
		return n, err
	}
	s.rebase = false
	if p.last, err = markOf(s.db, s.commits); err != nil {
		return n, err
	}
	p.base, p.since = p.last, 0
	p.size, err = sizeOf(n.path(s.dir))
	return n, err
}

// rebase writes a base from a snapshot. It sends its error to the channel done, or nil after success.
func (p *publisher) rebase(ctx context.Context, from snapshot, done chan<- error) {
	done <- p.store.put(from.asBase().file(), func(path string) error { return from.write(ctx, p.store.dir, path) })
}

// adopt starts to use the base that rebase has written. It does nothing if no new base is finished.
func (p *publisher) adopt() (err error) {
	select {
	case err = <-p.rebasing:
	default:
		return nil
	}
	base := p.rebaseFrom.asBase()
	p.rebasing, p.rebaseFrom = nil, snapshot{}
	switch {
	case err != nil: // the old base can still be used; the next attempt comes when the deltas have grown as much again
		p.since = 0
		if p.failed++; p.failed == maxFailedBases {
			return fmt.Errorf("make a new base, attempt %d: %w", p.failed, err)
		}
	case p.end.commits > p.base.commits: // otherwise p.first has written a newer base meanwhile
		p.base, p.since, p.failed = p.end, 0, 0
		p.size, err = sizeOf(base.path(p.store.dir))
		return err
	}
	return nil
}

// put writes a file in the study's directory under a temporary name, syncs it, and then renames it. So a reader never
// finds an incomplete file.
func (s *Store) put(name string, write func(path string) error) error {
	path := filepath.Join(s.dir, name)
	next := name + ".tmp"
	if err := s.folder.Remove(next); err != nil { // a killed owner may have left the temporary file
		return err
	}
	if err := s.folder.Create(next, nil); err != nil { // if SQLite created the file, it would lack the study's permissions
		return err
	}
	if err := errors.Join(write(filepath.Join(s.dir, next)), syncPath(filepath.Join(s.dir, next))); err != nil {
		return errors.Join(err, s.folder.Remove(next))
	}
	return errors.Join(os.Rename(filepath.Join(s.dir, next), path), syncPath(filepath.Dir(path)))
}

func sizeOf(path string) (int64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// removeOld removes old snapshots, and incomplete files that killed owners of earlier epochs left.
func (p *publisher) removeOld(epoch int64) error {
	names, err := p.store.folder.List(snapshotDir)
	if err != nil {
		return err
	}
	var all []snapshot
	for _, name := range names {
		if n, ok := parseSnapshot(name); ok {
			all = append(all, n)
		}
		unfinished, isUnfinished := parseSnapshot(strings.TrimSuffix(name, ".tmp"))
		if isUnfinished && strings.HasSuffix(name, ".tmp") && unfinished.epoch < epoch {
			if err := p.store.folder.Remove(snapshotDir + "/" + name); err != nil {
				return err
			}
		}
	}
	for _, n := range obsoleteSnapshots(all, p.rebaseFrom) {
		if err := p.store.folder.Remove(n.file()); err != nil {
			return err
		}
	}
	return nil
}

// obsoleteSnapshots returns the snapshots to remove. It keeps the newest snapshots with their bases, and a new base
// that has no delta yet. It also keeps the source, which is the snapshot from which a base is being written.
func obsoleteSnapshots(all []snapshot, source snapshot) []snapshot {
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, snapshot.compare)
	newest := all[max(0, len(all)-keepSnapshots):]
	oldest := newest[0].baseSnapshot()
	wantedToo := append(slices.Clone(newest), source)
	return slices.DeleteFunc(all, func(n snapshot) bool {
		wanted := func(m snapshot) bool { return m == n || m.baseSnapshot() == n }
		return slices.ContainsFunc(wantedToo, wanted) || n.isBase() && n.compare(oldest) > 0
	})
}
