package searchbench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// A runStore keeps what the methods did, so that a run of many hours can be interrupted, and goes on later.
type runStore struct {
	dir    string // SEARCH_RUNS; "" keeps nothing
	commit string // another commit has runs of its own
}

// find returns what the method did. If the run is on the disk, find reads it; otherwise find runs the method.
func (s runStore) find(m method, w world, seed uint64, trials int) (f methodRun, err error) {
	path := filepath.Join(s.dir, s.commit, w.name+"-"+digest(w.file, w.engine), fmt.Sprintf("%s-%d-%d.json", m.name, trials, seed))
	if s.dir != "" {
		text, err := os.ReadFile(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return f, errors.Join(err, json.Unmarshal(text, &f))
		}
	}
	if f, err = m.find(w, seed, trials); err != nil || s.dir == "" {
		return f, err
	}
	f.Method = m.name
	text, err := json.Marshal(f)
	if err != nil {
		return f, err
	}
	return f, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), writeWhole(path, text))
}

// writeWhole writes a file completely or not at all, because several runs may share its directory.
func writeWhole(path string, text []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	return errors.Join(err, file.Close(), os.Rename(file.Name(), path))
}
