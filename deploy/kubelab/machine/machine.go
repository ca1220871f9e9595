// Package machine plays a computer of a cluster: it has processes and mounts of its own, and it runs one node agent. It
// knows nothing of Kubernetes.
//
// The first process of the machine is the first of a PID namespace. If it ends, the kernel ends all the others, as when
// the power fails. It takes orders from its standard input, and it ends when that input ends. So the machine never
// outlives the program that started it.
package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"vllmtuner/deploy/kubelab/container"
)

// An Order is what the first process does next. It has either Start or Signal.
type Order struct {
	Start     []string       `json:",omitempty"` // arguments of the agent to start
	Log       string         `json:",omitempty"` // file to which the started agent writes
	Signal    syscall.Signal `json:",omitempty"`
	To        Target         `json:",omitempty"` // who gets the signal
	Container string         `json:",omitempty"` // directory of the container, for ToContainer
}

// A Target is who gets a signal.
type Target string

const (
	ToAgent     Target = "agent" // the answer to a signal that ends the agent comes when the agent is gone
	ToAll       Target = "all"   // the agent and all containers
	ToContainer Target = "container"
)

// Ends reports whether the agent ends when it gets the signal: at once, or when it has ended its pods.
func Ends(s syscall.Signal) bool {
	return s == syscall.SIGKILL || s == syscall.SIGTERM || s == syscall.SIGPWR
}

// An Answer follows each order.
type Answer struct {
	Error string `json:",omitempty"`
}

// A machine owns the agent and reaps everybody.
type machine struct {
	mu     sync.Mutex    // held while an agent is started, so that it is not reaped before it is known
	agent  int           // process of the agent; 0 means none
	exited chan struct{} // closed when that agent is gone
}

// Main runs the machine's first process until its orders end.
func Main(orders io.Reader, answers io.Writer) error {
	if os.Getpid() != 1 {
		return errors.New("the first process of a machine is started in a PID namespace of its own")
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil { // the processes of this namespace
		return fmt.Errorf("mount /proc: %w", err)
	}
	m := new(machine)
	defer m.reapAll()()
	in, out := json.NewDecoder(orders), json.NewEncoder(answers)
	for {
		var o Order
		if err := in.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read an order: %w", err)
		}
		var a Answer
		if err := m.follow(o); err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return fmt.Errorf("answer an order: %w", err)
		}
	}
}

func (m *machine) follow(o Order) error {
	switch {
	case o.Start != nil:
		return m.start(o.Start, o.Log)
	case o.To == ToAgent:
		return m.signalAgent(o.Signal)
	case o.To == ToContainer:
		return container.Signal(o.Container, o.Signal)
	case o.To == ToAll:
		// -1 means all processes of this namespace and of those inside it, except this process.
		return unix.Kill(-1, o.Signal)
	}
	return fmt.Errorf("an order to signal %q", o.To)
}

// start starts this program again as the agent.
func (m *machine) start(args []string, log string) (err error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.agent != 0 {
		return errors.New("the agent runs already")
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		return err
	}
	m.agent, m.exited = cmd.Process.Pid, make(chan struct{})
	return cmd.Process.Release() // reap waits for it
}

func (m *machine) signalAgent(s syscall.Signal) error {
	m.mu.Lock()
	agent, exited := m.agent, m.exited
	var err error
	if agent != 0 {
		err = unix.Kill(agent, s) // under the lock, so the agent is not yet reaped and the number is its own
	}
	m.mu.Unlock()
	if agent == 0 {
		return errors.New("no agent runs")
	}
	if err == nil && Ends(s) {
		<-exited
	}
	return err
}

// reapAll reaps every process that ends, until the returned function is called.
func (m *machine) reapAll() (stop func()) {
	died := make(chan os.Signal, 1) // one is enough: each call of reap takes all that have ended
	signal.Notify(died, syscall.SIGCHLD)
	var reaper sync.WaitGroup
	reaper.Go(func() {
		for range died {
			m.reap()
		}
	})
	return func() {
		signal.Stop(died)
		close(died)
		reaper.Wait()
	}
}

// reap takes note of all processes that have ended. Orphans come to the first process of their namespace.
func (m *machine) reap() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return // nobody else has ended
		}
		if pid == m.agent {
			m.agent = 0
			close(m.exited)
		}
	}
}
