package bench

import (
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func testdata(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// fieldsOf decodes a result.
func fieldsOf(t testing.TB, text []byte) map[string]any {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	return fields
}

// seriesOf counts the chunks of samples in each second after the start, as vLLM does.
func seriesOf(samples []Sample) Series {
	s := make(Series, 1000)
	for i := range samples {
		if at := samples[i].First; samples[i].OK() {
			s[second(at)].Chunks++
			for _, gap := range samples[i].Gaps {
				at += gap
				s[second(at)].Chunks++
			}
		}
	}
	return s
}

// rewritten reads a result file. It returns the fields that we write for the same run, and the fields of the file.
func rewritten(t *testing.T, name string, limits []Limit) (written, file map[string]any) {
	t.Helper()
	text := testdata(t, name)
	run, err := ReadVLLMResult(text, limits)
	if err != nil {
		t.Fatal(err)
	}
	m := Measure(Run{Samples: run.Samples, Series: seriesOf(run.Samples)}, Scope{Natural: true, Limits: limits})
	m.rates(run.Measurement.Duration)
	if run.Samples == nil {
		m = run.Measurement
	}
	result, err := NewVLLMResult(m, run.Meta, run.Samples)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	return fieldsOf(t, ours), fieldsOf(t, text)
}

// Measure computes the figures of a real run from its requests. They must equal the figures that vllm bench serve
// wrote. The tolerance allows for the nanosecond resolution of time.Duration. 0.14.1 writes no start times, so the
// peaks cannot be compared. It writes no latencies either, so ReadVLLMResult sums up the parts of an answer. These sums
// are a microsecond too long, because 0.14.1 reads the clock twice at the first token.
func TestMeasureAgreesWithVLLMsOwnFigures(t *testing.T) {
	slow := []Limit{{MetricTTFT, time.Hour}}
	for _, row := range []struct {
		name      string
		unknown   []string
		tolerance float64
	}{
		{"vllm-0.32-openai.json", []string{"queue_times"}, 3e-6}, // our TTFT includes the queue time
		{"vllm-0.14.1.json", []string{"max_output_tokens_per_s", "max_concurrent_requests"}, 5e-5},
	} {
		ours, theirs := rewritten(t, row.name, slow)
		ours["errors"] = theirs["errors"] // our texts begin with the kind of the failure
		for _, key := range slices.Sorted(maps.Keys(theirs)) {
			if slices.Contains(row.unknown, key) {
				continue
			}
			got, there := ours[key]
			want := theirs[key]
			if list, ok := want.([]any); ok && key == "start_times" {
				want = sinceEarliest(list)
			}
			if !there || !near(got, want, row.tolerance) {
				t.Errorf("%s: %s = %v, want %v", row.name, key, got, want)
			}
		}
	}
}

// sinceEarliest returns times relative to the earliest one.
func sinceEarliest(list []any) []any {
	earliest := math.Inf(1)
	for _, v := range list {
		earliest = min(earliest, v.(float64))
	}
	all := make([]any, len(list))
	for i, v := range list {
		all[i] = v.(float64) - earliest
	}
	return all
}

// near reports whether two JSON values are equal. Numbers may differ by a relative tolerance or by 2 ns.
func near(a, b any, tolerance float64) bool {
	switch b := b.(type) {
	case float64:
		a, ok := a.(float64)
		return ok && math.Abs(a-b) <= max(tolerance*math.Abs(b), 2e-9)
	case []any:
		a, ok := a.([]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for i := range b {
			if !near(a[i], b[i], tolerance) {
				return false
			}
		}
		return true
	}
	return reflect.DeepEqual(a, b)
}

// The wanted counts were computed from the file's lists with numpy: 6 requests over 12 ms of TTFT, 20 over 1.1 ms of
// TPOT, 27 over 45 ms of E2EL, and 29 over no limit.
func TestGoodputOfARealRun(t *testing.T) {
	ms := time.Millisecond
	run, err := ReadVLLMResult(testdata(t, "vllm-0.32-openai.json"), []Limit{{MetricTTFT, 12 * ms}, {MetricTPOT, 1100 * time.Microsecond}, {MetricE2EL, 45 * ms}})
	if err != nil {
		t.Fatal(err)
	}
	m := run.Measurement
	if m.Over[0].Over != 6 || m.Over[1].Over != 20 || m.Over[2].Over != 27 || m.Good != 29 || math.Abs(m.Goodput-1.9276274134166447) > 1e-6 {
		t.Errorf("over %+v, good %d, goodput %g, want 6, 20, 27, 29 and 1.9276", m.Over, m.Good, m.Goodput)
	}
}

func TestAResultWithoutListsIsReadFromItsFigures(t *testing.T) {
	run, err := ReadVLLMResult(testdata(t, "vllm-0.32-chat.json"), nil, 95)
	if err != nil {
		t.Fatal(err)
	}
	m := run.Measurement
	want := Stats{N: 60, Mean: 13.478230749979048, Std: 10.243730808573847, P50: 10.410965499886515, P90: 19.809495200024706, P95: 37.85557004944166, P99: 54.28168208987699}
	if m.TTFT != want || m.Completed != 60 || m.Failed != 0 || m.Requests != 60 || m.Rate != 4 || m.Window != 15*time.Second || m.PeakInFlight != 6 || m.PeakChunks != 214 {
		t.Errorf("%+v, want TTFT %+v", m, want)
	}
	if m.ITL.P99 != 2.978913179813386 || m.E2E.P99 != 69.22332220992755 || math.Abs(m.OutputThroughput-127.576749590674) > 1e-6 || math.Abs(m.Goodput-3.98885) > 1e-5 {
		t.Errorf("%+v", m)
	}
	if run.Meta.Backend != "openai-chat" || run.Meta.Model != "tiny" || run.Meta.Date.Format(vllmDate) != "20261120-200452" || run.Samples != nil {
		t.Errorf("%+v", run.Meta)
	}
}

// If every request fails, vLLM writes latencies of 0 ms and exits with success.
func TestAFailedRunIsNotAFastRun(t *testing.T) {
	run, err := ReadVLLMResult(testdata(t, "vllm-0.32-all-failed.json"), nil, 99.9)
	if err != nil {
		t.Fatal(err)
	}
	m := run.Measurement
	if m.Completed != 0 || m.Failed != 12 || m.Requests != 12 || m.TTFT != (Stats{}) || run.Meta.Metadata["a"] != "b" {
		t.Errorf("%+v, want 12 failed requests and no latencies", m)
	}
	ours, _ := rewritten(t, "vllm-0.32-all-failed.json", nil)
	for _, key := range []string{"mean_ttft_ms", "p99_tpot_ms", "p99.9_e2el_ms"} {
		if value, there := ours[key]; !there || value != nil {
			t.Errorf("%s = %v, want null: 0 ms would keep every limit", key, value)
		}
	}
}

func TestFailuresOfAResultKeepTheirKind(t *testing.T) {
	run, err := ReadVLLMResult(testdata(t, "vllm-0.14.1.json"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if m := run.Measurement; m.Completed != 10 || m.Failed != 2 || m.Failures[Status] != 2 || m.TPOT.N != 9 || run.Samples[4].Detail != "Internal Server Error" {
		t.Errorf("%+v, want 10 completed, one of them with one token, and two refused", m)
	}
	for text, want := range map[string]Failure{"": NoTokens, "Never received a valid chunk": NoTokens, "Traceback (most recent": Reset, "Bad Request": Status} {
		if got := vllmFailure(text, 0); got != want {
			t.Errorf("failure of %q: %s, want %s", text, got, want)
		}
	}
}

// changed returns a file with some of its fields replaced by JSON. The text "" removes a field.
func changed(t *testing.T, name string, changes map[string]string) []byte {
	t.Helper()
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(testdata(t, name), &fields); err != nil {
		t.Fatal(err)
	}
	for key, value := range changes {
		if fields[key] = json.RawMessage(value); value == "" {
			delete(fields, key)
		}
	}
	var b strings.Builder
	for key, value := range fields { // json.Marshal would reject NaN
		b.WriteString(`, "` + key + `": ` + string(value))
	}
	return []byte("{" + b.String()[1:] + "}\n")
}

func TestABadResultIsRefused(t *testing.T) {
	const remedy = ": run vllm bench serve with --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99,99.9"
	for _, row := range []struct {
		name    string
		file    string
		changes map[string]string
		want    string
	}{
		{"a percentile that the SLO needs", "vllm-0.32-chat.json", nil, "vllm bench serve result: missing p99.9_ttft_ms, p99.9_tpot_ms" + remedy},
		{"missing counts", "vllm-0.32-chat.json", map[string]string{"completed": "", "duration": "", "request_rate": ""}, "missing request_rate, duration, completed" + remedy},
		{"a latency that is not a number", "vllm-0.32-chat.json", map[string]string{"mean_ttft_ms": "NaN"}, "mean_ttft_ms: is null or NaN, must be a number"},
		{"a text for a number", "vllm-0.32-chat.json", map[string]string{"completed": `"60"`}, "completed: json: cannot unmarshal string"},
		{"a negative duration", "vllm-0.32-chat.json", map[string]string{"duration": "-1"}, "duration: -1 is negative"},
		{"half a request", "vllm-0.32-chat.json", map[string]string{"completed": "59.5"}, "completed: 59.5 is not a count"},
		{"an endless run", "vllm-0.32-chat.json", map[string]string{"duration": "1e300"}, "duration: is 1e+300 s, must be 0 to 1e+07 s"},
		{"an unknown rate", "vllm-0.32-chat.json", map[string]string{"request_rate": `"fast"`}, `request_rate: is "fast", must be a number or "inf"`},
		{"lists of different lengths", "vllm-0.14.1.json", map[string]string{"ttfts": "[1]"}, "the lists of requests differ in length: ttfts has 1 values, another list has 12"},
		{"an impossible time", "vllm-0.14.1.json", map[string]string{"ttfts": "[1e30,0,0,0,0,0,0,0,0,0,0,0]"}, "ttfts[0]: is 1e+30 s"},
	} {
		_, err := ReadVLLMResult(changed(t, row.file, row.changes), nil, 99.9)
		if err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: error %v, want %q", row.name, err, row.want)
		}
	}
	for text, want := range map[string]string{
		"":                  "vllm bench serve result: not a JSON object: EOF",
		"[]":                "not a JSON object: it is another JSON value",
		"{}\n{}":            "the file has more than one object, as --append-result writes it",
		`{"num_prompts": 1`: "not a JSON object: unexpected EOF",
	} {
		if _, err := ReadVLLMResult([]byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func TestFieldsThatMayBeEmpty(t *testing.T) {
	text := changed(t, "vllm-0.32-chat.json", map[string]string{
		"request_rate": `"inf"`, "request_goodput": "null", "label": `"say \"NaN\" \\"`, "p90_ttft_ms": "NaN", "max_concurrency": "16", "failed": "",
		"mean_itl_ms": "", "num_prompts": "61",
	})
	run, err := ReadVLLMResult(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	m := run.Measurement
	if !math.IsInf(run.Meta.Rate, 1) || m.Rate != 0 || m.Window != m.Duration || m.Goodput != 0 || run.Meta.MaxConcurrency != 16 {
		t.Errorf("%+v of %+v, want an infinite rate, a window as long as the run, and no goodput", m, run.Meta)
	}
	if run.Meta.Label != `say "NaN" \` || m.TTFT.P90 != 0 || m.TTFT.P99 == 0 || m.Failed != 1 || m.ITL.N != 0 {
		t.Errorf("%+v of %+v, want the unchanged label, no P90, and one failed request", m, run.Meta)
	}
}

// vLLM's keys come in vLLM's order. Our own keys follow them.
func TestAResultHasVLLMsFields(t *testing.T) {
	meta := VLLMMeta{Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Backend: "openai", Model: "m", Prompts: 2, Metadata: map[string]string{"gpu": "H200", "a": "b"}}
	samples := []Sample{sample(1000, 1100, 1600), {Due: 1, Sent: 1, End: 2, Failure: Status, Detail: "503: full"}, {Due: 3}}
	result, err := NewVLLMResult(Measure(Run{Samples: samples}, Scope{}), meta, samples)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"date":"20260102-030405","endpoint_type":"openai","backend":"openai","label":null,"model_id":"m","tokenizer_id":"m","num_prompts":2,` +
		`"a":"b","gpu":"H200","request_rate":"inf","burstiness":0,"max_concurrency":null,"duration":1.601,"completed":1,"failed":1,` +
		`"total_input_tokens":100,"total_output_tokens":11,"request_throughput":0.6246096189881324,"request_goodput":null,`
	if !strings.HasPrefix(string(text), want) {
		t.Errorf("%s\nwant it to begin with\n%s", text, want)
	}
	fields := fieldsOf(t, text)
	for key, want := range map[string]any{
		"errors": []any{"", "http-status: 503: full", "withdrawn before it ended"}, "output_lens": []any{11.0, 0.0, 0.0}, "ttfts": []any{0.1, 0.0, 0.0},
		"itls": []any{[]any{}, []any{}, []any{}}, "p99.9_ttft_ms": 100.0, "p50_tpot_ms": 50.0, "failures": map[string]any{"http-status": 1.0},
	} {
		if !reflect.DeepEqual(fields[key], want) {
			t.Errorf("%s = %v, want %v", key, fields[key], want)
		}
	}
	if _, there := fields["mean_itl_ms"]; there {
		t.Error("mean_itl_ms is present, though no times between tokens were recorded")
	}
	meta.Metadata["request_rate"] = "5"
	if _, err := NewVLLMResult(Measurement{}, meta, nil); err == nil || err.Error() != `metadata key "request_rate" is a field of vLLM's result: choose another` {
		t.Errorf("metadata that hides a field: %v", err)
	}
}

func FuzzReadVLLMResult(f *testing.F) {
	for _, name := range []string{"vllm-0.14.1.json", "vllm-0.32-chat.json", "vllm-0.32-all-failed.json"} {
		f.Add(testdata(f, name))
	}
	f.Add([]byte(`{"completed": NaN, "x": "\"Infinity`))
	f.Fuzz(func(t *testing.T, text []byte) {
		run, err := ReadVLLMResult(text, allLimits, 99.9)
		if err != nil {
			return
		}
		if run.Measurement.Completed > 0 && run.Measurement.TTFT.N == 0 {
			t.Errorf("%d completed requests but no latencies", run.Measurement.Completed)
		}
		if _, err := json.Marshal(run.Measurement); err != nil {
			t.Errorf("the measurement cannot be stored: %v", err)
		}
	})
}
