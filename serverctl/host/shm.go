package host

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A ShmWatch finds out which shared memory belongs to one server, so that it can be removed after the server was
// killed. Python's multiprocessing makes the files psm_* for shared memory and sem.mp-* for semaphores, and torch makes
// torch_<pid>_*. All other files that the server's processes had open belong to the server too. Several goroutines may
// use a ShmWatch.
type ShmWatch struct {
	dir string

	lease func(fd int) error // takeLease, except in tests

	mu      sync.Mutex
	names   map[string]bool // names of files that existed before the server
	inodes  map[uint64]bool // inodes of files that existed before the server
	held    map[key]bool    // files that a process of the server has held at any time
	members map[int]bool    // the PIDs of all processes of the server so far
}

// A key identifies a file, and tells it from a later file with the same name.
type key struct {
	name  string
	inode uint64
}

// listShm returns our user's regular files in a directory for shared memory. It returns none if there is no directory.
func listShm(dir string) (map[key]bool, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list shared memory: %w", err)
	}
	all := map[key]bool{}
	for _, entry := range entries {
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("list shared memory: %w", err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && int(stat.Uid) == os.Geteuid() {
			all[key{info.Name(), stat.Ino}] = true
		}
	}
	return all, nil
}

// WatchShm must be called before the server starts, because files that are already in the directory do not count as the
// server's. The directory is normally DevShm.
func WatchShm(dir string) (*ShmWatch, error) {
	before, err := listShm(dir)
	if err != nil {
		return nil, err
	}
	w := &ShmWatch{
		dir: dir, lease: takeLease,
		names: map[string]bool{}, inodes: map[uint64]bool{}, held: map[key]bool{}, members: map[int]bool{},
	}
	for k := range before {
		w.names[k.name], w.inodes[k.inode] = true, true
	}
	return w, nil
}

// Observe records which files the server's processes have mapped or open now. Call it while the server is alive: at
// least once when it is ready and once before it is stopped. If there are new files, Observe reads as much of /proc as
// `lsof -p` does for these processes. It skips a process that has ended.
func (w *ShmWatch) Observe(pids []int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pid := range pids {
		w.members[pid] = true
	}
	fresh, err := w.newFiles()
	if err != nil || len(fresh) == 0 {
		return err
	}
	var errs []error
	for _, pid := range pids {
		if err := w.see(pid, fresh); err != nil {
			errs = append(errs, fmt.Errorf("list the shared memory of process %d: %w", pid, err))
		}
	}
	return errors.Join(errs...)
}

// newFiles returns the files that are new since WatchShm. It leaves out a file that reuses an earlier name or inode,
// because nobody knows whose file that is.
func (w *ShmWatch) newFiles() (map[key]bool, error) {
	now, err := listShm(w.dir)
	maps.DeleteFunc(now, func(k key, _ bool) bool { return w.names[k.name] || w.inodes[k.inode] })
	return now, err
}

// Sweep removes the files that the server has left behind, and returns their names. Call it after the server's end.
// Sweep removes a file only if all of this is true. The file is new. A process of the server was seen to hold it, or
// its name contains the PID of such a process. It is a regular file of our own user. The kernel grants us an exclusive
// lease (fcntl(2), F_SETLEASE). The kernel grants such a lease only if nobody else has the file open or mapped, in any
// container and as any user. If the kernel has no leases, as in gVisor, the file stays.
func (w *ShmWatch) Sweep() (names []string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left, err := w.newFiles()
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(left, func(k key, _ bool) bool { return !w.held[k] && !w.namesMember(k.name) })
	if len(left) == 0 {
		return nil, nil
	}
	dir, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: w.dir, Err: err}
	}
	defer unix.Close(dir) // opened only for reading, so an error loses nothing
	var errs []error
	for k := range left {
		done, err := w.remove(dir, k)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove shared memory %s: %w", filepath.Join(w.dir, k.name), err))
		}
		if done {
			names = append(names, k.name)
		}
	}
	slices.Sort(names)
	return names, errors.Join(errs...)
}

// namesMember reports whether a file name contains the PID of a process of the server. It knows the formats of torch's
// manager (c10, torch_<pid>_<random>_<count>) and LLVM's OpenMP (__KMP_REGISTERED_LIB_<pid>_<uid>).
func (w *ShmWatch) namesMember(name string) bool {
	for _, prefix := range []string{"torch_", "__KMP_REGISTERED_LIB_"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			text, _, more := strings.Cut(rest, "_")
			pid, err := strconv.Atoi(text)
			return more && err == nil && w.members[pid]
		}
	}
	return false
}

// see records which of the files a process has mapped or open. A process that has ended holds no files.
func (w *ShmWatch) see(pid int, files map[key]bool) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	mappings, err1 := os.ReadFile(filepath.Join(dir, "maps"))
	for line := range strings.Lines(string(mappings)) {
		if k, ok := mappedFile(line); ok && files[k] {
			w.held[k] = true
		}
	}
	fds, err2 := os.ReadDir(filepath.Join(dir, "fd"))
	for _, fd := range fds {
		k, err := openedFile(filepath.Join(dir, "fd", fd.Name()), files)
		if err != nil {
			return err
		}
		if files[k] {
			w.held[k] = true
		}
	}
	if err := errors.Join(err1, err2); !gone(err) {
		return err
	}
	return nil
}

// gone reports whether an error about a file below /proc/PID means that the process has ended or has closed the file.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// mappedFile parses a line of /proc/PID/maps (proc(5)), whose fields are address, rights, offset, device, inode and
// path. It ignores the device, which stat(2) reports differently for bind mounts and overlays. Name and inode are
// enough to identify the file.
func mappedFile(line string) (key, bool) {
	fields := strings.Fields(line)
	if len(fields) < 6 || !strings.HasPrefix(fields[5], "/") {
		return key{}, false
	}
	inode, err := strconv.ParseUint(fields[4], 10, 64)
	if err != nil {
		return key{}, false
	}
	name := strings.TrimSuffix(strings.TrimSpace(line[strings.Index(line, " /")+1:]), " (deleted)")
	return key{filepath.Base(name), inode}, true
}

// openedFile returns the key of the file that a link in /proc/PID/fd points to, or the zero key if that file is not
// among the given files.
func openedFile(link string, files map[key]bool) (key, error) {
	target, err := os.Readlink(link)
	if gone(err) {
		return key{}, nil // the process has closed the file meanwhile
	}
	if err != nil {
		return key{}, err
	}
	name := filepath.Base(target)
	for k := range files {
		if k.name != name {
			continue
		}
		info, err := os.Stat(link) // Stat finds the open file even if another file has its name now
		if gone(err) {
			return key{}, nil
		}
		if err != nil {
			return key{}, err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Ino == k.inode {
			return k, nil
		}
	}
	return key{}, nil
}

// remove takes a lease on one file and then removes it. The lease makes every process that opens the file meanwhile
// wait until the file is out of the directory. So nobody else uses the removed file.
func (w *ShmWatch) remove(dir int, k key) (bool, error) {
	fd, err := unix.Openat(dir, k.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // the owner has already removed it
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd) // opened only for reading, so an error loses nothing
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return false, err
	}
	if stat.Ino != k.inode || stat.Mode&unix.S_IFMT != unix.S_IFREG || int(stat.Uid) != os.Geteuid() {
		return false, nil // another file has this name now
	}
	switch err := w.lease(fd); {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil // a process holds the file, or the kernel has no leases
	case err != nil:
		return false, err
	}
	if err := unix.Unlinkat(dir, k.name, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return true, nil
}

// takeLease takes an exclusive lease on an open file; closing the file ends the lease. It fails with EAGAIN when
// anybody else has the file open or mapped (fs/locks.c, check_conflicting_open).
func takeLease(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	return err
}
