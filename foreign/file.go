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

// ErrNoFile says that what has a file's name is something else, such as a directory or a pipe.
var ErrNoFile = errors.New("it is not a file")

// OpenRegular opens a regular file with flags by way of open, and nothing else: a pipe would hold up whoever opens it for good, and a device
// may have no end. O_NONBLOCK, by which it does not, is nothing to a file.
func OpenRegular(flag int, open func(flag int) (*os.File, error)) (*os.File, error) {
	file, err := open(flag | unix.O_NONBLOCK | unix.O_NOCTTY)
	if errors.Is(err, unix.EWOULDBLOCK) { // a file, of which another host has a lease that is first taken back: this is its server
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

// A FileError says in words why a file that the user names cannot be read, and what to do.
type FileError struct {
	text string
	err  error
}

func (e *FileError) Error() string { return e.text }
func (e *FileError) Unwrap() error { return e.err }

// Open opens a file that the user names, to read it. It must be a regular one. The error is a *FileError.
func Open(path string) (*os.File, error) {
	// A device may act when it is opened, so that it is looked at first. Who changes it meanwhile gets no further than OpenRegular.
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

// Read reads a file that the user names, of so many bytes at most. The error is a *FileError.
func Read(path string, most int64) ([]byte, error) {
	file, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()                                    // only read
	text, err := io.ReadAll(io.LimitReader(file, most+1)) // one byte more shows that it is too long
	switch {
	case err != nil:
		return nil, Unreadable(path, err)
	case int64(len(text)) > most:
		return nil, &FileError{fmt.Sprintf("%s has more than %d bytes, too many for what it should be; name another file", path, most), ErrNoFile}
	}
	return bytes.TrimPrefix(text, []byte(byteOrderMark)), nil
}

// byteOrderMark is what editors of Windows put before a text.
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

// unreadable says why a file cannot be read.
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

// Unreadable says in words why what the user names cannot be read.
func Unreadable(path string, err error) error { return &FileError{unreadable(path, err), err} }

// Cause is what the operating system says of an error, without the calls that it went through.
func Cause(err error) string {
	if number, ok := errors.AsType[unix.Errno](err); ok {
		return number.Error()
	}
	return err.Error()
}
