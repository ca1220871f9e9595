// Package container runs one container as processes of this machine and keeps its result on disk, so that the container
// and its result survive the agent that started it. It never talks to a cluster.
//
// A container is three processes. The launcher starts the shim and ends at once, so the shim belongs to the machine and
// not to the agent. The shim starts the init process, waits for it and writes down how it ended. The init process builds
// the container's file tree and becomes the container's command.
package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// These files are in a container's directory.
const (
	specFile  = "spec.json"  // Spec, written before anything starts
	stateFile = "state.json" // state, written when the command runs
	exitFile  = "exit.json"  // Exit, written when the command has ended
	aliveFile = "alive"      // a FIFO that the shim holds open as long as it lives
	// MessageFile is what the container wrote to its termination message path.
	MessageFile = "message"
)

// A Spec says what a container is made of: its files, its rights and its command.
type Spec struct {
	Hostname        string
	Image           string // directory whose files are laid over the machine's files; empty means none
	Mounts          []Mount
	Args            []string
	Env             []string
	WorkingDir      string
	User, Group     int
	Groups          []int
	Capabilities    []string // names such as CAP_KILL; the command loses all others
	NoNewPrivileges bool
	ReadOnlyRoot    bool
	Network         string // file of a network namespace; empty means the machine's network
	Log             string // file that gets standard output and standard error; the shim's own errors are beside it, in .shim
	MessagePath     string // path in the container that is backed by MessageFile
}

// A Mount shows a file or directory of the machine in the container.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// state names the process of the command. The start time tells it from a later process with the same number.
type state struct {
	PID       int
	StartTime string // field 22 of /proc/PID/stat
	Started   time.Time
}

// An Exit says how a container ended.
type Exit struct {
	Code    int
	Reason  string // reason in the words of the kubelet, such as Error
	Message string
	Started time.Time
	Ended   time.Time
}

// These are the kubelet's exit codes for containers that did not end by themselves.
const (
	codeNotStarted = 128
	codeUnknown    = 137
)

// These are the kubelet's words for a container of whose end nobody knows.
const (
	StatusUnknown        = "ContainerStatusUnknown"
	StatusUnknownMessage = "The container could not be located when the pod was terminated"
)

// A Container is a started container, whether it still runs or has ended.
type Container struct {
	dir   string
	alive *os.File // end of file means that the shim has ended
}

// Start starts a container whose files are in dir. A command that cannot be started is no error: the container then ends
// at once with code 128.
func Start(ctx context.Context, dir string, spec Spec) (*Container, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, MessageFile), nil, 0o666); err != nil {
		return nil, err
	}
	// The mode of WriteFile loses the bits of the umask, and the container may run as any user.
	if err := os.Chmod(filepath.Join(dir, MessageFile), 0o666); err != nil {
		return nil, err
	}
	if err := writeJSON(filepath.Join(dir, specFile), spec); err != nil {
		return nil, err
	}
	if err := syscall.Mkfifo(filepath.Join(dir, aliveFile), 0o600); err != nil {
		return nil, fmt.Errorf("make the FIFO of the shim: %w", err)
	}
	launcher := exec.CommandContext(ctx, self, "launch", dir)
	launcher.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if output, err := launcher.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("launch the shim: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return Attach(dir)
}

// Attach finds a container that Start started in dir, maybe in an earlier life of the agent. The error is
// fs.ErrNotExist if there is none.
func Attach(dir string) (*Container, error) {
	// Without O_NONBLOCK, the open would wait for a writer, and a dead shim is none.
	alive, err := os.OpenFile(filepath.Join(dir, aliveFile), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return &Container{dir: dir, alive: alive}, nil
}

// Close forgets the container. It does not end it.
func (c *Container) Close() error { return c.alive.Close() }

// Wait waits until the container has ended, or until ctx ends. Only one goroutine may wait at a time.
func (c *Container) Wait(ctx context.Context) (Exit, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.alive.SetReadDeadline(time.Now()) }) // fails only after Close
	defer stop()
	for {
		if err := ctx.Err(); err != nil {
			return Exit{}, context.Cause(ctx)
		}
		_, err := c.alive.Read(make([]byte, 1)) // the shim writes nothing
		switch {
		case errors.Is(err, io.EOF):
			return c.exit()
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return Exit{}, fmt.Errorf("wait for the shim: %w", err)
		}
		// The deadline may also be that of an earlier Wait, whose AfterFunc was late.
		if err := c.alive.SetReadDeadline(time.Time{}); err != nil {
			return Exit{}, err
		}
	}
}

// exit reads how the container ended. A shim that was killed has not written it.
func (c *Container) exit() (Exit, error) {
	var e Exit
	err := readJSON(filepath.Join(c.dir, exitFile), &e)
	if errors.Is(err, fs.ErrNotExist) {
		return Exit{
			Code:    codeUnknown,
			Reason:  StatusUnknown,
			Message: StatusUnknownMessage,
			Started: c.Started(),
			Ended:   time.Now(),
		}, nil
	}
	return e, err
}

// Started returns when the command began to run. It returns the zero time if it never did.
func (c *Container) Started() time.Time {
	var s state
	_ = readJSON(filepath.Join(c.dir, stateFile), &s) // no file: the command never ran
	return s.Started
}

// Signal sends a signal to the first process of the container. A SIGKILL ends all its processes, because they are in
// one PID namespace. A container that has ended is no error.
func (c *Container) Signal(signal syscall.Signal) error { return Signal(c.dir, signal) }

// Signal sends a signal to the container whose files are in dir.
func Signal(dir string, signal syscall.Signal) error {
	var s state
	if err := readJSON(filepath.Join(dir, stateFile), &s); err != nil {
		return fmt.Errorf("signal a container that has not started: %w", err)
	}
	process, err := os.FindProcess(s.PID)
	if err != nil {
		return fmt.Errorf("find process %d: %w", s.PID, err)
	}
	defer process.Release()
	// The handle is a file descriptor of this very process, so no other process can get the signal after this check.
	if started, err := startTime(s.PID); err != nil || started != s.StartTime {
		return nil // the process has ended, and another one may have its number
	}
	if err := process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process %d: %w", s.PID, err)
	}
	return nil
}

// startTime returns when the process started, as the kernel counts it.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", err
	}
	// The name of the program is in parentheses and may hold blanks. The fields after it begin with number 3.
	_, after, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(after)
	const first, wanted = 3, 22
	if len(fields) <= wanted-first {
		return "", fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(fields))
	}
	return fields[wanted-first], nil
}

// writeJSON replaces a file as a whole, so a reader never sees half of it.
func writeJSON(path string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func readJSON(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
