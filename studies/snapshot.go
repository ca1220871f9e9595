package studies

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// publishEvery is the least time between two snapshots that nobody waits for. A snapshot of a thousand trials takes some
// tens of milliseconds, during which nothing can be committed.
const publishEvery = time.Second

// publishWait is how long anybody waits for a snapshot. On NFS a reader whose host is cut off has been promised that what it read does not change
// (a delegation), and the server keeps that until its lease is over, 90 s as a rule: a writer must not wait for that.
const publishWait = 2 * time.Second

// publishSoon asks the publisher for a snapshot.
func (s *Store) publishSoon() {
	select {
	case s.dirty <- struct{}{}:
	default: // asked already
	}
}

// publishNow asks for a snapshot and waits for it, but not for long.
func (s *Store) publishNow() error {
	done := make(chan error, 1)
	late := time.After(publishWait)
	select {
	case s.asked <- done:
	case <-late:
		s.publishSoon()
		return nil
	}
	select {
	case err := <-done:
		return err
	case <-late:
		return nil // it goes on; if it fails the next commit says so
	}
}

// publishLater is the publisher: it makes all snapshots, until s.stop is closed. Its errors break the Store, so that the next call returns
// them.
func (s *Store) publishLater() {
	defer close(s.gone)
	for {
		select {
		case <-s.stop:
			return
		case done := <-s.asked:
			done <- s.publish()
			continue
		case <-s.dirty:
		}
		_ = s.publish() // an error breaks the store, and the next call returns it
		rest := time.After(publishEvery)
		for resting := true; resting; {
			select {
			case <-s.stop:
				return
			case done := <-s.asked:
				done <- s.publish()
			case <-rest:
				resting = false
			}
		}
	}
}

// Snapshots are in a directory of their own, named by the epoch and the commits that they have. A name is used once, and the highest is the
// newest, whoever wrote it and when: an owner that was superseded long ago has a lower epoch.
const (
	snapshotDir = "snap"
	// currentFile names the newest snapshot. It is written in place: on NFS a reader of another host finds what is in a file when it opens it,
	// but what is in a directory up to a minute later.
	currentFile   = snapshotDir + "/CURRENT"
	keepSnapshots = 3
)

// publish writes what is committed to a file of its own, so that a reader can never hold up the writer. Only the publisher calls it. An error
// breaks the Store.
func (s *Store) publish() error {
	err := s.publishOnce()
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.broken == nil {
			s.broken = err
		}
	}
	return err
}

func (s *Store) publishOnce() error {
	name, err := s.writeSnapshot()
	if err != nil {
		return fmt.Errorf("publish in %s: %w", filepath.Join(s.dir, snapshotDir), err)
	}
	if name == "" {
		return nil
	}
	err = s.folder.Write(currentFile, strings.NewReader(name+"\n"))
	if err == nil {
		err = s.removeSnapshots()
	}
	if err != nil {
		err = fmt.Errorf("publish %s: %w", filepath.Join(s.dir, name), err)
	}
	return err
}

// writeSnapshot writes a snapshot and returns its name; "" when nothing is new. It has another name first: whoever finds one finds it whole.
func (s *Store) writeSnapshot() (name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.dirty: // served by this snapshot
	default:
	}
	if s.broken != nil {
		return "", s.broken
	}
	name = fmt.Sprintf("%s/%s-%012d.db", snapshotDir, s.hold.Dir()[1:], s.commits)
	path := filepath.Join(s.dir, name)
	if _, err := os.Stat(path); err == nil {
		return "", nil
	}
	if err := s.folder.Make(snapshotDir); err != nil {
		return "", err
	}
	next := path + ".tmp"
	// One may be left of an owner that was killed here; VACUUM INTO wants no file.
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if _, err := s.db.Exec("VACUUM INTO ?", next); err != nil {
		return "", err
	}
	return name, errors.Join(syncPath(next), os.Rename(next, path), syncPath(filepath.Dir(path)))
}

// removeSnapshots removes all but the newest snapshots, and what killed owners left of theirs.
func (s *Store) removeSnapshots() error {
	names, err := s.folder.List(snapshotDir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasSuffix(name, ".db") && !strings.HasSuffix(name, ".db.tmp") })
	for _, name := range names[:max(0, len(names)-keepSnapshots)] {
		if err := s.folder.Remove(snapshotDir + "/" + name); err != nil {
			return err
		}
	}
	return nil
}

// newestSnapshot returns the name of the newest snapshot in a study's directory; fs.ErrNotExist when there is none.
func newestSnapshot(dir string) (string, error) {
	newest := ""
	names, err := os.ReadDir(filepath.Join(dir, snapshotDir))
	if err != nil {
		return "", err
	}
	for _, e := range names {
		if strings.HasSuffix(e.Name(), ".db") {
			newest = max(newest, snapshotDir+"/"+e.Name())
		}
	}
	current, err := os.ReadFile(filepath.Join(dir, currentFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if name := strings.TrimSpace(string(current)); snapshotName.MatchString(name) {
		newest = max(newest, name)
	}
	if newest == "" {
		return "", fmt.Errorf("%s: no snapshot: %w", dir, fs.ErrNotExist)
	}
	return newest, nil
}

// snapshotName is what may be read from currentFile, which may be half written.
var snapshotName = regexp.MustCompile(`^` + snapshotDir + `/[0-9]{12}-[0-9]{12}\.db$`)
