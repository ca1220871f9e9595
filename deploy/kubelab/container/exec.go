package container

import (
	"context"
	"encoding/json"
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

// namespaces are those that a container has for itself.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC

// Exec runs one more command in the container whose files are in dir, with the rights of the container. A command that
// fails gives an *exec.ExitError.
func Exec(ctx context.Context, dir string, args []string, in io.Reader, out, errors io.Writer) error {
	cmd := exec.CommandContext(ctx, self, append([]string{"enter", dir}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, errors
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // the copy of the input ends only with its sender
	err := cmd.Run()
	if cmd.ProcessState != nil && cmd.ProcessState.Success() {
		return nil // the sender of the input was still there
	}
	return err
}

// enter joins the namespaces of the container, runs the command in them, and ends as the command ends.
func enter(dir string, args []string) error {
	runtime.LockOSThread() // namespaces belong to a thread
	var spec Spec
	var s state
	if err := errors.Join(readJSON(filepath.Join(dir, specFile), &spec), readJSON(filepath.Join(dir, stateFile), &s)); err != nil {
		return err
	}
	spec.Args = args
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	program, err := os.Open(self) // the container's files do not have it
	if err != nil {
		return err
	}
	defer program.Close()
	if err := join(s); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/fd/3", "entered", string(text))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{program}
	// A Pdeathsig here would kill the child: package syscall sends it to a child that does not see its parent, and the parent is
	// in another PID namespace. restrict sets it later.
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exitCode(exit.ProcessState)) // nothing is deferred that the end of the process does not do
	}
	return err
}

// join moves this thread into the namespaces of the process.
func join(s state) error {
	process, err := unix.PidfdOpen(s.PID, 0)
	if err != nil {
		return fmt.Errorf("find process %d: %w", s.PID, err)
	}
	defer unix.Close(process)
	if started, err := startTime(s.PID); err != nil || started != s.StartTime {
		return errors.New("the container has ended")
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // a thread that shares its root cannot change its mounts
		return err
	}
	if err := unix.Setns(process, namespaces|unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the container: %w", err)
	}
	return nil
}

// entered runs in the container and becomes the command.
func entered(text string) error {
	runtime.LockOSThread()
	unix.CloseOnExec(3) // the program that runs now
	var spec Spec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	return runCommand(spec)
}
