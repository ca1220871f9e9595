package live

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"vllmtuner/foreign"
	"vllmtuner/serverctl/proc"
)

// recordFile identifies the process of the running server. If this tuner is killed, the next run ends that process.
const recordFile = "server.json"

func writeRecord(dir string, r proc.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp, err := os.CreateTemp(dir, recordFile+".*.tmp")
	if err != nil {
		return err
	}
	_, err = temp.Write(text)
	if err := errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return os.Rename(temp.Name(), filepath.Join(dir, recordFile))
}

// removeRecord removes the process record when the server is gone. A missing record is no error.
func removeRecord(dir string) error {
	if err := os.Remove(filepath.Join(dir, recordFile)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// maxRecord limits how much of a record is read, in bytes. It is far more than any record takes.
const maxRecord = 1 << 20

// A RecordError says that a process record cannot be read. Only the user can find out whether its server still runs.
type RecordError struct {
	path string
	err  error
}

func (e *RecordError) Error() string {
	return fmt.Sprintf("%s names the server that a killed run may have left, but it cannot be read: %v; check that no such server runs, then remove the file",
		e.path, e.err)
}

func (e *RecordError) Unwrap() error { return e.err }

// readRecord returns nil if there is no record. The error is a *RecordError, or an error of the disk.
func readRecord(dir string) (*proc.Record, error) {
	path := filepath.Join(dir, recordFile)
	file, err := foreign.OpenRegular(os.O_RDONLY, func(flag int) (*os.File, error) { return os.OpenFile(path, flag, 0) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var r proc.Record
	opened := err == nil
	if opened {
		err = errors.Join(json.NewDecoder(io.LimitReader(file, maxRecord)).Decode(&r), file.Close())
	}
	if _, isDisk := errors.AsType[*fs.PathError](err); isDisk { // no *RecordError, because the next try or another user may succeed
		return nil, fmt.Errorf("%s names the server that a killed run may have left: %w", path, err)
	}
	if opened && (err != nil || r.PID <= 0 || r.Token == "") {
		err = errors.New("it names no server") // plainer than the decoder's error
	}
	if err != nil {
		return nil, &RecordError{path, err}
	}
	return &r, nil
}

// CheckRecord returns what is wrong with the process record in a study's directory, before a run takes the study over.
// It ignores errors of the directory itself, because opening the study explains them better.
func CheckRecord(dir string) error {
	_, err := readRecord(dir)
	for _, ofDir := range []error{fs.ErrPermission, syscall.ENOTDIR, syscall.ELOOP} {
		if errors.Is(err, ofDir) {
			return nil
		}
	}
	return err
}

// Reclaim ends the server that a killed run left, and returns how many processes it ended.
func Reclaim(dir string) (int, error) {
	r, err := readRecord(dir)
	if r == nil || err != nil {
		return 0, err
	}
	killed, err := proc.Reclaim(*r)
	if err != nil {
		return len(killed), fmt.Errorf("stop the server that a killed run left behind: %w", err)
	}
	return len(killed), removeRecord(dir)
}
