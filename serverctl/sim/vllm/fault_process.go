package vllm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"vllmtuner/serverctl/sim"
)

// subprocess returns a command that starts this program again with other arguments. It uses /proc/self/exe, which is
// the running program even when its file on disk has been replaced.
func (s *Server) subprocess(words ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = slices.Concat(s.Reexec, words)
	return cmd
}

// These are the roles of a child process: it exits at once, or it is a daemon.
const (
	roleExit   = "exit"
	roleDaemon = "daemon"
)

// RunChild is the main function of a child process that a fault starts. The parameter words has the child's role and
// the arguments of that role.
func RunChild(words []string) error {
	switch {
	case len(words) == 1 && words[0] == roleExit:
		return nil
	case len(words) == 2 && words[0] == roleDaemon:
		lifetime, err := time.ParseDuration(words[1])
		if err != nil {
			return fmt.Errorf("read the daemon's lifetime: %w", err)
		}
		return runDaemon(lifetime)
	}
	return fmt.Errorf("the simulated server has no child process %q", strings.Join(words, " "))
}

// runDaemon ignores all signals that ask it to end. It ends after its lifetime, so that a daemon of a failed test lives
// only for some minutes.
func runDaemon(lifetime time.Duration) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	if err := tellParent("ready"); err != nil {
		return err
	}
	time.Sleep(lifetime)
	return nil
}

// tellParent writes a word to the pipe that startWithPipe made. The pipe's file descriptor is 3, the first after
// standard input, output and error.
func tellParent(word string) error {
	const fd = 3
	pipe := os.NewFile(fd, "pipe to the parent")
	if _, err := fmt.Fprintln(pipe, word); err != nil {
		return fmt.Errorf("tell the parent: %w; only the simulated server itself starts this subcommand",
			errors.Join(err, pipe.Close()))
	}
	return pipe.Close()
}

// startWithPipe starts a subprocess and returns the pipe to which the subprocess will write.
func startWithPipe(cmd *exec.Cmd) (*os.File, error) {
	told, teller, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.ExtraFiles = []*os.File{teller}
	err = cmd.Start()
	if err = errors.Join(err, teller.Close()); err != nil {
		return nil, errors.Join(err, told.Close())
	}
	return told, nil
}

// childStartLimit limits the start of a child. This program starts in 0.1 s, but on a busy machine it needs some
// seconds.
const childStartLimit = 20 * time.Second

// startDaemon starts a process that ignores SIGTERM and has its own session and an empty environment. The server does
// not wait for this process. When the server has ended, init reaps the process.
func startDaemon(_ context.Context, s *Server, _ sim.Options, f Fault, log *logger) error {
	cmd := s.subprocess("child", roleDaemon, f.For.String())
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	told, err := startWithPipe(cmd)
	if err != nil {
		return fmt.Errorf("start the daemon of fault %q: %w", f, err)
	}
	defer told.Close()
	err = told.SetReadDeadline(time.Now().Add(childStartLimit))
	if err == nil {
		_, err = told.Read(make([]byte, 1)) // the daemon writes as soon as it ignores signals
	}
	if err != nil {
		return fmt.Errorf("wait for the daemon of fault %q: %w", f, errors.Join(err, cmd.Process.Kill()))
	}
	log.api("Fault daemon: process %d has a session of its own and ignores SIGTERM", cmd.Process.Pid)
	return cmd.Process.Release()
}

// shmDir is the directory in which Linux keeps POSIX shared memory segments (shm_overview(7)).
const shmDir = "/dev/shm"

// leakShm makes a segment of shared memory, keeps it mapped, and never removes it. The name of the segment has the form
// of names in Python's multiprocessing.shared_memory. Like a segment that a killed vLLM leaves behind, the segment uses
// much less memory than its size.
func leakShm(_ context.Context, _ *Server, _ sim.Options, f Fault, log *logger) error {
	name := make([]byte, 4)
	rand.Read(name) // cannot fail: crypto/rand would end the program
	path := filepath.Join(shmDir, "psm_"+hex.EncodeToString(name))
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	defer file.Close() // the mapping stays when the file is closed
	if err := file.Truncate(f.Bytes); err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	if _, err := unix.Mmap(int(file.Fd()), 0, int(f.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %s: %w", path, err)
	}
	log.api("Fault leak-shm: %s has %d bytes and stays", path, f.Bytes)
	return nil
}

// ignoreTerm applies the fault named ignore-term: the process ignores SIGTERM.
func ignoreTerm(context.Context, *Server, sim.Options, Fault, *logger) error {
	signal.Ignore(syscall.SIGTERM)
	return nil
}

// zombies starts children that end at once. It does not wait for them, so they become zombies.
func (h *faultHandler) zombies(f Fault) {
	var pids []int
	for range f.Count {
		cmd := h.server.subprocess("child", roleExit)
		if err := cmd.Start(); err != nil {
			h.log.apiError("Fault zombies: %v", err)
			break
		}
		pids = append(pids, cmd.Process.Pid)
	}
	h.log.api("Fault zombies: processes %v are not waited for", pids)
}

// stopItself applies the fault named stop. The process sends itself SIGSTOP, which no process can ignore.
func (h *faultHandler) stopItself(Fault) {
	h.log.api("Fault stop: SIGSTOP to process %d", os.Getpid())
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP) // cannot fail: a process may always signal itself
}

// crash ends the API server by SIGSEGV. Before that it logs what torch's signal handler would print. Go's own handler
// would print a traceback and exit with code 2, so crash restores the kernel's default action. No core file is written.
func (h *faultHandler) crash(Fault) {
	h.log.write(h.log.errors, "", "!!!!!!! Segfault encountered !!!!!!!\n  File \"<unknown>\", line 0, in cuMemCreate\n"+
		"  File \"<unknown>\", line 0, in 0xffffffffffffffff\n")
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // cannot fail: lowering a limit is always allowed
	// This is the kernel's struct sigaction, not libc's: SIG_DFL, no flags, no restorer, an empty mask of 8 bytes. The
	// struct is the same on amd64 and arm64 (include/linux/signal_types.h).
	var standard [4]uint64
	action := uintptr(unsafe.Pointer(&standard))
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGSEGV), action, 0, 8, 0, 0)
	if errno == 0 {
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV) // cannot fail: a process may always signal itself
	}
	<-h.stopped
}
