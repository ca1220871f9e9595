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

// A tally collects the readings that Watch reports.
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

// In two rows of the table, Watch waits 1.7 s for each stalled nvidia-smi. The time cannot be shorter, because a stub
// (a simulated nvidia-smi) may need most of a second to start on busy cores.
func TestWatch(t *testing.T) {
	for _, row := range []struct {
		name, role string
		timeout    time.Duration // time limit for one answer, and for a silent nvidia-smi
		readings   int
		runs       int // how many starts of nvidia-smi the test waits for
	}{
		{"one nvidia-smi brings many readings", "fine", testLimit, 10, 2},
		{"a loop that dies is begun anew", "dies", testLimit, 6, 6},
		{"a loop that stalls is ended, whatever it does with SIGTERM, and begun anew", "stalls", 1500 * time.Millisecond, 4, 4},
		{"a loop that writes only garbage is ended", "babbles", testLimit, 3, 5},
		{"a loop that has lost a GPU is begun anew", "loses-one", 1500 * time.Millisecond, 4, 4},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			n := &NvidiaSMI{Path: stub(t, row.role), Timeout: row.timeout, pause: 10 * time.Millisecond}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var got tally
			ended := make(chan error, 1)
			go func() { ended <- n.Watch(ctx, minInterval, got.add) }() // the select below waits for this goroutine
			eventually(t, fmt.Sprintf("%d readings of %d runs", row.readings, row.runs), func() bool {
				return got.count() >= row.readings && len(runs(t, n.Path)) >= row.runs
			})
			cancel()
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("Watch() = %v", err)
				}
			case <-time.After(testLimit):
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

func TestLinesAreJoinedToReadings(t *testing.T) {
	const row = "%d, GPU-1, 580.1, 143771, 0, 143158, 0, 76.12, 700.00, 345, 3201, 29, 0x1, Disabled, NVIDIA H200\n"
	zero, one := fmt.Sprintf(row, 0), fmt.Sprintf(row, 1)
	for _, test := range []struct {
		name, output string
		want         int // number of readings
	}{
		{"two lines are a round", zero + one + zero + one, 2},
		{"a round that is cut short is dropped", zero + zero + one + one + zero + one, 2},
		{"garbage between lines is passed over", zero + "GPU is lost\n\n" + one, 1},
		{"too much garbage ends the reading", zero + one + strings.Repeat("GPU is lost\n", maxGarbage/12) + zero + one, 1},
		{"so does a line without an end", zero + one + strings.Repeat("x", maxGarbage) + "\n" + zero + one, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := 0
			passOn(strings.NewReader(test.output), (&NvidiaSMI{}).names(gpuColumns()), 2, func(g []GPU) {
				if got++; len(g) != 2 || g[0].Index != 0 || g[1].Index != 1 {
					t.Errorf("reading %d is %s", got, asJSON(t, g))
				}
			})
			if got != test.want {
				t.Errorf("%d readings, want %d", got, test.want)
			}
		})
	}
}
