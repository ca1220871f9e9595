package studies

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies/fence"
	"vllmtuner/tuner/space"
)

// An epochBackup is a whole database of an older epoch.
type epochBackup struct {
	path    string
	hot     bool // its journal has a transaction to roll back
	name    string
	commits int64
	trials  int
	updated time.Time
}

// newestBackup returns the newest whole database of all epochs, except the database named but. It writes nothing beside
// the databases.
func newestBackup(dir, but string) (b epochBackup, found bool) {
	epochs, err := fs.Glob(os.DirFS(dir), "e[0-9]*/"+fence.Database)
	if err != nil {
		return b, false
	}
	slices.SortFunc(epochs, func(a, b string) int { return cmp.Compare(b, a) }) // their names have the same length
	for _, name := range epochs {
		if path := filepath.Join(dir, name); path != but {
			if b, err := readBackup(path); err == nil {
				return b, true
			}
		}
	}
	return b, false
}

// readBackup reads and checks a database. If its journal has a transaction, it rolls that back in a copy.
func readBackup(path string) (b epochBackup, err error) {
	b.path = path
	if b.hot, err = isHot(path); err != nil {
		return b, err
	}
	if !b.hot {
		info, err := os.Stat(path)
		if err == nil && !info.Mode().IsRegular() {
			err = foreign.ErrNoFile
		}
		if err != nil {
			return b, err
		}
		err = b.read(path, published)
		return b, err
	}
	temp, err := os.MkdirTemp("", "tuner-backup-")
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	for _, name := range []string{fence.Journal, fence.Database} {
		if err := copyFile(context.Background(), filepath.Join(filepath.Dir(path), name), filepath.Join(temp, name)); err != nil {
			return b, err
		}
	}
	err = b.read(filepath.Join(temp, fence.Database), settings)
	return b, err
}

// read checks a database and reads its key figures. It returns sql.ErrNoRows when the database has no study.
func (b *epochBackup) read(path, query string) (err error) {
	db, err := openFile(path, query)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if b.commits, err = checkDatabase(db); err != nil {
		return err
	}
	return b.scan(db)
}

func (b *epochBackup) scan(db *sql.DB) error {
	var updated string
	if err := db.QueryRow(`SELECT name, updated, (SELECT count(*) FROM trials) FROM studies`).Scan(&b.name, &updated, &b.trials); err != nil {
		return err
	}
	return parseTime(updated, &b.updated)
}

// offer says how to go on from the backup: in another directory, because the slots of this one belong to newer epochs.
// There it is a study of the first schema, with its database in the study's directory itself.
func (b *epochBackup) offer(acknowledged int64) string {
	files := space.ShellWord(b.path)
	if b.hot {
		files += " " + space.ShellWord(b.path+strings.TrimPrefix(fence.Journal, fence.Database))
	}
	return fmt.Sprintf("\n%s is whole, a copy of the study as it was at %s, with %s and %s; %s.\n"+
		"To go on from there, in another root directory: mkdir -p OTHER/%s && cp %s OTHER/%s/ && tuner run FILE --root OTHER",
		b.path, b.updated.Local().Format(time.DateTime), render.Count(b.trials, "trial"), render.Count(int(b.commits), "commit"), lostAfter(acknowledged-b.commits), b.name, files, b.name)
}

// lostAfter returns a phrase about the commits that a backup or snapshot lacks.
func lostAfter(commits int64) string {
	switch {
	case commits == 1:
		return "a later commit would be lost"
	case commits > 1:
		return fmt.Sprintf("%d later commits would be lost", commits)
	}
	return "nothing was stored after it"
}
