package vllm

import (
	"embed"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"vllmtuner/serverctl/sim"
)

// metricFiles are the metrics of each version without their values, as a server of that version writes them
// (serverctl/vllmlab/record.py). With speculative decoding, the lines of speculation.txt come first
// (vllm/v1/spec_decode/metrics.py).
//
// The simulator does not use Go's client library, because it would write another text, and some clients compare samples
// as text. Python's library also writes gauges NAME_created, and has its own form of numbers.
//
//go:embed versions/*/metrics.txt versions/speculation.txt
var metricFiles embed.FS

// metricLines returns the lines of /metrics without values, with the labels of the recorded server.
func metricLines(o sim.Options) (lines []string) {
	read := func(name string) string {
		text, err := metricFiles.ReadFile("versions/" + name)
		if err != nil {
			panic("vllm: the metrics of vLLM: " + err.Error()) // tests read the files of all versions
		}
		return string(text)
	}
	all := read(releaseOf(o).version + "/metrics.txt")
	if o.SpeculativeTokens > 0 {
		all = read("speculation.txt") + all
	}
	for line := range strings.Lines(all) {
		line = strings.TrimSuffix(line, "\n")
		const position = `position="0"`
		if !strings.Contains(line, position) {
			lines = append(lines, line)
			continue
		}
		for i := range o.SpeculativeTokens {
			lines = append(lines, strings.Replace(line, position, fmt.Sprintf("position=%q", strconv.Itoa(i)), 1))
		}
	}
	return lines
}

// metrics answers with all metrics of vLLM. With --disable-log-stats there are none, as in vLLM.
func (a *api) metrics(w http.ResponseWriter, _ *http.Request) {
	var text string
	a.live.withEngine(func(e *sim.Engine) {
		if !e.Options.NoStats {
			text = a.live.stats.exposition(e)
		}
	})
	// This is the content type of prometheus_client 0.26, with which all versions were recorded.
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = w.Write([]byte(text)) // fails only when the client has disconnected
}

// recordedModel is the model name of the recorded server.
const recordedModel = `model_name="tiny"`

var (
	// withoutCommon removes the labels that nearly all samples have.
	withoutCommon = strings.NewReplacer(
		`{engine="0",`+recordedModel+"}", "", `engine="0",`, "", ","+recordedModel, "", recordedModel+",", "")
	escapeLabel = strings.NewReplacer("\\", "\\\\", "\n", "\\n", "\"", "\\\"")
	labelPair   = regexp.MustCompile(`(\w+)="[^"]*"`)
)

// exposition returns the text of /metrics.
func (s *stats) exposition(e *sim.Engine) string {
	var b strings.Builder
	model := `model_name="` + escapeLabel.Replace(e.Options.Model) + `"`
	values, created := s.values(e), float64(s.since.UnixNano())/1e9
	for _, line := range s.lines {
		name, _, isSample := strings.Cut(line, "{")
		value := values[withoutCommon.Replace(line)]
		switch {
		case !isSample: // a comment
			b.WriteString(line + "\n")
			if words := strings.Fields(line); words[1] == "TYPE" && words[3] == "histogram" {
				s.histograms[words[2]].write(&b, words[2], model)
			}
			continue
		case isOfHistogram(name): // the histogram's samples were already written after its TYPE line
			continue
		case strings.HasSuffix(name, "_created"):
			value = created
		case name == "vllm:cache_config_info":
			line, value = cacheConfig(line, e), 1
		}
		b.WriteString(strings.Replace(line, recordedModel, model, 1) + " " + pythonFloat(value) + "\n")
	}
	return b.String()
}

// isOfHistogram reports whether samples of this name belong to a histogram.
func isOfHistogram(name string) bool {
	return strings.HasSuffix(name, "_bucket") || strings.HasSuffix(name, "_count") || strings.HasSuffix(name, "_sum")
}

// values returns the simulated values. A key is the name and the labels of a sample, without the labels that nearly
// all samples have. Samples that are not listed have the value 0, because the simulator does not have their features.
func (s *stats) values(e *sim.Engine) map[string]float64 {
	t, waiting := e.Totals, float64(e.Waiting())
	values := map[string]float64{
		"vllm:num_requests_running":                                    float64(e.Running()),
		"vllm:num_requests_waiting":                                    waiting,
		`vllm:num_requests_waiting_by_reason{reason="capacity"}`:       waiting,
		`vllm:engine_sleep_state{sleep_state="awake"}`:                 1,
		"vllm:kv_cache_usage_perc":                                     e.KVUsage(),
		"vllm:prefix_cache_queries_total":                              float64(t.PrefixQueries),
		"vllm:prefix_cache_hits_total":                                 float64(t.PrefixHits),
		`vllm:prompt_tokens_cached_by_source_total{source="device"}`:   float64(t.PrefixHits),
		"vllm:num_preemptions_total":                                   float64(t.Preemptions),
		"vllm:prompt_tokens_total":                                     float64(s.promptTokens),
		`vllm:prompt_tokens_by_source_total{source="local_compute"}`:   float64(s.promptTokens - s.cachedTokens),
		`vllm:prompt_tokens_by_source_total{source="local_cache_hit"}`: float64(s.cachedTokens),
		"vllm:prompt_tokens_cached_total":                              float64(s.cachedTokens),
		"vllm:generation_tokens_total":                                 float64(s.generationTokens),
		`vllm:request_success_total{finished_reason="length"}`:         float64(s.finished), // no answer ends by itself
		"vllm:spec_decode_num_drafts_total":                            float64(t.Drafts),
		"vllm:spec_decode_num_draft_tokens_total":                      float64(t.DraftTokens),
		"vllm:spec_decode_num_accepted_tokens_total":                   float64(t.AcceptedTokens),
	}
	for i, n := range t.AcceptedPerPos {
		values[fmt.Sprintf(`vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}`, i)] = float64(n)
	}
	return values
}

// cacheConfig sets the labels of vLLM's CacheConfig that the simulator models. Other labels keep their recorded values.
func cacheConfig(line string, e *sim.Engine) string {
	o := e.Options
	fields := map[string]string{
		"block_size":                     strconv.Itoa(sim.BlockSize),
		"effective_attention_block_size": strconv.Itoa(sim.BlockSize),
		"enable_prefix_caching":          pythonValue(!o.NoPrefixCaching),
		"gpu_memory_utilization":         pythonValue(o.GPUMemoryUtilization),
		"num_gpu_blocks":                 strconv.Itoa(e.KVTokens() / sim.BlockSize),
		"kv_cache_size_tokens":           strconv.Itoa(e.KVTokens()),
		"kv_cache_max_concurrency":       pythonValue(float64(e.KVTokens()) / float64(o.MaxModelLen)),
	}
	for label, flag := range map[string]string{"cache_dtype": "kv_cache_dtype", "swap_space": "swap_space"} {
		if v, given := o.Given[flag]; given {
			fields[label] = strings.Trim(pythonValue(v), "'")
		}
	}
	return labelPair.ReplaceAllStringFunc(line, func(pair string) string {
		name, _, _ := strings.Cut(pair, "=")
		if value, ok := fields[name]; ok {
			return name + `="` + escapeLabel.Replace(value) + `"`
		}
		return pair
	})
}

// pythonFloat writes a float as prometheus_client's floatToGoString does: Python's repr, and an exponent from 1e6 on.
func pythonFloat(x float64) string {
	if math.IsInf(x, 1) {
		return "+Inf"
	}
	text := pythonRepr(x)
	dot := strings.IndexByte(text, '.')
	if x <= 0 || dot <= 6 {
		return text
	}
	mantissa := strings.TrimRight(text[:1]+"."+text[1:dot]+text[dot+1:], "0.")
	return fmt.Sprintf("%se+%02d", mantissa, dot-1)
}
