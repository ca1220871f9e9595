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
	// minInterval is the minInterval interval between readings: the driver updates its values every 1/6 s or slower.
	minInterval = 100 * time.Millisecond
	// firstPause is the pause before a failed loop is restarted. It doubles while restarts fail, up to maxPause.
	firstPause = time.Second
	maxPause   = 30 * time.Second
	// maxLine is how many bytes of a line are kept. A line of nvidia-smi has about 150.
	maxLine = 4 << 10
	// maxGarbage is how many bytes may come without a reading before the loop is restarted.
	maxGarbage = 256 << 10
)

// Watch calls got with a reading at each interval, at least 100 ms, until ctx ends. It then returns nil, and
// nvidia-smi is gone, or a *Failure if nvidia-smi cannot be ended. It returns ErrNone when there is no GPU at the
// beginning.
//
// Watch keeps one nvidia-smi running, because a start costs far more than a query. If it dies, stalls, or writes
// nonsense, Watch ends it and starts another after a pause of one second, which grows to 30 s while restarts fail.
// One goroutine at a time calls got, which must be quick: no reading is taken meanwhile.
func (n *NvidiaSMI) Watch(ctx context.Context, every time.Duration, got func(Reading)) error {
	every = max(every, minInterval)
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
		n.log().Warn("reading the GPUs failed; starting again", "reason", err, "in", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
}

func (n *NvidiaSMI) log() *slog.Logger {
	if n.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return n.Log
}

// loop keeps one nvidia-smi running and passes on its readings of the given number of GPUs, until it fails or ctx
// ends. It returns how many readings there were and why it ended.
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
		close(quit) // first: the child can only end when its output is read
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
			return count, n.failure(fmt.Sprintf("no reading for %v; %s", patience, out.last()), "")
		case <-c.exited:
			return count, n.failure(fmt.Sprintf("its loop has ended (%v); %s", c.cmd.ProcessState, out.last()), "")
		case <-ctx.Done():
			return count, context.Cause(ctx)
		}
	}
}

// rounds takes the output of a loop and joins the lines of each round to a reading.
type rounds struct {
	fields   []field[GPU]
	gpus     int // lines per round
	readings chan Reading
	failed   chan error    // holds one error, so that the writer need not wait
	quit     chan struct{} // closed when nobody takes readings any more

	line    []byte // an incomplete line
	round   []GPU
	garbage int // bytes since the last reading

	mu    sync.Mutex
	words string // the last line that belongs to no round
}

// errQuit stops copying output that nobody reads.
var errQuit = errors.New("nobody reads any more")

// Write takes a piece of output. One goroutine copies stdout and stderr, because exec sees one writer for both.
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
			r.failed <- fmt.Errorf("its loop wrote %d KiB without a reading; %s", maxGarbage>>10, r.last())
			return 0, errQuit // happens once: exec stops copying
		}
	}
	return len(p), nil
}

// take handles a whole line, and delivers the round that it completes.
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
		r.round = r.round[:0] // a round was cut short, for example by a lost GPU
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

// last returns the last line that belongs to no round, in words.
func (r *rounds) last() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.words == "" {
		return "it printed no reason"
	}
	return fmt.Sprintf("its last line: %q", r.words)
}
