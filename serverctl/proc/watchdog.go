package proc

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watchdogVariable makes a program that calls Main the watchdog of the process that started it.
const watchdogVariable = "TUNER_WATCHDOG"

// tellLimit is how long the watchdog may leave its pipe full. It reads at once unless it is stopped.
const tellLimit = time.Second

// mainCalled is whether this program would become a watchdog when it is started as one.
var mainCalled atomic.Bool

// Main is called first thing in main, and in TestMain of tests that start processes. In a watchdog it does not return;
// elsewhere it lets Start have one. A program that never calls it has no watchdog: started again, it would not become one
// but run, and start itself once more.
func Main() {
	if os.Getenv(watchdogVariable) == "" {
		mainCalled.Store(true)
		return
	}
	// Only the end of the pipe ends it. What ends a whole terminal or session must find it at its post.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	closeInherited()
	_ = os.WriteFile("/proc/self/comm", []byte("tuner-watchdog"), 0) // for ps; without it, it is called exe
	if err := guard(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "tuner: watchdog:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// closeInherited closes what was open in the owner without its doing, such as a pipe of the shell that started it: who
// reads that waits for the owner's end, not for ours. Go opens every file close-on-exec, so what has survived the exec
// beside the standard three was inherited.
func closeInherited() {
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return // only a bad pattern is an error
	}
	for _, name := range fds {
		fd, err := strconv.Atoi(filepath.Base(name))
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd) // it is not ours: what it cannot write is not our loss
		}
	}
}

// An order tells the watchdog of a tree, or that it is gone.
type order struct {
	Keep *Record `json:"keep,omitempty"` // takes the place of what was kept under its token
	Drop string  `json:"drop,omitempty"` // a token
}

// guard takes orders until the owner has died, and then reclaims what it was told of and not told to drop.
func guard(orders io.Reader) error {
	kept := map[string]Record{}
	for lines := json.NewDecoder(orders); ; {
		var o order
		if lines.Decode(&o) != nil { // the end, perhaps in the middle of a line
			break
		}
		if o.Keep != nil {
			kept[o.Keep.Token] = *o.Keep
		}
		delete(kept, o.Drop)
	}
	// A line that cannot be read is not the owner's death. What follows it cannot be read either: that is waited out.
	if _, err := io.Copy(io.Discard, orders); err != nil {
		return fmt.Errorf("wait for the owner's end: %w", err)
	}
	failures := make(chan error, len(kept))
	var work sync.WaitGroup
	for _, record := range kept { // at once: one that does not die must not keep the others alive
		work.Go(func() {
			_, err := record.reclaim()
			failures <- err
		})
	}
	work.Wait()
	close(failures)
	var failed error
	for err := range failures {
		failed = errors.Join(failed, err)
	}
	return failed
}

// A watchdog is the owner's end of it: a second process of this program that reads a pipe whose other end nobody but us
// holds (os.Pipe makes it close-on-exec). However we die, the pipe ends, and it ends what we have left behind. There is
// one for all trees, from the first Start to our end; one that has died is replaced by the next Start, or by the reaper
// when it sees it dead.
type watchdog struct {
	mu     sync.Mutex
	cmd    *exec.Cmd // nil while there is none
	since  time.Time // when it was started
	orders *os.File
	err    error // why there is none
	number atomic.Int64
}

// replaceAfter is how long one must have lived to be replaced before the next Start. One that cannot live must not be
// started over and over.
const replaceAfter = 10 * time.Second

// WatchdogSupport returns why nothing would end our servers if we were killed; nil means that a watchdog is running.
func WatchdogSupport() error {
	home.dog.mu.Lock()
	defer home.dog.mu.Unlock()
	home.dog.tell(order{}) // shows whether it is still there to hear it
	home.dog.ensure()
	return home.dog.err
}

// replace replaces one that was seen dead.
func (w *watchdog) replace() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd != nil && time.Since(w.since) > replaceAfter {
		w.tell(order{}) // fails, and so makes room, unless another was started meanwhile
		w.ensure()
	}
}

// pid is the number of its process; 0 means there is none.
func (w *watchdog) pid() int { return int(w.number.Load()) }

// keep tells it of a tree that is about to start or has started, and starts one if there is none. That it cannot be had
// is no error: WatchdogSupport has the reason.
func (w *watchdog) keep(r Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell(order{Keep: &r})
	w.ensure()
}

// drop tells it that a tree is gone. If it is not there to hear it, that is as good.
func (w *watchdog) drop(token string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell(order{Drop: token})
}

// ensure starts one if there is none, and tells it of every tree. The caller holds the lock.
func (w *watchdog) ensure() {
	if w.cmd != nil {
		return
	}
	if w.err = w.start(); w.err != nil {
		return
	}
	for _, r := range home.records() {
		w.tell(order{Keep: &r})
	}
}

// tell gives an order. A watchdog that does not take it is dead, or stopped: an order that may have been cut short cannot
// be followed by another, so it is ended.
func (w *watchdog) tell(o order) {
	if w.cmd == nil {
		return // there is none, or it has refused an order before
	}
	line, err := json.Marshal(o)
	if err == nil {
		err = w.orders.SetWriteDeadline(time.Now().Add(tellLimit))
	}
	if err == nil {
		_, err = w.orders.Write(append(line, '\n'))
	}
	if err != nil {
		w.end()
		w.err = fmt.Errorf("tell the watchdog of a server: %w", err)
	}
}

// start starts the process: this very program, even if its file was replaced meanwhile, in a session of its own, with no
// more of our environment than it needs, so that it holds no secret. Its stderr is ours: it may have to say what it could
// not end.
func (w *watchdog) start() error {
	if !mainCalled.Load() {
		return errors.New("start the watchdog: this program does not call proc.Main, so it cannot be its own watchdog")
	}
	r, orders, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start the watchdog: %w", err)
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe")
	// Our own name goes first, because a program may choose what to be by it.
	cmd.Args = []string{os.Args[0], fmt.Sprintf("watchdog of process %d", os.Getpid())}
	cmd.Env = []string{watchdogVariable + "=1", "GOMAXPROCS=1"}
	for _, name := range []string{"GODEBUG", "GORACE", "GOCOVERDIR"} { // how Go itself is to behave
		if value, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Dir = "/" // so that it keeps no file system from being unmounted
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start the watchdog: %w", err), orders.Close())
	}
	w.cmd, w.orders, w.since = cmd, orders, time.Now()
	w.number.Store(int64(cmd.Process.Pid))
	return nil
}

// end ends the process, which must not begin to reclaim what still has an owner: it is killed before its pipe ends.
func (w *watchdog) end() {
	_ = w.cmd.Process.Kill() // it may be dead already
	_ = w.cmd.Wait()         // that it was killed is known
	_ = w.orders.Close()     // nothing is lost: it has no reader
	w.cmd, w.orders = nil, nil
	w.number.Store(0)
}
