package proc

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watchdogVariable makes a program that calls Main the watchdog of the process that started it.
const watchdogVariable = "TUNER_WATCHDOG"

// tellLimit is how long a write to the watchdog's pipe may block. The watchdog reads at once unless it is stopped. Tests shorten it.
var tellLimit = time.Second

// mainCalled is set when this program would become a watchdog if it were started as one.
var mainCalled atomic.Bool

// Main must be the first call in main, and in TestMain of tests that start processes. In a watchdog it does not
// return; elsewhere it allows Start to have one. A program that never calls it has no watchdog: started again, it
// would run as itself and start itself once more.
func Main() {
	if os.Getenv(watchdogVariable) == "" {
		mainCalled.Store(true)
		return
	}
	// Only the end of the pipe ends the watchdog. It must survive the signals that end a whole terminal or session.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	closeInherited()
	_ = os.WriteFile("/proc/self/comm", []byte("tuner-watchdog"), 0) // shown by ps, which would call it exe otherwise
	if err := guard(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "tuner: watchdog:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// closeInherited closes the files that the owner itself had inherited, such as a pipe of the shell that started it.
// The reader of such a pipe waits for the owner's end, not for ours. Go opens every file close-on-exec, so any file
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
			_ = unix.Close(fd) // not our file, so an error when closing it does not matter
		}
	}
}

// An order tells the watchdog to keep a tree in mind, or to drop it.
type order struct {
	Keep *Record `json:"keep,omitempty"` // replaces what was kept under the same token
	Drop string  `json:"drop,omitempty"` // a token
}

// guard takes orders until the owner has died. Then it reclaims every tree that was kept and not dropped.
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
	// A line that cannot be parsed does not mean that the owner has died. Nothing after it can be parsed either, so only
	// its end is awaited.
	if _, err := io.Copy(io.Discard, orders); err != nil {
		return fmt.Errorf("wait for the owner's end: %w", err)
	}
	records := slices.Collect(maps.Values(kept))
	failures := make([]error, len(records))
	var work sync.WaitGroup
	for i, record := range records { // all at once: a tree that does not die must not keep the others alive
		work.Go(func() { _, failures[i] = record.reclaim() })
	}
	work.Wait()
	return errors.Join(failures...)
}

// A watchdog is the owner's handle of its watchdog process: a second process of this program, which reads a pipe.
// Nobody but the owner holds the other end (os.Pipe makes it close-on-exec). However the owner dies, the pipe ends,
// and the watchdog ends what is left. One watchdog serves all trees, from the first Start to the owner's end. If it
// dies, the next Start replaces it, or the first scan that finds it dead.
type watchdog struct {
	mu      sync.Mutex
	cmd     *exec.Cmd // nil while there is none
	since   time.Time // when it was started
	orders  *os.File
	err     error // why there is none
	process atomic.Int64
}

// replaceAfter is how long a watchdog must have lived for a scan to replace it. One that cannot live must not be
// started over and over.
const replaceAfter = 10 * time.Second

// WatchdogSupport returns why nothing would end our servers if we were killed; nil means that a watchdog runs.
func WatchdogSupport() error {
	home.watchdog.mu.Lock()
	defer home.watchdog.mu.Unlock()
	home.watchdog.tell(order{}) // fails when the watchdog is dead
	home.watchdog.ensure()
	return home.watchdog.err
}

// replace replaces a watchdog that was seen dead.
func (w *watchdog) replace() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd != nil && time.Since(w.since) > replaceAfter {
		w.tell(order{}) // fails and clears w.cmd, unless another watchdog was started meanwhile
		w.ensure()
	}
}

// pid is the PID of its process; 0 means there is none.
func (w *watchdog) pid() int { return int(w.process.Load()) }

// keep tells the watchdog of a tree that is about to start or has started. It starts a watchdog if there is none. A
// failure is no error here: WatchdogSupport has the reason.
func (w *watchdog) keep(r Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell(order{Keep: &r})
	w.ensure()
}

// drop tells the watchdog that a tree is gone.
func (w *watchdog) drop(token string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell(order{Drop: token})
}

// ensure starts a watchdog if there is none, and tells it of every tree. The caller holds the lock.
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

// tell sends an order. A watchdog that does not take it is dead or stopped. The order may have been cut short, so no
// other may follow it, and tell ends the watchdog.
func (w *watchdog) tell(o order) {
	if w.cmd == nil {
		return // there is none, or it failed before
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

// start starts this very program, even if its file was replaced meanwhile, in its own session. It passes only the
// environment that the watchdog needs, so that it holds no secret. The watchdog shares our stderr, because it may
// have to say what it could not end.
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
	// Our own name comes first, because a program may decide by it what to be.
	cmd.Args = []string{os.Args[0], fmt.Sprintf("watchdog of process %d", os.Getpid())}
	cmd.Env = []string{watchdogVariable + "=1", "GOMAXPROCS=1"}
	for _, name := range []string{"GODEBUG", "GORACE", "GOCOVERDIR"} { // settings of Go itself
		if value, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Dir = "/" // so that it does not keep a file system from being unmounted
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start the watchdog: %w", err), orders.Close())
	}
	w.cmd, w.orders, w.since = cmd, orders, time.Now()
	w.process.Store(int64(cmd.Process.Pid))
	return nil
}

// end kills the watchdog before its pipe ends: it must not reclaim trees that still have an owner.
func (w *watchdog) end() {
	_ = w.cmd.Process.Kill() // it may already be dead
	_ = w.cmd.Wait()         // we killed it, so its status says nothing
	_ = w.orders.Close()     // it has no reader, so nothing is lost
	w.cmd, w.orders = nil, nil
	w.process.Store(0)
}
