package gpu

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	// minInterval is the least interval between readings: the driver updates its values every 1/6 s or slower.
	minInterval = 100 * time.Millisecond
	// firstPause is the pause before a failed loop is restarted. It doubles while restarts fail, up to maxPause.
	firstPause = time.Second
	maxPause   = 30 * time.Second
	// maxGarbage is how many bytes may come without a reading before the loop is restarted. A line has about 150.
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
			if n.loop(ctx, every, len(reading.GPUs), got) > 0 {
				pause = first
			}
		}
		if ctx.Err() != nil {
			return n.left()
		}
		if !seen && errors.Is(err, ErrNone) {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
}

// loop keeps one nvidia-smi running and passes on its readings of the given number of GPUs, until it fails, stalls or
// ctx ends. It returns how many readings there were.
func (n *NvidiaSMI) loop(ctx context.Context, every time.Duration, gpus int, got func(Reading)) (count int) {
	path, err := n.find()
	if err != nil {
		return 0
	}
	output, input, err := os.Pipe()
	if err != nil {
		return 0
	}
	defer output.Close()
	names := n.names(gpuColumns())
	c, err := start(path, []string{
		"--query-gpu=" + strings.Join(names, ","), "--format=csv,noheader,nounits", "-lms", strconv.FormatInt(every.Milliseconds(), 10),
	}, input, input)
	input.Close() // the child has its own copy; ours would keep the pipe open
	if err != nil {
		return 0
	}
	defer n.end(c)
	defer context.AfterFunc(ctx, func() { output.Close() })()
	patience := func() { output.SetReadDeadline(time.Now().Add(2*every + n.limit())) }
	patience()
	passOn(output, names, gpus, func(g []GPU) {
		got(Reading{At: time.Now(), GPUs: g})
		count++
		patience()
	})
	return count
}

// passOn joins the lines of each round of a loop to a reading. It returns when the output ends, or has brought too many
// bytes without a reading.
func passOn(output io.Reader, names []string, gpus int, got func([]GPU)) {
	var round []GPU
	garbage := 0 // bytes since the last reading
	for lines := bufio.NewScanner(output); garbage <= maxGarbage && lines.Scan(); {
		garbage += len(lines.Bytes()) + 1
		g, err := parseLine(strings.TrimSpace(lines.Text()), names, newGPU)
		if err != nil {
			continue // a warning, or the last words of a dying nvidia-smi
		}
		if len(round) > 0 && g.Index <= round[len(round)-1].Index {
			round = nil // a round was cut short, for example by a lost GPU
		}
		if round = append(round, g); len(round) == gpus {
			got(round)
			round, garbage = nil, 0
		}
	}
}
