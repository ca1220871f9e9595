package serverctl

import (
	"context"
	"sync"

	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/proc"
)

// A Server is a running inference server. Start returns it when it is ready.
type Server struct {
	config   Config
	process  *proc.Process
	log      *logbook
	client   *client
	gpus     gpus
	port     int
	owned    bool // a check has shown that only our process listens on the port
	modelID  string
	facts    Facts
	shm      *host.ShmWatch
	oomKills int64 // how many processes the kernel had killed for lack of memory before the start
	series   recorder

	stopWatch context.CancelFunc // ends the watchers
	watched   sync.WaitGroup     // the watchers
	exited    chan struct{}      // closed by a watcher, after err was set
	err       error

	stopOnce sync.Once
	ended    Ended
	stopErr  error
}

// URL is the base URL, such as http://127.0.0.1:8000.
func (s *Server) URL() string { return s.client.url }

// ModelID is the name that requests use for the model.
func (s *Server) ModelID() string { return s.modelID }

// Facts returns what the server told about itself during its start.
func (s *Server) Facts() Facts { return s.facts }

// Exited is closed when the server has died or become useless. Stop does not close it.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// Err returns why Exited was closed, as an *ExitError. Before that it returns nil.
func (s *Server) Err() error {
	select {
	case <-s.exited:
		return s.err
	default:
		return nil
	}
}
