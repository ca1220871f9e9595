package container

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// self starts this program again, even if its file was replaced.
const self = "/proc/self/exe"

// Main runs the part of a container that the first argument names. A program that uses this package must pass its
// arguments on to Main, because the package starts the program again for each part.
func Main(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("want the name of a part and its arguments, got %q", args)
	}
	switch part, dir := args[0], args[1]; part {
	case "try":
		return try(dir)
	case "launch":
		return launch(dir)
	case "shim":
		return shim(dir)
	case "init":
		return becomeCommand(dir)
	case "enter":
		return enter(dir, args[2:])
	case "entered":
		return entered(args[1])
	}
	return fmt.Errorf("a container has no part %q", args[0])
}

// launch starts the shim and returns when its command runs or cannot run. When the launcher ends, the shim becomes a
// child of the machine's first process, which outlives the agent.
func launch(dir string) (err error) {
	// Opened for both, a FIFO does not wait for the other side.
	alive, err := os.OpenFile(filepath.Join(dir, aliveFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer alive.Close()
	var spec Spec
	if err := readJSON(filepath.Join(dir, specFile), &spec); err != nil {
		return err
	}
	log, err := os.Create(spec.Log + ".shim")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	ready, told, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(self, "shim", dir)
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{alive, told}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, told.Close())
	}
	if err := told.Close(); err != nil {
		return err
	}
	_, err = io.ReadAll(ready) // the shim closes its end when it is ready, and the kernel does so if it dies
	return err
}

// These are the shim's files from the launcher. Both are open only to be closed.
const (
	shimAlive = 3
	shimReady = 4
)

// shim runs a container from its start to its end and writes both down.
func shim(dir string) error {
	// The kernel kills the container when the thread that started it ends. A locked main goroutine keeps its thread.
	runtime.LockOSThread()
	unix.CloseOnExec(shimAlive) // a process of the container must not pass for the shim
	unix.CloseOnExec(shimReady)
	exit := runContainer(dir, func() error { return unix.Close(shimReady) })
	exit.Ended = time.Now()
	return writeJSON(filepath.Join(dir, exitFile), exit)
}

// runContainer returns when all processes of the container are gone. It calls ready as soon as the command runs.
func runContainer(dir string, ready func() error) Exit {
	cmd, err := startInit(dir)
	if err != nil {
		return Exit{Code: codeNotStarted, Reason: "StartError", Message: err.Error()}
	}
	s := state{PID: cmd.Process.Pid, Started: time.Now()}
	if s.StartTime, err = startTime(s.PID); err == nil {
		err = writeJSON(filepath.Join(dir, stateFile), s)
	}
	if err = errors.Join(err, ready()); err != nil {
		err = errors.Join(err, cmd.Process.Kill(), cmd.Wait())
		return Exit{Code: codeNotStarted, Reason: "StartError", Message: err.Error(), Started: s.Started}
	}
	// The kernel lets the first process of a PID namespace end only after all others.
	err = cmd.Wait()
	exit := Exit{Code: exitCode(cmd.ProcessState), Reason: "Completed", Started: s.Started}
	if err != nil {
		exit.Reason = "Error"
	}
	return exit
}

// exitCode counts a death by a signal as shells and the kubelet do.
func exitCode(p *os.ProcessState) int {
	if status, ok := p.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return p.ExitCode()
}

// startInit starts the container's first process and returns when that process has become the container's command.
func startInit(dir string) (cmd *exec.Cmd, err error) {
	var spec Spec
	if err := readJSON(filepath.Join(dir, specFile), &spec); err != nil {
		return nil, err
	}
	if spec.Network != "" {
		if err := JoinNetwork(spec.Network); err != nil {
			return nil, err
		}
	}
	log, err := os.OpenFile(spec.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	fault, told, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer fault.Close()
	cmd = exec.Command(self, "init", dir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{told}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: namespaces,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, told.Close())
	}
	if err := told.Close(); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	text, err := io.ReadAll(fault) // empty: the command has replaced the init process, which closed the pipe
	if err == nil && len(text) > 0 {
		err = errors.New(string(text))
	}
	if err != nil {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // its fault is known
		return nil, err
	}
	return cmd, nil
}
