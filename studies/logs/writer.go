package logs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"vllmtuner/render"
)

const (
	// flushEvery is how long a line waits before it goes to the disk, where a follower sees it.
	flushEvery = time.Second
	// flushAt is how many bytes may wait before they are written at once, without waiting for flushEvery. One write
	// call then takes hundreds of lines. Each call may be a request to a file server.
	flushAt = 64 << 10
	// maxPending is the number of bytes that may wait for the disk: about 9,000 lines of 110 bytes. While so many wait,
	// Write waits too.
	maxPending = 1 << 20
)

// A Writer writes the log of one trial's server. If the disk is full, lost or slow, Write returns no error and hardly
// delays the server. The Writer leaves out lines that it cannot write, and counts their bytes. It writes this number to
// the log when the disk works again, and the error of Close has it too.
//
// Several goroutines may use a Writer. Each of them should write complete lines.
type Writer struct {
	trial int
	limits

	mu       sync.Mutex    // guards the fields up to closed
	pending  []byte        // bytes that wait for the disk
	room     chan struct{} // closed and replaced when the goroutine has taken the bytes in pending
	stuck    bool          // a Write has waited for the whole limits.patience, and no bytes have been taken from pending since
	overflow int64         // bytes that Write has left out for lack of room since the bytes in pending were last taken
	closed   bool

	wake    chan struct{} // has one value when the goroutine should write
	closing chan struct{}
	gone    chan struct{} // closed when the goroutine has ended
	spare   []byte        // memory of the last batch, for reuse; only the goroutine uses it
	disk    disk          // only the goroutine uses it

	close    sync.Once
	closeErr error
}

// Create returns a Writer for the log of a trial in dir/logs, where dir is the study's directory. If the trial is run
// again, the log gets a line that says so, and continues after it. If the disk cannot be written, the Writer tries
// again while the server runs. The caller must call Close.
func Create(dir string, trial int) *Writer { return create(dir, trial, ordinaryLimits) }

func create(dir string, trial int, l limits) *Writer {
	w := newWriter(dir, trial, l)
	w.signal() // creates the file before the server's first line
	go w.run()
	return w
}

// newWriter returns a Writer whose goroutine does not run yet.
func newWriter(dir string, trial int, l limits) *Writer {
	return &Writer{
		trial: trial, limits: l, room: make(chan struct{}),
		wake: make(chan struct{}, 1), closing: make(chan struct{}), gone: make(chan struct{}),
		disk: disk{limits: l, dir: dir, trial: trial},
	}
}

// Write adds bytes to the log. Its only error is os.ErrClosed. While 1 MiB waits for the disk, Write waits too, for at
// most a second. After a Write has waited for a whole second, no Write waits until the disk has taken some bytes.
func (w *Writer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waitForRoom()
	switch {
	case w.closed:
		return 0, fmt.Errorf("log of trial %d: %w", w.trial, os.ErrClosed)
	case len(w.pending) >= maxPending:
		w.overflow += int64(len(b))
		return len(b), nil
	}
	w.pending = append(w.pending, b...)
	if len(w.pending) >= flushAt {
		w.signal()
	}
	return len(b), nil
}

// waitForRoom waits until the field pending has room, but not longer than limits.patience. The caller holds the mutex
// mu, which is unlocked during the wait.
func (w *Writer) waitForRoom() {
	var limit <-chan time.Time
	for len(w.pending) >= maxPending && !w.closed && !w.stuck {
		if limit == nil {
			limit = time.After(w.patience)
		}
		w.signal()
		room := w.room
		w.mu.Unlock()
		select {
		case <-room:
			w.mu.Lock()
		case <-limit:
			w.mu.Lock()
			w.stuck = len(w.pending) >= maxPending
			return
		}
	}
}

// errSlow is the reason for bytes that were left out because the disk was slow.
var errSlow = errors.New("the disk did not keep up")

// leftOut returns the line that replaces missing bytes in the log.
func leftOut(n int64, why error) string {
	return fmt.Sprintf("… %s left out here: %s …\n", render.Bytes(n), reason(why))
}

func (w *Writer) signal() {
	select {
	case w.wake <- struct{}{}:
	default: // the goroutine has not taken the last signal yet
	}
}

// run writes pending lines to the disk until Close.
func (w *Writer) run() {
	defer close(w.gone)
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for last := false; !last; {
		select {
		case <-w.wake:
		case <-tick.C:
		case <-w.closing:
			last = true
		}
		lines, dropped := w.take(last)
		w.disk.write(lines, dropped, last)
		if last && dropped > 0 {
			w.disk.write(nil, 0, true) // writes the line about the dropped bytes
		}
	}
	w.disk.close()
}

// take returns the complete pending lines. If isLast is true, it returns all pending bytes. It also returns the number
// of bytes that Write left out after them. take does not write to the disk itself, because it holds the mutex mu.
func (w *Writer) take(isLast bool) (batch []byte, dropped int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := bytes.LastIndexByte(w.pending, '\n') + 1
	if isLast || w.overflow > 0 || n == 0 && len(w.pending) >= maxPending { // a line longer than maxPending is cut
		n = len(w.pending)
	}
	batch, dropped, w.overflow = w.pending[:n], w.overflow, 0
	w.pending, w.spare = append(w.spare[:0], w.pending[n:]...), batch
	w.stuck = false
	close(w.room)
	w.room = make(chan struct{})
	return batch, dropped
}

// Close writes the pending bytes and waits for the Writer's goroutine. It waits at most ten seconds, because a call to
// a hanging disk cannot be interrupted. Its error says how many bytes of the log were left out, and why. A second Close
// returns the same error.
func (w *Writer) Close() error {
	w.close.Do(func() {
		w.mu.Lock()
		w.closed = true
		w.mu.Unlock()
		close(w.closing)
		select {
		case <-w.gone:
			w.closeErr = w.loss()
		case <-time.After(w.limits.closing):
			w.closeErr = fmt.Errorf("log of trial %d: the end of the log was not written to %s within %s", w.trial, w.disk.path(), render.Took(w.limits.closing))
		}
	})
	return w.closeErr
}

// loss returns an error if bytes are missing on the disk. It is called after the goroutine has ended.
func (w *Writer) loss() error {
	switch {
	case w.disk.lost > 0:
		return fmt.Errorf("log of trial %d: %s of the log were left out: %w", w.trial, render.Bytes(w.disk.lost), cmp.Or(w.disk.first, errSlow))
	case w.disk.closeErr != nil:
		return fmt.Errorf("log of trial %d: the end of the log may be missing: %w", w.trial, w.disk.closeErr)
	}
	return nil
}
