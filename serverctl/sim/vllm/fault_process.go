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

// subprocess returns a command that runs another role of this program. It runs /proc/self/exe, which is the same
// program even when the file on disk has been replaced.
func (s *Server) subprocess(words ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = slices.Concat(s.Reexec, words)
	return cmd
}

// RunChild has these roles.
const (
	roleExit   = "exit"
	roleDaemon = "daemon"
)

// RunChild is the main function of a child process that a fault starts. words are its role and the arguments of the
// role.
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

// runDaemon ignores all signals that ask it to end. Its lifetime is limited, so that a failed test leaves it behind for
// some minutes only.
func runDaemon(lifetime time.Duration) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	if err := tellParent("ready"); err != nil {
		return err
	}
	time.Sleep(lifetime)
	return nil
}

// tellParent writes a word to the parent's pipe, whose file descriptor follows the three standard ones.
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
// not wait for it; when the server has ended, init reaps it.
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
		_, err = told.Read(make([]byte, 1)) // the daemon writes when it ignores signals
	}
	if err != nil {
		return fmt.Errorf("wait for the daemon of fault %q: %w", f, errors.Join(err, cmd.Process.Kill()))
	}
	log.api("Fault daemon: process %d has a session of its own and ignores SIGTERM", cmd.Process.Pid)
	return cmd.Process.Release()
}

// shmDir has the POSIX shared memory segments, shm_overview(7).
const shmDir = "/dev/shm"

// leakShm makes a segment, maps it while the process lives, and leaves it behind. The segment has a name as from
// Python's multiprocessing.shared_memory. Like a segment of a killed vLLM, it is much larger than its memory in use.
func leakShm(_ context.Context, _ *Server, _ sim.Options, f Fault, log *logger) error {
	name := make([]byte, 4)
	rand.Read(name) // never fails: crypto/rand would end the program
	path := filepath.Join(shmDir, "psm_"+hex.EncodeToString(name))
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	defer file.Close() // the mapping keeps the segment open
	if err := file.Truncate(f.Bytes); err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	if _, err := unix.Mmap(int(file.Fd()), 0, int(f.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %s: %w", path, err)
	}
	log.api("Fault leak-shm: %s has %d bytes and stays", path, f.Bytes)
	return nil
}

// ignoreTerm makes the process ignore SIGTERM.
func ignoreTerm(context.Context, *Server, sim.Options, Fault, *logger) error {
	signal.Ignore(syscall.SIGTERM)
	return nil
}

// zombies starts children that end at once, and does not wait for them.
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

// stopItself sends SIGSTOP, which no process can ignore.
func (h *faultHandler) stopItself(Fault) {
	h.log.api("Fault stop: SIGSTOP to process %d", os.Getpid())
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP) // a process may always signal itself
}

// crash ends the API server by SIGSEGV, after the output of torch's signal handler. Go's handler would turn the signal
// into a traceback and exit code 2, so crash restores the kernel's default first. It writes no core file.
func (h *faultHandler) crash(Fault) {
	h.log.write(h.log.errors, "", "!!!!!!! Segfault encountered !!!!!!!\n  File \"<unknown>\", line 0, in cuMemCreate\n"+
		"  File \"<unknown>\", line 0, in 0xffffffffffffffff\n")
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // lowering a limit is always allowed
	// struct sigaction of the kernel, not of libc: SIG_DFL, no flags, no restorer, an empty mask of 8 bytes; the same
	// on amd64 and arm64 (include/linux/signal_types.h).
	var standard [4]uint64
	action := uintptr(unsafe.Pointer(&standard))
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGSEGV), action, 0, 8, 0, 0)
	if errno == 0 {
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV) // a process may always signal itself
	}
	<-h.stopped
}
