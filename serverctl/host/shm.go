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

// A ShmWatch distinguishes the shared memory of one server from everybody else's, so that the files of a killed
// server can be removed: psm_* of Python's multiprocessing.shared_memory, sem.mp-* of its semaphores, torch_<pid>_*
// of torch's, and anything else that its processes had open. Several goroutines may use it.
type ShmWatch struct {
	dir string

	lease func(fd int) error // exclusive outside tests

	mu      sync.Mutex
	names   map[string]bool // files that existed before the server
	inodes  map[uint64]bool // files that existed before the server
	held    map[key]bool    // files that a member has held at any time
	members map[int]bool    // the PIDs of all members so far
}

// A key distinguishes a file from a later one with the same name.
type key struct {
	name  string
	inode uint64
}

// listShm returns our user's regular files in a directory for shared memory. A missing directory has none.
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

// WatchShm must be called before the server starts: files that are already in the directory, normally DevShm, are not
// the server's.
func WatchShm(dir string) (*ShmWatch, error) {
	before, err := listShm(dir)
	if err != nil {
		return nil, err
	}
	w := &ShmWatch{
		dir: dir, lease: exclusive,
		names: map[string]bool{}, inodes: map[uint64]bool{}, held: map[key]bool{}, members: map[int]bool{},
	}
	for k := range before {
		w.names[k.name], w.inodes[k.inode] = true, true
	}
	return w, nil
}

// Observe records which files the server's processes have mapped or open now. Call it while the server is alive, at
// least once when it is ready and once before it is stopped. It reads as much as `lsof -p` of the members, and
// nothing when there are no new files. It skips a member that has ended.
func (w *ShmWatch) Observe(pids []int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pid := range pids {
		w.members[pid] = true
	}
	fresh, err := w.fresh()
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

// fresh returns the new files. It leaves out a file that reuses an earlier name or inode, because its owner is uncertain.
func (w *ShmWatch) fresh() (map[key]bool, error) {
	now, err := listShm(w.dir)
	maps.DeleteFunc(now, func(k key, _ bool) bool { return w.names[k.name] || w.inodes[k.inode] })
	return now, err
}

// Sweep removes the files that the server has left, after its end, and returns their names. It removes a file only if
// all of this holds: the file is new; a process of the server was seen to hold it, or its name carries such a process's
// PID; it is a regular file of our own user; and the kernel grants us an exclusive lease (fcntl(2), F_SETLEASE). The kernel
// does so only if nobody else has the file open or mapped, in any container and as any user. Where it knows no leases, as
// in gVisor, the file stays.
func (w *ShmWatch) Sweep() (names []string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left, err := w.fresh()
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(left, func(k key, _ bool) bool { return !w.held[k] && !w.named(k.name) })
	if len(left) == 0 {
		return nil, nil
	}
	dir, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: w.dir, Err: err}
	}
	defer unix.Close(dir) // opened for reading: there is nothing to lose
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

// named reports whether a name carries the PID of a member, in the formats of torch's manager (c10,
// torch_<pid>_<random>_<count>) and LLVM's OpenMP (__KMP_REGISTERED_LIB_<pid>_<uid>).
func (w *ShmWatch) named(name string) bool {
	for _, prefix := range []string{"torch_", "__KMP_REGISTERED_LIB_"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			text, _, more := strings.Cut(rest, "_")
			pid, err := strconv.Atoi(text)
			return more && err == nil && w.members[pid]
		}
	}
	return false
}

// see records which of the files a process has mapped or open. A process that has ended holds none.
func (w *ShmWatch) see(pid int, files map[key]bool) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	mappings, err1 := os.ReadFile(filepath.Join(dir, "maps"))
	for line := range strings.Lines(string(mappings)) {
		if k, ok := mapped(line); ok && files[k] {
			w.held[k] = true
		}
	}
	fds, err2 := os.ReadDir(filepath.Join(dir, "fd"))
	for _, fd := range fds {
		k, err := opened(filepath.Join(dir, "fd", fd.Name()), files)
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

// gone reports whether an error of a file below /proc/PID means that the process has ended.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// mapped parses a line of /proc/PID/maps (proc(5)): address, rights, offset, device, inode, path. It ignores the
// device, because bind mounts and overlays show another one there than stat(2). Name and inode together identify the
// file.
func mapped(line string) (key, bool) {
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

// opened returns the key of the file behind a link of /proc/PID/fd, or the zero key if it is none of the files.
func opened(link string, files map[key]bool) (key, error) {
	target, err := os.Readlink(link)
	if gone(err) {
		return key{}, nil // closed meanwhile
	}
	if err != nil {
		return key{}, err
	}
	name := filepath.Base(target)
	for k := range files {
		if k.name != name {
			continue
		}
		info, err := os.Stat(link) // the open file itself, even if its name now means another file
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

// remove removes one file while it holds a lease on it. A process that opens the file now must wait until it is
// gone from the directory, and so shares it with nobody.
func (w *ShmWatch) remove(dir int, k key) (bool, error) {
	fd, err := unix.Openat(dir, k.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // its owner has removed it
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd) // opened for reading: there is nothing to lose
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return false, err
	}
	if stat.Ino != k.inode || stat.Mode&unix.S_IFMT != unix.S_IFREG || int(stat.Uid) != os.Geteuid() {
		return false, nil // another file has the name now
	}
	switch err := w.lease(fd); {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil // a process holds it, or the kernel knows no leases
	case err != nil:
		return false, err
	}
	if err := unix.Unlinkat(dir, k.name, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return true, nil
}

// exclusive takes a lease on an open file; closing the file ends it. It fails with EAGAIN when anybody else has the
// file open or mapped (fs/locks.c, check_conflicting_open).
func exclusive(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	return err
}
