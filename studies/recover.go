package studies

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/mattn/go-sqlite3"

	"vllmtuner/render"
	"vllmtuner/studies/fence"
)

// recoverCopy opens the database in a new epoch's directory, and returns its number of commits. SQLite rolls back an
// incomplete transaction when it opens the database. If the copy is damaged or lacks acknowledged commits, recoverCopy
// returns an error. With Options.FromSnapshot, it replaces the copy by the newest snapshot instead.
func (s *Store) recoverCopy(epoch string, acknowledged int64) (commits int64, err error) {
	s.path = filepath.Join(s.dir, epoch, fence.Database)
	if s.db, err = openLive(s.path); err != nil {
		return 0, err
	}
	s.commits, err = checkDatabase(s.db)
	err = explainFile(err, s.path)
	if hot := checkRolledBack(s.path); err == nil {
		err = hot
	} else if hot != nil { // the transaction that was not rolled back may be the only damage
		err = fmt.Errorf("%w; %w", err, hot)
	}
	// Published commits were acknowledged before. So if the snapshot has more commits than the slots say, slots are
	// lost.
	_, published, readErr := newest(s.dir, loadStudy)
	if readErr == nil { // otherwise there is no snapshot to compare with
		acknowledged = max(acknowledged, published.Commits)
	}
	if err == nil && readErr == nil && (s.commits > 0 || acknowledged == 0) { // this check comes before the comparison of commits, because the number of commits of another study means nothing here
		err = sameStudy(s.db, published)
	}
	if err == nil && s.commits < acknowledged {
		err = fmt.Errorf("%w: of %s only %d are left", fence.ErrLost, render.Count(int(acknowledged), "commit"), s.commits)
	}
	if err == nil {
		return s.commits, nil
	}
	if !isDamage(err) {
		return 0, err
	}
	name, study, noSnapshot := newest(s.dir, loadWhole)
	switch {
	case noSnapshot != nil:
		return 0, fmt.Errorf("%w; there is no snapshot to go on from (%v)%s", err, noSnapshot, s.offerBackup(acknowledged))
	case s.options.FromSnapshot:
		return s.restore(err, name, study, acknowledged)
	}
	return 0, fmt.Errorf("%w\n%s", err, s.offer(name, study, acknowledged))
}

// sameStudy returns an error if a database has another study than the published snapshot.
func sameStudy(db *sql.DB, published Study) error {
	var id string
	err := db.QueryRow(`SELECT id FROM studies`).Scan(&id)
	if err == nil && id != published.ID {
		err = damagedf("it holds another study than the published one: %s, not %s", id, published.ID)
	}
	return err
}

// isDamage reports whether an error means that a database is damaged or lacks commits. Other errors may go away at the
// next try.
func isDamage(err error) bool {
	var of sqlite3.Error
	if errors.As(err, &of) {
		return of.Code == sqlite3.ErrCorrupt || of.Code == sqlite3.ErrNotADB || of.Code == sqlite3.ErrError // ErrError: the tables of a study are missing
	}
	return errors.Is(err, errDamaged) || errors.Is(err, fence.ErrLost)
}

// errDamaged is wrapped by errors of a damaged database.
var errDamaged = errors.New("it is damaged")

// checkRolledBack returns an error if the journal of an opened database still has an incomplete transaction. This can
// happen when SQLite cannot see the journal: it then opens the database as if there were none.
func checkRolledBack(path string) error {
	hot, err := isHot(path)
	if err == nil && hot {
		err = errors.New("an incomplete transaction was not rolled back; run the same command again before anything else")
	}
	return err
}

// isHot reports whether a database has a journal that SQLite would roll back. Such a journal does not begin with a zero
// byte.
func isHot(path string) (bool, error) {
	f, err := openRegular(path + "-journal")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	first := make([]byte, 1)
	n, err := f.Read(first)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n == 1 && first[0] != 0, errors.Join(err, f.Close())
}

// checkDatabase checks a database and returns its number of commits.
func checkDatabase(db *sql.DB) (commits int64, err error) {
	version, err := schemaVersion(db)
	if err != nil {
		return 0, err
	}
	var damage string
	if err := db.QueryRow("PRAGMA integrity_check(1)").Scan(&damage); err != nil {
		return 0, err
	}
	if damage != "ok" {
		return 0, damagedf("its pages do not fit together")
	}
	switch {
	case version == 0:
		return 0, noOthers(db)
	case version < countsCommits:
		return 0, nil
	case version >= hasSums:
		return verifyAll(db)
	}
	err = db.QueryRow(`SELECT commits FROM studies`).Scan(&commits)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return commits, err
}

// noOthers returns an error if a database without a study has tables of another program.
func noOthers(db *sql.DB) error {
	var table string
	err := db.QueryRow(`SELECT name FROM sqlite_master LIMIT 1`).Scan(&table)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return cmp.Or(err, damagedf("it holds %s of another program, and no study", table))
}

// offerBackup says how to continue if the database and all snapshots are damaged or lost.
func (s *Store) offerBackup(acknowledged int64) string {
	if backup, found := newestBackup(s.dir, s.path); found {
		return backup.offer(acknowledged)
	}
	return ", and no undamaged copy in an older epoch: restore the study's directory from a backup, or begin the study under another name"
}

// offer says how to continue from a snapshot, and how many commits would be lost.
func (s *Store) offer(name snapshot, study Study, acknowledged int64) string {
	probes := 0
	for _, t := range study.Trials {
		probes += len(t.Probes)
	}
	return fmt.Sprintf("%s holds the study as it was published at %s, with %s and %s; %s.\nTo go on from there: tuner run --from-snapshot",
		name.path(s.dir), study.Updated.Local().Format(time.DateTime), render.Count(len(study.Trials), "trial"), render.Count(probes, "probe"),
		lostAfter(acknowledged-study.Commits))
}

// loadWhole checks a whole database, and loads its study.
func loadWhole(db *sql.DB) (Study, error) {
	if _, err := checkDatabase(db); err != nil {
		return Study{}, err
	}
	return load(db)
}

// restore replaces a damaged copy by a snapshot. The error damage says what is wrong with the copy.
func (s *Store) restore(damage error, name snapshot, study Study, acknowledged int64) (commits int64, err error) {
	epoch := filepath.Base(filepath.Dir(s.path))
	err = errors.Join(s.db.Close(), s.folder.Remove(epoch+"/"+fence.Journal), s.folder.Remove(epoch+"/"+fence.Database))
	if err != nil {
		return 0, errors.Join(damage, err)
	}
	if err := name.write(context.Background(), s.dir, s.path); err != nil {
		return 0, errors.Join(damage, err)
	}
	if s.db, err = openLive(s.path); err != nil {
		return 0, err
	}
	if _, err := checkDatabase(s.db); err != nil {
		return 0, errors.Join(damage, fmt.Errorf("%s cannot be used either: %w", name.file(), err))
	}
	s.commits = max(acknowledged, study.Commits)
	s.Restored = fmt.Sprintf("from %s, which has %s: %v", name.file(), render.Of(int(study.Commits), int(s.commits), "commit"), damage)
	return s.commits, transact(s.db, func(tx *transaction) error {
		return tx.inStudy(func(tx *transaction) error {
			tx.set("commits", s.commits)
			addEvent(tx, Restored, s.Restored)
			return nil
		})
	})
}
