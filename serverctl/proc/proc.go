// Package proc owns a process tree until it is gone: it starts a command in a session of its own, knows everything that
// comes of it, ends it, and sees to it that nothing outlives the owner either: a watchdog ends what a killed owner leaves
// behind, and the next run reclaims what a watchdog could not. It knows nothing of vLLM, and never finds a process by its
// name. It is for Linux.
//
// What comes of a command is known by several marks, because each can be shed: its session (a daemon leaves it), a token
// in the environment (cleared by env -i), its cgroup v2 where we may have one (shed only with rights over cgroups), its
// parents as they were seen, and its being handed to us when its parent died, for this process is a child subreaper.
package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
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
	// outputLimit is how long the writer may take over the last 64 KiB that the pipe held: a disk may have a bad moment.
	outputLimit = 10 * time.Second
	// pollEvery is how often /proc is read while something is waited for. One reading of 200 processes takes about 2 ms.
	pollEvery = 20 * time.Millisecond
)

// A Spec says what to start.
type Spec struct {
	Argv   []string  // the program and its args; a program without a slash is looked up in the owner's PATH
	Env    []string  // KEY=VALUE; nil means the owner's environment
	Dir    string    // working directory; empty means the owner's
	Output io.Writer // gets stdout and stderr in pieces of 32 KiB at most, from one goroutine; nil means they are discarded
}

// A Process is a started command with everything that came of it.
type Process struct {
	record Record // complete, and fixed, when Start has returned; until then it is guarded by the household's lock
	cmd    *exec.Cmd
	pipe   *os.File // read end of its output

	exited    chan struct{} // closed when the leader was reaped
	read      chan struct{} // closed when the output was read to its end
	outputErr error         // first error of Spec.Output; to be read after read is closed
	gone      atomic.Bool   // no member lived any more; from then on a number may mean another process
	released  sync.Once     // the household has forgotten it
}

// Start starts the command in a session of its own. It dies when this process dies, however that happens; what it
// started itself is then ended by the watchdog (see Main), or by Reclaim with its Record. The caller must call Stop, also
// when the leader has exited. A missing cgroup or watchdog does not keep it from starting: see CgroupSupport and
// WatchdogSupport. From the first Start on this process is a child subreaper: orphans of what it started become its
// children.
func Start(spec Spec) (*Process, error) {
	if len(spec.Argv) == 0 {
		return nil, errors.New("start a process: no program is given")
	}
	record, err := newRecord()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	output, input, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	p := &Process{record: record, pipe: output, exited: make(chan struct{}), read: make(chan struct{})}
	home.begin(p)
	started := make(chan error)
	go p.run(spec, input, started)
	err = <-started
	input.Close() // the child has its own copy; ours would keep the pipe from ending
	if err != nil {
		output.Close()
		p.release()
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	home.dog.keep(p.record) // its token alone was told before: now its session can be found too
	go p.readOutput(spec.Output)
	return p, nil
}

// run starts the leader and waits for it, on one thread: the kernel sends the parent-death signal when the thread that
// forked dies (prctl(2)), and Go ends the thread of a goroutine that exits locked to it.
func (p *Process) run(spec Spec, input *os.File, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.fork(spec, input)
	started <- err
	if err != nil {
		return
	}
	_ = p.cmd.Wait() // how it ended is kept in ProcessState
	select {
	case <-p.read:
	case <-time.After(outputGrace):
	}
	close(p.exited)
}

// fork starts the leader in its cgroup, or without when that does not work. Whether the cgroup or the program is at fault
// cannot be told from the error: seccomp profiles answer ENOSYS to clone3, and a missing program is ENOENT either way.
func (p *Process) fork(spec Spec, input *os.File) error {
	err := p.forkInto(p.record.group(), spec, input)
	if err == nil || p.record.Cgroup == "" {
		return err
	}
	obstacle := fmt.Errorf("start a process in %s: %w", p.record.Cgroup, err)
	if err := p.forkInto("", spec, input); err != nil {
		return err
	}
	home.dropGroup(p, obstacle)
	return nil
}

func (p *Process) forkInto(group cgroup, spec Spec, input *os.File) error {
	cmd := exec.Command(spec.Argv[0], spec.Argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if group != "" {
		dir, err := os.Open(string(group))
		if err != nil {
			return err
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	env := spec.Env
	if env == nil {
		env = os.Environ()
	}
	// setproctitle writes its titles over the environment, and the token with it, unless SPT_NOENV is set.
	cmd.Env = append(env[:len(env):len(env)], tokenVariable+"="+p.record.Token, "SPT_NOENV=1")
	cmd.Dir = spec.Dir
	cmd.Stdout, cmd.Stderr = input, input
	if err := cmd.Start(); err != nil {
		return err
	}
	s, err := readStat(cmd.Process.Pid) // it was not reaped yet, so its entry is there even if it has died
	if err != nil {
		return errors.Join(err, cmd.Process.Kill(), reaped(cmd.Wait()))
	}
	p.cmd = cmd
	home.born(p, s)
	return nil
}

// reaped drops the error that only says how a reaped process ended.
func reaped(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

// readOutput reads until the last process that holds the pipe has ended. It goes on when the writer fails: a full pipe
// would stop the child. However much a child writes, 32 KiB of it are held.
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

// Members are the living processes of our user, zombies excluded, that came of the leader, in ascending order.
func (p *Process) Members() ([]int, error) {
	f, err := p.family()
	return numbers(f.living), err
}

func (p *Process) family() (family, error) {
	if p.gone.Load() {
		return family{}, nil
	}
	return home.family(p)
}

// Stop ends the process: SIGTERM to the leader, grace for it to end, then SIGKILL to every member until none is left. The
// end of ctx cuts the grace short and nothing else. Stop returns when no member lives, with an error when one survives
// SIGKILL for ten seconds, or when the output could not be written. It is safe to call again.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	refused := p.terminate()
	if refused == nil {
		p.awaitEnd(ctx, grace)
	}
	if err := errors.Join(refused, p.kill()); err != nil {
		return err
	}
	// Nobody who belongs here writes any more. A stranger who was handed the pipe must not keep the reader.
	_ = p.pipe.SetReadDeadline(time.Now().Add(outputGrace)) // fails when the reader is done already
	select {
	case <-p.read:
	case <-time.After(outputLimit):
		return fmt.Errorf("wait for the last output of process %d to be written: not done after %v; see whether its disk "+
			"still takes data", p.record.PID, outputLimit)
	}
	<-p.exited // the leader is dead and the output is read: nothing is left to wait for
	p.release()
	return p.outputErr
}

// terminate asks the leader to end. It is refused when the leader has become another user.
func (p *Process) terminate() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", p.record.PID, err)
	}
	return nil
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

// kill kills every member.
func (p *Process) kill() error {
	if p.gone.Load() {
		return nil
	}
	if _, err := killAll(p.record.PID, p.record.group(), p.family); err != nil {
		return err
	}
	p.gone.Store(true)
	return nil
}

// release makes the household, the watchdog and the kernel forget a process that is gone. The group goes first: should we
// die in between, the watchdog still knows of it.
func (p *Process) release() {
	p.released.Do(func() {
		home.removeGroup(p.record.group())
		home.dog.drop(p.record.Token)
		home.end(p)
	})
}
