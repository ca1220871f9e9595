package studies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"vllmtuner/studies/fence"
)

// IsFile reports whether an SQLite file holds a study in the form that Export writes. Files of other programs have no
// schema version, or lack a study's tables.
func IsFile(path string) (bool, error) {
	return inFile(path, publishedOptions, func(db *sql.DB) (bool, error) {
		version, err := schemaVersion(db)
		if _, newer := errors.AsType[newerError](err); version == 0 || err != nil && !newer {
			return false, explainSQLite(err)
		}
		var tables int
		err = db.QueryRow(`SELECT count(*) FROM sqlite_schema
			WHERE type='table' AND name IN ('studies', 'trials', 'probes', 'events')`).Scan(&tables)
		return tables == 4, explainSQLite(err)
	})
}

// ReadFile returns the study in a file that Export has written, and creates no other file. It refuses a file in a
// study's own directory, because such a file may hold only a part of the study.
func ReadFile(path string) (study Study, err error) {
	dir, err := filepath.Abs(filepath.Join(filepath.Dir(path), ".."))
	if err != nil {
		return Study{}, err
	}
	if _, err := os.Stat(filepath.Join(dir, fence.SlotDir)); err == nil {
		return Study{}, unusablef("%s is a part of the study in %s: name that directory", path, dir)
	}
	if study, err = readFile(path); err != nil {
		return Study{}, markUnusable(fmt.Errorf("read %s: %w", path, err))
	}
	return study, nil
}

// readFile reads a file. If the file has an older schema, it reads a converted copy.
func readFile(path string) (study Study, err error) {
	study, err = inFile(path, publishedOptions, func(db *sql.DB) (Study, error) {
		switch version, err := schemaVersion(db); {
		case err != nil:
			return Study{}, err
		case version == len(migrations):
			return load(db)
		}
		return readCopy(func(copied string) error {
			if err := copyFile(context.Background(), path, copied); err != nil {
				return err
			}
			_, err := inFile(copied, scratchOptions, func(db *sql.DB) (any, error) { return nil, migrate(db) })
			return err
		}, load)
	})
	return study, explainFile(err, path)
}
