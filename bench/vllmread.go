package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench/workload"
)

// A VLLMRun is the content of a result file of vllm bench serve.
type VLLMRun struct {
	Meta        VLLMMeta
	Measurement Measurement
	Samples     []Sample // empty if the file lacks the lists of --save-detailed; 0.14.1 writes no start times, so all its samples start at 0
}

// ReadVLLMResult reads the JSON of vllm bench serve --save-result (vllm/benchmarks/serve.py, 0.14.1, 0.32 and 0.33). It
// counts requests over the limits if the file has the lists of --save-detailed. The file must have the given
// percentiles of TTFT and TPOT, and their 99th percentiles. If one is missing, the error names the option that writes
// it. A missing percentile is not taken as 0 ms, because 0 ms would be within every limit. For the same reason a run
// without completed requests has no latencies, although vLLM writes 0 ms.
//
// A file does not tell everything. Percentiles that the file lacks, and the largest latency of a file without lists,
// are 0. Without lists two numbers are estimates: the number of answers with a TPOT, and the number of gaps between
// tokens. vLLM counts an answer that broke off under HTTP 200 as completed.
func ReadVLLMResult(text []byte, limits []Limit, percentiles ...float64) (VLLMRun, error) {
	f, err := readVLLMFields(text)
	if err != nil {
		return VLLMRun{}, fmt.Errorf("vllm bench serve result: %w", err)
	}
	run := VLLMRun{Meta: f.meta()}
	run.Samples = f.samples()
	run.Measurement = f.measurement(&run, limits, percentiles)
	if err := f.problem(); err != nil {
		return VLLMRun{}, fmt.Errorf("vllm bench serve result: %w", err)
	}
	return run, nil
}

// vllmFields holds the fields of a result and the errors found in them.
type vllmFields struct {
	raw     map[string]json.RawMessage
	missing []string
	wrong   []error
}

func readVLLMFields(text []byte) (*vllmFields, error) {
	f := &vllmFields{}
	d := json.NewDecoder(bytes.NewReader(withoutNaN(text)))
	if err := d.Decode(&f.raw); err != nil {
		why := err.Error()
		if _, other := errors.AsType[*json.UnmarshalTypeError](err); other {
			why = "it is another JSON value"
		}
		return nil, fmt.Errorf("not a JSON object: %s", why)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("the file has more than one object, as --append-result writes it: give each result its own file")
	}
	return f, nil
}

// stringOrNaN matches a number that Python writes but JSON does not allow. It also matches a whole string, so that
// nothing is replaced within strings.
var stringOrNaN = regexp.MustCompile(`(?s)"(\\.|[^"\\])*"|NaN|-?Infinity`)

// withoutNaN replaces NaN, Infinity and -Infinity by null.
func withoutNaN(text []byte) []byte {
	if !bytes.Contains(text, []byte("NaN")) && !bytes.Contains(text, []byte("Infinity")) {
		return text // a file with the times of all tokens is large, so do not copy it without need
	}
	return stringOrNaN.ReplaceAllFunc(text, func(match []byte) []byte {
		if match[0] == '"' {
			return match
		}
		return []byte("null")
	})
}

// problem returns the errors found in the fields.
func (f *vllmFields) problem() error {
	if len(f.missing) > 0 {
		f.wrong = append(f.wrong, fmt.Errorf("missing %s: run vllm bench serve with --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99,99.9", strings.Join(f.missing, ", ")))
	}
	return errors.Join(f.wrong...)
}

// get decodes a field. It reports whether the file has the field with a value other than null.
func (f *vllmFields) get(key string, to any) bool {
	raw, ok := f.raw[key]
	if !ok || string(raw) == "null" {
		return false
	}
	if err := json.Unmarshal(raw, to); err != nil {
		f.wrong = append(f.wrong, fmt.Errorf("%s: %w", key, err))
		return false
	}
	return true
}

// nonNegative returns a required number that cannot be negative.
func (f *vllmFields) nonNegative(key string) float64 {
	var n float64
	switch there := f.get(key, &n); {
	case there && n < 0:
		f.wrong = append(f.wrong, fmt.Errorf("%s: %g is negative", key, n))
	case !there && f.raw[key] == nil:
		f.missing = append(f.missing, key)
	case !there && string(f.raw[key]) == "null":
		f.wrong = append(f.wrong, fmt.Errorf("%s: is null or NaN, must be a number", key))
	}
	return n
}

// count returns a required whole number.
func (f *vllmFields) count(key string) int {
	n := f.nonNegative(key)
	if n > math.MaxInt32*1000 || n != math.Trunc(n) {
		f.wrong = append(f.wrong, fmt.Errorf("%s: %g is not a count", key, n))
		return 0
	}
	return int(n)
}

// duration converts seconds to a duration. An error names the value by its key.
func (f *vllmFields) duration(seconds float64, key string) time.Duration {
	const maxSeconds = 1e7 // about four months; larger values are errors, because their sums could overflow
	if seconds < 0 || seconds > maxSeconds {
		f.wrong = append(f.wrong, fmt.Errorf("%s: is %g s, must be 0 to %g s", key, seconds, float64(maxSeconds)))
		return 0
	}
	return time.Duration(seconds * float64(time.Second))
}

func (f *vllmFields) meta() VLLMMeta {
	m := VLLMMeta{Prompts: f.count("num_prompts"), Metadata: make(map[string]string)}
	for key, raw := range f.raw {
		var text string
		if len(raw) > 0 && raw[0] == '"' && f.get(key, &text) {
			switch key {
			case "date":
				m.Date, _ = time.ParseInLocation(vllmDate, text, time.Local) // an invalid date stays zero; no figure depends on it
			case "backend":
				m.Backend = text
			case "label":
				m.Label = text
			case "model_id":
				m.Model = text
			case "tokenizer_id":
				m.Tokenizer = text
			case "endpoint_type", "request_rate":
			default:
				m.Metadata[key] = text
			}
		}
	}
	var rate any
	switch f.get("request_rate", &rate); r := rate.(type) {
	case float64:
		m.Rate = r
	case string:
		if r == "inf" {
			m.Rate = math.Inf(1)
			break
		}
		f.wrong = append(f.wrong, fmt.Errorf(`request_rate: is %q, must be a number or "inf"`, r))
	default:
		f.missing = append(f.missing, "request_rate")
	}
	f.get("burstiness", &m.Burstiness)
	f.get("max_concurrency", &m.MaxConcurrency)
	return m
}

// measurement returns the figures of the run. If the file has lists, this method computes the figures from the lists.
// Otherwise it takes the figures that vLLM wrote.
func (f *vllmFields) measurement(run *VLLMRun, limits []Limit, percentiles []float64) Measurement {
	duration := f.duration(f.nonNegative("duration"), "duration")
	m := Measurement{Window: duration, Exact: true, PromptTokens: f.count("total_input_tokens"), OutputTokens: f.count("total_output_tokens")}
	if rate := run.Meta.Rate; rate > 0 && !math.IsInf(rate, 0) { // in vLLM the window ends when the last request is sent
		m.Rate, m.Window = rate, f.duration(float64(run.Meta.Prompts)/rate, "num_prompts / request_rate")
	}
	if run.Samples != nil {
		l := Measure(Run{Samples: run.Samples}, Scope{Limits: limits})
		m.Requests, m.Completed, m.Failed, m.Failures = l.Requests, l.Completed, l.Failed, l.Failures
		m.TTFT, m.TPOT, m.ITL, m.E2E, m.Over, m.Good = l.TTFT, l.TPOT, l.ITL, l.E2E, l.Over, l.Good
	} else {
		f.summary(&m, run.Meta.Prompts, percentiles)
	}
	m.rates(duration)
	if len(m.Over) == 0 {
		f.get("request_goodput", &m.Goodput) // null without --goodput
	}
	if m.Window > 0 {
		m.MeanInFlight = m.E2E.Mean / 1000 * float64(m.E2E.N) / m.Window.Seconds()
	}
	var chunks float64
	if f.get("max_output_tokens_per_s", &chunks) {
		m.PeakChunks = int(chunks)
	}
	f.get("max_concurrent_requests", &m.PeakInFlight)
	return m
}

// summary reads the figures of a file without lists.
func (f *vllmFields) summary(m *Measurement, prompts int, percentiles []float64) {
	m.Completed = f.count("completed")
	m.Failed = max(0, prompts-m.Completed)
	if _, there := f.raw["failed"]; there {
		m.Failed = f.count("failed")
	}
	m.Requests = m.Completed + m.Failed
	if m.Completed == 0 {
		return
	}
	percentiles = append([]float64{99}, percentiles...)
	m.TTFT, m.TPOT = f.stats("ttft", m.Completed, percentiles), f.stats("tpot", m.Completed, percentiles)
	if _, there := f.raw["mean_itl_ms"]; there {
		m.ITL = f.stats("itl", max(0, m.OutputTokens-m.Completed), nil)
	}
	if _, there := f.raw["mean_e2el_ms"]; there {
		m.E2E = f.stats("e2el", m.Completed, nil)
	}
}

// stats reads one metric. The file must have the given percentiles.
func (f *vllmFields) stats(metric string, n int, percentiles []float64) Stats {
	s := Stats{N: n, Mean: f.nonNegative("mean_" + metric + "_ms"), P50: f.nonNegative("median_" + metric + "_ms")}
	f.get("std_"+metric+"_ms", &s.Std)
	for _, p := range vllmPercentiles[1:] {
		if !slices.Contains(percentiles, p) {
			f.get(vllmKey(p, metric), s.percentile(p))
		}
	}
	for _, p := range slices.Compact(slices.Sorted(slices.Values(percentiles))) {
		value := f.nonNegative(vllmKey(p, metric))
		if to := s.percentile(p); to != nil {
			*to = value
		}
	}
	return s
}

// vllmLists are the lists of --save-detailed, with one entry for each request. Times are in seconds.
type vllmLists struct {
	input, output             []int
	ttfts, latencies, started []float64
	itls                      [][]float64
	errors                    []string
}

// lists returns the lists of a file, or nil if it has none.
func (f *vllmFields) lists() *vllmLists {
	var l vllmLists
	if !f.get("ttfts", &l.ttfts) || !f.get("output_lens", &l.output) || !f.get("itls", &l.itls) || !f.get("errors", &l.errors) {
		return nil
	}
	n := len(l.ttfts)
	f.get("input_lens", &l.input)
	if !f.get("start_times", &l.started) { // vLLM 0.14.1 writes no start times
		l.started = make([]float64, n)
	}
	if !f.get("latencies", &l.latencies) { // vLLM 0.14.1 writes no latencies, so sum up the parts
		for i := range min(n, len(l.itls)) {
			latency := l.ttfts[i]
			for _, gap := range l.itls[i] {
				latency += gap
			}
			l.latencies = append(l.latencies, latency)
		}
	}
	for _, other := range []int{len(l.input), len(l.output), len(l.itls), len(l.latencies), len(l.started), len(l.errors)} {
		if other != n {
			f.wrong = append(f.wrong, fmt.Errorf("the lists of requests differ in length: ttfts has %d values, another list has %d", n, other))
			return nil
		}
	}
	return &l
}

// samples returns the requests of a result, or nil if the file has no lists of requests.
func (f *vllmFields) samples() []Sample {
	l := f.lists()
	if l == nil {
		return nil
	}
	begin := math.Inf(1) // the earliest start; in 0.33, times count from the boot of the machine, so this start becomes 0
	for i, started := range l.started {
		if l.errors[i] == "" {
			begin = min(begin, started)
		}
	}
	all := make([]Sample, len(l.ttfts))
	for i := range all {
		all[i] = f.sample(l, i, begin)
	}
	return all
}

// sample returns the i-th request as a Sample.
func (f *vllmFields) sample(l *vllmLists, i int, begin float64) Sample {
	start := f.duration(max(0, l.started[i]-begin), fmt.Sprintf("start_times[%d]", i))
	end := start + f.duration(l.latencies[i], fmt.Sprintf("latencies[%d]", i))
	s := Sample{
		Phase: workload.Window, Index: i, Conversation: -1, PromptTokens: l.input[i],
		Due: start, Sent: start, Connected: start, End: max(end, 1), Failure: vllmFailure(l.errors[i], l.output[i]),
	}
	if s.Failure != "" {
		s.Detail = firstLine(l.errors[i])
		return s
	}
	s.First, s.Last = start+f.duration(l.ttfts[i], fmt.Sprintf("ttfts[%d]", i)), end
	s.OutputTokens, s.Chunks = l.output[i], 1+len(l.itls[i])
	for _, gap := range l.itls[i] {
		s.Gaps = append(s.Gaps, f.duration(gap, fmt.Sprintf("itls[%d]", i)))
	}
	return s
}

// vllmFailure classifies a failure by the text that vLLM stores for it. The text is the reason phrase of an HTTP status
// (which may be empty), a sentence about missing chunks, or a traceback.
func vllmFailure(text string, tokens int) Failure {
	switch {
	case strings.HasPrefix(text, "Never received"), text == "" && tokens == 0:
		return NoTokens
	case strings.HasPrefix(text, "Traceback"):
		return Reset
	case text != "":
		return Status
	}
	return ""
}
