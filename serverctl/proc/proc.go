// Package proc starts a command in its own session, knows every process that descends from it, and owns this process
// tree until it is gone. The command's own process is the leader of the tree, and each process of the tree is a member.
// Nothing outlives the owner: a watchdog ends what a killed owner leaves behind, and the next run reclaims what the
// watchdog could not end. The package knows nothing of vLLM, and never finds a process by its name. It is for Linux.
//
// The package knows members by several marks, because a process can lose each mark. A daemon leaves its session. env -i
// clears the token in the environment. If we may make a cgroup v2 for the tree, only a process with rights over cgroups
// can leave that cgroup. The last mark is the parent that a process had when we saw it. Our own process is also a child
// subreaper: it becomes the parent of descendants whose own parent died.
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

	"vllmtuner/render"
)

// TokenVariable is the environment variable with the token that marks a child and its descendants. A process that
// leaves the session keeps the token.
const TokenVariable = "TUNER_SERVER_TOKEN"

// TitleVariable is the environment variable that keeps setproctitle from overwriting the environment, and with it the
// token.
const TitleVariable = "SPT_NOENV"

const (
	// killLimit is how long processes may take to disappear after SIGKILL. Even a CUDA context of 140 GiB is freed
	// faster.
	killLimit = 10 * time.Second
	// outputGrace is how long to wait for the last output of a dead leader. We cannot wait for the end of the pipe,
	// because a living process may hold it open.
	outputGrace = 500 * time.Millisecond
	// outputLimit is how long the writer may take for the last 64 KiB of the pipe. It is long, because a disk or a
	// machine without free processors may be slow for a moment.
	outputLimit = time.Minute
	// pollEvery is the pause between two readings of /proc while we wait for processes. One reading of 200 processes
	// takes about 2 ms.
	pollEvery = 20 * time.Millisecond
)

// orphanGrace is how long processes may outlive their leader. It is short, because nobody is left to tell them to end.
// Tests shorten it further.
var orphanGrace = time.Second

// A Spec says what to start.
type Spec struct {
	Argv   []string  // the program and its args; a program without a slash is looked up in the owner's PATH
	Env    []string  // KEY=VALUE; nil means the owner's environment
	Dir    string    // working directory; empty means the owner's
	Output io.Writer // gets stdout and stderr in pieces of at most 32 KiB, from one goroutine; nil discards them
	Stdin  *os.File  // the child's standard input; nil means /dev/null. The caller closes its copy
	Stderr *os.File  // the child's standard error; nil means that it goes to Output. The caller closes its copy
}

// A Process is a started command with all its descendants.
type Process struct {
	record Record // guarded by the registry's lock until Start returns, and complete and constant afterwards
	cmd    *exec.Cmd
	pipe   *os.File // read end of the pipe for the output

	exited     chan struct{} // closed after the leader was reaped, when its output was read or outputGrace is over
	outputRead chan struct{} // closed when the output was read to its end
	outputErr  error         // first error of Spec.Output; valid once outputRead is closed
	gone       atomic.Bool   // set when no member is alive; from then on a PID may mean another process
	released   sync.Once     // lets release() act only once
}

// Start starts the command in its own session. If this process dies, for whatever reason, the kernel kills the command.
// Then the watchdog (see Main), or Reclaim with the Record, ends the descendants of the command. The caller must call
// Stop, even when the leader has exited. Start works without a cgroup and without a watchdog: see CgroupSupport and
// WatchdogSupport. The first Start makes this process a child subreaper: orphaned descendants become its children.
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
	p := &Process{record: record, pipe: output, exited: make(chan struct{}), outputRead: make(chan struct{})}
	home.begin(p)
	started := make(chan error)
	go p.run(spec, input, started)
	err = <-started
	input.Close() // the child has its own copy; ours would keep the pipe open
	if err != nil {
		output.Close()
		p.release()
		return nil, fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	home.watchdog.keep(p.record) // before the fork the watchdog got only the token; the complete record also has the session
	go p.readOutput(spec.Output)
	return p, nil
}

// run starts the leader and waits for it, on one locked thread. The kernel sends the parent-death signal as soon as the
// thread that forked dies, even if the process lives on (prctl(2)). So the thread must live as long as the leader. Go
// ends a thread if its goroutine exits without unlocking it.
func (p *Process) run(spec Spec, input *os.File, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.fork(spec, input)
	started <- err
	if err != nil {
		return
	}
	_ = p.cmd.Wait() // p.cmd.ProcessState says how the leader ended
	select {
	case <-p.outputRead:
	case <-time.After(outputGrace):
	}
	close(p.exited)
}

// fork starts the leader in its cgroup. If that fails, fork tries again without a cgroup, because the error does not
// tell whether the cgroup or the program is at fault. For example, ENOENT means that one of the two is missing. A
// seccomp profile may answer ENOSYS to clone3, which only a start in a cgroup needs.
func (p *Process) fork(spec Spec, input *os.File) error {
	err := p.forkInto(p.record.group(), spec, input)
	if err == nil || p.record.Cgroup == "" {
		return err
	}
	if err := p.forkInto("", spec, input); err != nil {
		return err
	}
	home.dropGroup(p)
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
	cmd.Env = append(env[:len(env):len(env)], TokenVariable+"="+p.record.Token, TitleVariable+"=1")
	cmd.Dir = spec.Dir
	cmd.Stdout, cmd.Stderr = input, input
	if spec.Stdin != nil { // a nil *os.File in the interface would not be nil
		cmd.Stdin = spec.Stdin
	}
	if spec.Stderr != nil {
		cmd.Stderr = spec.Stderr
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	s, err := readStat(cmd.Process.Pid) // the child is not reaped yet, so /proc has it even if it is dead
	if err != nil {
		return errors.Join(err, cmd.Process.Kill(), reaped(cmd.Wait()))
	}
	p.cmd = cmd
	home.born(p, s)
	return nil
}

// reaped returns the error of Wait, or nil if the error only says how the process ended.
func reaped(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

// readOutput reads until the last process that holds the pipe has ended. It goes on when the writer fails, because a
// full pipe would block the child. It buffers at most 32 KiB.
func (p *Process) readOutput(w io.Writer) {
	defer close(p.outputRead)
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

// Record returns what a later owner needs to reclaim the tree.
func (p *Process) Record() Record { return p.record }

// Exited returns a channel that is closed when the leader has ended and its output was written. If a living process
// holds the pipe, the channel is closed 500 ms after the leader's end. Other members may still be alive: see Members.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// State returns how the leader ended. It is nil while the leader runs.
func (p *Process) State() *os.ProcessState {
	select {
	case <-p.exited:
		return p.cmd.ProcessState
	default:
		return nil
	}
}

// Members returns the living processes of the tree that run as our user, without zombies, in ascending order.
func (p *Process) Members() ([]int, error) {
	f, err := p.state()
	return pidsOf(f.living), err
}

func (p *Process) state() (treeState, error) {
	if p.gone.Load() {
		return treeState{}, nil
	}
	return home.state(p)
}

// Stop ends the tree. It sends SIGTERM to the leader, and waits until all members have ended, but at most for the grace
// period. Then it sends SIGKILL to every member until none is left. The end of ctx only cuts the wait short. Stop
// returns when no member is alive. It fails when a member survives SIGKILL for ten seconds, or when the output could
// not be written. Stop may be called again.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	refused := p.terminate()
	if refused == nil {
		p.awaitEnd(ctx, grace)
	}
	if err := errors.Join(refused, p.kill()); err != nil {
		return err
	}
	// No member writes any more. But a process outside the tree may hold the pipe, and must not block the reader.
	_ = p.pipe.SetReadDeadline(time.Now().Add(outputGrace)) // this call fails when the reader has already finished
	select {
	case <-p.outputRead:
	case <-time.After(outputLimit):
		return fmt.Errorf("write the last output of process %d: not done after %s; check that the disk of the log "+
			"still accepts data", p.record.PID, render.Took(outputLimit))
	}
	<-p.exited // the leader is dead and the output is read, so this returns at once
	p.release()
	return p.outputErr
}

// terminate sends SIGTERM to the leader. It fails when the leader runs as another user.
func (p *Process) terminate() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", p.record.PID, err)
	}
	return nil
}

// awaitEnd waits until the leader and its descendants have ended, but at most for the grace period. After the leader's
// end it waits at most orphanGrace.
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

func (p *Process) kill() error {
	if p.gone.Load() {
		return nil
	}
	if _, err := killAll(p.record.PID, p.record.group(), p.state); err != nil {
		return err
	}
	p.gone.Store(true)
	return nil
}

// release removes the cgroup of a tree that has ended, and makes the watchdog and the registry forget the tree. The
// cgroup is removed first: if we die before the next step, the watchdog still knows the tree.
func (p *Process) release() {
	p.released.Do(func() {
		_ = p.record.group().remove() // a cgroup that cannot be removed is empty and harmless
		home.watchdog.drop(p.record.Token)
		home.end(p)
	})
}
