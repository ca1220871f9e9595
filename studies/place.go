package studies

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// CheckDir returns an error if no study can be in a directory, because its path, or a part of it, is another kind of
// file.
func CheckDir(dir string) error {
	switch info, err := os.Stat(dir); {
	case err == nil && !info.IsDir():
		return unusablef("%s is a file, but a study is a directory; move the file away, or choose another study or --root", dir)
	case errors.Is(err, unix.ENOTDIR):
		return unusablef("%s cannot exist: a file stands where its path has a directory; choose another study or --root", dir)
	}
	return checkLink(dir)
}

// checkLink refuses a link that leads nowhere. A link to a study's directory is another name of the study; only Delete
// refuses it, because it would leave the link or the study behind.
func checkLink(dir string) error {
	to, noLink := os.Readlink(dir)
	if _, err := os.Stat(dir); err != nil && noLink == nil {
		return unusablef("%s is a link to %s, which does not exist; remove the link, or make that directory", dir, to)
	}
	return nil // opening the directory returns other errors
}
