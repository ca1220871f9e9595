package foreign

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
)

// Create writes a file completely or not at all. It calls write to fill a temporary file in the same directory. Then it
// renames the temporary file to path. If path exists and replace is false, the error wraps fs.ErrExist.
func Create(path string, perm fs.FileMode, replace bool, write func(temp string) error) (err error) {
	name := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+strings.ToLower(rand.Text())+".tmp")
	temp, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
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
	if replace {
		return os.Rename(name, path)
	}
	return rename(name, path, perm, os.Link)
}

// rename renames a file, and fails if the new name exists. The parameter link is os.Link, except in tests. Unlike
// os.Rename, rename never replaces a file. On a file system without links, this function first makes an empty file with
// the new name, which a reader may see for a moment.
func rename(from, to string, perm fs.FileMode, link func(from, to string) error) error {
	err := link(from, to)
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	if err := cmp.Or(file.Close(), os.Rename(from, to)); err != nil {
		return errors.Join(err, os.Remove(to))
	}
	return nil
}
