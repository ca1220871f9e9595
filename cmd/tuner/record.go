package main

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

// recordFile says which server process runs, so that the next run can end it when this one is killed.
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

// forgetRecord is for a server that is gone.
func forgetRecord(dir string) error {
	if err := os.Remove(filepath.Join(dir, recordFile)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// recordSize is more than a record ever has.
const recordSize = 1 << 20

// readRecord returns what is known of a server that may have been left behind; nil where there is none.
func readRecord(dir string) (*proc.Record, error) {
	path := filepath.Join(dir, recordFile)
	file, err := foreign.OpenRegular(os.O_RDONLY, func(flag int) (*os.File, error) { return os.OpenFile(path, flag, 0) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var r proc.Record
	if err == nil {
		err = errors.Join(json.NewDecoder(io.LimitReader(file, recordSize)).Decode(&r), file.Close())
	}
	_, ofDisk := errors.AsType[*fs.PathError](err)
	if opened := file != nil; opened && !ofDisk && (err != nil || r.PID <= 0 || r.Token == "") { // the decoder speaks of JSON
		err = errors.New("it names no server")
	}
	if ofDisk { // it may go well the next time, or as another user
		return nil, fmt.Errorf("%s says which server may have been left behind: %w", path, err)
	}
	if err != nil {
		return nil, usage("%s says which server may have been left behind, and cannot be read: %w; see that none runs, and remove it", path, err)
	}
	return &r, nil
}

// checkRecord says what is wrong with the record before a study is taken over. Of a directory that is none, or another user's, opening the study says more.
func checkRecord(dir string) error {
	_, err := readRecord(dir)
	for _, ofDir := range []error{fs.ErrPermission, syscall.ENOTDIR, syscall.ELOOP} {
		if errors.Is(err, ofDir) {
			return nil
		}
	}
	return err
}

// reclaim ends the server that a killed tuner left behind, and returns how many processes that were.
func reclaim(dir string) (int, error) {
	r, err := readRecord(dir)
	if r == nil || err != nil {
		return 0, err
	}
	killed, err := proc.Reclaim(*r)
	if err != nil {
		return len(killed), fmt.Errorf("end the server that was left behind: %w", err)
	}
	return len(killed), forgetRecord(dir)
}
