package main

import (
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
)

// An outputBuffer is a writer that keeps the bytes written to it.
type outputBuffer struct {
	mu   sync.Mutex
	text []byte
	keep int // how many of the last bytes to keep at least; 0 means all
}

func (w *outputBuffer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, b...)
	if w.keep > 0 && len(w.text) > 2*w.keep {
		w.text = append(w.text[:0], w.text[len(w.text)-w.keep:]...)
	}
	return len(b), nil
}

func (w *outputBuffer) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.text)
}

// patience is how long a test waits for a command. It is long enough for a busy machine with the race detector.
const patience = 90 * time.Second

// A startedCommand is a command that a test has started. It keeps the command's output.
type startedCommand struct {
	outputBuffer
	cmd   *exec.Cmd
	tty   *os.File      // the command's terminal, if it has one
	ended chan struct{} // closed when the command has ended
}

// launch starts a command. Its standard output and standard error go to the same writer.
func launch(t *testing.T, cmd *exec.Cmd) *startedCommand {
	t.Helper()
	r := &startedCommand{cmd: cmd, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = r, r
	must(t, cmd.Start())
	r.await(t, func() {})
	return r
}

// onTerminal starts a command on a terminal of a kind, such as xterm. The command's standard output goes to stdout
// instead, unless stdout is nil.
func onTerminal(t *testing.T, kind string, columns int, stdout io.Writer, args ...string) *startedCommand {
	t.Helper()
	r := &startedCommand{cmd: tunerCommand(t.Context(), t, args...), ended: make(chan struct{})}
	r.cmd.Stdout = stdout
	r.cmd.Env = append(r.cmd.Env, everyStep+"=1", "TERM="+kind, "COLUMNS=300") // the terminal's own width must count more than COLUMNS
	var err error
	r.tty, err = pty.StartWithSize(r.cmd, &pty.Winsize{Rows: 40, Cols: uint16(columns)})
	must(t, err)
	r.await(t, func() {
		_, _ = io.Copy(r, r.tty) // the error is EIO when the command has ended
		_ = r.tty.Close()
	})
	return r
}

// await waits in the background until read has returned and the command has ended. At the end of the test it
// kills the command.
func (r *startedCommand) await(t *testing.T, read func()) {
	go func() {
		defer close(r.ended)
		read()
		_ = r.cmd.Wait() // the exit code says how the command ended
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // usually fails, because the command has ended
		<-r.ended
	})
}

// waitFor waits until the command has printed a text.
func (r *startedCommand) waitFor(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		over := time.Now().After(deadline)
		select {
		case <-r.ended:
			over = true
		default:
		}
		if strings.Contains(r.String(), text) {
			return
		}
		if over {
			t.Fatalf("the command ended, or %s passed, before it printed %q: %q", patience, text, r)
		}
	}
}

// end waits until the command has ended, and returns its output and its exit code.
func (r *startedCommand) end(t *testing.T) (string, int) {
	t.Helper()
	select {
	case <-r.ended:
		return r.String(), r.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatalf("the command has not ended within %s: %q", patience, r)
		return "", 0
	}
}
