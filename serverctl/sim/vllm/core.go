package vllm

import (
	"bufio"
	"cmp"
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
	// engineGrace is the time between SIGTERM and SIGKILL to an engine (shutdown in vllm/v1/utils.py, 0.14.1).
	engineGrace = 5 * time.Second
	// orphanCheck is how often an engine checks whether its API server has ended. If the API server has ended, the
	// engine ends too. A real engine would live for ever, but a forgotten simulated engine must not.
	orphanCheck = time.Hour
	// tellReady is the engine's message to its API server.
	tellReady = "ready"
)

// A core is the API server's handle on the engine. The engine runs in this process or in a process of its own.
type core struct {
	log    *logger
	memory *memory       // GPU memory that an engine in this process holds
	cmd    *exec.Cmd     // nil for an engine in this process
	dead   chan struct{} // closed when the engine is dead

	watchdog time.Duration // how long the API server outlives the engine, unless a fault says otherwise

	mu      sync.Mutex
	logged  bool          // whether the engine logged why it died
	outlive time.Duration // how long the API server outlives the engine; 0 means the value of the field watchdog
	die     func()        // closes the channel dead
}

// A coreError says that the engine did not become ready.
type coreError struct {
	release *release
	exit    int   // exit code, or minus the signal
	cause   error // nil when the engine has its own process, which logs the cause
}

// Error returns the cause, if it is known, and the API server's message.
func (e *coreError) Error() string {
	text := e.release.initFailed(e.exit)
	if e.cause != nil {
		text = e.cause.Error() + "\n" + text
	}
	return text
}

// Unwrap returns the cause.
func (e *coreError) Unwrap() error { return e.cause }

// startEngine starts the engine in this process or in a process of its own, and returns when it is ready.
func (s *Server) startEngine(ctx context.Context, args []string, o sim.Options, log *logger) (*core, error) {
	c := &core{log: log, dead: make(chan struct{}), watchdog: cmp.Or(s.watchdog, watchdogTime)}
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
	case errors.Is(err, errKilled):
		return nil, &coreError{release: log.release, exit: -int(syscall.SIGKILL)}
	}
	return nil, &coreError{release: log.release, exit: 1, cause: err}
}

// load waits as long as a start takes, and claims the GPU's memory. If load fails, it logs the reason.
func (s *Server) load(ctx context.Context, o sim.Options, log *logger) (*memory, error) {
	m, err := s.startUp(ctx, o, log)
	switch start, ok := errors.AsType[*sim.StartError](err); {
	case err == nil, ctx.Err() != nil, errors.Is(err, errKilled):
	case ok:
		log.engineFailed(start.Text)
	default:
		log.engineFailed("RuntimeError: the simulated server: " + err.Error())
	}
	return m, err
}

// startChild starts the engine's process and waits until that process is ready. startChild has no time limit of its
// own, because the caller decides how long a start may take. As in vLLM, the process is in our process group and
// session.
func (s *Server) startChild(ctx context.Context, c *core, args []string) error {
	c.cmd = s.subprocess(slices.Concat([]string{"engine"}, s.ownArgs(), args)...)
	c.cmd.Env = slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, faultsVariable+"=") // the args hold the faults already
	})
	c.cmd.Stdout, c.cmd.Stderr = s.Out, s.Err
	told, err := startWithPipe(c.cmd)
	if err != nil {
		return fmt.Errorf("start the engine's process: %w", err)
	}
	defer told.Close()
	c.log.enginePID = c.cmd.Process.Pid
	go func() { // this goroutine ends when the process ends; the method stop waits for that
		_ = c.cmd.Wait() // c.cmd.ProcessState has the result
		c.die()
	}()
	// SetReadDeadline fails only on a closed pipe. The pipe is closed only after the wait below.
	unwait := context.AfterFunc(ctx, func() { _ = told.SetReadDeadline(time.Now()) })
	defer unwait()
	word, _ := bufio.NewReader(told).ReadString('\n') // if the engine ends first, the pipe ends and the variable word is empty
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

// exitOf returns the exit code as Python's multiprocessing gives it: minus the signal if a signal ended the process.
func exitOf(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return -int(status.Signal())
	}
	return state.ExitCode()
}

// kill makes the engine die of a fault. Before that, the engine logs the text of the exception, if the text is not
// empty.
func (c *core) kill(f Fault, exception string) {
	c.mu.Lock()
	c.logged, c.outlive = exception != "", f.For
	c.mu.Unlock()
	if exception != "" {
		c.log.engineFatal(exception)
	}
	if c.cmd == nil {
		c.memory.release()
		c.die()
		return
	}
	_ = c.cmd.Process.Kill() // fails if the engine has already ended
}

// death returns whether the engine logged why it died, and how long the API server outlives the engine.
func (c *core) death() (logged bool, outlive time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.logged, cmp.Or(c.outlive, c.watchdog)
}

// stop ends the engine and returns when it has ended. It may be called again.
func (c *core) stop() {
	if c.cmd == nil {
		c.memory.release()
		return
	}
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails if the engine has already ended
	select {
	case <-c.dead:
	case <-time.After(engineGrace):
		_ = c.cmd.Process.Kill() // fails if the engine has already ended
		<-c.dead
	}
}

// RunEngine is the main function of the engine process, which a Server with EngineProcess starts. It waits as long as a
// start takes, holds the simulated GPU's memory, and returns when SIGTERM ends ctx. The API server computes the tokens.
// Like vLLM's engine, this process lives on when its API server is killed. RunEngine logs its error.
func (s *Server) RunEngine(ctx context.Context, args []string) error {
	o, err := s.Profile.ParseArgsOf(s.version(), args)
	if err != nil {
		return err
	}
	log := s.logger()
	m, err := s.load(ctx, o, log)
	if errors.Is(err, errKilled) {
		return errors.Join(err, syscall.Kill(os.Getpid(), syscall.SIGKILL)) // does not return
	}
	if err != nil {
		return err
	}
	defer m.release()
	if err := tellParent(tellReady); err != nil {
		log.trace(engineCore, "the simulated engine: "+err.Error())
		return err
	}
	for parent := os.Getppid(); os.Getppid() == parent; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(orphanCheck):
		}
	}
	return nil
}
