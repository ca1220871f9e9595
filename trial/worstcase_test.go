package trial

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

func TestTheWorstCaseIsTriedWhereNoProbeShowedIt(t *testing.T) {
	seqs := func(n string) map[string]string { return map[string]string{"max-num-seqs": n} }
	on := func(r *Runner) { r.WorstCase = true }
	for _, row := range []struct {
		name  string
		stub  *stub
		set   func(*Runner)
		burst int // number of requests in the worst case; 0 means that it is not sent
	}{
		{"nobody asks", &stub{capacity: 4.8, facts: seqs("32")}, nil, 0},
		{"no probe came near", &stub{capacity: 4.8, facts: seqs("32")}, on, 32},
		{"the KV cache of 1000 tokens is full before 512 requests run", &stub{capacity: 4.8, facts: seqs("512")}, on, 79}, // 79 requests of at least 16 tokens fill 1.25 times the cache: 1250 / 16
		{"the server does not say how many", &stub{capacity: 4.8}, on, 79},
		{"a probe showed it", &stub{capacity: 4.8, facts: seqs("32"), running: 32}, on, 0},
		{"a probe had a full KV cache", &stub{capacity: 4.8, facts: seqs("32"), drafts: serverctl.Counters{Preemptions: 1}}, on, 0},
		{"a probe nearly showed it", &stub{capacity: 4.8, facts: seqs("32"), running: 31}, on, 32},
		{"nothing was found", &stub{capacity: 0.01, facts: seqs("32")}, on, 0},
	} {
		did, result := trialOf(t, row.stub, Reset, row.set)
		if got := strings.HasSuffix(did, "burst stop"); got != (row.burst > 0) || len(row.stub.burst) != row.burst {
			t.Errorf("%s: did %q with %d requests at once, want %d", row.name, did, len(row.stub.burst), row.burst)
		}
		if said := strings.Contains(strings.Join(result.Notes, " "), "the server survived"); said != (row.burst > 0) || result.Outcome != Measured {
			t.Errorf("%s: %s with notes %q", row.name, result.Outcome, result.Notes)
		}
	}
}

func TestTheGPUTimeOfTheWorstCaseCounts(t *testing.T) {
	_, without := trialOf(t, &stub{capacity: 4.8}, Reset, nil)
	_, with := trialOf(t, &stub{capacity: 4.8}, Reset, func(r *Runner) { r.WorstCase = true })
	if got := with.GPUTime - without.GPUTime; got != 21*time.Second || !reflect.DeepEqual(with.Capacity, without.Capacity) {
		t.Errorf("the worst case adds %s and changes the capacity from %+v to %+v; want 21 s and no change", got, without.Capacity, with.Capacity)
	}
}

func TestAServerThatDiesInTheWorstCaseIsInfeasible(t *testing.T) {
	// The warm-up has two loads and the search four, so the seventh load is the worst case.
	_, result := trialOf(t, &stub{capacity: 4.8, dieAt: 7}, Reset, func(r *Runner) { r.WorstCase = true })
	if result.Outcome != Infeasible || result.Class != serverctl.OOMLoad || result.Capacity.Met() ||
		!strings.Contains(result.Evidence, "CUDA out of memory; it had survived its search, and died under 79 requests at once") {
		t.Errorf("result %+v, want an infeasible point with the server's last words", result)
	}
}

func TestTheWorstCaseHasTheLongestPrompts(t *testing.T) {
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 100, OutputTokens: 400, RangeRatio: 0.8, Requests: 200}, 1)
	if err != nil {
		t.Fatal(err)
	}
	var lengths []int
	for i := range 200 {
		lengths = append(lengths, source.Request(workload.WindowStream, i).PromptTokens)
	}
	slices.Sort(lengths)
	task := Task{Args: []string{"--max_num_seqs=20", "--max-num-batched-tokens", "64"}}
	w := &worstCase{session: &session{runner: &Runner{Source: source}, task: task}}
	chosen := w.requests()
	asked := 0
	for i, q := range chosen {
		asked += q.PromptTokens
		if q.PromptTokens != lengths[199-i] {
			t.Errorf("request %d has %d tokens, want %d", i, q.PromptTokens, lengths[199-i])
		}
	}
	for _, q := range chosen {
		if q.OutputTokens > 16+asked/64 {
			t.Errorf("an answer has %d tokens, want at most %d: the steps that prefill all prompts, and 16", q.OutputTokens, asked/64+16)
		}
	}
	if len(chosen) != 20 {
		t.Errorf("%d requests, want max-num-seqs", len(chosen))
	}
}
