package studies

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"vllmtuner/studies/fence"
)

// IsFile reports whether a SQLite file holds a study, as Export writes it. Other programs' files have no schema
// version, or other tables.
func IsFile(path string) (is bool, err error) {
	db, err := openFile(path, published)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	defer func() { err = explainSQLite(err) }()
	version, err := schemaVersion(db)
	if err != nil || version == 0 {
		return false, err
	}
	var tables int
	err = db.QueryRow(`SELECT count(*) FROM sqlite_schema WHERE type='table' AND name IN ('studies', 'trials', 'probes', 'events')`).Scan(&tables)
	return tables == 4, err
}

// ReadFile returns the study in a file that Export has written. It writes no file beside it. It refuses a file of a
// study's own directory, because that may be a part of the study only.
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

// readFile reads a file, or a converted copy of one with an older schema.
func readFile(path string) (study Study, err error) {
	db, err := openFile(path, published)
	if err != nil {
		return Study{}, err
	}
	defer func() { err = explainFile(path, errors.Join(err, db.Close())) }()
	version, err := schemaVersion(db)
	switch {
	case err != nil:
		return Study{}, err
	case version > len(migrations):
		return Study{}, newerError{version}
	case version < len(migrations):
		return readCopy(func(copied string) error {
			if err := copyFile(context.Background(), path, copied); err != nil {
				return err
			}
			return renew(copied)
		}, load)
	}
	return load(db)
}
