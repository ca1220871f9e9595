package foreign

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNoFile means that a path names something else than a file, such as a directory or a pipe.
var ErrNoFile = errors.New("it is not a file")

// OpenRegular opens a regular file by calling open with flag, and refuses anything else. A pipe could block its reader for ever, and
// a device may have no end. O_NONBLOCK keeps the call itself from blocking; it has no effect on a file.
func OpenRegular(flag int, open func(flag int) (*os.File, error)) (*os.File, error) {
	file, err := open(flag | unix.O_NONBLOCK | unix.O_NOCTTY)
	if errors.Is(err, unix.EWOULDBLOCK) { // this host serves a file on which another host has a lease; a blocking open waits until the lease is returned
		file, err = open(flag)
	}
	if errors.Is(err, unix.ENXIO) { // a pipe that nobody reads, or a socket
		return nil, ErrNoFile
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrNoFile
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// A FileError says why a file that the user named cannot be read, and what to do.
type FileError struct {
	text string
	err  error
}

func (e *FileError) Error() string { return e.text }
func (e *FileError) Unwrap() error { return e.err }

// Open opens a file that the user named for reading. It must be a regular file. The error is a *FileError.
func Open(path string) (*os.File, error) {
	// Opening a device may make it act, so Stat comes first. If the path changes in between, OpenRegular still refuses.
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, &FileError{irregular(path, info.Mode()), ErrNoFile}
	}
	var file *os.File
	if err == nil {
		file, err = OpenRegular(os.O_RDONLY, func(flag int) (*os.File, error) { return os.OpenFile(path, flag, 0) })
	}
	if err != nil {
		return nil, Unreadable(path, err)
	}
	return file, nil
}

// Read reads a file that the user named, of at most maxBytes bytes. The error is a *FileError.
func Read(path string, maxBytes int64) ([]byte, error) {
	file, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxBytes+1)) // one byte more shows that it is too long
	switch {
	case err != nil:
		return nil, Unreadable(path, err)
	case int64(len(text)) > maxBytes:
		return nil, &FileError{fmt.Sprintf("%s has more than %d bytes, too many for what it should be; name another file", path, maxBytes), ErrNoFile}
	}
	return bytes.TrimPrefix(text, []byte(byteOrderMark)), nil
}

// byteOrderMark is what editors on Windows put before a text.
const byteOrderMark = "\ufeff"

func irregular(path string, mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return path + " is a directory; name a file"
	case mode&fs.ModeNamedPipe != 0:
		return path + " is no regular file but a pipe; write what comes through it to a file first, and name that"
	case mode&fs.ModeSocket != 0:
		return path + " is no regular file but a socket; name a file"
	}
	return path + " is no regular file but a device; name a file"
}

// unreadable returns the text of a FileError.
func unreadable(path string, err error) string {
	switch {
	case path == "":
		return "the name of the file is empty; give its path"
	case errors.Is(err, fs.ErrNotExist):
		return path + ": no such file; check the path"
	case errors.Is(err, fs.ErrPermission):
		return path + ": this user may not read it; check its rights and those of the directories above it (ls -ld)"
	case errors.Is(err, unix.ENOTDIR):
		return path + ": a file stands where the path has a directory; check the path"
	case errors.Is(err, ErrNoFile):
		return path + " is no regular file; name a file"
	}
	return path + ": " + Cause(err) + "; check the path and its disk"
}

// Unreadable returns a *FileError for a file that the user named.
func Unreadable(path string, err error) error { return &FileError{unreadable(path, err), err} }

// Cause returns the operating system's words for an error, without the names of the calls.
func Cause(err error) string {
	if number, ok := errors.AsType[unix.Errno](err); ok {
		return number.Error()
	}
	return err.Error()
}
