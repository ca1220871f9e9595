package studies

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mattn/go-sqlite3"

	"vllmtuner/render"
	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// New describes a study to begin, or to resume with the same values.
type New struct {
	Name  string // see ValidName
	Seed  uint64
	File  string            // text of the study file; resuming replaces it
	World map[string]string // what was asked for and must not change between two runs: model, workload, SLO, …
	Found map[string]string // facts of the machine that must not change: GPU, image, …; a fact that becomes known later is no change
	Noted map[string]string // what may change, and is recorded: host, driver, …
	Final []string          // keys of World that AcceptDrift does not allow to change, because all trials were judged by them

	// Open gives the values of State and Note to a study that it begins; "" means Running. A resumed study keeps its
	// own State and Note.
	State State
	Note  string
}

// Options configure Open.
type Options struct {
	AcceptDrift  bool // continue in a changed world, and store the new world
	FromSnapshot bool // if the database is damaged or lost, continue from the newest snapshot and lose later commits

	// TakeoverAfter is how long an owner must be silent to count as dead. It matters if the disk's locks do not show
	// whether the owner lives; 0 means fence.DefaultTTL. An owner gives up when its disk does not answer for half of
	// that time.
	TakeoverAfter time.Duration
}

// A Store is a study that is open in this process, its only owner. Its methods may be called from several goroutines.
//
// A method that returns a disk error leaves the Store broken. Then it is unknown whether the last commit happened,
// until the study is opened again. All later calls return the same error.
type Store struct {
	Disk     Disk   // the study's disk
	Restored string // names the snapshot that Open restored, the commits that it lacks, and the reason; "" if the database was whole

	dir     string
	options Options
	folder  *fence.Folder
	lease   *fence.Lease

	silent time.Duration // how long the last owner lived after its last commit, if it was killed

	mu      sync.Mutex // guards the fields from db to rebase
	db      *sql.DB
	path    string // path of the live database
	file    os.FileInfo
	commits int64
	broken  error
	spent   trial.Spent // time that the next commit stores
	untold  error       // the publisher's error, until a caller has received it
	rebase  bool        // the next snapshot must be a base

	dirty chan struct{}   // has a value while a commit is not published yet
	asked chan chan error // requests for a snapshot; the publisher answers with its error
	stop  chan struct{}
	gone  chan struct{} // closed when the publisher has ended
}

// Open begins the study in the directory, or resumes it. The Store owns the study until Close. If another process owns
// the study, the error wraps ErrOwned. If the study's world differs from New, the error wraps ErrWorldChanged. Open
// first checks that the disk can be written and has space. An error that will come back at the next try wraps
// ErrUnusable.
//
// On a disk of this host, a lock tells whether an owner lives. On a shared disk, Open may have to wait for
// Options.TakeoverAfter to find that out.
//
// Open does not change the State of a resumed study: the first Begin or Record sets it to Running. If a trial is
// Running after Open, an earlier owner left it unfinished. It keeps its probes.
func Open(ctx context.Context, dir string, study New, options Options) (store *Store, resumed bool, err error) {
	defer func() { err = markUnusable(err) }()
	if dir, err = absoluteDir(dir, study, options); err != nil {
		return nil, false, err
	}
	s := &Store{
		dir: dir, options: options,
		dirty: make(chan struct{}, 1), asked: make(chan chan error), stop: make(chan struct{}), gone: make(chan struct{}),
	}
	if err := s.take(ctx); err != nil {
		return nil, false, fmt.Errorf("open study %s (%s): %w", study.Name, dir, err)
	}
	resumed, err = s.open(study)
	if err == nil {
		err = s.folder.Sync(s.lease.Dir()) // SQLite ignores errors when it syncs the directory that has its files
	}
	if err == nil {
		err = s.sweep()
	}
	if err != nil {
		return nil, false, errors.Join(fmt.Errorf("open study %s (%s): %w", study.Name, s.path, err), s.release())
	}
	go s.publishLater()
	if err := s.publishNow(); err != nil {
		return nil, false, errors.Join(fmt.Errorf("open study %s (%s): %w", study.Name, dir, err), s.Close())
	}
	return s, resumed, nil
}

// CheckOpen returns the study's disk. It returns the errors of Open that can be found without owning the study.
func CheckOpen(dir string, study New) (disk Disk, err error) {
	defer func() { err = markUnusable(err) }()
	if dir, err = absoluteDir(dir, study, Options{}); err != nil {
		return Disk{}, err
	}
	disk, err = ExamineDisk(dir)
	if _, gone := os.Stat(dir); err == nil && gone == nil {
		err = checkOwn(dir)
	}
	return disk, err
}

// absoluteDir returns the absolute path of a study's directory. It returns an error if Open must fail because of the
// study's name or its newest snapshot.
func absoluteDir(dir string, study New, options Options) (string, error) {
	if err := ValidName(study.Name); err != nil {
		return "", err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if err := refuse(dir, study, options); err != nil {
		return "", fmt.Errorf("open study %s (%s): %w", study.Name, dir, err)
	}
	return dir, nil
}

// refuse returns an error if the newest snapshot has another study or another world. It runs before Open writes
// anything, so a refused Open changes nothing. If no snapshot can be read, Store.open checks the same in the database.
func refuse(dir string, is New, options Options) error {
	measured := false
	_, was, err := newest(dir, func(db *sql.DB) (study Study, err error) {
		if measured, err = hasMeasured(db); err != nil {
			return Study{}, err
		}
		return loadStudy(db)
	})
	if newer, ok := errors.AsType[newerError](err); ok {
		return newer
	}
	if err != nil {
		return nil
	}
	return is.fits(was, measured, options)
}

// hasMeasured reports whether a study has a probe, or a trial with a result.
func hasMeasured(db *sql.DB) (measured bool, err error) {
	err = db.QueryRow(`SELECT EXISTS(SELECT 1 FROM probes) OR EXISTS(SELECT 1 FROM trials WHERE state=?)`, Done).Scan(&measured)
	return measured, err
}

// take makes this process the study's owner.
func (s *Store) take(ctx context.Context) (err error) {
	if s.Disk, err = prepare(s.dir); err != nil {
		return err
	}
	if s.folder, err = fence.OpenFolder(s.dir, s.Disk.Mount.Locks()); err != nil {
		return err
	}
	ttl := cmp.Or(s.options.TakeoverAfter, fence.DefaultTTL)
	if s.lease, err = fence.Take(ctx, s.folder, thisOwner(), ttl, s.recoverCopy); err != nil {
		return errors.Join(err, s.close(), s.folder.Close())
	}
	return nil
}

// thisOwner describes this process.
func thisOwner() fence.Owner {
	host, err := os.Hostname()
	if err != nil {
		host = "an unknown host"
	}
	return fence.Owner{ID: strings.ToLower(rand.Text()), Host: host, PID: os.Getpid(), Since: time.Now().Truncate(time.Second)}
}

// open migrates the database, and begins or resumes the study.
func (s *Store) open(study New) (resumed bool, err error) {
	if err := s.upgrade(); err != nil {
		return false, explainSQLite(err)
	}
	was, err := loadStudy(s.db)
	resumed = err == nil
	switch {
	case errors.Is(err, sql.ErrNoRows):
		err = s.commit("begin", func(tx *transaction) error { insertStudy(tx, study); return nil })
	case err == nil:
		s.silent = afterLastCommit(was, s.lease.PreviousSlot())
		err = s.resume(was, study)
	}
	return resumed && err == nil, err
}

// backupDir has a copy of the database in each older schema that the study had. Nothing is ever removed from it.
const backupDir = "backup"

// upgrade migrates the database to the newest schema, and keeps a copy of the old one.
func (s *Store) upgrade() error {
	version, err := schemaVersion(s.db)
	if err != nil || version == 0 || version == len(migrations) {
		return errors.Join(err, migrate(s.db))
	}
	if err := s.folder.Make(backupDir); err != nil {
		return err
	}
	name := fmt.Sprintf("%s/schema-%d.db", backupDir, version)
	if _, err := os.Stat(filepath.Join(s.dir, name)); errors.Is(err, fs.ErrNotExist) { // a run that was killed may have made the copy
		if err := s.put(name, s.writeWhole); err != nil {
			return fmt.Errorf("keep the database of schema %d: %w", version, err)
		}
	}
	return migrate(s.db)
}

// writeWhole writes a copy of the live database to a new file.
func (s *Store) writeWhole(path string) error {
	_, err := s.db.Exec("VACUUM INTO ?", path)
	return err
}

func insertStudy(tx *transaction, study New) {
	now := formatTime(time.Now())
	tx.insert(studiesTable, []any{strings.ToLower(rand.Text()), study.Name, formatSeed(study.Seed), study.File,
		cmp.Or(study.State, Running), study.Note, now, now, 0, "{}"})
	writeWorld(tx, study)
	addEvent(tx, "begun", thisOwner().String())
	if study.State != "" {
		addEvent(tx, string(study.State), study.Note)
	}
}

// resume checks the world. It records the new owner and the changes of the world.
func (s *Store) resume(was Study, is New) error {
	measured, err := hasMeasured(s.db)
	if err == nil {
		err = is.fits(was, measured, s.options)
	}
	if err != nil {
		return err
	}
	return s.commit("resume", func(tx *transaction) error {
		switch diff := drift(was, is); {
		case len(diff) == 0:
		case !measured: // a trial that was only begun has args of the old world, so it is removed; a delta cannot show the removal, but the first snapshot of an epoch is a base
			tx.remove(trialsTable, "")
			tx.remove(worldTable, "")
		default:
			if err := s.abandon(tx, "the world changed before the trial was finished: "+strings.Join(diff.lines(), "; ")); err != nil {
				return err
			}
			addChanges(tx, trialCount(tx), Drift, diff)
		}
		if now := difference(knownTo(is.Noted, was.Noted), is.Noted); len(now) > 0 {
			addChanges(tx, trialCount(tx), noted, now)
		}
		// The study file may change without a change of the world, such as a larger budget or another timeout.
		tx.set("file", is.File)
		tx.set("seed", formatSeed(is.Seed))
		writeWorld(tx, is)
		addEvent(tx, "resumed", thisOwner().String())
		return nil
	})
}

// addEvent stores an event. The event comes after all trials that have begun so far.
func addEvent(tx *transaction, kind, text string) {
	tx.insert(eventsTable, []any{tx.nextID(eventsTable), formatTime(time.Now()), kind, text, trialCount(tx)})
}

func trialCount(tx *transaction) int64 { return tx.sums[trialsTable.name].Rows }

// formatSeed returns a seed as decimal text, because an unsigned 64-bit number does not fit SQLite's INTEGER.
func formatSeed(seed uint64) string { return strconv.FormatUint(seed, 10) }

// Dir returns the study's directory. Other packages keep files there too.
func (s *Store) Dir() string { return s.dir }

// Study returns the whole study.
func (s *Store) Study() (Study, error) { return s.read(load) }

// Summary returns what ReadSummary returns, but from the live database.
func (s *Store) Summary(selectTrials func(Study) []int) (Study, error) {
	return s.read(func(db *sql.DB) (Study, error) { return summarize(db, selectTrials, short) })
}

// History returns the study as the search needs it. Most finished trials are summaries. A trial is whole if it is
// unfinished, or if selectTrials returns its number.
func (s *Store) History(selectTrials func(Study) []int) (Study, error) {
	all := func(study Study) []int { return append(Unfinished(study), selectTrials(study)...) }
	return s.read(func(db *sql.DB) (Study, error) { return summarize(db, all, long) })
}

// Unfinished returns the numbers of the unfinished trials. Their GPU time so far is known only from their probes.
func Unfinished(study Study) (numbers []int) {
	for _, t := range study.Trials {
		if t.State != Done {
			numbers = append(numbers, t.Number)
		}
	}
	return numbers
}

func (s *Store) read(loadFrom func(*sql.DB) (Study, error)) (Study, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return Study{}, s.brokenError("read the study")
	}
	study, err := loadFrom(s.db)
	if err != nil {
		return Study{}, markUnusable(fmt.Errorf("read %s: %w", s.path, explainSQLite(err)))
	}
	return study, nil
}

// SetState stores the study's state with a line of explanation, and publishes it.
func (s *Store) SetState(state State, note string) error { return s.setState(state, note, "") }

// Fail sets the state Failed, as SetState does. It also stores the remedy, which says what the user can do; "" if no
// remedy is known.
func (s *Store) Fail(note, remedy string) error { return s.setState(Failed, note, remedy) }

func (s *Store) setState(state State, note, remedy string) error {
	return s.write("set the study's state", true, func(tx *transaction) error {
		tx.set("state", state)
		tx.set("note", note)
		addEvent(tx, string(state), note)
		if remedy != "" {
			addEvent(tx, remedyEvent, remedy)
		}
		return nil
	})
}

// Close publishes the last commits, releases the study, and waits for the Store's goroutines. A second Close does
// nothing.
func (s *Store) Close() error {
	s.mu.Lock()
	broken := s.broken
	s.mu.Unlock()
	if errors.Is(broken, errClosed) {
		return nil
	}
	var err error
	wait := publishEnd
	if broken == nil {
		if err = s.publishWithin(publishEnd); errors.Is(err, errLate) {
			err, wait = fmt.Errorf("%w after %s, so that readers do not see the end of the study: %w", errLate, render.Took(publishEnd), ErrSilent), time.Second
		}
	}
	s.mu.Lock()
	if err == nil {
		err = s.untold
	}
	s.broken = errClosed
	s.mu.Unlock()
	close(s.stop)
	select {
	case <-s.gone:
	case <-time.After(wait):
		err = errors.Join(err, fmt.Errorf("writing in %s has not ended after %s: %w", filepath.Join(s.dir, snapshotDir), render.Took(wait), ErrSilent))
	}
	return errors.Join(err, s.release())
}

// publishEnd is how long Close waits for the last snapshot. This is longer than an NFS server keeps the lease of a lost
// host.
const publishEnd = 2 * time.Minute

var errClosed = errors.New("it is closed")

// release closes the database and then releases the study.
func (s *Store) release() error {
	err := errors.Join(s.close(), s.lease.Release())
	if err = errors.Join(err, s.folder.Close()); err != nil {
		err = fmt.Errorf("give up the study in %s: %w", s.dir, err)
	}
	return err
}

func (s *Store) close() error {
	if s.db == nil {
		return nil
	}
	return s.db.Close()
}

// Lost returns a channel that is closed when this Store has lost the study. Then another owner has the study, or may
// have it because the disk does not answer. Err says which of the two is true.
func (s *Store) Lost() <-chan struct{} { return s.lease.Lost() }

// Err returns the reason why the study is lost; nil if it is not lost.
func (s *Store) Err() error {
	if err := s.lease.Err(); err != nil {
		return fmt.Errorf("this run no longer owns the study in %s: %w", s.dir, err)
	}
	return nil
}

// brokenError returns the error of a call on a broken Store. The caller holds the mutex mu.
func (s *Store) brokenError(what string) error {
	s.untold = nil
	return fmt.Errorf("%s: the store of %s is not usable: %w", what, s.dir, s.broken)
}

// write runs the callback in one transaction, and acknowledges the transaction. If atOnce is true, write also asks for
// a snapshot and waits for it, for at most publishWait. Otherwise the publisher writes a snapshot soon.
func (s *Store) write(what string, atOnce bool, callback func(*transaction) error) error {
	s.mu.Lock()
	err := s.broken
	if err != nil {
		err = s.brokenError(what)
	} else {
		err = s.commit(what, callback)
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if !atOnce {
		s.publishSoon()
		return nil
	}
	if err := s.publishNow(); err != nil {
		return fmt.Errorf("%s: it is stored, but readers cannot see it: %w", what, err)
	}
	return nil
}

// commit runs the callback in one transaction, and acknowledges the transaction when it is on the disk. After a disk
// error it is unknown whether the transaction happened. If the acknowledgement fails, it is unknown who owns the study.
// Both errors break the Store.
func (s *Store) commit(what string, callback func(*transaction) error) error {
	if err := s.lease.Err(); err != nil {
		s.broken = err
		return fmt.Errorf("%s in %s: %w", what, s.path, err)
	}
	err := transact(s.db, func(tx *transaction) error {
		return tx.inStudy(func(tx *transaction) error {
			if err := callback(tx); err != nil {
				return err
			}
			tx.addSpent(s.spent)
			tx.set("updated", formatTime(time.Now()))
			tx.set("commits", s.commits+1)
			return nil
		})
	})
	if err != nil {
		err = fmt.Errorf("%s in %s: %w", what, s.path, err)
		if _, disk := errors.AsType[sqlite3.Error](err); disk {
			s.broken = err
		}
		return err
	}
	s.spent = nil
	if err := s.inPlace(); err != nil {
		s.broken = fmt.Errorf("%s in %s: %w", what, s.path, err)
		return s.broken
	}
	s.commits++
	if err := s.lease.Acknowledge(s.commits); err != nil {
		s.broken = fmt.Errorf("%s in %s: it is stored, but not acknowledged: %w", what, s.path, err)
	}
	return s.broken
}

// inPlace returns an error if the database was removed or replaced. SQLite could still write to the old file, but that
// file is lost when it is closed. On NFS the check may be a minute late.
func (s *Store) inPlace() error {
	info, err := os.Stat(s.path)
	switch {
	case err != nil:
		return fmt.Errorf("it was removed while it was written: %w", err)
	case s.file == nil:
		s.file = info
	case !os.SameFile(s.file, info):
		return errors.New("it was replaced by another file while it was written")
	}
	return nil
}
