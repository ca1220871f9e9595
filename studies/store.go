package studies

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mattn/go-sqlite3"

	"vllmtuner/studies/fence"
)

// New is what a study begins with. Resuming it needs the same again.
type New struct {
	Name  string // see ValidName
	Seed  uint64
	File  string            // text of the study file; the last owner's is kept
	World map[string]string // what must not change between two runs: model, server version, workload, SLO, …
}

// Options say how to open a study.
type Options struct {
	AcceptDrift  bool // go on in a changed world, and remember the new one
	FromSnapshot bool // where the database is damaged or lost, go on from the newest snapshot, without what came later

	// TakeoverAfter is how long a study's owner must have been silent to be taken for dead, where the disk's locks cannot tell; 0 means
	// a minute. An owner whose disk does not answer for half as long gives up.
	TakeoverAfter time.Duration
}

// usualTakeover leaves an owner half a minute to find a server again that restarts: starting vLLM once more would take longer.
const usualTakeover = time.Minute

// A Store is the open study of its one owner. Its methods may be called from several goroutines.
//
// A method that returns an error of the disk leaves the Store broken: whether the last commit happened is then unknown, and
// only opening the study again can tell. All later calls return the same error.
type Store struct {
	dir     string
	options Options
	folder  *fence.Folder
	hold    *fence.Hold

	mu      sync.Mutex // of all below
	db      *sql.DB
	path    string // of the live database
	commits int64
	broken  error

	dirty chan struct{}   // something was committed that readers do not see yet
	asked chan chan error // somebody waits for a snapshot
	stop  chan struct{}
	gone  chan struct{} // the publisher has ended
}

// Open begins the study in the directory, or resumes the one that is there. The Store owns the study until Close; another
// owner gives an error that wraps ErrOwned, and a different New one that wraps ErrWorldChanged. A disk that cannot be
// written or is nearly full is an error too, before anything else happens.
//
// On a disk of this host an owner is known to live by its lock. On one that is shared it may take Options.TakeoverAfter to know that it
// does not.
//
// Resuming changes no state: the first Begin or Record sets it to Running. A trial that is found Running is the half-done
// one of a dead owner and keeps its probes.
func Open(ctx context.Context, dir string, study New, options Options) (store *Store, resumed bool, err error) {
	if err := ValidName(study.Name); err != nil {
		return nil, false, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, false, err
	}
	s := &Store{dir: dir, options: options, dirty: make(chan struct{}, 1), asked: make(chan chan error), stop: make(chan struct{}), gone: make(chan struct{})}
	if err := s.take(ctx); err != nil {
		return nil, false, fmt.Errorf("open study %s (%s): %w", study.Name, dir, err)
	}
	if resumed, err = s.open(study); err != nil {
		return nil, false, errors.Join(fmt.Errorf("open study %s (%s): %w", study.Name, s.path, err), s.release())
	}
	go s.publishLater()
	if err := s.publishNow(); err != nil {
		return nil, false, errors.Join(fmt.Errorf("open study %s (%s): %w", study.Name, dir, err), s.Close())
	}
	return s, resumed, nil
}

// take makes this process the study's owner.
func (s *Store) take(ctx context.Context) (err error) {
	if err := prepare(s.dir); err != nil {
		return err
	}
	mount, err := fence.MountOf(s.dir)
	if err != nil {
		return err
	}
	if s.folder, err = fence.OpenFolder(s.dir, mount.Locks()); err != nil {
		return err
	}
	ttl := cmp.Or(s.options.TakeoverAfter, usualTakeover)
	if s.hold, err = fence.Take(ctx, s.folder, thisOwner(), ttl, s.settle); err != nil {
		return errors.Join(err, s.close(), s.folder.Close())
	}
	return nil
}

// thisOwner is this process.
func thisOwner() fence.Owner {
	host, err := os.Hostname()
	if err != nil {
		host = "an unknown host"
	}
	return fence.Owner{ID: strings.ToLower(rand.Text()), Host: host, PID: os.Getpid(), Since: time.Now().Truncate(time.Second)}
}

// open brings the database's schema up to date, and begins or resumes the study.
func (s *Store) open(study New) (resumed bool, err error) {
	if err := migrate(s.db); err != nil {
		return false, err
	}
	was, err := loadStudy(s.db)
	resumed = err == nil
	switch {
	case errors.Is(err, sql.ErrNoRows):
		err = s.commit("begin", func(tx *sql.Tx) error { return insertStudy(tx, study) })
	case err == nil:
		err = s.resume(was, study)
	}
	return resumed && err == nil, err
}

func insertStudy(tx *sql.Tx, study New) error {
	world, err := encode(study.World)
	if err != nil {
		return err
	}
	now := formatTime(time.Now())
	err = execute(tx, `INSERT INTO studies VALUES (?,?,?,?,?,?,?,?,?,0)`, strings.ToLower(rand.Text()), study.Name,
		strconv.FormatUint(study.Seed, 10), study.File, world, Running, "", now, now)
	if err != nil {
		return err
	}
	return addEvent(tx, "begun", thisOwner().String())
}

// resume compares the worlds, and writes down who goes on in which.
func (s *Store) resume(was Study, is New) error {
	if was.Name != is.Name {
		return fmt.Errorf("the directory holds the study %q, not %q", was.Name, is.Name)
	}
	diff := worldDiff(was.World, is.World)
	if was.Seed != is.Seed {
		diff = append(diff, fmt.Sprintf("seed: %d → %d", was.Seed, is.Seed))
	}
	if len(diff) > 0 && !s.options.AcceptDrift {
		return worldError(diff)
	}
	return s.commit("resume", func(tx *sql.Tx) error {
		if len(diff) > 0 {
			world, err := encode(is.World)
			if err != nil {
				return err
			}
			seed := strconv.FormatUint(is.Seed, 10)
			if err := execute(tx, `UPDATE studies SET world=?, seed=?`, world, seed); err != nil {
				return err
			}
			if err := addEvent(tx, "drift", strings.Join(diff, "\n")); err != nil {
				return err
			}
		}
		// What is not of the world may differ: a larger budget, another timeout.
		if err := execute(tx, `UPDATE studies SET file=?`, is.File); err != nil {
			return err
		}
		return addEvent(tx, "resumed", thisOwner().String())
	})
}

func addEvent(tx *sql.Tx, kind, text string) error {
	return execute(tx, `INSERT INTO events (time, kind, text) VALUES (?,?,?)`, formatTime(time.Now()), kind, text)
}

// Dir returns the study's directory, for the files that others keep beside the database.
func (s *Store) Dir() string { return s.dir }

// Study returns all that is stored.
func (s *Store) Study() (Study, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return Study{}, s.brokenError("read the study")
	}
	study, err := load(s.db)
	if err != nil {
		return Study{}, fmt.Errorf("read %s: %w", s.path, err)
	}
	return study, nil
}

// SetState stores how far the study has come, with one line of explanation, and publishes it.
func (s *Store) SetState(state State, note string) error {
	return s.write("set the study's state", true, func(tx *sql.Tx) error {
		if err := execute(tx, `UPDATE studies SET state=?, note=?`, state, note); err != nil {
			return err
		}
		return addEvent(tx, string(state), note)
	})
}

// Close publishes what readers do not see yet, gives the study up and returns when nothing of the Store is left.
// A second Close does nothing.
func (s *Store) Close() error {
	s.mu.Lock()
	broken := s.broken
	s.mu.Unlock()
	if errors.Is(broken, errClosed) {
		return nil
	}
	var err error
	if broken == nil {
		err = s.publishNow()
	}
	s.mu.Lock()
	s.broken = errClosed
	s.mu.Unlock()
	close(s.stop)
	select {
	case <-s.gone:
	case <-time.After(publishEnd):
		err = errors.Join(err, fmt.Errorf("the snapshot in %s is not written after %s: %w", filepath.Join(s.dir, snapshotDir), publishEnd, ErrSilent))
	}
	return errors.Join(err, s.release())
}

// publishEnd is longer than an NFS server keeps its promises to a host that is lost.
const publishEnd = 2 * time.Minute

var errClosed = errors.New("it is closed")

// release lets go of the database and then of the study.
func (s *Store) release() error {
	err := errors.Join(s.close(), s.hold.Release())
	return errors.Join(err, s.folder.Close())
}

func (s *Store) close() error {
	if s.db == nil {
		return nil
	}
	return s.db.Close()
}

// Lost is closed when the study is not this Store's any more: another owner has it, or may have it because the disk does not answer. Err
// says which.
func (s *Store) Lost() <-chan struct{} { return s.hold.Lost() }

// Err is why the study is lost; nil while it is not.
func (s *Store) Err() error { return s.hold.Err() }

func (s *Store) brokenError(what string) error {
	return fmt.Errorf("%s: the store of %s is not usable: %w", what, s.dir, s.broken)
}

// write runs do in one transaction, acknowledged when write returns nil, and has it published now or soon.
func (s *Store) write(what string, now bool, do func(*sql.Tx) error) error {
	if err := s.store(what, do); err != nil {
		return err
	}
	if !now {
		s.publishSoon()
		return nil
	}
	if err := s.publishNow(); err != nil {
		return fmt.Errorf("%s: it is stored, but readers cannot see it: %w", what, err)
	}
	return nil
}

// store is commit for those who do not have s.mu.
func (s *Store) store(what string, do func(*sql.Tx) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return s.brokenError(what)
	}
	return s.commit(what, do)
}

// commit runs do in one transaction and acknowledges it: first it is on the disk, then it counts. Whether a transaction happened that
// the disk returned an error for is not known, and neither is whose the study is when it cannot be acknowledged.
func (s *Store) commit(what string, do func(*sql.Tx) error) error {
	if err := s.hold.Err(); err != nil {
		s.broken = err
		return fmt.Errorf("%s in %s: %w", what, s.path, err)
	}
	err := transact(s.db, func(tx *sql.Tx) error {
		if err := do(tx); err != nil {
			return err
		}
		return execute(tx, `UPDATE studies SET updated=?, commits=?`, formatTime(time.Now()), s.commits+1)
	})
	if err != nil {
		err = fmt.Errorf("%s in %s: %w", what, s.path, err)
		if _, disk := errors.AsType[sqlite3.Error](err); disk {
			s.broken = err
		}
		return err
	}
	s.commits++
	if err := s.hold.Acknowledge(s.commits); err != nil {
		s.broken = fmt.Errorf("%s in %s: it is not known to count: %w", what, s.path, err)
	}
	return s.broken
}
