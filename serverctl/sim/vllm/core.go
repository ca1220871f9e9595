package vllm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"vllmtuner/serverctl/sim"
)

const (
	// engineGrace is what an engine gets between SIGTERM and SIGKILL (shutdown in vllm/v1/utils.py, 0.14.1).
	engineGrace = 5 * time.Second
	// orphanLife is how long an engine lives whose API server has gone. A real one lives for ever; ours must not stay when
	// nobody is left who knows of it.
	orphanLife = time.Hour
	// tellReady is the engine's word to its API server.
	tellReady = "ready"
)

// A core is the engine as its API server sees it: alive or dead, in this process or in one of its own.
type core struct {
	log    *logger
	memory *memory       // of an engine in this process
	cmd    *exec.Cmd     // nil for an engine in this process
	orders *os.File      // to the engine's process
	dead   chan struct{} // closed when the engine is dead

	mu      sync.Mutex
	told    bool          // it says why it dies
	outlive time.Duration // how long the API server lives on; 0 is as long as vLLM's
	die     func()        // closes dead
}

// A coreError is an engine that did not get ready, as the API server says it.
type coreError struct {
	release *release
	exit    int   // exit code, or minus the signal
	cause   error // nil when another process knows it
}

// Error returns the cause as far as it is known.
func (e *coreError) Error() string {
	text := e.release.initFailed(e.exit)
	if e.cause != nil {
		text = e.cause.Error() + "\n" + text
	}
	return text
}

// Unwrap returns the cause.
func (e *coreError) Unwrap() error { return e.cause }

// startEngine starts the engine where it belongs and returns it when it is ready.
func (s *Server) startEngine(ctx context.Context, args []string, o sim.Options, log *logger) (*core, error) {
	c := &core{log: log, dead: make(chan struct{})}
	c.die = sync.OnceFunc(func() { close(c.dead) })
	if s.EngineProcess {
		return c, s.startChild(ctx, c, args)
	}
	var err error
	c.memory, err = s.load(ctx, o, log)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		return nil, err
	case errors.Is(err, errVanished):
		return nil, &coreError{release: log.release, exit: -int(syscall.SIGKILL)}
	}
	return nil, &coreError{release: log.release, exit: 1, cause: err}
}

// load takes the time of a start and holds the GPU's memory. Why it fails is in the log.
func (s *Server) load(ctx context.Context, o sim.Options, log *logger) (*memory, error) {
	m, err := s.startUp(ctx, o, log)
	switch start, ok := errors.AsType[*sim.StartError](err); {
	case err == nil, ctx.Err() != nil, errors.Is(err, errVanished):
	case ok:
		log.engineFailed(log.release.fitted(start.Text))
	default:
		log.engineFailed("RuntimeError: the simulated server: " + err.Error())
	}
	return m, err
}

// startChild starts the engine's process and waits until it is ready, however long that takes: a server that never gets
// ready is ended by whoever waits for it. The process is in our group and our session, as vLLM's is.
func (s *Server) startChild(ctx context.Context, c *core, args []string) error {
	orders, orderer, err := os.Pipe()
	if err != nil {
		return err
	}
	c.orders = orderer
	c.cmd = s.part(slices.Concat([]string{"engine"}, s.ownArgs(), args)...)
	c.cmd.Env = slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, faultsVariable+"=") // they are among the args
	})
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = orders, s.Out, s.Err
	told, err := startTold(c.cmd)
	if err = errors.Join(err, orders.Close()); err != nil {
		return fmt.Errorf("start the engine's process: %w", errors.Join(err, orderer.Close()))
	}
	defer told.Close()
	c.log.enginePID = c.cmd.Process.Pid
	go func() { // ends with the process, for which stop waits
		_ = c.cmd.Wait() // how it ended is kept in ProcessState
		c.die()
	}()
	unwait := context.AfterFunc(ctx, func() { _ = told.SetReadDeadline(time.Now()) }) // fails when it is closed: then nobody waits
	defer unwait()
	word, _ := bufio.NewReader(told).ReadString('\n') // a pipe that ends before the word says that the engine has ended
	switch {
	case strings.TrimSpace(word) == tellReady:
		return nil
	case ctx.Err() != nil:
		c.stop()
		return context.Cause(ctx)
	}
	c.stop()
	return &coreError{release: c.log.release, exit: exitOf(c.cmd.ProcessState)}
}

// exitOf is how Python's multiprocessing says it: an exit code, or minus a signal.
func exitOf(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return -int(status.Signal())
	}
	return state.ExitCode()
}

// kill makes the engine die of a fault: with its last words, or without any.
func (c *core) kill(f Fault, words string) {
	c.mu.Lock()
	c.told, c.outlive = words != "", f.For
	c.mu.Unlock()
	switch {
	case c.cmd == nil:
		if words != "" {
			c.log.engineFatal(words)
		}
		c.memory.release()
		c.die()
	case words == "":
		_ = c.cmd.Process.Kill() // fails when it is dead already
	default:
		_, _ = fmt.Fprintln(c.orders, f.Kind) // likewise
	}
}

// death returns whether the engine said why it died, and how long the API server lives on.
func (c *core) death() (told bool, outlive time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.outlive == 0 {
		return c.told, watchdogTime
	}
	return c.told, c.outlive
}

// stop ends the engine and returns when it is gone. It may be called again.
func (c *core) stop() {
	if c.cmd == nil {
		c.memory.release()
		return
	}
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails when it has ended
	select {
	case <-c.dead:
	case <-time.After(engineGrace):
		_ = c.cmd.Process.Kill() // likewise
		<-c.dead                 // nothing survives SIGKILL
	}
	_ = c.orders.Close() // the second time it is closed already
}

// RunEngine is the process of the engine of a Server with EngineProcess; args are what that gave it. It takes the time to
// start, holds the simulated GPU's memory, and lives until SIGTERM, that is until ctx ends; the tokens are computed in the
// API server. Like vLLM's it lives on when its API server is killed. Its error is in the log.
func (s *Server) RunEngine(ctx context.Context, args []string) error {
	o, err := s.Profile.ParseArgsOf(s.version(), args)
	if err != nil {
		return err
	}
	log := s.logger()
	m, err := s.load(ctx, o, log)
	if errors.Is(err, errVanished) {
		return errors.Join(err, syscall.Kill(os.Getpid(), syscall.SIGKILL)) // does not return
	}
	if err != nil {
		return err
	}
	defer m.release()
	if err = tellParent(tellReady); err == nil {
		err = s.obey(ctx, o, log)
	}
	if _, said := errors.AsType[*coreError](err); err != nil && !said {
		log.trace(engineCore, "the simulated engine: "+err.Error())
	}
	return err
}

// obey waits for the engine's end. The API server's orders are names of faults, of which the engine then dies.
func (s *Server) obey(ctx context.Context, o sim.Options, log *logger) error {
	const stdin = 0
	if err := syscall.SetNonblock(stdin, true); err != nil {
		return fmt.Errorf("read the API server's orders: %w", err)
	}
	pipe := os.NewFile(stdin, "orders") // a file that does not block is one whose reading can be ended
	ctx, cancel := context.WithCancel(ctx)
	orders := make(chan string)
	var reader sync.WaitGroup
	reader.Go(func() { readOrders(ctx, pipe, orders) })
	defer func() {
		cancel()
		_ = pipe.Close() // ends the reading; a pipe that is only read loses nothing
		reader.Wait()
	}()
	var tooOld <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tooOld:
			return nil
		case kind, ok := <-orders:
			if !ok { // the API server was killed
				orders, tooOld = nil, time.After(orphanLife)
				continue
			}
			if f, ok := s.Faults.find(kind); ok {
				words := f.kind.last(s.Profile, o)
				log.engineFatal(words)
				return &coreError{release: log.release, exit: 1, cause: errors.New(words)}
			}
		}
	}
}

// readOrders passes lines on until there are no more, and closes orders then.
func readOrders(ctx context.Context, pipe *os.File, orders chan<- string) {
	defer close(orders)
	for lines := bufio.NewScanner(pipe); lines.Scan(); {
		select {
		case orders <- lines.Text():
		case <-ctx.Done():
			return
		}
	}
}
