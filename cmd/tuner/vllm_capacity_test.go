//go:build vllm && linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// A tinyCapacity has the fields that the test reads from tuner bench --find-capacity -o json.
type tinyCapacity struct {
	Capacity *struct {
		Rate, Lowest, Highest float64
		StdErr                float64 `json:"std_err"`
		Bound, Binding, Why   string
		Probes                int
	}
}

// TestVLLMCapacity searches twice for the capacity of one real server, with different requests and arrivals. The two
// results must agree within their own standard errors. The probes are short, so these errors are large.
func TestVLLMCapacity(t *testing.T) {
	if testing.Short() {
		t.Skip("the short form leaves out the capacity, which needs a quiet machine")
	}
	tuner := buildTuner(t)
	for _, version := range []string{"0.14.1", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			ctx, cancel := contextOf(t)
			defer cancel()
			s := &tinyRun{rig: openRig(t, version), tuner: tuner, dir: t.ArtifactDir()}
			url, server := s.rig.serve(t, filepath.Join(s.dir, "server.log"), []string{"--served-model-name", "tiny",
				"--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "2"})
			defer server.stop()
			var found [2]tinyCapacity
			for i := range found {
				// With two requests at a time, the tiny model gives about 16 answers of 64 tokens a second. The client
				// on the same machine can send more than that.
				out, foreign := s.runTool(t, exec.CommandContext(ctx, s.tuner, "bench", "--url", url, "--workload", "random",
					"--input-tokens", "128", "--output-tokens", "64", "--range-ratio", "0.3", "--vocab-size", "4096", "--find-capacity",
					"--rate", "12", "--max-rate", "100", "--requests", "300", "--seconds", "12", "--lead-in", "3s", "--budget", searchBudget(ctx, len(found)-i).String(),
					"--slo", "p99 ttft <= 1500ms", "--seed", fmt.Sprint(1+i), "-o", "json"))
				found[i] = capacityIn(t, out)
				t.Logf("%d: %+v, other work %.0f %%", i+1, *found[i].Capacity, 100*foreign)
			}
			a, b := found[0].Capacity, found[1].Capacity
			stdErr := math.Hypot(a.StdErr, b.StdErr)
			if off := math.Abs(math.Log(a.Rate / b.Rate)); a.Bound != "exact" || b.Bound != "exact" || a.StdErr == 0 || b.StdErr == 0 || off > 1.96*stdErr {
				t.Errorf("the capacities, %s %.3g and %s %.3g req/s, differ by %.0f %%, want exact capacities that differ by at most %.0f %%", a.Bound, a.Rate, b.Bound, b.Rate, 100*off, 196*stdErr)
			}
		})
	}
}

// maxSearch is the most time that one search may take.
const maxSearch = 4 * time.Minute

// searchBudget returns the time for the next one of the remaining searches. It is maxSearch, or less if a slow start
// has left too little time. Then the time until the test's deadline, minus one minute to stop the server, is divided
// equally among the searches.
func searchBudget(ctx context.Context, remaining int) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return maxSearch
	}
	return min(maxSearch, ((time.Until(deadline) - time.Minute) / time.Duration(remaining)).Round(time.Second))
}

// capacityIn returns the last answer in the output of tuner bench.
func capacityIn(t *testing.T, out []byte) (last tinyCapacity) {
	t.Helper()
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var next tinyCapacity
		switch err := d.Decode(&next); {
		case errors.Is(err, io.EOF) && last.Capacity != nil:
			return last
		case err != nil:
			t.Fatalf("tuner bench --find-capacity: %v\n%s", err, out)
		case next.Capacity != nil:
			last = next
		}
	}
}
