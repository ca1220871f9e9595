package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/studies/rights"
)

// checkNew returns an error if the file that -o names cannot be written: it exists, its directory is missing or
// read-only, or it is inside a study.
func checkNew(path string, force bool) error {
	dir := filepath.Dir(path)
	if study := studies.Around(path); study != "" {
		return usage("-o %s: it is inside the study in %s, where only tuners write; name a file elsewhere", path, study)
	}
	if info, err := os.Stat(path); err == nil && (!force || !info.Mode().IsRegular()) {
		return nameTaken(path)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return usage("-o %s: there is no directory %s; make it first", path, dir)
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return usage("-o %s: cannot write to %s: %v; name a file elsewhere", path, dir, err)
	}
	return nil
}

func nameTaken(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return usage("-o %s: it exists and is not a file; choose another name", path)
	}
	return usage("-o %s: it exists; choose another name, or replace it with --force", path)
}

// writeNew writes the file that -o names, completely or not at all. It calls write with the path of an empty temporary
// file, and then renames this file to path.
func writeNew(path string, force bool, write func(temp string) error) error {
	err := foreign.Create(path, rights.File(filepath.Dir(path)), force, write)
	if errors.Is(err, fs.ErrExist) {
		return nameTaken(path)
	}
	return err
}
