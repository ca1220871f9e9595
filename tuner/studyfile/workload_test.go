package studyfile

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"vllmtuner/bench/workload"
)

func TestWorkloadsAreRead(t *testing.T) {
	tests := []struct {
		text  string
		want  workload.Spec
		world string
	}{
		{"{kind: random, prefix_tokens: 64, range_ratio: {input: 0.5, output: 0.25}}",
			workload.Spec{Kind: "random", PrefixTokens: 64, InputRangeRatio: 0.5, OutputRangeRatio: 0.25},
			"random, completions, prefix tokens 64, input range ratio 0.5, output range ratio 0.25"},
		{"{kind: prefix-repetition, prefix_tokens: 512, suffix_tokens: 128, prefixes: 20, output_tokens: 64, requests: 400, repeat: salt}",
			workload.Spec{Kind: "prefix-repetition", PrefixTokens: 512, SuffixTokens: 128, Prefixes: 20, OutputTokens: 64, Requests: 400, Repeat: workload.Salt},
			"prefix-repetition, completions, output tokens 64, requests 400, prefix tokens 512, suffix tokens 128, prefixes 20, repeat salt"},
		{"{kind: shared-prefix, input_tokens: 4000, hit_percent: 60, groups: 8, range_ratio: 0.1}",
			workload.Spec{Kind: "shared-prefix", InputTokens: 4000, HitPercent: 60, Groups: 8, RangeRatio: 0.1},
			"shared-prefix, completions, input tokens 4000, range ratio 0.1, hit percent 60, groups 8"},
		{"{kind: trace, path: t.csv, layout: azure, skip_bad_rows: true, repeat: error}",
			workload.Spec{Kind: "trace", Path: "dir/t.csv", Layout: "azure", SkipBadRows: true, Repeat: workload.ErrorEnded},
			"trace, completions, path t.csv, layout azure, skip bad rows true, repeat error"},
		{"{kind: capture, path: log.jsonl, endpoint: chat, output: natural}",
			workload.Spec{Kind: "capture", Path: "dir/log.jsonl", Endpoint: "chat", Output: workload.Natural},
			"capture, chat, path log.jsonl, output natural"},
		{"{kind: phase1, repeat: salt, output: pinned}", workload.Spec{Kind: "phase1", Repeat: workload.Salt}, "phase1, completions, repeat salt"},
	}
	for _, test := range tests {
		f := parse(t, strings.Replace(full, "{kind: sharegpt, path: data/real.json, endpoint: chat, output_tokens: 64, requests: 200}", test.text, 1)+"allow_meaningless_speculation: true\n")
		if test.want.Endpoint == "" {
			test.want.Endpoint = workload.Completions
		}
		if got := f.WorkloadSpec(); got != test.want {
			t.Errorf("%s: WorkloadSpec = %+v, want %+v", test.text, got, test.want)
		}
		if got := f.World()["workload"]; got != test.world {
			t.Errorf("%s: the world has %q, want %q", test.text, got, test.world)
		}
	}
}

// With random tokens no draft is accepted. So a study refuses speculation for every kind of workload that has random
// tokens.
func TestSpeculationNeedsRealPrompts(t *testing.T) {
	for _, kind := range workload.Kinds {
		settings := map[string]string{"shared-prefix": ", hit_percent: 50", "sharegpt": ", path: x", "jsonl": ", path: x", "trace": ", path: x", "capture": ", path: x"}
		text := strings.Replace(full, "{kind: sharegpt, path: data/real.json, endpoint: chat, output_tokens: 64, requests: 200}", "{kind: "+kind+settings[kind]+"}", 1)
		_, err := Parse("study.yaml", []byte(text))
		real := kind == "sharegpt" || kind == "jsonl" || kind == "capture"
		if refused := err != nil && strings.Contains(err.Error(), "has random tokens, and no draft of them is accepted"); refused == real {
			t.Errorf("%s: Parse says %v", kind, err)
		}
	}
}

// Every example in docs/workloads.md must be a legal workload, and it must be possible to open its data.
func TestWorkloadsOfTheDocument(t *testing.T) {
	const root = "../../"
	text, err := os.ReadFile(root + "docs/workloads.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for _, block := range regexp.MustCompile("(?s)```yaml\n(workload: .*?)```").FindAllStringSubmatch(string(text), -1) {
		study := "version: 1\nname: doc\nmodel: a/model\nserver: {command: [vllm, serve]}\nslo: {ttft_p99: 1s}\nparameters: {enable-chunked-prefill: bool}\n"
		f, err := Parse(root+"study.yaml", []byte(study+block[1])) // paths are relative to the root
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := workload.Open(f.WorkloadSpec(), 1); err != nil {
			t.Errorf("%s: %v", block[1], err)
		}
		seen[f.Workload.Kind] = true
	}
	for _, kind := range workload.Kinds {
		if !seen[kind] && kind != "phase1" {
			t.Errorf("docs/workloads.md has no snippet of kind %s", kind)
		}
	}
}
