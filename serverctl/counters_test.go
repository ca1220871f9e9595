package serverctl

import (
	"os"
	"reflect"
	"strings"
	"testing"
)

func TestParseCounters(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile("testdata/" + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, row := range []struct {
		name, text string
		want       Counters
		err        string
	}{
		{"0.14.1", read("metrics-0.14.1.txt"), Counters{PrefixQueries: 2, PromptTokens: 2, GenerationTokens: 8}, ""},
		{"0.25.1 on an H200 under load", read("metrics-0.25.1.txt"), Counters{Running: 122, KVUsage: 0.3013870077322681, PrefixQueries: 3380180,
			PrefixHits: 3069280, PromptTokens: 3380180, GenerationTokens: 240064}, ""},
		{"0.32.0", read("metrics-0.32.0.txt"), Counters{PrefixQueries: 3967, PromptTokens: 3967, GenerationTokens: 1927}, ""},
		{"two engines are added, their KV usage is averaged", `
vllm:num_requests_running{engine="0",model_name="a}b {c"} 3.0
vllm:num_requests_running{engine="1",model_name="a}b {c"} 4.0 1795204102708
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.7
vllm:num_preemptions_total 2
vllm:num_preemptions_created 1.7e+09
vllm:spec_decode_num_drafts_total{engine="0"} 184
vllm:spec_decode_num_draft_tokens_total{engine="0"} 544
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 532
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 180
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 172
`, Counters{Running: 7, Waiting: 1, KVUsage: 0.6, Preemptions: 2, Drafts: 184, DraftTokens: 544, AcceptedTokens: 532,
			AcceptedAt: []float64{200, 0, 172}}, ""},
		{"a position that is none", "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"x\"} 1\n", Counters{}, `the position "x" is not a number`},
		{"no statistics", "python_info 1\n", Counters{}, "remove --disable-log-stats"},
		{"a figure that is none", "vllm:num_requests_running{engine=\"0\"} many\n", Counters{}, `line 1 of its answer, "vllm:num_requests_running{engine=\"0\"} many", is not in the format`},
	} {
		got, err := parseCounters(row.text)
		if row.err != "" {
			if err == nil || !strings.Contains(err.Error(), row.err) {
				t.Errorf("%s: error %v, want %q", row.name, err, row.err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: parseCounters = %+v, %v, want %+v", row.name, got, err, row.want)
		}
	}
}

func FuzzParseCounters(f *testing.F) {
	f.Add("vllm:num_requests_running{engine=\"0\"} 3.0\n}{")
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := parseCounters(text); err != nil && !reflect.DeepEqual(c, Counters{}) {
			t.Errorf("counters beside an error: %+v, %v", c, err)
		}
	})
}
