package vllm

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// A fakeGPU is a directory that stands for the memory of one GPU. The file total has the size in MiB. Each other file
// has one memoryUse. The file of a server is named after the server's PID.
type fakeGPU struct{ dir string }

// A memoryUse is memory in use on the GPU. The memory counts as used only while its process lives. So the memory
// becomes free however the process ends, as with a real driver. Memory without a process, and memory that leaks, counts
// until the time Until instead.
type memoryUse struct {
	PID   int           `json:"pid,omitempty"`   // the process that holds the memory; 0 means none
	Start uint64        `json:"start,omitempty"` // start of the process in clock ticks since boot; the kernel reuses PIDs
	MiB   float64       `json:"mib"`
	Leak  time.Duration `json:"leak,omitempty"` // time in use after the end of the process; below 0 means for ever
	Until time.Time     `json:"until,omitzero"` // zero means for ever; the method measure sets this field when it first finds a leak whose process has ended
}

const (
	totalFile  = "total"
	tempPrefix = ".new-" // names of files that are being written begin with this
)

// leakForEver is the Leak of memory that never becomes free.
const leakForEver = -1

// openGPU makes a directory into a GPU whose memory has the given size.
func openGPU(dir string, totalMiB float64) (*fakeGPU, error) {
	g := &fakeGPU{dir: dir}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("open the simulated GPU: %w", err)
	}
	return g, g.put(totalFile, totalMiB)
}

// put replaces a file atomically.
func (g *fakeGPU) put(name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write the simulated GPU's %s: %w", name, err)
	}
	file, err := os.CreateTemp(g.dir, tempPrefix+"*")
	if err != nil {
		return fmt.Errorf("write the simulated GPU's %s: %w", name, err)
	}
	_, err = file.Write(append(text, '\n'))
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(file.Name(), filepath.Join(g.dir, name))
	}
	if err != nil {
		return fmt.Errorf("write the simulated GPU's %s: %w", name, errors.Join(err, os.Remove(file.Name())))
	}
	return nil
}

func (g *fakeGPU) read(name string, content any) error {
	text, err := os.ReadFile(filepath.Join(g.dir, name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, content); err != nil {
		return fmt.Errorf("read the simulated GPU's %s: %w", name, err)
	}
	return nil
}

// total returns the GPU's size in MiB. If no server has opened the GPU yet, it returns the value of fallback.
func (g *fakeGPU) total(fallback float64) (float64, error) {
	size := fallback
	err := g.read(totalFile, &size)
	if errors.Is(err, fs.ErrNotExist) {
		return fallback, nil
	}
	return size, err
}

// measure returns the MiB that are in use at the time now. It also returns what each living process uses, in the order
// of their PIDs.
func (g *fakeGPU) measure(now time.Time) (mib float64, living []memoryUse, err error) {
	files, err := os.ReadDir(g.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, nil, fmt.Errorf("read the simulated GPU: %w", err)
	}
	for _, file := range files {
		if file.Name() == totalFile || strings.HasPrefix(file.Name(), tempPrefix) {
			continue
		}
		var h memoryUse
		err := g.read(file.Name(), &h)
		if err == nil && h.Leak > 0 && h.Until.IsZero() && !lives(h) {
			h.Until = now.Add(h.Leak)
			err = g.put(file.Name(), h)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // its process has released the memory in the meantime
		case err != nil:
			return 0, nil, err
		case lives(h):
			mib += h.MiB
			living = append(living, h)
		case (h.PID == 0 || h.Leak != 0) && (h.Until.IsZero() || now.Before(h.Until)):
			mib += h.MiB
		}
	}
	slices.SortFunc(living, func(a, b memoryUse) int { return a.PID - b.PID })
	return mib, living, nil
}

// lives reports whether the process of the memoryUse h runs. A later process with the same PID does not count. A zombie
// does not count either, because its memory is free already.
func lives(h memoryUse) bool {
	if h.PID == 0 {
		return false
	}
	start, alive, err := processStart(h.PID)
	return err == nil && alive && start == h.Start
}

// processStart returns when a process started, in clock ticks since boot, and whether the process still lives. The two
// values come from fields 22 and 3 of /proc/PID/stat (proc_pid_stat(5)). The second field is a name in parentheses that
// may hold any characters, so only the text after the last parenthesis is split.
func processStart(pid int) (start uint64, alive bool, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	const (
		state     = 0 // the text after the name begins with field 3, the state
		startTime = 22 - 3
	)
	if len(fields) <= startTime {
		return 0, false, fmt.Errorf("read /proc/%d/stat: %d fields after the name", pid, len(fields))
	}
	start, err = strconv.ParseUint(fields[startTime], 10, 64)
	return start, !strings.Contains("ZXx", fields[state]), err
}

// A memory is the GPU memory that this process holds. The zero memory is for a server without a GPU.
type memory struct {
	gpu  *fakeGPU
	free float64 // MiB that were free before this process held any
	use  memoryUse
}

// claim opens the GPU. It refuses, as vLLM does, when too little memory is free.
func (s *Server) claim(o sim.Options) (*memory, error) {
	if s.GPU == "" {
		return &memory{}, nil
	}
	total := s.Profile.Memory.GPUGiB * 1024
	gpu, err := openGPU(s.GPU, total)
	if err != nil {
		return nil, err
	}
	used, _, err := gpu.measure(time.Now())
	if err != nil {
		return nil, err
	}
	if free := total - used; free < total*o.GPUMemoryUtilization {
		return nil, &sim.StartError{Text: deathText("little-memory", fields{
			"free": roundGiB(free / 1024), "total": roundGiB(total / 1024),
			"utilization": pythonRepr(o.GPUMemoryUtilization), "wanted": roundGiB(total / 1024 * o.GPUMemoryUtilization),
		})}
	}
	start, _, err := processStart(os.Getpid())
	if err != nil {
		return nil, err
	}
	held := memoryUse{PID: os.Getpid(), Start: start}
	if leak, ok := s.Faults.find("leak-gpu"); ok {
		held.Leak = cmp.Or(leak.For, leakForEver)
	}
	return &memory{gpu: gpu, free: total - used, use: held}, nil
}

// hold sets the MiB that this process holds.
func (m *memory) hold(mib float64) error {
	if m.gpu == nil {
		return nil
	}
	m.use.MiB = mib
	return m.gpu.put(m.file(), m.use)
}

// disturbed returns vLLM's error if another process has released memory since the start. It notices this when at least
// as much memory is free as before the weights were loaded.
func (m *memory) disturbed() error {
	if m.gpu == nil {
		return nil
	}
	total, err := m.gpu.total(0)
	if err != nil {
		return err
	}
	used, _, err := m.gpu.measure(time.Now())
	if err != nil {
		return err
	}
	if free := total - used; free >= m.free {
		parts := fields{"before": roundGiB(m.free / 1024), "after": roundGiB(free / 1024)}
		return &sim.StartError{Text: deathText("profiling", parts)}
	}
	return nil
}

func (m *memory) file() string { return strconv.Itoa(m.use.PID) }

// release frees the memory, unless it leaks. It may be called again.
func (m *memory) release() {
	if m.gpu != nil && m.use.Leak == 0 {
		_ = os.Remove(filepath.Join(m.gpu.dir, m.file())) // may fail: a file without its process does not count
	}
}
