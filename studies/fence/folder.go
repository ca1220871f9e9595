package fence

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/studies/rights"
)

// A Folder is a study's directory as a Disk. It touches nothing outside the directory, even if a name leads out of it.
type Folder struct {
	root  *os.Root
	locks Locks
}

// OpenFolder opens a directory that exists.
func OpenFolder(dir string, locks Locks) (*Folder, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &Folder{root, locks}, nil
}

// Close closes the directory. Its locks stay until each of them is closed.
func (f *Folder) Close() error { return f.root.Close() }

// Locks implements Disk.
func (f *Folder) Locks() Locks { return f.locks }

// Create implements Disk with O_EXCL and fsync. On NFS the server decides whether the file exists already (RFC 8881,
// 18.16.3).
func (f *Folder) Create(name string, content []byte) error {
	file, err := f.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, rights.File(f.root.Name()))
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil && len(content) > 0 {
		err = errors.Join(file.Sync(), f.Sync(path.Dir(name)))
	}
	return errors.Join(err, file.Close())
}

// Open implements Disk. It bypasses the page cache if the disk supports that: on NFS a cached page may be stale,
// because the server's time stamps are coarse.
func (f *Folder) Open(name string) (io.ReadCloser, error) {
	file, err := f.open(name, os.O_RDONLY|unix.O_DIRECT)
	if errors.Is(err, unix.EINVAL) { // tmpfs, for example, has no direct reads
		return f.open(name, os.O_RDONLY)
	}
	if err != nil {
		return nil, err
	}
	return &directReader{file: file}, nil
}

// open opens a regular file, and refuses anything else.
func (f *Folder) open(name string, flag int) (*os.File, error) {
	file, err := foreign.OpenRegular(flag, func(flag int) (*os.File, error) { return f.root.OpenFile(name, flag, rights.File(f.root.Name())) })
	if errors.Is(err, foreign.ErrNoFile) {
		return nil, noFile(name)
	}
	return file, err
}

func noFile(name string) error {
	return DamagedError(fmt.Sprintf("%s is not a file: move it to another place, and restore the file from a backup", name))
}

// Write implements Disk.
func (f *Folder) Write(name string, content io.Reader) error {
	file, err := f.open(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// List implements Disk.
func (f *Folder) List(dir string) ([]string, error) {
	d, err := f.root.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	return names, errors.Join(err, d.Close())
}

// Make implements Disk.
func (f *Folder) Make(dir string) error {
	if err := f.root.MkdirAll(dir, rights.Dir(f.root.Name())); err != nil {
		return err
	}
	return f.Sync(path.Dir(dir))
}

// Remove implements Disk.
func (f *Folder) Remove(name string) error { return f.root.RemoveAll(name) }

// Sync implements Disk.
func (f *Folder) Sync(dir string) error {
	d, err := f.root.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Lock implements Disk with flock. Such a lock belongs to the open file: it stays when this process opens and closes
// the same file again. On NFS, Linux makes it a lock of the whole file on the server (flock(2), since 2.6.12).
func (f *Folder) Lock(name string) (io.Closer, error) {
	file, err := f.open(name, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil || f.locks == NoLocks { // with NoLocks a missing lock does not matter: Locked is never called
		return file, nil
	}
	return nil, errors.Join(fmt.Errorf("lock %s: %w; the study needs a disk with working locks", name, err), file.Close())
}

// Locked implements Disk.
func (f *Folder) Locked(name string) (held bool, err error) {
	file, err := f.open(name, os.O_RDONLY)
	_, other := errors.AsType[DamagedError](err) // not a regular file, such as OwnerDir itself if the owner has no ID
	if errors.Is(err, fs.ErrNotExist) || other {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	err = unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// A directReader reads a file in aligned blocks, as O_DIRECT requires.
type directReader struct {
	file  *os.File
	block []byte // page-aligned memory
	rest  []byte // the unread part of block
}

// directBlock is a multiple of all block sizes of disks.
const directBlock = 1 << 20

func (d *directReader) Read(into []byte) (int, error) {
	if len(d.rest) == 0 {
		if d.block == nil {
			block, err := unix.Mmap(-1, 0, directBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // mapped memory is aligned, because it begins at a page
			if err != nil {
				return 0, err
			}
			d.block = block
		}
		n, err := d.file.Read(d.block)
		if n == 0 || err != nil {
			return 0, err
		}
		d.rest = d.block[:n]
	}
	n := copy(into, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

func (d *directReader) Close() error {
	var err error
	if d.block != nil {
		err = unix.Munmap(d.block)
	}
	return errors.Join(err, d.file.Close())
}
