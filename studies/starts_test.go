package studies

import (
	"testing"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

func started(took time.Duration, args ...string) Trial {
	return Trial{State: Done, Args: args, Result: trial.Result{Facts: serverctl.Facts{
		Version: "0.14.1", StartUp: took, Parts: []serverctl.Part{{Name: "loading the weights", Took: took / 2}},
	}}}
}

func TestAStartCostsLessWhenItsGraphsAreCompiled(t *testing.T) {
	starts := StartsOf([]Trial{
		started(300*time.Second, "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.9"),
		started(100*time.Second, "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.95"),
		started(320*time.Second, "--max-num-batched-tokens", "4096"),
		started(110*time.Second, "--max-num-batched-tokens", "8192"),
		{State: Running, Args: []string{"--max-num-batched-tokens", "1"}},
	})
	for _, row := range []struct {
		name string
		args []string
		want time.Duration
	}{
		{"the same graphs", []string{"--gpu-memory-utilization", "0.85", "--max-num-batched-tokens", "8192"}, 110 * time.Second},
		{"graphs that were never compiled", []string{"--max-num-batched-tokens", "2048"}, 300 * time.Second},
	} {
		if got := starts.Cost(row.args); got != row.want {
			t.Errorf("%s: Cost = %v, want %v", row.name, got, row.want)
		}
	}
	if starts.Count() != 4 || starts.Cold() != 300*time.Second || starts.Warm() != 100*time.Second {
		t.Errorf("%d starts, cold %v, warm %v", starts.Count(), starts.Cold(), starts.Warm())
	}
	if parts := starts.Parts(); len(parts) != 1 || parts[0].Took != 55*time.Second {
		t.Errorf("Parts = %v", parts)
	}
	if none := StartsOf(nil); none.Cost(nil) != 0 || none.Cold() != 0 {
		t.Errorf("a study without starts costs %v", none.Cost(nil))
	}
}
