package vllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"vllmtuner/serverctl/sim"
)

// A fakeGPU is a directory that stands for the memory of one GPU. A file named by a process's number says what that process
// holds, and counts for as long as the process lives: memory comes back when a process dies, however it dies, as with a real
// driver. A file named leak-… is memory that no process holds, until the time in it. The file total has the size in MiB.
type fakeGPU struct{ dir string }

// A holding is the content of one such file.
type holding struct {
	PID   int       `json:"pid,omitempty"`   // whose it is; of a leak, who must be gone before it counts; 0 is nobody
	Start uint64    `json:"start,omitempty"` // of that process, in clock ticks since boot: numbers are given away again
	MiB   float64   `json:"mib"`
	Until time.Time `json:"until,omitzero"` // of a leak; zero is for ever
}

const (
	totalFile  = "total"
	leakPrefix = "leak-"
	// leakEvery is how often a living process says anew until when its memory is to leak: after SIGKILL it cannot.
	leakEvery = 100 * time.Millisecond
)

// openGPU makes the directory a GPU of so many MiB.
func openGPU(dir string, total float64) (*fakeGPU, error) {
	g := &fakeGPU{dir: dir}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("open the simulated GPU: %w", err)
	}
	return g, g.put(totalFile, total)
}

// put replaces a file at once, so that nobody reads half of it.
func (g *fakeGPU) put(name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write the simulated GPU's %s: %w", name, err)
	}
	file, err := os.CreateTemp(g.dir, ".new-*")
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

// total returns the size in MiB, or the one given when nobody has opened the GPU yet.
func (g *fakeGPU) total(otherwise float64) (float64, error) {
	size := otherwise
	err := g.read(totalFile, &size)
	if errors.Is(err, fs.ErrNotExist) {
		return otherwise, nil
	}
	return size, err
}

// used returns the MiB that are in use at a time, and the holdings of living processes by their numbers.
func (g *fakeGPU) used(now time.Time) (mib float64, living []holding, err error) {
	files, err := os.ReadDir(g.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, nil, fmt.Errorf("read the simulated GPU: %w", err)
	}
	for _, file := range files {
		leak := strings.HasPrefix(file.Name(), leakPrefix)
		if _, err := strconv.Atoi(file.Name()); err != nil && !leak {
			continue
		}
		var h holding
		err := g.read(file.Name(), &h)
		switch {
		case errors.Is(err, fs.ErrNotExist): // given back in the meantime
		case err != nil:
			return 0, nil, err
		case leak && !lives(h) && (h.Until.IsZero() || now.Before(h.Until)):
			mib += h.MiB
		case !leak && lives(h):
			mib += h.MiB
			living = append(living, h)
		}
	}
	slices.SortFunc(living, func(a, b holding) int { return a.PID - b.PID })
	return mib, living, nil
}

// lives reports whether the holding's process is there: not one that got its number later, and not one that has ended and
// only waits to be reaped, whose memory is free already.
func lives(h holding) bool {
	if h.PID == 0 {
		return false
	}
	start, alive, err := processStart(h.PID)
	return err == nil && alive && start == h.Start
}

// processStart returns when a process began, in clock ticks since boot (field 22 of /proc/PID/stat, proc_pid_stat(5)), and
// whether it has not ended yet. The second field is a name in parentheses that may hold anything.
func processStart(pid int) (start uint64, alive bool, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	const (
		state     = 0 // what is left begins with field 3, the state
		startTime = 22 - 3
	)
	if len(fields) <= startTime {
		return 0, false, fmt.Errorf("read /proc/%d/stat: %d fields after the name", pid, len(fields))
	}
	start, err = strconv.ParseUint(fields[startTime], 10, 64)
	return start, !strings.Contains("ZXx", fields[state]), err
}

// A memory is what this process holds of the GPU. The zero memory is that of a server without one.
type memory struct {
	gpu     *fakeGPU
	free    float64 // MiB before anything was held
	holding holding
	leak    *Fault // nil when all comes back

	mu       sync.Mutex // of holding, which the keeper reads
	released bool
	stop     chan struct{}
	keeper   sync.WaitGroup
}

// claim takes hold of the GPU, or refuses as vLLM does when too little of it is free.
func (s *Server) claim(o sim.Options) (*memory, error) {
	m := &memory{stop: make(chan struct{})}
	if s.GPU == "" {
		return m, nil
	}
	total := s.Profile.Memory.GPUGiB * 1024
	gpu, err := openGPU(s.GPU, total)
	if err != nil {
		return nil, err
	}
	used, _, err := gpu.used(time.Now())
	if err != nil {
		return nil, err
	}
	if free := total - used; free < total*o.GPUMemoryUtilization {
		return nil, &sim.StartError{Text: tooLittleFree(free/1024, total/1024, o.GPUMemoryUtilization)}
	}
	start, _, err := processStart(os.Getpid())
	if err != nil {
		return nil, err
	}
	m.gpu, m.free, m.holding = gpu, total-used, holding{PID: os.Getpid(), Start: start}
	if leak, ok := s.Faults.find("leak-gpu"); ok {
		m.leak = &leak
		m.keeper.Go(m.keepLeaking)
	}
	return m, nil
}

// hold sets how many MiB are held.
func (m *memory) hold(mib float64) error {
	if m.gpu == nil {
		return nil
	}
	m.mu.Lock()
	m.holding.MiB = mib
	held := m.holding
	m.mu.Unlock()
	return errors.Join(m.sayLeak(), m.gpu.put(strconv.Itoa(held.PID), held))
}

// disturbed returns vLLM's refusal when another process gave memory back in the meantime: as much is free as before the
// weights, or more.
func (m *memory) disturbed() error {
	if m.gpu == nil {
		return nil
	}
	total, err := m.gpu.total(0)
	if err != nil {
		return err
	}
	used, _, err := m.gpu.used(time.Now())
	if err != nil {
		return err
	}
	if free := total - used; free >= m.free {
		return &sim.StartError{Text: profilingDisturbed(m.free/1024, free/1024)}
	}
	return nil
}

// sayLeak writes until when the memory would leak if the process died now.
func (m *memory) sayLeak() error {
	if m.leak == nil {
		return nil
	}
	m.mu.Lock()
	leak := m.holding
	m.mu.Unlock()
	if m.leak.For > 0 {
		leak.Until = time.Now().Add(m.leak.For)
	}
	return m.gpu.put(leakPrefix+strconv.Itoa(leak.PID), leak)
}

// keepLeaking says so again and again, for a process that is killed says nothing.
func (m *memory) keepLeaking() {
	for {
		select {
		case <-m.stop:
			return
		case <-time.After(leakEvery):
			_ = m.sayLeak() // the directory was removed with its test: then nobody reads it
		}
	}
}

// release gives the memory back. One that leaks stays with its process, and leaks when that has ended.
func (m *memory) release() {
	m.mu.Lock()
	done := m.released
	m.released = true
	m.mu.Unlock()
	if done || m.gpu == nil {
		return
	}
	close(m.stop)
	m.keeper.Wait()
	if m.leak != nil {
		_ = m.sayLeak() // as in keepLeaking
		return
	}
	// A file of a process that has ended does not count, so one that stays does no harm.
	_ = os.Remove(filepath.Join(m.gpu.dir, strconv.Itoa(m.holding.PID)))
}
