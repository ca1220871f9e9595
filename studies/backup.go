package studies

import (
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

	"vllmtuner/render"
	"vllmtuner/studies/fence"
	"vllmtuner/tuner/space"
)

// An epochBackup is a whole database of an older epoch. An epoch is the directory with one owner's copy of the study.
type epochBackup struct {
	files   []string // the database, and also its journal if the journal has a transaction to roll back
	name    string
	commits int64
	trials  int
	updated time.Time
}

// newestBackup returns the newest whole database of all epochs. It leaves out the live database, which is at livePath.
// It creates no file beside a database.
func newestBackup(dir, livePath string) (b epochBackup, found bool) {
	epochs, err := fs.Glob(os.DirFS(dir), "e[0-9]*/"+fence.Database)
	if err != nil {
		return b, false
	}
	slices.Sort(epochs) // sorts by number too, because all names have the same length
	for _, name := range slices.Backward(epochs) {
		if path := filepath.Join(dir, name); path != livePath {
			if b, err := readBackup(path); err == nil {
				return b, true
			}
		}
	}
	return b, false
}

// readBackup copies a database and checks the copy. SQLite rolls back an incomplete transaction in the copy. readBackup
// returns the key figures, or sql.ErrNoRows when the database has no study.
func readBackup(path string) (b epochBackup, err error) {
	b.files = []string{path}
	hot, err := isHot(path)
	if hot {
		b.files = append(b.files, path+"-journal")
	}
	if err != nil {
		return b, err
	}
	temp, err := os.MkdirTemp("", "tuner-backup-")
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	for _, file := range b.files {
		if err := copyFile(context.Background(), file, filepath.Join(temp, filepath.Base(file))); err != nil {
			return b, err
		}
	}
	return inFile(filepath.Join(temp, fence.Database), liveOptions, func(db *sql.DB) (epochBackup, error) {
		if b.commits, err = checkDatabase(db); err != nil {
			return b, err
		}
		var updated string
		figures := db.QueryRow(`SELECT name, updated, (SELECT count(*) FROM trials) FROM studies`)
		if err := figures.Scan(&b.name, &updated, &b.trials); err != nil {
			return b, err
		}
		return b, parseTime(updated, &b.updated)
	})
}

// offer returns a text that tells the user how to go on from the backup. The user must copy the backup to another
// directory, because the slots of this directory acknowledge commits of newer epochs. In the other directory, the copy
// has the layout of the first schema: the database is in the study's directory itself.
func (b *epochBackup) offer(acknowledged int64) string {
	var files []string
	for _, file := range b.files {
		files = append(files, space.ShellWord(file))
	}
	return fmt.Sprintf("\n%s is undamaged: a copy of the study as it was at %s, with %s and %s; %s.\n"+
		"To go on from there, in another root directory: mkdir -p OTHER/%s && cp %s OTHER/%s/ && tuner run FILE --root OTHER",
		b.files[0], b.updated.Local().Format(time.DateTime), render.Count(b.trials, "trial"), render.Count(int(b.commits), "commit"),
		lostAfter(acknowledged-b.commits), b.name, strings.Join(files, " "), b.name)
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
