package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/host"
)

// portCloseLimit is how long a port may stay open after the last process has ended. Normally the kernel closes it at
// once.
const portCloseLimit = 5 * time.Second

// An Ended reports how the end of a server went.
type Ended struct {
	Took     time.Duration `json:"took_ns"`             // total time
	Shm      []string      `json:"shm,omitempty"`       // files of this server in /dev/shm that it left and we removed
	GPUWait  time.Duration `json:"gpu_wait_ns"`         // time until the GPUs' memory was released
	GPUs     []GPUMemory   `json:"gpus,omitempty"`      // nil if there is no GPU to query
	LogError string        `json:"log_error,omitempty"` // why the log is incomplete
	GPUError string        `json:"gpu_error,omitempty"` // why the GPUs were not watched until the end
}

// takeStock runs before the start. It records the shared memory and GPU memory that are in use already, and the number
// of OOM kills so far, because none of them comes from the server.
func (s *Server) takeStock(ctx context.Context) (err error) {
	if s.shm, err = host.WatchShm(host.DevShm); err != nil {
		return err
	}
	s.oomKills, _, _ = s.config.machine.OOMKills() // without a count of OOM kills, no death is blamed on memory
	return s.gpus.takeStock(ctx)
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
		s.ended.GPUError = s.gpus.watchError
	}
	s.client.http.CloseIdleConnections()
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
	s.ended.GPUs, s.ended.GPUWait, err = s.gpus.awaitRelease(context.WithoutCancel(ctx))
	return err
}

// seeShm records the shared memory that the server's processes hold. Stop removes only recorded memory, because other
// memory may belong to another program.
func (s *Server) seeShm() error {
	pids, err := s.process.Members()
	if err != nil {
		return err
	}
	return s.shm.Observe(pids)
}

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
