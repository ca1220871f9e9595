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
	// maxGarbage is how many bytes nvidia-smi may write without a complete reading; then it is restarted. A line has
	// about 150 bytes.
	maxGarbage = 256 << 10
)

// Watch calls got with a new reading once per interval until ctx ends. The interval is at least 100 ms. At the end
// Watch returns nil if nvidia-smi has ended too, and a *Failure if nvidia-smi cannot be ended. If there is no GPU at
// the beginning, Watch returns ErrNone.
//
// Watch keeps one nvidia-smi running, because a start costs far more than a query. If nvidia-smi dies, stalls or writes
// nonsense, Watch ends it and starts another. The pause before the restart is one second, and grows to 30 s while
// restarts fail. Calls of got never overlap. got must be quick, because Watch takes no reading while got runs.
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

// loop runs one nvidia-smi and passes each reading of all GPUs to got. It returns when nvidia-smi fails or stalls, or
// when ctx ends. gpus is how many GPUs a reading has; count is how many readings there were.
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

// passOn reads the output of nvidia-smi and joins one line for each GPU to a reading. It returns when the output ends,
// or when more than maxGarbage bytes come without a reading.
func passOn(output io.Reader, names []string, gpus int, got func([]GPU)) {
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
		if round = append(round, g); len(round) == gpus {
			got(round)
			round, garbage = nil, 0
		}
	}
}
