package prior

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/studies/optuna"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

func reader(t testing.TB) *Reader {
	t.Helper()
	s, err := space.New([]space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.98, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
		{Name: "enable-prefix-caching", Kind: space.Bool},
		{Name: "attention-backend", Kind: space.Categorical, Choices: []string{"FLASH_ATTN", "FLASHINFER"}},
	}, nil, nil, map[string]string{"max-num-batched-tokens": "2048"})
	if err != nil {
		t.Fatal(err)
	}
	return &Reader{Space: s, World: map[string]string{"model": "my/model"}, SLO: slo.SLO{Limits: []slo.Limit{
		{Metric: slo.TTFT, Percentile: 99, Max: time.Second}, {Metric: slo.TPOT, Percentile: 99, Max: 60 * time.Millisecond},
	}}}
}

// put writes files below a new directory, and returns the directory.
func put(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// listTaken lists the taken trials as "capacity bound point", and the results that were left out as "file: why".
func listTaken(dir string, s Source) (got, left []string) {
	for _, t := range s.Taken {
		c := t.Result.Capacity
		got = append(got, fmt.Sprintf("%g %s %s", c.Rate, c.Bound, t.Point))
	}
	for _, l := range s.Left {
		left = append(left, strings.TrimPrefix(l.From, dir+"/")+": "+l.Why)
	}
	return got, left
}

func readOne(t *testing.T, r *Reader, paths ...string) Source {
	t.Helper()
	all, err := r.Read(paths)
	if err != nil || len(all) != 1 {
		t.Fatalf("Read = %+v, %v; want one source", all, err)
	}
	return all[0]
}

const autoTuneResult = `hash:0123456789abcdef
max_num_seqs: 128, max_num_batched_tokens: 2048, request_rate: inf, e2el: 450.5, throughput: 9.81, goodput: 9.7
max_num_seqs: 256, max_num_batched_tokens: 2048, request_rate: 8, e2el: 499.12, throughput: 7.4, goodput: 7.4

max_num_seqs: 512, max_num_batched_tokens: 2048 does not meet latency requirement 500
max_num_seqs: 128, max_num_batched_tokens: 4096, request_rate: 9, e2el: 450.5, throughput: 8.9, goodput: 8.9
max_num_seqs: 8, max_num_batched_tokens: 2048, request_rate: 9, e2el: 450.5, throughput: 8.9, goodput: 8.9
max_num_seqs: 64, max_num_batched_tokens: 2048, request_rate: inf, e2el: , throughput: , goodput:
best_max_num_seqs: 128, best_num_batched_tokens: 2048, best_throughput: 9.81, profile saved in: /x/profile
`

// auto_tune.sh lowers the utilization from 0.98, so the lowest value with a log is the one that it used.
func TestAutoTune(t *testing.T) {
	dir := put(t, map[string]string{
		"2026_03_01_10_30/result.txt":                                     autoTuneResult,
		"2026_03_01_10_30/vllm_log_gpu_memory_utilization_0.98.log":       "",
		"2026_03_01_10_30/vllm_log_gpu_memory_utilization_.97.log":        "",
		"2026_03_01_10_30/profile/trace.json":                             "{}",
		"2026_03_01_10_30/vllm_log_gpu_memory_utilization_0.98.log.other": "",
	})
	s := readOne(t, reader(t), dir)
	got, left := listTaken(dir, s)
	if want := []string{
		"9.81 at least enable-prefix-caching=true gpu-memory-utilization=0.97 max-num-seqs=128",
		"8 at least enable-prefix-caching=true gpu-memory-utilization=0.97 max-num-seqs=256",
	}; s.Name != dir || s.Kind != autoTune || !slices.Equal(got, want) {
		t.Errorf("%s of %s gives %q, want %q", s.Name, s.Kind, got, want)
	}
	for i, want := range []string{
		"result.txt:5: enable-prefix-caching=true gpu-memory-utilization=0.97 max-num-seqs=512: no rate kept the limit, or the server did not start",
		"result.txt:6: max-num-batched-tokens is 4096 in the source, but 2048 in the server.args of this study",
		"result.txt:7: max-num-seqs=8 is below the range [16, 1024]",
		"result.txt:8: enable-prefix-caching=true gpu-memory-utilization=0.97 max-num-seqs=64: the file has no throughput",
	} {
		if i >= len(left) || !strings.Contains(left[i], want) {
			t.Errorf("left out %q, want %q", left, want)
		}
	}
	for _, one := range s.Taken {
		if one.Number != -1 || one.Origin != studies.Prior || one.State != studies.Done || !one.Met() || one.Source != dir || len(one.Args) == 0 {
			t.Errorf("a prior is %+v", one)
		}
	}

	// Without the logs, the memory utilization is not known, because result.txt does not have it.
	alone := put(t, map[string]string{"result.txt": autoTuneResult})
	s = readOne(t, reader(t), filepath.Join(alone, "result.txt"))
	if got, _ := listTaken(alone, s); got[0] != "9.81 at least enable-prefix-caching=true max-num-seqs=128" || !strings.Contains(strings.Join(s.Notes, " "), "--set gpu-memory-utilization=0.95") {
		t.Errorf("without logs %q with the notes %q", got, s.Notes)
	}
	r := reader(t)
	r.Set = map[string]string{"gpu-memory-utilization": "0.90"}
	if got, _ := listTaken(alone, readOne(t, r, alone)); got[0] != "9.81 at least enable-prefix-caching=true gpu-memory-utilization=0.9 max-num-seqs=128" {
		t.Errorf("with --set %q", got)
	}
}

func TestPointsAreWrittenAsTheSamplerWritesThem(t *testing.T) {
	point, err := reader(t).point(map[string]string{"gpu-memory-utilization": "0.8799999999999999", "max-num-seqs": "128.0", "enable-prefix-caching": "True", "max-num-batched-tokens": "2048.0"})
	if want := "enable-prefix-caching=true gpu-memory-utilization=0.88 max-num-seqs=128"; err != nil || point.String() != want {
		t.Errorf("point %s, %v; want %s", point, err, want)
	}
}

// result returns a result of vllm bench serve for 300 requests, without data of single requests. The parameters ttft
// and tpot are in ms.
func result(rate any, ttft, tpot float64, more map[string]any) string {
	fields := map[string]any{
		"model_id": "my/model", "backend": "openai", "num_prompts": 300, "request_rate": rate, "burstiness": 1.0, "max_concurrency": nil,
		"duration": 100.0, "completed": 300, "failed": 0, "total_input_tokens": 30000, "total_output_tokens": 30000, "request_throughput": 3.0,
	}
	for metric, p99 := range map[string]float64{"ttft": ttft, "tpot": tpot} {
		for _, name := range []string{"mean", "median", "std", "p99"} {
			fields[name+"_"+metric+"_ms"] = p99
		}
	}
	maps.Copy(fields, more)
	text, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// All runs of one point, at several rates, make one trial, whichever files they are in.
func TestBenchRunsAreJoined(t *testing.T) {
	dir := put(t, map[string]string{
		"a/1.json": result(1, 200, 40, map[string]any{"max_num_seqs": "128"}),
		"a/2.json": result(2, 300, 50, map[string]any{"max-num-seqs": "128"}),
		"a/4.json": result(4, 300, 70, map[string]any{"max_num_seqs": "128", "gpu": "H200"}),
		"b/max_num_seqs=256,gpu-memory-utilization=0.95/rate-3.json":         result(3, 300, 50, nil),
		"b/max_num_seqs=256,gpu-memory-utilization=0.95/rate-inf.json":       result("inf", 9000, 90, nil),
		"c/SERVE--max_num_seqs=512, enable_prefix_caching=True-/run=0.json":  result("inf", 300, 50, nil),
		"c/SERVE--max_num_seqs=64, attention-backend=FLASHINFER-/run=0.json": result(3, 300, 90, nil),
	})
	s := readOne(t, reader(t), dir)
	got, left := listTaken(dir, s)
	if want := []string{
		"3 at least enable-prefix-caching=true max-num-seqs=512",
		"3 exact gpu-memory-utilization=0.95 max-num-seqs=256",
		"2 exact max-num-seqs=128",
	}; !slices.Equal(got, want) {
		t.Errorf("taken %q, want %q", got, want)
	}
	if len(left) != 1 || !strings.Contains(left[0], "no rate kept the SLO (p99 TPOT 90 of 60 ms); measure lower rates") {
		t.Errorf("left out %q", left)
	}
	if len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "the runs of max-num-seqs=128 differ in gpu, which is not a flag of this study") {
		t.Errorf("notes %q", s.Notes)
	}
	for _, one := range s.Taken {
		if one.Point["max-num-seqs"] == "128" && (len(one.Probes) != 3 || one.Probes[2].Rate != 4 || one.Probes[2].Verdict.Pass || one.Result.Capacity.High != 4) {
			t.Errorf("joined %+v", one)
		}
	}
}

func TestUnusableBenchRuns(t *testing.T) {
	for _, c := range []struct {
		name, text, want string
		change           func(*Reader)
	}{
		{"the flags are not known", result(1, 200, 40, nil), "neither the file nor its name has the server's flags", nil},
		{"the model is another", result(1, 200, 40, map[string]any{"model_id": "other/model"}), "its model is other/model, but this study's is my/model", nil},
		{"a closed loop", result("inf", 200, 40, map[string]any{"max_concurrency": 64}), "--max-concurrency 64 delayed requests", nil},
		{"a missing latency", strings.ReplaceAll(result(1, 200, 40, nil), "p99_tpot_ms", "p98_tpot_ms"), "missing p99_tpot_ms", nil},
		{"too few requests", result(1, 200, 40, map[string]any{"num_prompts": 50, "completed": 50}), "50 requests are too few for p99 TTFT, which needs 100; measure with --num-prompts 100", func(r *Reader) { r.Defaults = true }},
		{"no request completed", result(1, 0, 0, map[string]any{"completed": 0, "failed": 300}), "no request was completed", nil},
		{"a limit on E2E, which the file does not have", result(1, 200, 40, nil), "p99 E2E is not in the file; measure with --percentile-metrics", func(r *Reader) {
			r.Defaults = true
			r.SLO.Limits = append(r.SLO.Limits, slo.Limit{Metric: slo.E2E, Percentile: 99, Max: time.Minute})
		}},
		{"requests failed", result(1, 200, 40, map[string]any{"completed": 290, "failed": 10}), "no rate kept the SLO (10 of 300 requests failed)", func(r *Reader) { r.Defaults = true }},
		{"out of the range", result(1, 200, 40, map[string]any{"max_num_seqs": "4"}), "max-num-seqs=4 is below the range", nil},
		{"other fixed args", result(1, 200, 40, map[string]any{"max_num_seqs": "32", "max_num_batched_tokens": "512"}), "max-num-batched-tokens is 512 in the source, but 2048", nil},
		{"an impossible latency", result(1, 1e-308, 40, nil), "p99 TTFT is 1e-308 ms, which is too short for any server; measure again", func(r *Reader) { r.Defaults = true }},
		{"an impossible rate", result(1e300, 200, 40, nil), "its probe 0 is 1e+300 requests per second, but must be from 1e-06 to 1000000", func(r *Reader) { r.Defaults = true }},
		{"a rate near zero", result(1e-300, 200, 40, nil), "num_prompts / request_rate", func(r *Reader) { r.Defaults = true }},
		{"an impossible throughput", result("inf", 200, 40, map[string]any{"duration": 1e-6}), "its probe 0 is 3e+08 requests per second", func(r *Reader) { r.Defaults = true }},
		{"a value of very many digits", result(1, 200, 40, map[string]any{"max_num_seqs": strings.Repeat("9", 300)}), "--max-num-seqs 1e+300 is not a number; write one, such as 16", nil},
		{"another file", `{"a": 1}`, "missing num_prompts", nil},
		{"a list", `[{"a": 1}]`, "not a JSON object: it is another JSON value", nil},
		{"two results in one file", result(1, 200, 40, nil) + result(2, 200, 40, nil), "give each result its own file", nil},
	} {
		r := reader(t)
		if c.change != nil {
			c.change(r)
		}
		dir := put(t, map[string]string{"x.json": c.text})
		got, left := listTaken(dir, readOne(t, r, filepath.Join(dir, "x.json")))
		if len(got) > 0 || len(left) != 1 || !strings.HasPrefix(left[0], "x.json: ") || !strings.Contains(left[0], c.want) {
			t.Errorf("%s: taken %q and left %q, want %q", c.name, got, left, c.want)
		}
	}
}

// If a file has the lists of --save-detailed, its requests are judged one by one, as in a sweep.
func TestRealBenchRun(t *testing.T) {
	r := reader(t)
	r.Defaults, r.AnyModel = true, true
	r.SLO.Limits = []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: 100 * time.Millisecond}, {Metric: slo.TPOT, Percentile: 95, Max: 10 * time.Millisecond}}
	path := "../../bench/testdata/vllm-0.32-openai.json"
	s := readOne(t, r, path)
	got, _ := listTaken("", s)
	if !slices.Equal(got, []string{"4 at least "}) || s.Taken[0].Probes[0].Verdict.Checks[0].Each == "" {
		t.Errorf("%q of %+v", got, s)
	}
	// This file cannot be used: it has 12 requests, and 2 of them failed.
	path = "../../bench/testdata/vllm-0.14.1.json"
	if _, left := listTaken("", readOne(t, r, path)); len(left) != 1 {
		t.Errorf("of 12 requests, 2 of them failed: %q", left)
	}
}

func TestSeveralPathsAreOneSource(t *testing.T) {
	dir := put(t, map[string]string{
		"runs/1.json": result(1, 200, 40, map[string]any{"max_num_seqs": "128"}), "runs/2.json": result(2, 200, 90, map[string]any{"max_num_seqs": "128"}),
	})
	s := readOne(t, reader(t), filepath.Join(dir, "runs/1.json"), filepath.Join(dir, "runs/2.json"), filepath.Join(dir, "runs/1.json"))
	if got, _ := listTaken(dir, s); !strings.HasPrefix(s.Name, "runs/1.json and 1 more #") || s.Path != s.Name || !slices.Equal(got, []string{"1 exact max-num-seqs=128"}) {
		t.Errorf("%s: %q", s.Name, got)
	}
}

// An import replaces the priors (trials from elsewhere) of the same name. So the same set of files must always get the
// same name, and each other set must get another name.
func TestEachSetOfFilesHasItsOwnName(t *testing.T) {
	files := map[string]string{}
	for _, name := range []string{"a/1.json", "a/2.json", "a/4.json", "b/1.json", "b/2.json", "x/a/1.json", "x/a/2.json"} {
		files[name] = result(1, 200, 40, map[string]any{"max_num_seqs": "128"})
	}
	dir := put(t, files)
	t.Chdir(dir)
	name := func(paths ...string) string { return readOne(t, reader(t), paths...).Name }
	first := name("a/1.json", "a/2.json")
	for _, others := range [][]string{{"a/1.json", "a/4.json"}, {"a/1.json", "a/2.json", "a/4.json"}, {"b/1.json", "b/2.json"}, {"a/1.json", "b/2.json"}, {"x/a/1.json", "x/a/2.json"}, {"a", "b"}} {
		if name(others...) == first {
			t.Errorf("%q and %q are both called %s", others, []string{"a/1.json", "a/2.json"}, first)
		}
	}
	t.Chdir("a")
	for _, same := range [][]string{{"2.json", "1.json"}, {"../a/1.json", filepath.Join(dir, "a/2.json")}} {
		if got := name(same...); got != first {
			t.Errorf("%q in %s is called %s, want %s", same, filepath.Join(dir, "a"), got, first)
		}
	}
}

func TestMalformedFiles(t *testing.T) {
	dir := put(t, map[string]string{
		"result.txt": "hash:1\nmax_num_seqs: 128\n", "empty.txt": "", "broken.json": "{\n\"a\": 1,\n\"b\": }\n", "short.json": "{\n\"a\": 1,\n", "nothing/x.txt": "",
	})
	for _, c := range []struct{ path, want string }{
		{"result.txt", `result.txt:2: "max_num_seqs: 128" is not a line of auto_tune.sh's result.txt`},
		{"empty.txt", "empty.txt:1: the file is empty"},
		{"broken.json", "broken.json:3: invalid character '}'"},
		{"short.json", "short.json:3: unexpected EOF"},
		{"nothing", "has no results; give a study, a result.txt of auto_tune.sh, a .json file of vllm bench serve --save-result, or a folder with such files"},
		{"none", "no such file"},
	} {
		if all, err := reader(t).Read([]string{filepath.Join(dir, c.path)}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %+v, %v; want %q", c.path, all, err, c.want)
		}
	}
}

// An implausible result is left out when it is read. The printed reason names the file, and shortens long numbers.
func TestImplausibleResults(t *testing.T) {
	many := strings.Repeat("9", 300)
	dir := put(t, map[string]string{
		"auto/result.txt": "max_num_seqs: 128, max_num_batched_tokens: 2048, request_rate: " + many + ", e2el: 450.5, throughput: 9.81, goodput: 9.7\n" +
			"max_num_seqs: 128, max_num_batched_tokens: 2048, request_rate: inf, e2el: 450.5, throughput: 1e300, goodput: 9.7\n" +
			"max_num_seqs: " + many + ", max_num_batched_tokens: 2048, request_rate: 9, e2el: 450.5, throughput: 9.81, goodput: 9.7\n" +
			"max_num_seqs: 128, max_num_batched_tokens: 2048, request_rate: 9, e2el: 450.5, throughput: 9.81, goodput: 9.7\n",
		"long.txt": "max_num_seqs: 128, max_num_batched_tokens: 2048, request_rate: " + many + many + ", e2el: 450.5, throughput: 9.81, goodput: 9.7\n",
	})
	study := oldStudy()
	study.Trials[0].Result.Capacity.Rate = 1e300
	study.Trials[1].Result.Capacity.Rate = 1e-300
	study.Trials[2].Result.Capacity.High = -1
	file := exported(t, study, "")
	r := reader(t)
	for path, want := range map[string][]string{
		filepath.Join(dir, "auto"): {
			"auto/result.txt:1: its capacity is 1e+300 requests per second, but must be from 1e-06 to 1000000; correct it in the program or file that wrote it",
			"auto/result.txt:2: its capacity is 1e+300 requests per second",
			"auto/result.txt:3: --max-num-seqs 1e+300 is not a number; write one, such as 16",
		},
		file: {"old.db, trial 0: its capacity is 1e+300 requests", "old.db, trial 1: its capacity is 1e-300 requests", "old.db, trial 2: its value 0 is not a rate"},
	} {
		got, left := listTaken(filepath.Dir(path), readOne(t, r, path))
		if path != file && len(got) != 1 {
			t.Errorf("%s: taken %q, want only the plausible result", path, got)
		}
		for i, want := range want {
			if i >= len(left) || !strings.HasPrefix(left[i], want) {
				t.Errorf("%s: left out %q, want %q", path, left, want)
			}
		}
	}
	const want = "long.txt:1: request_rate 99999999999999999999 is not a number of requests per second; correct the line, or delete it"
	if _, err := r.Read([]string{filepath.Join(dir, "long.txt")}); err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("with too many digits: %v, want %q", err, want)
	}
}

// Every figure of a capacity and every latency of a probe is checked before it is stored.
func TestImplausibleFigures(t *testing.T) {
	one := func() (trial.Result, trial.Probe) {
		c := capacity.Capacity{Rate: 2, Low: 2, High: 3, Bound: capacity.Exact, InFlight: 40, Lowest: 1.8, Highest: 2.2, StdErr: 0.05, Probes: 2,
			Pieces: []capacity.Piece{{Moved: -0.01}}, Steps: []capacity.Step{{Rate: 2, Outcome: capacity.Outcome{Headroom: 0.1, InFlight: 40}}}}
		latencies := bench.Stats{N: 100, Mean: 50, Std: 1e-12, P50: 50, P99: 50, Max: 50}
		p := trial.Probe{Seq: 3, Rate: 2, HitRate: -1, Measurement: bench.Measurement{TTFT: latencies, TPOT: latencies, ITL: bench.Stats{N: 100, Mean: 1, Std: 2, P99: 3, Max: 9}, E2E: latencies}}
		p.Verdict.Checks = []slo.Check{{Limit: "p99 TTFT", ValueMS: 50}}
		return trial.Result{Outcome: trial.Measured, Capacity: c}, p
	}
	if result, p := one(); whyImplausible(result, []trial.Probe{p}) != "" {
		t.Fatalf("the result is implausible without a change: %s", whyImplausible(result, []trial.Probe{p}))
	}
	for _, outcome := range []trial.Outcome{trial.Infeasible, trial.Dropped, trial.Unknown} {
		if why := whyImplausible(trial.Result{Outcome: outcome}, nil); why != "" {
			t.Errorf("the outcome %s is implausible: %s", outcome, why)
		}
	}
	for _, c := range []struct {
		name   string
		change func(*trial.Result, *trial.Probe)
		want   string
	}{
		{"an unknown outcome", func(r *trial.Result, _ *trial.Probe) { r.Outcome = "zzz" }, `its outcome is "zzz", but must be one of measured, infeasible, dropped, unknown; correct it`},
		{"no outcome", func(r *trial.Result, _ *trial.Probe) { r.Outcome = "" }, `its outcome is "", but must be one of`},
		{"an unknown bound", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Bound = "zzz" }, `its bound is "zzz", but must be one of exact, at least, at most; correct it`},
		{"no bound", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Bound = "" }, `its bound is "", but must be one of`},
		{"an unknown bound of a dropped trial", func(r *trial.Result, _ *trial.Probe) { r.Outcome, r.Capacity.Bound = trial.Dropped, "zzz" }, `its bound is "zzz"`},
		{"a negative end of the interval", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Lowest = -5 }, "its capacity, or a bound of it, is -5 requests per second"},
		{"an absurd end of the interval", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Highest = 1e308 }, "its capacity, or a bound of it, is 1e+308 requests per second"},
		{"an absurd error", func(r *trial.Result, _ *trial.Probe) { r.Capacity.StdErr = 1e308 }, "its standard error of ln capacity is 1e+308, but must be from 0 to 40"},
		{"an error that is not a number", func(r *trial.Result, _ *trial.Probe) { r.Capacity.StdErr = math.NaN() }, "its standard error of ln capacity is NaN"},
		{"a negative error", func(r *trial.Result, _ *trial.Probe) { r.Capacity.StdErr = -1 }, "its standard error of ln capacity is -1"},
		{"a negative number of requests", func(r *trial.Result, _ *trial.Probe) { r.Capacity.InFlight = -1e308 }, "its number of requests in flight is -1e+308, but must be from 0 to 1e+07"},
		{"a negative number of probes", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Probes = -1 }, "its number of probes is -1"},
		{"an absurd part of the error", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Pieces[0].Moved = 1e9 }, "its part of the standard error is 1e+09"},
		{"a step with a negative rate", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Steps[0].Rate = -1 }, "its step 0 is -1 requests per second"},
		{"a step with an absurd headroom", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Steps[0].Headroom = -1e9 }, "its step 0: headroom is -1e+09"},
		{"a step with a negative number of requests", func(r *trial.Result, _ *trial.Probe) { r.Capacity.Steps[0].InFlight = -1 }, "its step 0: number of requests in flight is -1"},
		{"a probe with a negative rate", func(_ *trial.Result, p *trial.Probe) { p.Rate = -1 }, "its probe 3 is -1 requests per second"},
		{"a negative latency", func(_ *trial.Result, p *trial.Probe) { p.Measurement.TTFT.P50 = -3 }, "its probe 3: a figure of TTFT is -3 ms, but must be from 1e-06 to 1e+09"},
		{"a latency near zero", func(_ *trial.Result, p *trial.Probe) { p.Measurement.TPOT.P99 = 1e-308 }, "its probe 3: a figure of TPOT is 1e-308 ms"},
		{"an absurd latency", func(_ *trial.Result, p *trial.Probe) { p.Measurement.E2E.Max = 1e300 }, "its probe 3: a figure of E2E is 1e+300 ms"},
		{"a latency that is not a number", func(_ *trial.Result, p *trial.Probe) { p.Measurement.ITL.Mean = math.NaN() }, "its probe 3: a figure of ITL is NaN ms"},
		{"a negative standard deviation", func(_ *trial.Result, p *trial.Probe) { p.Measurement.ITL.Std = -1 }, "its probe 3: a figure of ITL is -1 ms"},
		{"a latency that was judged", func(_ *trial.Result, p *trial.Probe) { p.Verdict.Checks[0].ValueMS = -1 }, "its probe 3: p99 TTFT is -1 ms"},
		{"another figure that is not a number", func(_ *trial.Result, p *trial.Probe) { p.HitRate = math.Inf(1) }, "HitRate is +Inf, which cannot be stored; correct it"},
	} {
		result, p := one()
		c.change(&result, &p)
		if why := whyImplausible(result, []trial.Probe{p}); !strings.Contains(why, c.want) {
			t.Errorf("%s: %q, want %q", c.name, why, c.want)
		}
	}
}

// A trial of an Optuna file is left out if an attribute has a value that the tuner never writes.
func TestOptunaFiguresArePlausible(t *testing.T) {
	for _, c := range []struct{ name, add, want string }{
		{"an unknown bound", `bound='"zzz"'`, `old.db, trial 0: its bound is "zzz"`},
		{"an unknown outcome", `outcome='"zzz"'`, `old.db, trial 0: its outcome is "zzz", but a trial with a value must have measured`},
		{"an outcome without a value", `outcome='"infeasible"'`, `old.db, trial 0: its outcome is "infeasible"`},
		{"an absurd error", `std_err='1e308'`, "old.db, trial 0: its standard error of ln capacity is 1e+308"},
		{"an error that is not a number", `std_err='NaN'`, "old.db, trial 0: its std_err is NaN, which is not a number"},
		{"a negative number of requests", `in_flight='-1e308'`, "old.db, trial 0: its number of requests in flight is -1e+308"},
		{"a negative end of the interval", `lowest_rps='-5'`, "old.db, trial 0: its capacity, or a bound of it, is -5 requests"},
	} {
		key, value, _ := strings.Cut(c.add, "=")
		path := exported(t, oldStudy(), fmt.Sprintf(`UPDATE trial_user_attributes SET value_json=%s WHERE trial_id=1 AND "key"='%s'`, value, key))
		got, left := listTaken(filepath.Dir(path), readOne(t, reader(t), path))
		if len(got) != 4 || !strings.HasPrefix(left[0], c.want) {
			t.Errorf("%s: taken %q, left %q; want %q", c.name, got, left, c.want)
		}
	}
	// The user's own attributes may have the same names as the tuner's. They are ignored.
	path := exported(t, oldStudy(), addedTrial+`; INSERT INTO trial_user_attributes (trial_id, "key", value_json) VALUES
		(99, 'std_err', 'NaN'), (99, 'outcome', '"ok"'), (99, 'bound', '"upper"'), (99, 'in_flight', '-1'), (99, 'highest_rps', '1e308')`)
	if got, left := listTaken("", readOne(t, reader(t), path)); !slices.Contains(got, "3.5 at least gpu-memory-utilization=0.95") {
		t.Errorf("taken %q, left %q", got, left)
	}
}

// oldStudy returns another study of the tuner, with trials of all outcomes.
func oldStudy() studies.Study {
	trials := []studies.Trial{
		{Origin: studies.Default, Point: space.Point{}, Args: []string{"--max-num-seqs", "99"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{
			Rate: 2.1, Low: 2, High: 2.4, Bound: capacity.Exact, Binding: "p99 TPOT"}}},
		{Point: space.Point{"gpu-memory-utilization": "0.9"}, Args: []string{"--gpu-memory-utilization", "0.9", "--no-enable-prefix-caching"}, Result: trial.Result{Outcome: trial.Measured,
			Capacity: capacity.Capacity{Rate: 3, Low: 3, Bound: capacity.AtLeast}}},
		{Point: space.Point{"gpu-memory-utilization": "0.91"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 0.5, High: 0.5, Bound: capacity.AtMost}}},
		{Point: space.Point{"gpu-memory-utilization": "0.98"}, Result: trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: "CUDA out of memory"}},
		{Point: space.Point{"gpu-memory-utilization": "0.92"}, Result: trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero}},
		{Point: space.Point{"gpu-memory-utilization": "0.93"}, Result: trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure}},
		{Point: space.Point{"block-size": "32"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 3, Bound: capacity.AtLeast}}},
		{Point: space.Point{"gpu-memory-utilization": "0.94"}, State: studies.Running},
	}
	for i := range trials {
		trials[i].Number = i
		trials[i].Began = time.Unix(int64(i), 0)
		if trials[i].State == "" {
			trials[i].State = studies.Done
		}
	}
	return studies.Study{Name: "old", Trials: trials}
}

var oldParameters = []space.Parameter{{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.98, Step: 0.01}, {Name: "block-size", Kind: space.Categorical, Choices: []string{"16", "32"}}}

// An export to Optuna can be read back unchanged.
func TestOptunaRoundTrip(t *testing.T) {
	path := exported(t, oldStudy(), "")
	s := readOne(t, reader(t), path)
	got, left := listTaken(path, s)
	if want := []string{"2.1 exact ", "3 at least gpu-memory-utilization=0.9", "0.5 at most gpu-memory-utilization=0.91", "0  gpu-memory-utilization=0.98", "0  gpu-memory-utilization=0.92"}; !slices.Equal(got, want) {
		t.Errorf("taken %q, want %q", got, want)
	}
	for i, want := range []string{"trial 5: its state is FAIL", "trial 6: block-size=32 is not searched in this study; search it, or set it in server.args", "trial 7: its state is RUNNING"} {
		if i >= len(left) || !strings.Contains(left[i], want) {
			t.Errorf("left out %q, want %q", left, want)
		}
	}
	for i, one := range s.Taken {
		was := oldStudy().Trials[i].Result
		if one.Result.Outcome != was.Outcome || one.Result.Class != was.Class || one.Result.Capacity.High != was.Capacity.High || one.Met() != oldStudy().Trials[i].Met() {
			t.Errorf("trial %d came back as %+v, was %+v", i, one.Result, was)
		}
	}
	if len(s.Notes) > 0 {
		t.Errorf("the tuner's export has the notes %q", s.Notes)
	}

	r := reader(t)
	r.OptunaStudy = "olds"
	if _, err := r.Read([]string{path}); err == nil || !strings.Contains(err.Error(), `it holds no study "olds"; did you mean "old"?`) {
		t.Errorf("with another name: %v", err)
	}
}

func TestAnotherStudy(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "old")
	store, _, err := studies.Open(t.Context(), dir, studies.New{Name: "old", World: map[string]string{"model": "my/model", "slo": "p99 TTFT <= 500 ms"}}, studies.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range oldStudy().Trials {
		if err := store.Begin(one); err != nil {
			t.Fatal(err)
		}
		if one.State == studies.Done {
			if err := store.Finish(one.Number, one.Result); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	s := readOne(t, reader(t), dir)
	got, left := listTaken(dir, s)
	// If the old study fixed a flag and this study searches it, the flag is part of the point.
	if want := []string{"2.1 exact max-num-seqs=99", "3 at least enable-prefix-caching=false gpu-memory-utilization=0.9", "0.5 at most gpu-memory-utilization=0.91",
		"0  gpu-memory-utilization=0.98", "0  gpu-memory-utilization=0.92"}; s.Kind != tunerStudy || !slices.Equal(got, want) || len(left) != 3 {
		t.Errorf("%s: taken %q, want %q; left %q", s.Kind, got, want, left)
	}
	if !slices.Contains(s.Notes, `its slo is "p99 TTFT <= 500 ms", but this study's is ""`) {
		t.Errorf("notes %q", s.Notes)
	}
	r := reader(t)
	r.World["model"] = "other"
	if got, left := listTaken(dir, readOne(t, r, dir)); len(got) > 0 || !strings.Contains(left[0], "its model is my/model, but this study's is other") {
		t.Errorf("with another model: taken %q, left %q", got, left)
	}
}

// A variable of another study may be searched in this study, fixed in this study, or not set in either study.
func TestVariablesOfAnotherStudy(t *testing.T) {
	r := reader(t)
	parameters := append(r.Space.Parameters(), space.Parameter{Name: "VLLM_BACKEND", Kind: space.Categorical, Choices: []string{space.Unset, "A", "B"}})
	var err error
	if r.Space, err = space.New(parameters, nil, nil, map[string]string{"NCCL_ALGO": "Ring"}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		point space.Point
		asked map[string]string
		want  string // "" means that the point is refused
	}{
		{space.Point{"VLLM_BACKEND": "B"}, nil, "VLLM_BACKEND=B"},
		{space.Point{}, map[string]string{"server env VLLM_BACKEND": "A"}, "VLLM_BACKEND=A"},
		{space.Point{"VLLM_BACKEND": "B", "NCCL_ALGO": "Ring"}, nil, "VLLM_BACKEND=B"},
		{space.Point{"VLLM_BACKEND": "B", "NCCL_ALGO": "Tree"}, nil, ""},
		{space.Point{"VLLM_BACKEND": "B", "OMP_NUM_THREADS": space.Unset}, nil, "VLLM_BACKEND=B"},
		{space.Point{"VLLM_BACKEND": "B", "OMP_NUM_THREADS": "4"}, nil, ""},
		{space.Point{"VLLM_BACKEND": "C"}, nil, ""},
	} {
		got, err := r.point(r.flagsOf(studies.Trial{Point: test.point}, test.asked))
		if (err != nil) != (test.want == "") || err == nil && got.String() != test.want {
			t.Errorf("%s with %v: %s, %v, want %q", test.point, test.asked, got, err, test.want)
		}
	}
	if set, err := ParseSet(r.Space, []string{"VLLM_BACKEND=A", "MAX_NUM_SEQS=64"}); err != nil || set["VLLM_BACKEND"] != "A" || set["max-num-seqs"] != "64" {
		t.Errorf("ParseSet = %v, %v", set, err)
	}
}

// driftedStudy writes a study with two trials in its first world, one in its second, and none in its third. Trials of
// different worlds cannot be compared.
func driftedStudy(t *testing.T) (dir string, study studies.Study) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "old")
	begin := func(args string, trials ...studies.Trial) {
		world := map[string]string{"model": "my/model", "server args": args}
		store, _, err := studies.Open(t.Context(), dir, studies.New{Name: "old", World: world}, studies.Options{AcceptDrift: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range trials {
			if err := errors.Join(store.Begin(one), store.Finish(one.Number, one.Result)); err != nil {
				t.Fatal(err)
			}
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
	met := func(number int, seqs string, rate float64) studies.Trial {
		one := studies.Trial{Number: number, Origin: studies.Sampled, Point: space.Point{}, Result: trial.Result{Outcome: trial.Measured,
			Capacity: capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast}}}
		if seqs != "" {
			one.Point["max-num-seqs"] = seqs
		}
		return one
	}
	begin("--max-model-len 2048", met(0, "", 60), met(1, "64", 70))
	begin("--max-model-len 4096", met(2, "", 2.99))
	begin("--max-model-len 8192") // a world without trials
	study, err := studies.ReadSnapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir, study
}

// Each world of a study becomes a source of its own, because the search compares all trials of a source. The same holds
// for the worlds of a study in an Optuna file.
func TestEachWorldIsASource(t *testing.T) {
	dir, study := driftedStudy(t)
	file := filepath.Join(t.TempDir(), "old.db")
	if err := optuna.Write(file, study, study.Each(), []space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true}}); err != nil {
		t.Fatal(err)
	}
	r := reader(t)
	r.World["server args"] = "--max-model-len 2048"
	for _, c := range []struct {
		path         string
		newer, older []string // notes of the newer and the older source
	}{
		{dir, []string{
			"later, before trial 3, this changed: server args: --max-model-len 4096 → --max-model-len 8192",
			`its server args is "--max-model-len 4096", but this study's is "--max-model-len 2048"`,
		}, []string{"later, before trial 2, this changed: server args: --max-model-len 2048 → --max-model-len 4096"}},
		{file, []string{`its server args is "--max-model-len 4096", but this study's is "--max-model-len 2048"`}, []string{"its trials were measured with another model, server or workload than the best trial of that study"}},
	} {
		all, err := r.Read([]string{c.path})
		if err != nil || len(all) != 2 {
			t.Fatalf("%s: Read = %+v, %v; want two sources", c.path, all, err)
		}
		newer, _ := listTaken(dir, all[0])
		older, _ := listTaken(dir, all[1])
		if !slices.Equal(newer, []string{"2.99 at least "}) || !slices.Equal(older, []string{"60 at least ", "70 at least max-num-seqs=64"}) {
			t.Errorf("%s: the newer world has %q, the older %q", c.path, newer, older)
		}
		if all[0].Name != c.path+", world 2" || all[1].Name != c.path+", world 1" || all[1].Path != c.path || all[1].Taken[0].Source != all[1].Name {
			t.Errorf("%s: the sources are called %q and %q", c.path, all[0].Name, all[1].Name)
		}
		if !slices.Equal(all[0].Notes, c.newer) || !slices.Equal(all[1].Notes, c.older) {
			t.Errorf("%s: the notes are %q and %q", c.path, all[0].Notes, all[1].Notes)
		}
	}
}

// An Optuna file that the tuner exported is treated like another study: its world is compared with the world of this
// study. The world of a file that Optuna made is not known, even if the file has attributes of the same names.
func TestAnExportedOptunaFile(t *testing.T) {
	ours := oldStudy()
	ours.ID, ours.World = "a1", map[string]string{"model": "my/model", "slo": "p99 TTFT <= 500 ms", "server args": "--max-model-len 2048"}
	others := oldStudy()
	others.World = map[string]string{"model": "other"}
	for _, c := range []struct {
		name  string
		study studies.Study
		add   string // SQL that changes the file
		r     Reader
		taken int
		note  string
		want  string // the reason why something is left out, or the error
	}{
		{"another study is taken", ours, "", Reader{ID: "b2"}, 5, `its slo is "p99 TTFT <= 500 ms", but this study's is ""`, ""},
		{"a study that has not begun takes it", ours, "", Reader{}, 5, `its server args is "--max-model-len 2048", but this study's is ""`, ""},
		{"this study itself is refused", ours, "", Reader{ID: "a1"}, 0, "", "old.db is this study itself, or a copy of it"},
		{"trials that Optuna has added to this study are taken", ours, addedTrial, Reader{ID: "a1"}, 1, "this study exported it: only the trials that Optuna has added are read", ""},
		{"a study of another model is left out", ours, "", Reader{World: map[string]string{"model": "b"}}, 0, "", "its model is my/model, but this study's is b; if they are the same, give --any-model"},
		{"trials that Optuna has added to a study of another model are left out", ours, addedTrial, Reader{World: map[string]string{"model": "b"}}, 0, "", "its model is my/model, but this study's is b"},
		{"--any-model takes another model", ours, "", Reader{World: map[string]string{"model": "b"}, AnyModel: true}, 5, `its slo is "p99 TTFT <= 500 ms", but this study's is ""`, ""},
		{"the model is known without a list of worlds", ours, `DELETE FROM study_user_attributes WHERE "key"='worlds'`, Reader{World: map[string]string{"model": "b"}}, 0, "", "its model is my/model, but this study's is b"},
		{"the model is not known for a study that Optuna made", others, `DELETE FROM study_user_attributes WHERE "key"='tuner_study_id'`, Reader{}, 5, "", ""},
	} {
		path := exported(t, c.study, c.add)
		r := reader(t)
		r.ID, r.AnyModel = c.r.ID, c.r.AnyModel
		maps.Copy(r.World, c.r.World)
		all, err := r.Read([]string{path})
		if err != nil {
			if c.want == "" || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", c.name, err, c.want)
			}
			continue
		}
		got, left := listTaken(path, all[0])
		if len(all) != 1 || len(got) != c.taken || c.taken == 0 && (len(left) != 1 || !strings.Contains(left[0], c.want)) {
			t.Errorf("%s: %d sources, taken %q, left %q; want %d and %q", c.name, len(all), got, left, c.taken, c.want)
		}
		if c.note == "" && len(all[0].Notes) > 0 || c.note != "" && !slices.Contains(all[0].Notes, c.note) {
			t.Errorf("%s: the notes are %q, want %q", c.name, all[0].Notes, c.note)
		}
	}
}

// addedTrial is the SQL by which Optuna adds a finished trial.
const addedTrial = `INSERT INTO trials (trial_id, number, study_id, state) VALUES (99, 98, 1, 'COMPLETE');
	INSERT INTO trial_values (trial_id, objective, value, value_type) VALUES (99, 0, 3.5, 'FINITE');
	INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) VALUES (99, 'gpu-memory-utilization', 0.95,
		'{"name":"FloatDistribution","attributes":{"step":0.01,"low":0.7,"high":0.98,"log":false}}')`

// exported writes a study as an Optuna file called old.db, and runs SQL on it.
func exported(t *testing.T, study studies.Study, query string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "old.db")
	if err := optuna.Write(path, study, study.Each(), oldParameters); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite3", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(query); errors.Join(err, db.Close()) != nil {
		t.Fatal(err)
	}
	return path
}

func FuzzAutoTune(f *testing.F) {
	f.Add([]byte(autoTuneResult))
	f.Add([]byte("max_num_seqs: 1, max_num_batched_tokens: 1, request_rate: ..., e2el: , throughput: Inf, goodput: "))
	f.Fuzz(func(t *testing.T, text []byte) {
		rows, err := parseAutoTune(text)
		if err != nil {
			return
		}
		for _, row := range rows {
			if c := row.capacity(); row.met && (math.IsInf(c.Rate, 0) || math.IsNaN(c.Rate) || c.Rate < 0) {
				t.Errorf("%+v has the capacity %g", row, c.Rate)
			}
		}
	})
}

// FuzzBench reads any text as a result, and looks for flags in any file name.
func FuzzBench(f *testing.F) {
	f.Add([]byte(result(2, 200, 40, map[string]any{"max_num_seqs": "128"})), "a/max-num-seqs=64/x.json")
	f.Add([]byte(result(2, 1e-308, 40, map[string]any{"max_num_seqs": "128"})), "")
	f.Add([]byte(`{"request_rate": "inf", "a": NaN}`), "gpu_memory_utilization=0.9.json")
	f.Add([]byte("{\n"), "enable-prefix-caching=TRUE,attention_backend=flashinfer.json")
	r := reader(f)
	path := filepath.Join(f.TempDir(), "x.json")
	f.Fuzz(func(t *testing.T, text []byte, name string) {
		for flag, value := range r.inPath(name) {
			if p := r.Space.Parameter(flag); p == nil || value == "" {
				t.Errorf("%q says %s=%q", name, flag, value)
			}
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		one, why, err := r.readBench(path)
		if err == nil && why == "" && (one.point == nil || one.probe.Measurement.Completed == 0 || !finite(one.probe)) {
			t.Errorf("%q is taken as %s with %+v", text, one.point, one.probe)
		}
	})
}

// finite reports whether a probe can be stored.
func finite(p trial.Probe) bool {
	_, err := json.Marshal(p)
	return err == nil && p.Rate >= 0
}

// Read refuses devices and pipes, also inside a folder: a device has no end, and opening a pipe without a writer takes
// forever.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "bench", "pipe.json")
	if err := errors.Join(os.Mkdir(filepath.Dir(pipe), 0o755), unix.Mkfifo(pipe, 0o644), os.Symlink("/dev/zero", filepath.Join(dir, "zero"))); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/dev/zero", filepath.Join(dir, "zero"), pipe, filepath.Dir(pipe)} {
		all, err := reader(t).Read([]string{path})
		if err == nil || !strings.Contains(err.Error(), ", not a regular file") {
			t.Errorf("Read(%s) = %v, %v; want an error that it is no regular file", path, all, err)
		}
	}
}

// A folder with the name of the simulator gives no predictions.
func TestAFolderCalledTheSimulator(t *testing.T) {
	t.Chdir(put(t, map[string]string{"the simulator/result.txt": autoTuneResult}))
	s := readOne(t, reader(t), "the simulator")
	if s.Path != "./the simulator" || s.Name != s.Path || len(s.Taken) == 0 || s.Taken[0].Predicted() {
		t.Errorf("the source is %+v, want ./the simulator", s)
	}
}

func TestAPathInTwoSpellingsIsReadOnce(t *testing.T) {
	dir := put(t, map[string]string{"a/result.txt": autoTuneResult})
	link := filepath.Join(dir, "link")
	if err := os.Symlink("a", link); err != nil {
		t.Fatal(err)
	}
	s := readOne(t, reader(t), filepath.Join(dir, "a")+"/", filepath.Join(dir, "a"), dir+"/./a", link)
	if s.Name != filepath.Join(dir, "a") {
		t.Errorf("the source is called %s, want its first spelling", s.Name)
	}
}
