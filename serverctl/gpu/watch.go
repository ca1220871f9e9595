package gpu

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// shortest is how often readings can be asked for at most: the driver's own figures change every 1/6 s or slower.
	shortest = 100 * time.Millisecond
	// firstPause is the pause before a loop that has ended is begun anew; it doubles while that does not help.
	firstPause = time.Second
	longPause  = 30 * time.Second
	// maxLine is the longest line that is kept, in bytes. One of nvidia-smi has about 150.
	maxLine = 4 << 10
	// maxGarbage is how much may come without a reading in it, in bytes, before the loop is begun anew.
	maxGarbage = 256 << 10
)

// Watch calls got with a reading about every so often, 100 ms apart at least, until ctx ends. It then returns nil, and
// nvidia-smi is gone; or a *Failure when it cannot be ended. It returns ErrNone when there is no GPU at its beginning.
//
// One nvidia-smi is kept running, since starting it costs far more than asking it. When that dies, stalls, or writes what
// makes no sense, it is ended and begun anew after a pause: a second, and up to 30 s while that does not help. got is
// called by one goroutine at a time and must be quick, because meanwhile no reading is taken.
func (n *NvidiaSMI) Watch(ctx context.Context, every time.Duration, got func(Reading)) error {
	every = max(every, shortest)
	first := cmp.Or(n.pause, firstPause)
	seen, pause := false, first
	for {
		reading, err := n.Query(ctx)
		if err == nil {
			got(reading)
			seen = true
			var count int
			if count, err = n.loop(ctx, every, len(reading.GPUs), got); count > 0 {
				pause = first
			}
		}
		if ctx.Err() != nil {
			return n.left()
		}
		if !seen && errors.Is(err, ErrNone) {
			return err
		}
		n.log().Warn("reading the GPUs begins anew", "reason", err, "in", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, longPause)
	}
}

func (n *NvidiaSMI) log() *slog.Logger {
	if n.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return n.Log
}

// loop keeps one nvidia-smi running and passes its readings of so many GPUs on, until it fails or ctx ends. It returns
// how many there were and why it ended.
func (n *NvidiaSMI) loop(ctx context.Context, every time.Duration, gpus int, got func(Reading)) (count int, err error) {
	path, err := n.find()
	if err != nil {
		return 0, err
	}
	n.mu.Lock()
	fields := n.gpus
	n.mu.Unlock()
	quit := make(chan struct{})
	out := &rounds{fields: fields, gpus: gpus, readings: make(chan Reading), failed: make(chan error, 1), quit: quit}
	c, err := start(path, []string{
		"--query-gpu=" + asked(fields), "--format=csv,noheader,nounits", "-lms", strconv.FormatInt(every.Milliseconds(), 10),
	}, out, out)
	if err != nil {
		return 0, n.failure("it does not start: "+err.Error(), "")
	}
	defer func() {
		close(quit) // first: the child's end waits for its output to be taken
		if left := n.end(c); left != nil {
			err = left
		}
	}()
	patience := 2*every + n.limit()
	stalled := time.NewTimer(patience)
	defer stalled.Stop()
	for {
		select {
		case r := <-out.readings:
			got(r)
			count++
			stalled.Reset(patience)
		case err := <-out.failed:
			return count, n.failure(err.Error(), "")
		case <-stalled.C:
			return count, n.failure(fmt.Sprintf("no reading for %v, %s", patience, out.last()), "")
		case <-c.exited:
			return count, n.failure(fmt.Sprintf("its loop has ended (%v), %s", c.cmd.ProcessState, out.last()), "")
		case <-ctx.Done():
			return count, context.Cause(ctx)
		}
	}
}

// rounds takes what a loop writes and puts the lines of each round together to a reading.
type rounds struct {
	fields   []field[GPU]
	gpus     int // lines of a round
	readings chan Reading
	failed   chan error    // holds one, so that it can be left there
	quit     chan struct{} // is closed when nobody takes readings any more

	line    []byte // the beginning of a line
	round   []GPU
	garbage int // bytes since the last reading

	mu    sync.Mutex
	words string // the last line that was none of a round
}

// errQuit ends the copying of output that nobody wants.
var errQuit = errors.New("nobody reads any more")

// Write takes a piece of output. Standard output and error come from one goroutine, since they are one writer to exec.
func (r *rounds) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		end := bytes.IndexByte(rest, '\n')
		piece := rest
		if end >= 0 {
			piece = rest[:end]
		}
		r.garbage += len(piece) + 1
		r.line = append(r.line, piece[:min(len(piece), maxLine-len(r.line))]...)
		if end < 0 {
			rest = nil
		} else {
			rest = rest[end+1:]
			if err := r.take(strings.TrimSpace(string(r.line))); err != nil {
				return 0, err
			}
			r.line = r.line[:0]
		}
		if r.garbage > maxGarbage {
			r.failed <- fmt.Errorf("its loop wrote %d KiB without a reading, %s", maxGarbage>>10, r.last())
			return 0, errQuit // never comes here twice: exec stops to copy
		}
	}
	return len(p), nil
}

// take takes a whole line, and delivers the round that it completes.
func (r *rounds) take(line string) error {
	if !isRow(line) {
		return nil
	}
	g, err := parseLine(line, r.fields)
	if err != nil {
		r.mu.Lock()
		r.words = clip(line)
		r.mu.Unlock()
		return nil
	}
	if len(r.round) > 0 && g.Index <= r.round[len(r.round)-1].Index {
		r.round = r.round[:0] // a round was cut short, as by a GPU that was lost
	}
	r.round = append(r.round, g)
	if len(r.round) < r.gpus {
		return nil
	}
	reading := Reading{At: time.Now(), GPUs: r.round}
	r.round, r.garbage = nil, 0
	select {
	case r.readings <- reading:
		return nil
	case <-r.quit:
		return errQuit
	}
}

// last says what the loop's last words were.
func (r *rounds) last() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.words == "" {
		return "and it says nothing of it"
	}
	return fmt.Sprintf("its last words: %q", r.words)
}
