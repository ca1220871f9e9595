// Package host tells what the machine lets us use: cores, memory, shared memory, limits. It also removes the shared
// memory that one dead server has left. It never starts anything, and never uses a GPU.
package host

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"vllmtuner/serverctl/cgroup"
)

// A Machine tells what this process, and a server that it starts, may use. In a container that is less than the
// machine has.
type Machine struct {
	Cores  Cores  `json:"cores"`
	Memory Memory `json:"memory"`
	Shm    Shm    `json:"shm"`
	Limits Limits `json:"limits"`
	// Unknown lists what could not be read, and why. Those values are 0 or nil.
	Unknown []string `json:"unknown,omitempty"`
}

// Cores are logical CPUs, as Linux and Kubernetes count them: a physical core with SMT counts as two.
type Cores struct {
	Usable   float64  `json:"usable"`             // at the same time: the lower of the two below; 0 when neither is known
	Affinity int      `json:"affinity"`           // CPUs that the process may run on, by sched_setaffinity(2) and cpusets
	Limit    *float64 `json:"limit"`              // CPU limit of the cgroups, in CPUs; nil means none
	LimitAt  string   `json:"limit_at,omitempty"` // the file that sets it
}

// Memory is in bytes.
type Memory struct {
	Total   int64  `json:"total_bytes"`
	Free    int64  `json:"free_bytes"`         // MemAvailable, or the free room in the tightest cgroup if that is less
	Limit   *int64 `json:"limit_bytes"`        // limit of the tightest cgroup; nil means none
	LimitAt string `json:"limit_at,omitempty"` // the file that sets it
}

// Shm is the file system for shared memory. The cgroup that first touches a page pays for it.
type Shm struct {
	Dir   string `json:"dir"`
	Total int64  `json:"total_bytes"` // 0 when there is none
	Free  int64  `json:"free_bytes"`
}

// Limits are the limits of setrlimit(2).
type Limits struct {
	// OpenFiles is the limit of this process. Go has raised its soft limit to the hard one, less one (package syscall,
	// since Go 1.19). A server starts with the original soft limit.
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

// A Reader reads a Machine. The zero value reads this one.
type Reader struct {
	Root   fs.FS                                         // holds proc and sys; nil means the root of this machine
	Statfs func(dir string) (total, free int64, _ error) // sizes of a file system in bytes; nil means statfs(2)
}

// Read reads the machine. It never fails: Unknown lists what could not be read.
func (r Reader) Read() Machine {
	if r.Root == nil {
		r.Root = os.DirFS("/")
	}
	if r.Statfs == nil {
		r.Statfs = statfs
	}
	m := Machine{Shm: Shm{Dir: DevShm}}
	note := func(what string, err error) {
		if err == nil {
			return
		}
		for line := range strings.Lines(err.Error()) { // one for each of the joined errors
			m.Unknown = append(m.Unknown, what+": "+strings.TrimSpace(line))
		}
	}
	groups, err := cgroup.Groups(r.Root)
	note("cgroups", err)
	note("cores", r.cores(&m.Cores, groups))
	note("memory", r.memory(&m.Memory, groups))
	m.Shm.Total, m.Shm.Free, err = r.Statfs(DevShm)
	note("shared memory", err)
	note("limits", r.limits(&m.Limits))
	return m
}

func statfs(dir string) (total, free int64, _ error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize, nil
}

// read returns the text of a file, given by its absolute path.
func (r Reader) read(name string) (string, error) {
	text, err := fs.ReadFile(r.Root, strings.TrimPrefix(path.Clean(name), "/"))
	return string(text), err
}

// cores fills in the CPUs that we may use.
func (r Reader) cores(c *Cores, groups []cgroup.Group) error {
	limit, at, err1 := cpuLimit(groups)
	if at != "" {
		c.Limit, c.LimitAt = &limit, at
	}
	text, err2 := r.read("/proc/self/status")
	if err2 == nil {
		c.Affinity, err2 = allowedCPUs(text)
	}
	c.Usable = float64(c.Affinity)
	if c.Limit != nil && (c.Affinity == 0 || *c.Limit < c.Usable) {
		c.Usable = *c.Limit
	}
	return errors.Join(err1, err2)
}

// cpuLimit returns the lowest CPU limit of all groups, in CPUs, and the file that sets it. An empty file means no limit.
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

// allowedCPUs counts the CPUs of a line such as "Cpus_allowed_list:	0-15,32-47" in /proc/PID/status, proc(5).
func allowedCPUs(status string) (count int, err error) {
	list, ok := value(status, "Cpus_allowed_list:")
	if !ok {
		return 0, errors.New("/proc/self/status has no Cpus_allowed_list")
	}
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err := errors.Join(err1, err2); err != nil || first < 0 || last < first {
			return 0, fmt.Errorf("/proc/self/status: Cpus_allowed_list %q is not a list of CPUs", list)
		}
		count += last - first + 1
	}
	return count, nil
}

// value returns the rest of the line that begins with a name.
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

// memoryLimit returns the lowest memory limit of all groups in bytes, the file that sets it, and how many bytes are left
// in the fullest group. An empty file means no limit. Version 1 writes a huge number for "no limit", so a limit above
// the machine's memory does not count.
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

// kilobytes parses a line of /proc/meminfo, such as "MemTotal:  24684084 kB", and returns bytes.
func kilobytes(text, name string) (int64, error) {
	line, ok := value(text, name)
	number, isKB := strings.CutSuffix(line, " kB")
	n, err := strconv.ParseInt(number, 10, 64)
	if !ok || !isKB || err != nil || n < 0 || n > math.MaxInt64>>10 {
		return 0, fmt.Errorf("%s in /proc/meminfo is %q, not a number of kB", name, line)
	}
	return n << 10, nil
}

// limits fills in the limits of this process.
func (r Reader) limits(l *Limits) error {
	text, err := r.read("/proc/self/limits")
	if err != nil {
		return err
	}
	var err1, err2, err3 error
	l.OpenFiles, err1 = limit(text, "Max open files")
	l.LockedMemory, err2 = limit(text, "Max locked memory")
	l.Processes, err3 = limit(text, "Max processes")
	return errors.Join(err1, err2, err3)
}

// limit parses a line such as "Max open files            1024                 524288               files".
func limit(text, name string) (*Limit, error) {
	line, _ := value(text, name+" ")
	fields := strings.Fields(line)
	if len(fields) < 2 {
		return nil, fmt.Errorf("/proc/self/limits has no %q with two limits", name)
	}
	soft, err1 := ceiling(fields[0])
	hard, err2 := ceiling(fields[1])
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("%s in /proc/self/limits: %w", name, err)
	}
	return &Limit{soft, hard}, nil
}

// ceiling parses a number or "unlimited", which gives nil.
func ceiling(text string) (*int64, error) {
	if text == "unlimited" {
		return nil, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is not a number", text)
	}
	return &n, nil
}
