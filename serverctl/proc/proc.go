// Package proc owns a process tree until it is gone: it starts a command in a session of its own, finds everything that
// came of it, ends it, and after a crash of the owner reclaims what is left. It knows nothing of vLLM, and never finds a
// process by its name. It is for Linux.
package proc

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// tokenVariable marks a child and all that comes of it. A process inherits it even when it leaves the session.
const tokenVariable = "TUNER_SERVER_TOKEN"

const (
	// killLimit is how long SIGKILLed processes may take to disappear. A CUDA context of 140 GiB is torn down within it.
	killLimit = 10 * time.Second
	// orphanGrace is what processes get that outlive their leader: nobody is left who would tell them to end.
	orphanGrace = time.Second
	// outputGrace is how long the last output of a dead leader is waited for. A process that lives on may hold the pipe.
	outputGrace = 500 * time.Millisecond
	// pollEvery is how often /proc is read while something is waited for. One reading of 200 processes takes about 2 ms.
	pollEvery = 20 * time.Millisecond
)

// A Spec says what to start.
type Spec struct {
	Argv   []string  // the program and its args; a program without a slash is looked up in the owner's PATH
	Env    []string  // KEY=VALUE; nil means the owner's environment
	Dir    string    // working directory; empty means the owner's
	Output io.Writer // gets stdout and stderr, from one goroutine; nil means they are discarded
}

// A Process is a started command with everything that came of it.
type Process struct {
	record Record
	cmd    *exec.Cmd
	pipe   *os.File // read end of its output

	exited    chan struct{} // closed when the leader was reaped
	read      chan struct{} // closed when the output was read to its end
	outputErr error         // first error of Spec.Output; to be read after read is closed
	gone      atomic.Bool   // no member lived any more; from then on a number may mean another process
}

// Start starts the command in a session of its own. It dies when this process dies, however that happens; what it
// started itself is then found through its Record. The caller must call Stop, also when the leader has exited.
func Start(spec Spec) (*Process, error) {
	if len(spec.Argv) == 0 {
		return nil, errors.New("start a process: no program is given")
	}
	token := make([]byte, 16)
	rand.Read(token) // never fails: crypto/rand ends the program rather than return an error
	bootID, err := currentBootID()
	if err != nil {
		return nil, err
	}
	output, input, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	env := spec.Env
	if env == nil {
		env = os.Environ()
	}
	p := &Process{
		record: Record{BootID: bootID, Token: hex.EncodeToString(token)},
		cmd:    exec.Command(spec.Argv[0], spec.Argv[1:]...),
		pipe:   output,
		exited: make(chan struct{}),
		read:   make(chan struct{}),
	}
	p.cmd.Dir = spec.Dir
	// setproctitle writes its titles over the environment, and the token with it, unless SPT_NOENV is set.
	p.cmd.Env = append(env[:len(env):len(env)], tokenVariable+"="+p.record.Token, "SPT_NOENV=1")
	p.cmd.Stdout, p.cmd.Stderr = input, input
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error)
	go p.run(started)
	err = <-started
	input.Close() // the child has its own copy; ours would keep the pipe from ending
	if err != nil {
		output.Close()
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	go p.readOutput(spec.Output)
	return p, nil
}

// run starts the leader and waits for it, on one thread: the kernel sends the parent-death signal when the thread that
// forked dies, and Go ends idle threads as it likes.
func (p *Process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := p.cmd.Start(); err != nil {
		started <- err
		return
	}
	p.record.PID = p.cmd.Process.Pid
	s, err := readStat(p.record.PID) // it was not reaped yet, so its entry is there even if it has died
	if err != nil {
		started <- errors.Join(err, p.cmd.Process.Kill(), reaped(p.cmd.Wait()))
		return
	}
	p.record.StartTime = s.startTime
	started <- nil

	_ = p.cmd.Wait() // how it ended is kept in ProcessState
	select {
	case <-p.read:
	case <-time.After(outputGrace):
	}
	close(p.exited)
}

// reaped drops the error that only says how a reaped process ended.
func reaped(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

// readOutput reads until the last process that holds the pipe has ended. It goes on when the writer fails: a full pipe
// would stop the child.
func (p *Process) readOutput(w io.Writer) {
	defer close(p.read)
	defer p.pipe.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := p.pipe.Read(buf)
		if n > 0 && w != nil && p.outputErr == nil {
			if _, err := w.Write(buf[:n]); err != nil {
				p.outputErr = fmt.Errorf("write the output of process %d: %w", p.record.PID, err)
			}
		}
		if err != nil {
			return
		}
	}
}

// PID is the number of the leader, and of its session.
func (p *Process) PID() int { return p.record.PID }

// Record is what a later owner needs to reclaim the process.
func (p *Process) Record() Record { return p.record }

// Exited is closed when the leader has ended and what it wrote has reached the output. Others may live on: see Members.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// ExitCode is the leader's exit code; -1 while it runs, and when a signal ended it.
func (p *Process) ExitCode() int {
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	default:
		return -1
	}
}

// Ending says how the leader ended, such as "exit status 1" or "signal: killed"; it is empty while the leader runs.
func (p *Process) Ending() string {
	select {
	case <-p.exited:
		return p.cmd.ProcessState.String()
	default:
		return ""
	}
}

// Members are the living processes, zombies excluded, that belong to the leader's session or carry its token, in
// ascending order.
func (p *Process) Members() ([]int, error) {
	if p.gone.Load() {
		return nil, nil
	}
	return p.record.members()
}

// Stop ends the process: SIGTERM to the leader, grace for it to end, then SIGKILL to every member until none is left. The
// end of ctx cuts the grace short and nothing else. Stop returns when no member lives, with an error when one survives
// SIGKILL for ten seconds, or when the output could not be written. It is safe to call again.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", p.record.PID, err)
	}
	p.awaitEnd(ctx, grace)
	if !p.gone.Load() {
		if _, err := p.record.kill(); err != nil {
			return err
		}
		p.gone.Store(true)
	}
	// Nobody who belongs here writes any more. A stranger who was handed the pipe must not keep the reader.
	_ = p.pipe.SetReadDeadline(time.Now().Add(outputGrace)) // fails when the reader is done already
	<-p.read
	<-p.exited
	reapOrphans(p.record.PID)
	return p.outputErr
}

// awaitEnd waits until the leader has ended and its descendants have, for grace at most.
func (p *Process) awaitEnd(ctx context.Context, grace time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	select {
	case <-p.exited:
	case <-ctx.Done():
		return
	}
	deadline := time.Now().Add(orphanGrace)
	for ctx.Err() == nil && time.Now().Before(deadline) {
		if members, err := p.Members(); err == nil && len(members) == 0 {
			return
		}
		time.Sleep(pollEvery)
	}
}

// reapOrphans reaps the dead of a session that became our children. That happens when this process is PID 1 of a
// container or a child subreaper; nobody else would reap them.
func reapOrphans(session int) {
	for s := range processes() {
		if s.session == session && s.dead() && s.parent == os.Getpid() {
			var status syscall.WaitStatus
			_, _ = syscall.Wait4(s.pid, &status, syscall.WNOHANG, nil) // a zombie that is gone already is what we want
		}
	}
}
