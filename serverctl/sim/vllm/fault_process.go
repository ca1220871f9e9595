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

// part returns a command that runs a part of this very program. It is not looked up by its name, so it is the same program
// even when another has taken its place on disk.
func (s *Server) part(words ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = slices.Concat(s.Reexec, words)
	return cmd
}

// The roles of RunChild.
const (
	roleExit   = "exit"
	roleDaemon = "daemon"
)

// RunChild is a child process of a faulty server: words is its role with its arguments.
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
	return fmt.Errorf("there is no part %q of the simulated server", strings.Join(words, " "))
}

// runDaemon lives for its time whatever it is told. It has a time so that a test that fails leaves it for some minutes only.
func runDaemon(lifetime time.Duration) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	if err := tellParent("ready"); err != nil {
		return err
	}
	time.Sleep(lifetime)
	return nil
}

// tellParent writes a word to the pipe that a part of the program has as its first file beside the standard ones.
func tellParent(word string) error {
	const fd = 3
	pipe := os.NewFile(fd, "pipe to the parent")
	if _, err := fmt.Fprintln(pipe, word); err != nil {
		return fmt.Errorf("tell the parent: %w; parts of the simulated server are started by it alone",
			errors.Join(err, pipe.Close()))
	}
	return pipe.Close()
}

// startTold starts a part and returns the pipe on which it will tell its word.
func startTold(cmd *exec.Cmd) (*os.File, error) {
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

// bearLimit is how long a child may take until it has begun. Starting this program takes 0.1 s, on a busy machine some seconds.
const bearLimit = 20 * time.Second

// bearsDaemon starts a process that has left the server's session, does not have its environment, and does not end at
// SIGTERM. Nobody waits for it: when the server is gone it belongs to whoever reaps orphans.
func bearsDaemon(_ context.Context, s *Server, _ sim.Options, f Fault, log *logger) error {
	cmd := s.part("child", roleDaemon, f.For.String())
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	told, err := startTold(cmd)
	if err != nil {
		return fmt.Errorf("start the daemon of fault %q: %w", f, err)
	}
	defer told.Close()
	err = told.SetReadDeadline(time.Now().Add(bearLimit))
	if err == nil {
		_, err = told.Read(make([]byte, 1)) // until then it could still be ended
	}
	if err != nil {
		return fmt.Errorf("wait for the daemon of fault %q: %w", f, errors.Join(err, cmd.Process.Kill()))
	}
	log.api("simulated:1", "Fault daemon: process %d has a session of its own and ignores SIGTERM", cmd.Process.Pid)
	return cmd.Process.Release()
}

// shmDir is where POSIX shared memory is, shm_overview(7).
const shmDir = "/dev/shm"

// leaksShm makes a segment as Python's multiprocessing.shared_memory names them, holds it in memory for as long as the
// process lives, and leaves it behind. Like those of a killed vLLM it is much larger than the memory that it takes.
func leaksShm(_ context.Context, _ *Server, _ sim.Options, f Fault, log *logger) error {
	name := make([]byte, 4)
	rand.Read(name) // never fails: crypto/rand ends the program rather than return an error
	path := filepath.Join(shmDir, "psm_"+hex.EncodeToString(name))
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	defer file.Close() // the mapping holds it
	if err := file.Truncate(f.Bytes); err != nil {
		return fmt.Errorf("make the segment of fault %q: %w", f, err)
	}
	if _, err := unix.Mmap(int(file.Fd()), 0, int(f.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %s: %w", path, err)
	}
	log.api("simulated:1", "Fault leak-shm: %s has %d bytes and stays", path, f.Bytes)
	return nil
}

// ignoresTerm leaves SIGTERM to nobody.
func ignoresTerm(context.Context, *Server, sim.Options, Fault, *logger) error {
	signal.Ignore(syscall.SIGTERM)
	return nil
}

// zombies starts children that end at once, and never waits for them.
func (g *gate) zombies(f Fault) {
	var pids []int
	for range f.Count {
		cmd := g.server.part("child", roleExit)
		if err := cmd.Start(); err != nil {
			g.log.apiError("simulated:1", "Fault zombies: %v", err)
			break
		}
		pids = append(pids, cmd.Process.Pid)
	}
	g.log.api("simulated:1", "Fault zombies: nobody waits for processes %v", pids)
}

// stopItself is SIGSTOP, which no process can refuse.
func (g *gate) stopItself(Fault) {
	g.log.api("simulated:1", "Fault stop: SIGSTOP to process %d", os.Getpid())
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP) // a process may always signal itself
}

// crash ends the API server by SIGSEGV, after the words of torch's own handler. Go's handler would turn the signal into a
// traceback and exit code 2, so the kernel's is put back first; no core file is written.
func (g *gate) crash(Fault) {
	g.log.write(g.log.errors, "", "!!!!!!! Segfault encountered !!!!!!!\n  File \"<unknown>\", line 0, in cuMemCreate\n"+
		"  File \"<unknown>\", line 0, in 0xffffffffffffffff\n")
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // lowering a limit is always allowed
	// struct sigaction of the kernel, not of libc: SIG_DFL, no flags, no restorer, an empty mask of 8 bytes; the same on
	// amd64 and arm64 (include/linux/signal_types.h).
	var standard [4]uint64
	action := uintptr(unsafe.Pointer(&standard))
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGSEGV), action, 0, 8, 0, 0)
	if errno == 0 {
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV) // a process may always signal itself
	}
	<-g.stopped
}
