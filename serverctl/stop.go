package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
)

const (
	// portCloseLimit is how long a port may stay open after the last process has gone. The kernel closes it at once.
	portCloseLimit = 5 * time.Second
	// gpuSlackMiB is by how much the GPU's memory may be above its level before the start and still count as given back:
	// the driver keeps some MiB per GPU for itself, more after its first use.
	gpuSlackMiB = 256
	// gpuEvery is how often the GPU is asked whether its memory is back. nvidia-smi takes about 50 ms a call and GPU.
	gpuEvery = 250 * time.Millisecond
)

// An Ended is what the end of a server took, and what it left.
type Ended struct {
	Took     time.Duration `json:"took_ns"`             // all of it
	Shm      []string      `json:"shm,omitempty"`       // left in /dev/shm by this server, and removed
	GPUWait  time.Duration `json:"gpu_wait_ns"`         // until the GPUs' memory was back
	GPUs     []GPUMemory   `json:"gpus,omitempty"`      // nil where there is no GPU to ask
	LogError string        `json:"log_error,omitempty"` // why the log is incomplete
	GPUError string        `json:"gpu_error,omitempty"` // why the GPUs were not watched to the end
}

// A GPUMemory is the memory that is in use on one GPU, MiB.
type GPUMemory struct {
	Index  int     `json:"index"`
	Before float64 `json:"before_mib"` // before the server's start
	After  float64 `json:"after_mib"`  // after its end; -1 when the GPU does not tell any more
}

// A MemoryError says that a server's GPU memory did not come back: the next one must not be started, for it would die of
// that, or measure a smaller cache.
type MemoryError struct {
	GPUs    []GPUMemory // those that are above their level
	Waited  time.Duration
	Holders []gpu.Process // who holds memory there, as far as the driver tells
}

// Error names each GPU with its numbers, and what can be done.
func (e *MemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "wait for the GPU's memory to come back: after %v", e.Waited.Round(100*time.Millisecond))
	for _, g := range e.GPUs {
		if g.After == untold {
			fmt.Fprintf(&b, " GPU %d does not tell its memory any more;", g.Index)
			continue
		}
		fmt.Fprintf(&b, " GPU %d has %.0f MiB in use, before the start %.0f MiB;", g.Index, g.After, g.Before)
	}
	for _, p := range e.Holders {
		if p.UsedMiB == nil {
			fmt.Fprintf(&b, " process %d holds some;", p.PID)
			continue
		}
		fmt.Fprintf(&b, " process %d holds %.0f MiB;", p.PID, *p.UsedMiB)
	}
	b.WriteString(" see nvidia-smi for who uses the GPU, or raise server.gpu_memory_timeout")
	return b.String()
}

// takeStock learns before the start what is in use, and so none of the server's: shared memory, and the GPUs' memory.
func (s *Server) takeStock(ctx context.Context) (err error) {
	if s.shm, err = host.WatchShm(host.DevShm); err != nil {
		return err
	}
	s.oomKills, _, _ = s.config.machine.OOMKills() // where nothing tells, none is ever blamed on it
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

// OwnGPUs returns the GPUs of a reading that a server with these args uses. env is on top of the tuner's own environment.
func OwnGPUs(reading gpu.Reading, env map[string]string, args []string) []gpu.GPU {
	visible := gpu.Visible(reading, func(name string) (string, bool) {
		if value, ok := env[name]; ok {
			return value, true
		}
		return os.LookupEnv(name)
	})
	return visible[:min(len(visible), worldSize(args))] // vLLM takes the first ones
}

// Stop ends the server: SIGTERM, StopTimeout for it to end, SIGKILL to everything that came of it; it returns when no
// process lives, the port is closed, what it left in /dev/shm is removed, and the GPUs' memory is back; and how that went.
// A *MemoryError says that it did not come back. Callers close their streams first: a server that waits for its clients
// uses up the StopTimeout. The end of ctx cuts the StopTimeout short. A second call returns the same.
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

// stop goes through the end, each step only when the one before it is done.
func (s *Server) stop(ctx context.Context) error {
	if s.stopWatch != nil {
		s.stopWatch()
		s.watched.Wait()
		s.ended.GPUError = s.gpuError
	}
	s.http.CloseIdleConnections()
	if err := s.seeShm(); err != nil {
		s.config.progress("not all of the server's shared memory could be seen: %v", err)
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
	swept, err := s.shm.Sweep()
	if err != nil {
		return err
	}
	for _, segment := range swept {
		s.ended.Shm = append(s.ended.Shm, segment.Name)
	}
	return s.awaitMemory(context.WithoutCancel(ctx))
}

// seeShm learns what shared memory the server's processes hold. What it could not see stays when the server is gone: a file
// too many is better than a neighbour's too few.
func (s *Server) seeShm() error {
	pids, err := s.process.Members()
	if err != nil {
		return err
	}
	return s.shm.Observe(pids)
}

// awaitMemory waits until the GPUs hold no more than before the start.
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
		above := aboveLevel(s.ended.GPUs)
		switch {
		case err == nil && len(above) == 0:
			return nil
		case s.ended.GPUWait < s.config.GPUMemoryTimeout:
			time.Sleep(gpuEvery)
		case err != nil:
			return fmt.Errorf("wait for the GPU's memory to come back: %w", err)
		default:
			return &MemoryError{GPUs: above, Waited: s.ended.GPUWait, Holders: s.holders(ctx)}
		}
	}
}

// holders are the processes that hold GPU memory; none where the driver does not tell, as in most containers.
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

// untold is the memory of a GPU that told it before, and does not any more.
const untold = -1

// compare puts the memory in use before and after side by side. A GPU that did not tell before is left out.
func compare(before, after []gpu.GPU) []GPUMemory {
	var list []GPUMemory
	for _, b := range before {
		if b.UsedMiB == nil {
			continue
		}
		now := GPUMemory{Index: b.Index, Before: *b.UsedMiB, After: untold}
		for _, a := range after {
			if a.UUID == b.UUID && a.Index == b.Index && a.MIG == b.MIG && a.UsedMiB != nil {
				now.After = *a.UsedMiB
			}
		}
		list = append(list, now)
	}
	return list
}

func aboveLevel(gpus []GPUMemory) []GPUMemory {
	var above []GPUMemory
	for _, g := range gpus {
		if g.After == untold || g.After > g.Before+gpuSlackMiB {
			above = append(above, g)
		}
	}
	return above
}

// awaitClosed waits until nobody listens on a port.
func awaitClosed(port int) error {
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for deadline := time.Now().Add(portCloseLimit); ; time.Sleep(50 * time.Millisecond) {
		conn, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return nil
		}
		if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("look whether port %d is closed: %w", port, err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait for port %d to close: still open after %v", port, portCloseLimit)
		}
	}
}
