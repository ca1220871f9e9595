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

// If watchdogVariable is set, Main makes this program the watchdog of the process that started it.
const watchdogVariable = "TUNER_WATCHDOG"

// tellLimit is how long a write to the watchdog's pipe may block. The watchdog reads at once unless it is stopped.
// Tests shorten the limit.
var tellLimit = time.Second

// mainCalled is set when this program has called Main. Only such a program becomes a watchdog when it is started as
// one.
var mainCalled atomic.Bool

// Main must be the first call in main, and in TestMain of tests that start processes. In a watchdog process Main does
// not return. In any other process it allows Start to start a watchdog. A program that never calls Main has no
// watchdog: its second process would run as the program itself and start a third.
func Main() {
	if os.Getenv(watchdogVariable) == "" {
		mainCalled.Store(true)
		return
	}
	// Only the end of the pipe ends the watchdog. It must survive signals that go to a whole terminal or session.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	closeInherited()
	_ = os.WriteFile("/proc/self/comm", []byte("tuner-watchdog"), 0) // ps shows this name; otherwise it would show exe
	if err := guard(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "tuner: watchdog:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// closeInherited closes the files that the owner itself had inherited, such as a pipe of the shell that started the
// owner. The reader of such a pipe waits for the owner's end, and must not wait for the watchdog's end. Go opens every
// file close-on-exec. So a file that is not close-on-exec was inherited, except the standard three.
func closeInherited() {
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return // Glob fails only for a malformed pattern
	}
	for _, name := range fds {
		fd, err := strconv.Atoi(filepath.Base(name))
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd) // the file is not ours, so an error when closing it does not matter
		}
	}
}

// An order tells the watchdog to remember a tree, or to forget it.
type order struct {
	Keep *Record `json:"keep,omitempty"` // replaces the record that was kept under the same token
	Drop string  `json:"drop,omitempty"` // the token of the tree
}

// guard takes orders until the owner has died. Then it reclaims every tree that was kept and not dropped.
func guard(orders io.Reader) error {
	kept := map[string]Record{}
	for lines := json.NewDecoder(orders); ; {
		var o order
		if lines.Decode(&o) != nil { // the end of the pipe, perhaps in the middle of a line, or a line that cannot be parsed
			break
		}
		if o.Keep != nil {
			kept[o.Keep.Token] = *o.Keep
		}
		delete(kept, o.Drop)
	}
	// A line that cannot be parsed does not mean that the owner has died. The orders after it cannot be parsed either,
	// so guard only waits for the end of the pipe.
	if _, err := io.Copy(io.Discard, orders); err != nil {
		return fmt.Errorf("wait for the owner's end: %w", err)
	}
	records := slices.Collect(maps.Values(kept))
	failures := make([]error, len(records))
	var work sync.WaitGroup
	for i, record := range records { // all at the same time: a tree that does not die must not keep the others alive
		work.Go(func() { _, failures[i] = record.reclaim() })
	}
	work.Wait()
	return errors.Join(failures...)
}

// A watchdog is the owner's handle of its watchdog process: a second process of this program, which reads from a pipe.
// Only the owner holds the write end (os.Pipe makes it close-on-exec). When the owner dies, for whatever reason, the
// pipe ends, and the watchdog ends what the owner left behind. One watchdog serves all trees, from the first Start to
// the owner's end. If the watchdog dies, it is replaced by the next Start, or by the first scan that finds it dead.
type watchdog struct {
	mu      sync.Mutex
	cmd     *exec.Cmd // nil while there is no watchdog
	since   time.Time // when the watchdog was started
	orders  *os.File
	err     error // why there is no watchdog
	process atomic.Int64
}

// replaceAfter is how long a watchdog must have lived before a scan replaces it. A watchdog that always dies at once
// must not be started over and over.
const replaceAfter = 10 * time.Second

// WatchdogSupport returns why no watchdog would end our servers if we were killed; nil means that a watchdog runs.
func WatchdogSupport() error {
	home.watchdog.mu.Lock()
	defer home.watchdog.mu.Unlock()
	home.watchdog.tell(order{}) // clears cmd if the watchdog is dead
	home.watchdog.ensure()
	return home.watchdog.err
}

// replace replaces a watchdog that was found dead, if it had lived long enough.
func (w *watchdog) replace() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd != nil && time.Since(w.since) > replaceAfter {
		w.tell(order{}) // clears w.cmd if the watchdog is dead; another watchdog may have been started meanwhile
		w.ensure()
	}
}

// pid returns the PID of the watchdog process; 0 means there is none.
func (w *watchdog) pid() int { return int(w.process.Load()) }

// keep tells the watchdog about a tree that will start or has started. It starts a watchdog if there is none. It
// returns no error, because WatchdogSupport tells why there is no watchdog.
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

// ensure starts a watchdog if there is none, and tells it about every tree. The caller holds the lock.
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

// tell sends an order. If the watchdog does not take the order, it is dead or stopped, and the order may be cut short.
// No other order may follow a cut one, so tell ends the watchdog.
func (w *watchdog) tell(o order) {
	if w.cmd == nil {
		return // there is no watchdog, or it failed before
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
		w.err = fmt.Errorf("register a server with the watchdog: %w", err)
	}
}

// start starts this program again as the watchdog, in its own session. It starts the same program even if the program's
// file was replaced meanwhile. The watchdog gets only the environment that it needs, so that it holds no secret. It
// shares our stderr, because it may have to report what it could not end.
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
	// Our own name comes first, because some programs decide by their name what to do.
	cmd.Args = []string{os.Args[0], fmt.Sprintf("watchdog of process %d", os.Getpid())}
	cmd.Env = []string{watchdogVariable + "=1", "GOMAXPROCS=1"}
	for _, name := range []string{"GODEBUG", "GORACE", "GOCOVERDIR"} { // settings of Go itself
		if value, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Dir = "/" // so the watchdog does not keep a file system from being unmounted
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start the watchdog: %w", err), orders.Close())
	}
	w.cmd, w.orders, w.since = cmd, orders, time.Now()
	w.process.Store(int64(cmd.Process.Pid))
	return nil
}

// end kills the watchdog before it closes the pipe. At the end of the pipe, the watchdog would reclaim trees that still
// have an owner.
func (w *watchdog) end() {
	_ = w.cmd.Process.Kill() // the watchdog may already be dead
	_ = w.cmd.Wait()         // we killed it, so its status says nothing
	_ = w.orders.Close()     // the pipe has no reader, so nothing is lost
	w.cmd, w.orders = nil, nil
	w.process.Store(0)
}
