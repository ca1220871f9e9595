package studies

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"vllmtuner/studies/fence"
)

// settle opens the database that was copied into an epoch's directory, which has SQLite take back a transaction that was not complete, and
// says how many commits it has. What is damaged, or has lost what was acknowledged, is an error, unless the user has said to go on from the
// newest snapshot.
func (s *Store) settle(epoch string, acknowledged int64) (commits int64, err error) {
	s.path = filepath.Join(s.dir, epoch, fence.Database)
	if s.db, err = openFile(s.path, settings); err != nil {
		return 0, err
	}
	s.commits, err = whole(s.db)
	if err == nil && s.commits < acknowledged {
		err = fmt.Errorf("%w: of %d commits %d are left", fence.ErrLost, acknowledged, s.commits)
	}
	if _, newer := errors.AsType[newerError](err); err == nil || newer {
		return s.commits, err
	}
	if s.options.FromSnapshot {
		return s.restore(err, acknowledged)
	}
	return 0, fmt.Errorf("%w%s", err, s.offer(acknowledged))
}

// newerError says that a database has a schema that this tuner does not know.
type newerError struct{ version int }

func (e newerError) Error() string {
	return fmt.Sprintf("written by a newer tuner (schema %d, this one knows %d): use that one", e.version, len(migrations))
}

// whole returns how many commits a database has, or what is wrong with it.
func whole(db *sql.DB) (commits int64, err error) {
	version, err := schemaVersion(db)
	switch {
	case err != nil:
		return 0, err
	case version > len(migrations):
		return 0, newerError{version}
	}
	var damage string
	if err := db.QueryRow("PRAGMA integrity_check(1)").Scan(&damage); err != nil {
		return 0, err
	}
	if damage != "ok" {
		return 0, fmt.Errorf("it is damaged: %s", damage)
	}
	if version < countsCommits {
		return 0, nil
	}
	err = db.QueryRow(`SELECT commits FROM studies`).Scan(&commits)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return commits, err
}

// offer says what there is instead of a database that is damaged or lost, and what would be lost with it.
func (s *Store) offer(acknowledged int64) string {
	name, study, err := newest(s.dir)
	if err != nil {
		return fmt.Sprintf("; there is no snapshot to go on from (%v)", err)
	}
	probes := 0
	for _, t := range study.Trials {
		probes += len(t.Probes)
	}
	lost := "nothing was stored after it"
	switch later := acknowledged - study.Commits; {
	case later == 1:
		lost = "a later commit would be lost"
	case later > 1:
		lost = fmt.Sprintf("%d later commits would be lost", later)
	}
	return fmt.Sprintf("\n%s holds the study as it was published at %s, with %d trials and %d probes; %s.\nTo go on from there: tuner run --from-snapshot",
		filepath.Join(s.dir, name), study.Updated.Local().Format(time.DateTime), len(study.Trials), probes, lost)
}

// restore puts the newest snapshot in the place of a copy that is of no use.
func (s *Store) restore(why error, acknowledged int64) (commits int64, err error) {
	name, study, err := newest(s.dir)
	if err != nil {
		return 0, errors.Join(why, err)
	}
	f, err := os.Open(filepath.Join(s.dir, name))
	if err != nil {
		return 0, errors.Join(why, err)
	}
	epoch := filepath.Base(filepath.Dir(s.path))
	err = errors.Join(s.db.Close(), s.folder.Remove(epoch+"/"+fence.Journal), s.folder.Write(epoch+"/"+fence.Database, f), f.Close())
	if err != nil {
		return 0, errors.Join(why, err)
	}
	if s.db, err = openFile(s.path, settings); err != nil {
		return 0, err
	}
	if err := migrate(s.db); err != nil {
		return 0, err
	}
	s.commits = max(acknowledged, study.Commits)
	return s.commits, transact(s.db, func(tx *sql.Tx) error {
		if err := execute(tx, `UPDATE studies SET commits=?`, s.commits); err != nil {
			return err
		}
		return addEvent(tx, "restored", fmt.Sprintf("from %s, which has %d of %d commits: %v", name, study.Commits, s.commits, why))
	})
}
