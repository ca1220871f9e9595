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
	"time"

	"golang.org/x/sys/unix"
)

// A Segment is one file of shared memory.
type Segment struct {
	Name    string    `json:"name"`
	Bytes   int64     `json:"bytes"` // that it really takes; a server's are much larger by name than by use
	Inode   uint64    `json:"inode"`
	UID     int       `json:"uid"` // of its owner
	ModTime time.Time `json:"mod_time"`
}

// A ShmWatch tells the shared memory of one server from everybody else's, so that what a killed server leaves can be
// removed: psm_* of Python's multiprocessing.shared_memory, sem.mp-* of its semaphores, torch_<pid>_* of torch's, and
// whatever else its processes had open. It may be used by several goroutines.
type ShmWatch struct {
	dir string

	proc  string             // holds the directories of the processes; /proc outside tests
	lease func(fd int) error // exclusive, outside tests

	mu      sync.Mutex
	names   map[string]bool // that were there before
	inodes  map[uint64]bool // likewise
	held    map[key]bool    // by a member, at any time
	members map[int]bool    // every process number that was one
}

// A key tells a file from a later one of the same name.
type key struct {
	name  string
	inode uint64
}

// ListShm returns the regular files of a directory for shared memory, in the order of their names. A directory that is
// not there holds none.
func ListShm(dir string) ([]Segment, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list shared memory: %w", err)
	}
	var all []Segment
	for _, entry := range entries {
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("list shared memory: %w", err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() {
			all = append(all, Segment{
				Name: info.Name(), Bytes: stat.Blocks * 512, Inode: stat.Ino, UID: int(stat.Uid), ModTime: info.ModTime(),
			})
		}
	}
	return all, nil
}

// WatchShm begins before the server starts: whatever is in the directory, usually DevShm, is not the server's.
func WatchShm(dir string) (*ShmWatch, error) {
	before, err := ListShm(dir)
	if err != nil {
		return nil, err
	}
	w := &ShmWatch{
		dir: dir, proc: "/proc", lease: exclusive,
		names: map[string]bool{}, inodes: map[uint64]bool{}, held: map[key]bool{}, members: map[int]bool{},
	}
	for _, s := range before {
		w.names[s.Name], w.inodes[s.Inode] = true, true
	}
	return w, nil
}

// Observe learns which files the server's processes have mapped or open now. It is to be called while the server lives,
// at least once when it is ready and once before it is stopped; it reads as much as a `lsof -p` of the members, and
// nothing when there are no new files. A member that has ended meanwhile is passed over.
func (w *ShmWatch) Observe(pids []int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pid := range pids {
		w.members[pid] = true
	}
	fresh, err := w.fresh()
	if err != nil {
		return err
	}
	var errs []error
	for _, pid := range pids {
		held, err := w.heldBy(pid, fresh)
		if err != nil {
			errs = append(errs, fmt.Errorf("see what shared memory process %d holds: %w", pid, err))
		}
		maps.Copy(w.held, held)
	}
	return errors.Join(errs...)
}

// fresh returns the files that were not there before, by their keys. One that took over a name or an inode of before is
// left out: it is not worth the doubt.
func (w *ShmWatch) fresh() (map[key]Segment, error) {
	now, err := ListShm(w.dir)
	if err != nil {
		return nil, err
	}
	fresh := map[key]Segment{}
	for _, s := range now {
		if !w.names[s.Name] && !w.inodes[s.Inode] {
			fresh[key{s.Name, s.Inode}] = s
		}
	}
	return fresh, nil
}

// Sweep removes what the server has left, after its end, and returns it. A file is removed when all of this is true:
// it was not there before; a process of the server was seen to hold it, or its name carries the number of one; it is a
// regular file of our own user; and nobody has it mapped or open now. The last is asked of /proc, and then of the kernel,
// which grants an exclusive lease (fcntl(2), F_SETLEASE) only on a file that nobody else has open or mapped, in whatever
// container and as whatever user. Where neither can prove it, the file stays.
func (w *ShmWatch) Sweep() ([]Segment, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left, err := w.fresh()
	if err != nil {
		return nil, err
	}
	for k, s := range left {
		if !w.held[k] && !w.named(s.Name) || s.UID != os.Geteuid() {
			delete(left, k)
		}
	}
	if len(left) == 0 {
		return nil, nil
	}
	blind, err := w.dropInUse(left)
	if err != nil {
		return nil, fmt.Errorf("see who still holds shared memory: %w", err)
	}
	return w.remove(left, blind)
}

// named reports whether a name carries the number of a member, in the form of those who write it there: torch's manager
// (c10, torch_<pid>_<random>_<count>) and LLVM's OpenMP (__KMP_REGISTERED_LIB_<pid>_<uid>).
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

// dropInUse takes those files out that some process holds. It is blind to a process of another user, to one that guards
// its memory (prctl(2), PR_SET_DUMPABLE; a key agent does), and, unless we are root, to a dead one that nobody has reaped.
func (w *ShmWatch) dropInUse(files map[key]Segment) (blind bool, _ error) {
	entries, err := os.ReadDir(w.proc)
	if err != nil {
		return false, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue // not a process
		}
		held, err := w.heldBy(pid, files)
		if errors.Is(err, fs.ErrPermission) {
			blind = true
		} else if err != nil {
			return false, err
		}
		for k := range held {
			delete(files, k)
		}
	}
	return blind, nil
}

// heldBy returns those of the files that a process has mapped or open, as far as it could be seen when there is an error.
// A process that has ended holds none.
func (w *ShmWatch) heldBy(pid int, files map[key]Segment) (map[key]bool, error) {
	held := map[key]bool{}
	if len(files) == 0 {
		return held, nil
	}
	dir := filepath.Join(w.proc, strconv.Itoa(pid))
	mappings, err := os.ReadFile(filepath.Join(dir, "maps"))
	if gone(err) {
		return held, nil
	}
	if err != nil {
		return held, err
	}
	for line := range strings.Lines(string(mappings)) {
		if k, ok := mapped(line); ok && has(files, k) {
			held[k] = true
		}
	}
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if gone(err) {
		return held, nil
	}
	if err != nil {
		return held, err
	}
	for _, fd := range fds {
		k, err := opened(filepath.Join(dir, "fd", fd.Name()), files)
		if err != nil {
			return held, err
		}
		if has(files, k) {
			held[k] = true
		}
	}
	return held, nil
}

func has(files map[key]Segment, k key) bool {
	_, ok := files[k]
	return ok
}

// gone reports whether an error of a file below /proc/PID means that the process has ended meanwhile.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// mapped reads a line of /proc/PID/maps, proc(5): address, rights, offset, device, inode, path. The device is not
// compared, since bind mounts and overlays show another one there than stat(2) does; name and inode together are enough.
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

// opened returns the file behind a link of /proc/PID/fd, or the zero key when its name is none of the files'.
func opened(link string, files map[key]Segment) (key, error) {
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
		info, err := os.Stat(link) // of the open file, whatever its name means by now
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

// remove removes the files that the kernel, too, says are nobody's.
func (w *ShmWatch) remove(files map[key]Segment, blind bool) (removed []Segment, err error) {
	dir, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: w.dir, Err: err}
	}
	defer unix.Close(dir) // opened for reading: there is nothing to lose
	var errs []error
	for k, s := range files {
		done, err := w.removeOne(dir, k, blind)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove shared memory %s: %w", filepath.Join(w.dir, k.name), err))
		}
		if done {
			removed = append(removed, s)
		}
	}
	slices.SortFunc(removed, func(a, b Segment) int { return strings.Compare(a.Name, b.Name) })
	return removed, errors.Join(errs...)
}

// removeOne removes one file while it holds a lease on it: whoever opened it now would wait until it is gone from the
// directory, and find that what it opened is nobody else's.
func (w *ShmWatch) removeOne(dir int, k key, blind bool) (bool, error) {
	fd, err := unix.Openat(dir, k.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // its own owner has removed it
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
		return false, nil // another file has taken the name
	}
	switch err := w.lease(fd); {
	case err == nil:
	case errors.Is(err, unix.EAGAIN):
		return false, nil // somebody has it whom /proc does not show
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		if blind { // no leases here, so /proc would have had to show everybody
			return false, nil
		}
	default:
		return false, err
	}
	if err := unix.Unlinkat(dir, k.name, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return true, nil
}

// exclusive takes a lease on an open file; closing it gives the lease up. It fails with EAGAIN when anybody else has the
// file open or mapped (fs/locks.c, check_conflicting_open).
func exclusive(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	return err
}
