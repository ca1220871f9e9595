package gpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// A tally collects the readings of a Watch.
type tally struct {
	mu       sync.Mutex
	readings []Reading
}

func (k *tally) add(r Reading) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.readings = append(k.readings, r)
}

func (k *tally) count() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.readings)
}

// Two of the rows wait for a stall of 1.7 s each, because a stub may take most of a second to start on busy cores.
func TestWatch(t *testing.T) {
	for _, row := range []struct {
		name, role string
		timeout    time.Duration // of one answer, and of a stall
		readings   int
		runs       int // of nvidia-smi, until that many readings have come
	}{
		{"one nvidia-smi brings many readings", "fine", patient, 10, 2},
		{"a loop that dies is begun anew", "dies", patient, 6, 6},
		{"a loop that stalls is ended, whatever it does with SIGTERM, and begun anew", "stalls", 1500 * time.Millisecond, 4, 4},
		{"a loop that writes only garbage is ended", "babbles", patient, 3, 5},
		{"a loop that has lost a GPU is begun anew", "loses-one", 1500 * time.Millisecond, 4, 4},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			n := &NvidiaSMI{Path: stub(t, row.role), Timeout: row.timeout, pause: 10 * time.Millisecond}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var got tally
			ended := make(chan error, 1)
			go func() { ended <- n.Watch(ctx, minInterval, got.add) }() // awaited below
			eventually(t, fmt.Sprintf("%d readings of %d runs", row.readings, row.runs), func() bool {
				return got.count() >= row.readings && len(runs(t, n.Path)) >= row.runs
			})
			cancel()
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("Watch() = %v", err)
				}
			case <-time.After(patient):
				t.Fatal("Watch did not end with its context")
			}
			allGone(t, n.Path)
			if row.role == "fine" && len(runs(t, n.Path)) != 2 {
				t.Errorf("nvidia-smi ran %d times, want one query and one loop", len(runs(t, n.Path)))
			}
			for i, r := range got.readings {
				if len(r.GPUs) != 2 || r.GPUs[0].Index != 0 || r.GPUs[1].Index != 1 || *r.GPUs[1].UsedMiB != 129000 {
					t.Fatalf("reading %d is %s", i, asJSON(t, r))
				}
			}
		})
	}
}

func TestWatchOfNoGPU(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: filepath.Join(t.TempDir(), "nvidia-smi")}
	err := n.Watch(t.Context(), time.Second, func(r Reading) { t.Errorf("a reading: %v", r) })
	if !errors.Is(err, ErrNone) {
		t.Errorf("Watch() = %v, want ErrNone", err)
	}
}

func TestRoundsAreBoundedAndComplete(t *testing.T) {
	const row = "%d, GPU-1, 580.1, 143771, 0, 143158, 0, 76.12, 700.00, 345, 3201, 29, 0x1, Disabled, NVIDIA H200\n"
	line := func(i int) string { return fmt.Sprintf(row, i) }
	for _, test := range []struct {
		name   string
		pieces []string
		want   int // readings
	}{
		{"two lines are a round", []string{line(0) + line(1) + line(0) + line(1)}, 2},
		{"pieces may end anywhere", strings.Split(line(0)+line(1), ""), 1},
		{"a round that is cut short is dropped", []string{line(0), line(0), line(1), line(1), line(0), line(1)}, 2},
		{"garbage between lines is passed over", []string{line(0), "GPU is lost\n\n", line(1)}, 1},
		{"a line that is too long spoils itself alone", []string{strings.Repeat("y", 3*maxLine) + "\n" + line(0) + line(1)}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &rounds{fields: gpuFields(), gpus: 2, readings: make(chan Reading, 10), failed: make(chan error, 1), quit: make(chan struct{})}
			for _, piece := range test.pieces {
				if n, err := r.Write([]byte(piece)); err != nil || n != len(piece) {
					t.Fatalf("Write() = %d, %v", n, err)
				}
				if cap(r.line) > 2*maxLine {
					t.Fatalf("a line of %d bytes is kept", cap(r.line))
				}
			}
			if got := len(r.readings); got != test.want {
				t.Errorf("%d readings, want %d", got, test.want)
			}
		})
	}
}
