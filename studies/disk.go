package studies

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"vllmtuner/studies/fence"
)

// minFree is what must be free on the study's disk before GPU time is spent, in bytes. A probe takes about 1.5 kB, so a
// study of a thousand trials with five probes each takes 8 MiB, its snapshot as much again, and so does the next one while
// it is made.
const minFree = 64 << 20

// prepare makes the study's directory, and checks that it can be written, has space, and is on a disk that keeps what it is given.
func prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the study's directory: %w", err)
	}
	return CheckDisk(dir)
}

// CheckDisk says whether a study could be kept in the directory: something can be written and synced there, and at least
// 64 MiB are free. Of a directory that does not exist yet, the nearest one above it is looked at. Nothing is left behind.
func CheckDisk(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	for {
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			return fmt.Errorf("%s is a file, not a directory for studies", dir)
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			break // it exists, or the write says what is wrong with it
		}
		dir = filepath.Dir(dir)
	}
	if err := checkWrite(dir); err != nil {
		return fmt.Errorf("%s cannot be written: %w", dir, err)
	}
	mount, err := fence.MountOf(dir)
	if err != nil {
		return err
	}
	if _, err := mount.Check(); err != nil {
		return err
	}
	return checkFree(dir)
}

// DiskWarnings says what a user should know of the disk that a study would be kept on.
func DiskWarnings(dir string) ([]string, error) {
	mount, err := fence.MountOf(dir)
	if err != nil {
		return nil, err
	}
	return mount.Check()
}

// takeLock takes the lock or says who has it. flock and not fcntl: it belongs to the open file, so that no other open and
// close of the same file in this process can lose it.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("the study's directory cannot be written: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		owner, readErr := io.ReadAll(io.LimitReader(f, 1000))
		text := strings.TrimSpace(string(owner))
		if text == "" {
			text = "it has not yet said who it is"
		}
		return nil, errors.Join(fmt.Errorf("%w: %s (%s)", ErrOwned, text, path), readErr, f.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w; the study needs a disk with working locks", path, err), f.Close())
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, thisOwner().String()+"\n")); err != nil {
		return nil, errors.Join(fmt.Errorf("write %s: %w", path, err), f.Close())
	}
	return f, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// checkWrite writes a few kilobytes and waits until they are on the disk: a full or read-only disk is to be found before
// GPU time is spent.
func checkWrite(dir string) error {
	f, err := os.CreateTemp(dir, "write-check-*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, 16<<10))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
}

// checkFree says no when the disk has less than minFree left for us.
func checkFree(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	if free := uint64(s.Bavail) * uint64(s.Bsize); free < minFree {
		return fmt.Errorf("%s has only %d bytes (%d MiB) free, a study needs %d MiB: make room or use another --root",
			dir, free, free>>20, minFree>>20)
	}
	return nil
}

// syncPath waits until a file's data, or a directory's names, are on the disk.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Lock makes a directory that one process at a time may use, such as that of a sweep's servers, and takes its lock, which holds
// until it is closed or the process is gone. It returns ErrOwned when another has it.
func Lock(dir string) (io.Closer, error) {
	if err := prepare(dir); err != nil {
		return nil, err
	}
	return takeLock(filepath.Join(dir, "lock"))
}
