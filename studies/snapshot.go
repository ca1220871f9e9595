package studies

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// publishEvery is the least time between two snapshots that nobody waits for. A snapshot of a thousand trials takes some
// tens of milliseconds, during which nothing can be committed.
const publishEvery = time.Second

// publishSoon asks the publisher for a snapshot. The caller holds s.mu.
func (s *Store) publishSoon() {
	select {
	case s.dirty <- struct{}{}:
	default: // asked already
	}
}

// publishLater is the publisher: it makes the snapshots that nobody waits for, until s.stop is closed. Its errors break the
// Store, so that the next call returns them.
func (s *Store) publishLater() {
	defer close(s.gone)
	for {
		select {
		case <-s.stop:
			return
		case <-s.dirty:
		}
		s.mu.Lock()
		if s.broken == nil {
			s.broken = s.publish()
		}
		s.mu.Unlock()
		select {
		case <-s.stop:
			return
		case <-time.After(publishEvery):
		}
	}
}

// publish writes what is committed to a file of its own and puts that in the place of the last snapshot, so that a reader
// finds either the old or the new one, whole, and can never hold up the writer. The caller holds s.mu.
func (s *Store) publish() error {
	select {
	case <-s.dirty: // served by this snapshot
	default:
	}
	path := filepath.Join(s.dir, snapshotFile)
	next := path + ".tmp"
	if err := s.writeSnapshot(next); err != nil {
		return fmt.Errorf("publish %s: %w", path, err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	if err := syncPath(s.dir); err != nil {
		return fmt.Errorf("publish %s: %w", path, err)
	}
	return nil
}

func (s *Store) writeSnapshot(path string) error {
	// One may be left of an owner that was killed here; VACUUM INTO wants no file.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := s.db.Exec("VACUUM INTO ?", path); err != nil {
		return err
	}
	return syncPath(path)
}
