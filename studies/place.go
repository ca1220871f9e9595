package studies

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// CheckDir returns an error if a study cannot be in a directory, because the path or a part of it is not a directory.
func CheckDir(dir string) error {
	switch info, err := os.Stat(dir); {
	case err == nil && !info.IsDir():
		return unusablef("%s is a file, but a study is a directory; move the file away, or choose another study or --root", dir)
	case errors.Is(err, unix.ENOTDIR):
		return unusablef("%s cannot exist: a part of its path is a file, not a directory; choose another study or --root", dir)
	}
	return checkLink(dir)
}

// checkLink refuses a link to a path that does not exist. A link to a study's directory is allowed, as another name of
// the study. Only Delete refuses such a link, because Delete would leave the link or the study behind.
func checkLink(dir string) error {
	to, noLink := os.Readlink(dir)
	if _, err := os.Stat(dir); err != nil && noLink == nil {
		return unusablef("%s is a link to %s, which does not exist; remove the link, or make that directory", dir, to)
	}
	return nil // other errors show when the directory is opened
}
