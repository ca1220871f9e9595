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

// The first start with a compile key is cold, and later starts with the same key are warm.
func TestStarts(t *testing.T) {
	starts := StartsOf([]Trial{
		started(300*time.Second, "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.9"),
		started(100*time.Second, "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.95"),
		started(320*time.Second, "--max-num-batched-tokens", "4096"),
		started(110*time.Second, "--max-num-batched-tokens", "8192"),
		{State: Running, Args: []string{"--max-num-batched-tokens", "1"}},
	})
	if starts.Cold != 300*time.Second || starts.Warm != 100*time.Second {
		t.Errorf("Cold = %v, Warm = %v; want 300 s and 100 s", starts.Cold, starts.Warm)
	}
	if parts := starts.Parts; len(parts) != 1 || parts[0].Took != 55*time.Second {
		t.Errorf("Parts = %v", parts)
	}
	if cold := StartsOf(nil).Cold; cold != 0 {
		t.Errorf("Cold = %v without starts, want 0", cold)
	}
}
