package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"vllmtuner/studies"
	"vllmtuner/studies/rights"
)

// checkNew refuses the name of a file to be written that something has, whose directory is not there, or which is a study's own.
func checkNew(path string, force bool) error {
	if dir := studies.Around(path); dir != "" {
		return usage("-o %s: it is in the directory of the study in %s, where tuners alone write; name a file elsewhere", path, dir)
	}
	if info, err := os.Stat(path); err == nil && (!force || !info.Mode().IsRegular()) {
		return alreadyThere(path)
	}
	if info, err := os.Stat(filepath.Dir(path)); err != nil || !info.IsDir() {
		return usage("-o %s: there is no directory %s; make it first", path, filepath.Dir(path))
	}
	if err := unix.Faccessat(unix.AT_FDCWD, filepath.Dir(path), unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return usage("-o %s: nothing can be written to %s: %v; name a file elsewhere", path, filepath.Dir(path), err)
	}
	return nil
}

func alreadyThere(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return usage("-o %s: it is no file; name one", path)
	}
	return usage("-o %s: it is there already; write elsewhere, or give --force to replace it", path)
}

// writeNew writes a file as a whole or not at all, over another one only if that is wanted: write fills an empty file beside it.
func writeNew(path string, force bool, write func(temp string) error) (err error) {
	name := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+strings.ToLower(rand.Text())+".tmp")
	temp, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, rights.File(filepath.Dir(path)))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if removed := os.Remove(name); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	err = write(name)
	if err := errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if force {
		return os.Rename(name, path)
	}
	err = rename(name, path, os.Link)
	if errors.Is(err, fs.ErrExist) {
		return alreadyThere(path)
	}
	return err
}

// rename gives a file another name, which nothing may have. link is os.Link, which unlike a rename replaces nothing, but which some file systems have
// not: there the name is made first, and who reads it a moment too early finds an empty file.
func rename(from, to string, link func(from, to string) error) error {
	err := link(from, to)
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, rights.File(filepath.Dir(to)))
	if err != nil {
		return err
	}
	if err := cmp.Or(file.Close(), os.Rename(from, to)); err != nil {
		return errors.Join(err, os.Remove(to))
	}
	return nil
}
