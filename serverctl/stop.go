package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
)

const (
	// portCloseLimit is how long a port may stay open after the last process has ended. Normally the kernel closes it
	// at once.
	portCloseLimit = 5 * time.Second
	// gpuSlackMiB is a tolerance in MiB. Memory counts as released if no more than this is in use on top of the memory
	// before the start. The driver keeps some MiB per GPU for itself, and more after its first use.
	gpuSlackMiB = 256
	// gpuEvery is the pause between two queries of the GPU's memory. nvidia-smi takes about 50 ms per call and GPU.
	gpuEvery = 250 * time.Millisecond
)

// An Ended reports how the end of a server went.
type Ended struct {
	Took     time.Duration `json:"took_ns"`             // in total
	Shm      []string      `json:"shm,omitempty"`       // files of this server in /dev/shm that it left and we removed
	GPUWait  time.Duration `json:"gpu_wait_ns"`         // until the GPUs' memory was released
	GPUs     []GPUMemory   `json:"gpus,omitempty"`      // nil without a GPU to query
	LogError string        `json:"log_error,omitempty"` // why the log is incomplete
	GPUError string        `json:"gpu_error,omitempty"` // why the GPUs were not watched until the end
}

// A GPUMemory is the memory in use on one GPU, in MiB.
type GPUMemory struct {
	Index  int     `json:"index"`
	Before float64 `json:"before_mib"` // before the server's start
	After  float64 `json:"after_mib"`  // after its end; -1 when the GPU no longer tells
}

// A MemoryError says that a server's GPU memory was not released. No other server may start then: it would run out of
// memory, or get a smaller cache.
type MemoryError struct {
	GPUs    []GPUMemory // GPUs with more memory in use than before the start
	Waited  time.Duration
	Holders []gpu.Process // processes that hold GPU memory, as far as the driver tells
}

// Error lists each GPU with its memory, and says what to do.
func (e *MemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "wait for the GPU's memory to be released: after %s", render.Took(e.Waited))
	for _, g := range e.GPUs {
		if g.After == unknownMiB {
			fmt.Fprintf(&b, " GPU %d no longer reports its memory;", g.Index)
			continue
		}
		fmt.Fprintf(&b, " GPU %d has %.0f MiB in use, but had %.0f MiB before the start;", g.Index, g.After, g.Before)
	}
	for _, p := range e.Holders {
		if p.UsedMiB == nil {
			fmt.Fprintf(&b, " process %d holds memory of unknown size;", p.PID)
			continue
		}
		fmt.Fprintf(&b, " process %d holds %.0f MiB;", p.PID, *p.UsedMiB)
	}
	b.WriteString(" find who uses the GPU with nvidia-smi, or raise server.gpu_memory_timeout")
	return b.String()
}

// takeStock runs before the start. It records the shared memory and GPU memory that are in use already, because they
// are not the server's.
func (s *Server) takeStock(ctx context.Context) (err error) {
	if s.shm, err = host.WatchShm(host.DevShm); err != nil {
		return err
	}
	s.oomKills, _, _ = s.config.machine.OOMKills() // without a count of OOM kills, no death is blamed on memory
	if s.config.GPU == nil {
		return nil
	}
	reading, err := s.config.GPU.Query(ctx)
	if errors.Is(err, gpu.ErrNone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the GPUs' memory before the start: %w", err)
	}
	s.before = OwnGPUs(reading, s.config.Env, s.config.Args)
	return nil
}

// OwnGPUs returns those GPUs of a reading that a server with these args uses. env is added to the tuner's own
// environment.
func OwnGPUs(reading gpu.Reading, env map[string]string, args []string) []gpu.GPU {
	visible := gpu.Visible(reading, func(name string) (string, bool) {
		if value, ok := env[name]; ok {
			return value, true
		}
		return os.LookupEnv(name)
	})
	return visible[:min(len(visible), worldSize(args))] // vLLM uses the first GPUs that it can see
}

// Stop ends the server: it sends SIGTERM, waits for StopTimeout, then sends SIGKILL to the whole process tree. It
// returns when no process is alive, the port is closed, the server's files in /dev/shm are removed and the GPUs' memory
// is released. A *MemoryError says that the memory was not released. Callers must close their streams first: a server
// that waits for its clients uses up the StopTimeout. The end of ctx cuts the StopTimeout short. A second call returns
// the result of the first.
func (s *Server) Stop(ctx context.Context) (Ended, error) {
	s.stopOnce.Do(func() {
		begin := time.Now()
		if err := s.stop(ctx); err != nil {
			s.stopErr = fmt.Errorf("stop the server on port %d: %w", s.port, err)
		}
		s.ended.Took = time.Since(begin)
	})
	return s.ended, s.stopErr
}

// stop performs the steps of Stop, one after another.
func (s *Server) stop(ctx context.Context) error {
	if s.stopWatch != nil {
		s.stopWatch()
		s.watched.Wait()
		s.ended.GPUError = s.gpuError
	}
	s.http.CloseIdleConnections()
	if err := s.seeShm(); err != nil {
		s.config.progress("the server's shared memory could not be listed completely: %v", err)
	}
	err := s.process.Stop(ctx, s.config.StopTimeout)
	if logErr := s.log.close(); logErr != nil {
		s.ended.LogError = logErr.Error()
		s.config.progress("the server's log is incomplete: %v", logErr)
	}
	if err != nil {
		return err
	}
	if s.owned {
		if err := awaitClosed(s.port); err != nil {
			return err
		}
	}
	if s.ended.Shm, err = s.shm.Sweep(); err != nil {
		return err
	}
	return s.awaitMemory(context.WithoutCancel(ctx))
}

// seeShm records the shared memory that the server's processes hold. Stop removes only recorded memory: to leave a file
// is better than to remove a neighbour's.
func (s *Server) seeShm() error {
	pids, err := s.process.Members()
	if err != nil {
		return err
	}
	return s.shm.Observe(pids)
}

// awaitMemory waits until the GPUs have no more memory in use than before the start.
func (s *Server) awaitMemory(ctx context.Context) error {
	if len(s.before) == 0 {
		return nil
	}
	begin := time.Now()
	for {
		reading, err := s.config.GPU.Query(ctx)
		if err == nil {
			s.ended.GPUs = compare(s.before, reading.GPUs)
		}
		s.ended.GPUWait = time.Since(begin)
		above := slices.DeleteFunc(slices.Clone(s.ended.GPUs), GPUMemory.released)
		switch {
		case err == nil && len(above) == 0:
			return nil
		case s.ended.GPUWait < s.config.GPUMemoryTimeout:
			time.Sleep(gpuEvery)
		case err != nil:
			return fmt.Errorf("wait for the GPU's memory to be released: %w", err)
		default:
			return &MemoryError{GPUs: above, Waited: s.ended.GPUWait, Holders: s.holders(ctx)}
		}
	}
}

// holders returns the processes that hold GPU memory. It returns none if the driver does not tell, as in most
// containers.
func (s *Server) holders(ctx context.Context) []gpu.Process {
	lister, ok := s.config.GPU.(interface {
		Processes(ctx context.Context) ([]gpu.Process, error)
	})
	if !ok {
		return nil
	}
	processes, err := lister.Processes(ctx)
	if err != nil {
		return nil
	}
	return processes
}

// unknownMiB stands for the memory in use on a GPU that no longer reports it.
const unknownMiB = -1

// compare pairs each GPU's memory in use before and after. It omits GPUs that did not report it before.
func compare(before, after []gpu.GPU) []GPUMemory {
	var list []GPUMemory
	for _, b := range before {
		if b.UsedMiB == nil {
			continue
		}
		now := GPUMemory{Index: b.Index, Before: *b.UsedMiB, After: unknownMiB}
		for _, a := range after {
			if a.UUID == b.UUID && a.Index == b.Index && a.MIG == b.MIG && a.UsedMiB != nil {
				now.After = *a.UsedMiB
			}
		}
		list = append(list, now)
	}
	return list
}

// released reports whether no more memory is in use than before the start, apart from gpuSlackMiB.
func (g GPUMemory) released() bool { return g.After != unknownMiB && g.After <= g.Before+gpuSlackMiB }

// awaitClosed waits until no process listens on a port.
func awaitClosed(port int) error {
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for deadline := time.Now().Add(portCloseLimit); ; time.Sleep(50 * time.Millisecond) {
		conn, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return nil
		}
		if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("check that port %d is closed: %w", port, err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait for port %d to close: still open after %s", port, render.Took(portCloseLimit))
		}
	}
}
