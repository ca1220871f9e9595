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

// ErrNoFile means that a path does not lead to a regular file, but for example to a directory or a pipe.
var ErrNoFile = errors.New("it is not a file")

// OpenRegular calls open with the given flag, and returns an error if the result is not a regular file. A pipe could
// block its reader for ever, and a device may have no end. OpenRegular adds the flag O_NONBLOCK, which keeps open from
// blocking on a pipe. The flag has no effect on a regular file.
func OpenRegular(flag int, open func(flag int) (*os.File, error)) (*os.File, error) {
	file, err := open(flag | unix.O_NONBLOCK | unix.O_NOCTTY)
	// If this host is an NFS server, another host may have a lease on the file. A blocking open waits until that host
	// returns the lease.
	if errors.Is(err, unix.EWOULDBLOCK) {
		file, err = open(flag)
	}
	if errors.Is(err, unix.ENXIO) { // the path leads to a pipe that nobody reads, or to a socket
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

// A fileError says why a file that the user named cannot be read, and what to do.
type fileError struct {
	text string
	err  error
}

func (e *fileError) Error() string { return e.text }
func (e *fileError) Unwrap() error { return e.err }

// Open opens a regular file that the user named, for reading. The error says what to do.
func Open(path string) (*os.File, error) {
	// Stat comes first, because opening a device may make it act. If the path changes after Stat, OpenRegular still
	// refuses a device.
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, &fileError{irregular(path, info.Mode()), ErrNoFile}
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

// Read reads a file that the user named. A file of more than maxBytes bytes is an error. The error says what to do.
func Read(path string, maxBytes int64) ([]byte, error) {
	file, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxBytes+1)) // the extra byte shows that the file is too long
	switch {
	case err != nil:
		return nil, Unreadable(path, err)
	case int64(len(text)) > maxBytes:
		return nil, &fileError{fmt.Sprintf("%s has more than %d bytes, too many for a file of its kind; name another file", path, maxBytes), ErrNoFile}
	}
	return bytes.TrimPrefix(text, []byte(byteOrderMark)), nil
}

// Editors on Windows put a byte order mark before a text.
const byteOrderMark = "\ufeff"

func irregular(path string, mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return path + " is a directory; name a file"
	case mode&fs.ModeNamedPipe != 0:
		return path + " is a pipe, not a regular file; write its content to a file first, and name that file"
	case mode&fs.ModeSocket != 0:
		return path + " is a socket, not a regular file; name a file"
	}
	return path + " is a device, not a regular file; name a file"
}

// Unreadable returns the error for a file that the user named: why it cannot be read, and what to do.
func Unreadable(path string, err error) error {
	text := path + ": " + Cause(err) + "; check the path and its disk"
	switch {
	case path == "":
		text = "the name of the file is empty; give its path"
	case errors.Is(err, fs.ErrNotExist):
		text = path + ": no such file; check the path"
	case errors.Is(err, fs.ErrPermission):
		text = path + ": this user may not read it; check the rights of the file and of the directories above it (ls -ld)"
	case errors.Is(err, unix.ENOTDIR):
		text = path + ": a part of the path is a file, not a directory; check the path"
	case errors.Is(err, ErrNoFile):
		text = path + " is not a regular file; name a file"
	}
	return &fileError{text, err}
}

// Cause returns the operating system's text for an error, without the names of system calls.
func Cause(err error) string {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno.Error()
	}
	return err.Error()
}
