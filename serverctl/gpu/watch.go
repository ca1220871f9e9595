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
	// minInterval is the shortest interval between readings. The driver updates its values every 1/6 s or more slowly.
	minInterval = 100 * time.Millisecond
	// firstPause is the pause before a failed nvidia-smi is restarted. It doubles while restarts fail, up to maxPause.
	firstPause = time.Second
	maxPause   = 30 * time.Second
	// maxGarbage is how many bytes nvidia-smi may write without a complete reading; after that, nvidia-smi is
	// restarted. A line has about 150 bytes.
	maxGarbage = 256 << 10
)

// Watch reports a new reading once per interval until ctx ends. The interval is at least 100 ms. At the end Watch
// returns nil if nvidia-smi has ended too, and a *Failure if nvidia-smi cannot be ended. If there is no GPU at the
// beginning, Watch returns ErrNone.
//
// Watch keeps one nvidia-smi running, because a start costs far more than a query. If nvidia-smi dies, stalls or writes
// nonsense, Watch ends it and starts another. The pause before the restart is one second, and grows to 30 s while
// restarts fail. Calls of report never overlap. A call must be quick, because Watch takes no reading during the call.
func (n *NvidiaSMI) Watch(ctx context.Context, interval time.Duration, report func(Reading)) error {
	interval = max(interval, minInterval)
	first := cmp.Or(n.pause, firstPause)
	seen, pause := false, first
	for {
		reading, err := n.Query(ctx)
		if err == nil {
			report(reading)
			seen = true
			if n.loop(ctx, interval, len(reading.GPUs), report) > 0 {
				pause = first
			}
		}
		if ctx.Err() != nil {
			return n.checkStuck()
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

// loop runs one nvidia-smi, and reports each reading of gpuCount GPUs. When nvidia-smi fails or stalls, or when ctx
// ends, loop returns the number of readings.
func (n *NvidiaSMI) loop(ctx context.Context, interval time.Duration, gpuCount int, report func(Reading)) (count int) {
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
		"--query-gpu=" + strings.Join(names, ","), "--format=csv,noheader,nounits", "-lms", strconv.FormatInt(interval.Milliseconds(), 10),
	}, input, input)
	input.Close() // the child has its own copy; ours would keep the pipe open
	if err != nil {
		return 0
	}
	defer n.end(c)
	defer context.AfterFunc(ctx, func() { output.Close() })()
	patience := func() { output.SetReadDeadline(time.Now().Add(2*interval + n.limit())) }
	patience()
	passOn(output, names, gpuCount, func(g []GPU) {
		report(Reading{At: time.Now(), GPUs: g})
		count++
		patience()
	})
	return count
}

// passOn reads the output of nvidia-smi and joins the lines, one for each GPU, into readings. It returns when the
// output ends, or when more than maxGarbage bytes come without a reading.
func passOn(output io.Reader, names []string, gpuCount int, report func([]GPU)) {
	var round []GPU
	garbage := 0 // bytes since the last reading
	for lines := bufio.NewScanner(output); garbage <= maxGarbage && lines.Scan(); {
		garbage += len(lines.Bytes()) + 1
		g, err := parseLine(strings.TrimSpace(lines.Text()), names, newGPU)
		if err != nil {
			continue // a warning, or an error message of a dying nvidia-smi
		}
		if len(round) > 0 && g.Index <= round[len(round)-1].Index {
			round = nil // a reading was cut short, for example by a lost GPU
		}
		if round = append(round, g); len(round) == gpuCount {
			report(round)
			round, garbage = nil, 0
		}
	}
}
