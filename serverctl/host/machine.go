// Package host finds out what the machine lets us use: cores, memory, shared memory, limits. It also removes shared
// memory that a dead server left behind. It never starts a process and never uses a GPU.
package host

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"vllmtuner/serverctl/cgroup"
)

// A Machine tells what this process, and a server that it starts, may use. In a container this is less than the whole
// machine has.
type Machine struct {
	Cores  Cores  `json:"cores"`
	Memory Memory `json:"memory"`
	Shm    Shm    `json:"shm"`
	Limits Limits `json:"limits"`
	// Unknown lists the values that could not be read, and why. Those values are 0 or nil.
	Unknown []string `json:"unknown,omitempty"`
}

// Cores are logical CPUs, as Linux and Kubernetes count them: a physical core with SMT counts as two.
type Cores struct {
	Usable   float64  `json:"usable"`             // how many can run at the same time: the lower of Affinity and Limit
	Affinity int      `json:"affinity"`           // CPUs that the process may run on, by sched_setaffinity(2) and cpusets
	Limit    *float64 `json:"limit"`              // CPU limit of the cgroups, in CPUs; nil means none
	LimitAt  string   `json:"limit_at,omitempty"` // the file that sets Limit
}

// Memory is in bytes.
type Memory struct {
	Total   int64  `json:"total_bytes"`
	Free    int64  `json:"free_bytes"`         // MemAvailable, or what the fullest cgroup has left if that is less
	Limit   *int64 `json:"limit_bytes"`        // the lowest limit of all cgroups; nil means none
	LimitAt string `json:"limit_at,omitempty"` // the file that sets Limit
}

// Shm is the file system for shared memory. A page counts against the memory limit of the cgroup that touches it first.
type Shm struct {
	Dir   string `json:"dir"`
	Total int64  `json:"total_bytes"` // 0 when there is none
	Free  int64  `json:"free_bytes"`
}

// Limits are the limits of setrlimit(2).
type Limits struct {
	// OpenFiles is the limit of this process. Go has raised the soft limit to one less than the hard limit (package
	// syscall, since Go 1.19). A server starts with the original soft limit.
	OpenFiles    *Limit `json:"open_files"`
	LockedMemory *Limit `json:"locked_memory_bytes"`
	Processes    *Limit `json:"processes"` // limit of the user's processes, threads included
}

// A Limit is a soft and a hard limit.
type Limit struct {
	Soft *int64 `json:"soft"` // nil means unlimited
	Hard *int64 `json:"hard"`
}

// DevShm is the directory of Linux's shared memory.
const DevShm = "/dev/shm"

// A Reader reads a Machine. The zero value reads this machine.
type Reader struct {
	Root   fs.FS   // holds the directories proc and sys; nil means the root of this machine
	kernel *kernel // nil means the kernel of this machine
}

// A kernel answers what only system calls tell. Tests replace it.
type kernel struct {
	cpus   int                                           // CPUs that the process may run on
	rlimit func(resource int, to *unix.Rlimit) error     // getrlimit(2)
	statfs func(dir string) (total, free int64, _ error) // sizes of a file system in bytes
}

// Read reads the machine. It never fails: Unknown lists what could not be read.
func (r Reader) Read() Machine {
	if r.Root == nil {
		r.Root = os.DirFS("/")
	}
	if r.kernel == nil {
		r.kernel = &kernel{runtime.NumCPU(), unix.Getrlimit, statfs}
	}
	m := Machine{Shm: Shm{Dir: DevShm}}
	note := func(what string, err error) {
		if err == nil {
			return
		}
		for line := range strings.Lines(err.Error()) { // errors.Join gives each error its own line
			m.Unknown = append(m.Unknown, what+": "+strings.TrimSpace(line))
		}
	}
	groups, err := cgroup.Groups(r.Root)
	note("cgroups", err)
	note("cores", r.cores(&m.Cores, groups))
	note("memory", r.memory(&m.Memory, groups))
	m.Shm.Total, m.Shm.Free, err = r.kernel.statfs(DevShm)
	note("shared memory", err)
	m.Limits = Limits{r.limit(unix.RLIMIT_NOFILE), r.limit(unix.RLIMIT_MEMLOCK), r.limit(unix.RLIMIT_NPROC)}
	return m
}

func statfs(dir string) (total, free int64, _ error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize, nil
}

func (r Reader) limit(resource int) *Limit {
	var l unix.Rlimit
	_ = r.kernel.rlimit(resource, &l) // getrlimit fails only for a resource that Linux does not have
	return &Limit{ceiling(l.Cur), ceiling(l.Max)}
}

func ceiling(n uint64) *int64 {
	if n == unix.RLIM_INFINITY {
		return nil
	}
	return new(int64(n))
}

// read returns the text of the file with this absolute path.
func (r Reader) read(name string) (string, error) {
	text, err := fs.ReadFile(r.Root, strings.TrimPrefix(path.Clean(name), "/"))
	return string(text), err
}

// cores fills in the CPUs that we may use.
func (r Reader) cores(c *Cores, groups []cgroup.Group) error {
	limit, at, err := cpuLimit(groups)
	if at != "" {
		c.Limit, c.LimitAt = &limit, at
	}
	c.Affinity = r.kernel.cpus
	c.Usable = float64(c.Affinity)
	if c.Limit != nil {
		c.Usable = min(c.Usable, *c.Limit)
	}
	return err
}

// cpuLimit returns the lowest CPU limit of all groups, in CPUs, and the file that sets it. If there is no limit, the
// file name is empty.
func cpuLimit(groups []cgroup.Group) (lowest float64, at string, _ error) {
	var errs []error
	for _, g := range groups {
		limit, file, err := g.CPULimit()
		errs = append(errs, err)
		if limit > 0 && (at == "" || limit < lowest) {
			lowest, at = limit, file
		}
	}
	return lowest, at, errors.Join(errs...)
}

// value finds the first line that begins with the given name. It returns the rest of that line, without spaces around
// it.
func value(text, name string) (string, bool) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(rest), true
		}
	}
	return "", false
}

// memory fills in the memory that we may use.
func (r Reader) memory(m *Memory, groups []cgroup.Group) error {
	text, err := r.read("/proc/meminfo")
	if err != nil {
		return err
	}
	total, err1 := kilobytes(text, "MemTotal:")
	available, err2 := kilobytes(text, "MemAvailable:")
	m.Total, m.Free = total, available
	limit, at, room, err3 := memoryLimit(groups, total)
	if at != "" {
		m.Limit, m.LimitAt = &limit, at
		m.Free = min(m.Free, room)
	}
	return errors.Join(err1, err2, err3)
}

// memoryLimit returns the lowest memory limit of all groups in bytes, and the file that sets it. If there is no limit,
// the file name is empty. The third result is what the fullest group has left, in bytes. Version 1 of cgroups writes a
// huge number for "no limit", so a limit above the machine's memory does not count.
func memoryLimit(groups []cgroup.Group, total int64) (lowest int64, at string, room int64, _ error) {
	var errs []error
	for _, g := range groups {
		limit, used, file, err := g.MemoryLimit()
		errs = append(errs, err)
		if file == "" || total > 0 && limit >= total {
			continue
		}
		left := max(0, limit-used)
		if at == "" || left < room {
			room = left
		}
		if at == "" || limit < lowest {
			lowest, at = limit, file
		}
	}
	return lowest, at, room, errors.Join(errs...)
}

// kilobytes parses the line of /proc/meminfo with the given name, such as "MemTotal:  24684084 kB". It returns bytes.
func kilobytes(text, name string) (int64, error) {
	line, ok := value(text, name)
	number, isKB := strings.CutSuffix(line, " kB")
	n, err := strconv.ParseInt(number, 10, 64)
	if !ok || !isKB || err != nil || n < 0 || n > math.MaxInt64>>10 {
		return 0, fmt.Errorf("%s in /proc/meminfo is %q, not a number of kB", name, line)
	}
	return n << 10, nil
}
