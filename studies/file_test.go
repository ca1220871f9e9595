package studies

import (
	"context"
	"fmt"
	"path/filepath"
	"reflect"
	"testing"
)

// Export writes one file, in the newest schema. ReadFile returns the same study as ReadSnapshot, and writes no file
// beside the exported one.
func TestReadFile(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)))
	path := filepath.Join(out, "llama70b.db")
	try(t, errorOf(Export(context.Background(), dir, path)))
	want, err := ReadSnapshot(dir)
	try(t, err)
	got, err := ReadFile(path)
	try(t, err)
	if len(got.Trials) != 1 || !reflect.DeepEqual(got, want) {
		t.Errorf("ReadFile = %+v, want %+v", got, want)
	}
	if is, err := IsFile(path); !is || err != nil {
		t.Errorf("IsFile = %t, %v of an export", is, err)
	}
	if version, err := inFile(path, publishedOptions, schemaVersion); err != nil || version != len(migrations) {
		t.Errorf("the export has schema %d, %v; want %d", version, err, len(migrations))
	}
	if left := namesIn(t, out); len(left) != 1 {
		t.Errorf("the directory has %v, want the exported file alone", left)
	}
	wantError(t, errorOf(Export(context.Background(), filepath.Join(dir, "nowhere"), path)), "no study")
	for _, pattern := range []string{"e*/study.db", "snap/*.db"} {
		parts, err := filepath.Glob(filepath.Join(dir, pattern))
		try(t, err)
		_, err = ReadFile(parts[0])
		wantError(t, err, parts[0]+" is a part of the study in "+dir+": name that directory")
	}
}

// IsFile and ReadFile refuse SQLite files that Export has not written.
func TestOtherSQLiteFiles(t *testing.T) {
	for name, sql := range map[string]string{
		"of another program":  `CREATE TABLE studies (study_id INTEGER); CREATE TABLE trials (trial_id INTEGER)`,
		"with only a version": `CREATE TABLE a (b); PRAGMA user_version=3`,
		"of a newer tuner": fmt.Sprintf(`CREATE TABLE studies (a); CREATE TABLE trials (a); CREATE TABLE probes (a); CREATE TABLE events (a); PRAGMA user_version=%d; PRAGMA application_id=%d`,
			len(migrations)+1, application(len(migrations)+1)),
	} {
		path := filepath.Join(t.TempDir(), "a.db")
		db, err := openFile(path, liveOptions)
		try(t, err)
		_, err = db.Exec(sql)
		try(t, err, db.Close())
		is, err := IsFile(path)
		if newer := name == "of a newer tuner"; is != newer || err != nil {
			t.Errorf("%s: IsFile = %t, %v", name, is, err)
		}
		if _, err := ReadFile(path); err == nil {
			t.Errorf("%s: ReadFile succeeds, want an error", name)
		}
	}
}
