package serverctl

import (
	"context"
	"net/http"
	"sync"

	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/proc"
)

// A Server is one running inference server, ready since Start returned it.
type Server struct {
	config    Config
	process   *proc.Process
	log       *logbook
	http      *http.Client
	port      int
	url       string
	owned     bool // the port was seen to be ours
	healthy   bool // /health was well
	strangers int  // looks in a row at which somebody else answered on the port
	modelID   string
	facts     Facts
	before    []gpu.GPU // those the server uses, as they were before its start; none when there is none to ask
	shm       *host.ShmWatch
	oomKills  int64 // of the kernel, before the start; see death
	series    recorder
	gpuError  string // why the GPUs are no longer watched; to be read when the watchers have ended

	stopWatch context.CancelFunc // ends the watchers
	watched   sync.WaitGroup     // the watchers
	exited    chan struct{}      // closed by a watcher, after err was set
	err       error

	stopOnce sync.Once
	ended    Ended
	stopErr  error
}

// URL is the base URL, such as http://127.0.0.1:8000.
func (s *Server) URL() string { return s.url }

// ModelID is the name under which requests address the model.
func (s *Server) ModelID() string { return s.modelID }

// Facts are what the server said of itself during its start.
func (s *Server) Facts() Facts { return s.facts }

// Exited is closed when the server has died or become useless by itself; not by Stop.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// Err returns why Exited is closed, an *ExitError, and nil while it is not.
func (s *Server) Err() error {
	select {
	case <-s.exited:
		return s.err
	default:
		return nil
	}
}
