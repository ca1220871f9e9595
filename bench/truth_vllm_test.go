package bench_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/truth"
)

// A vllmBench is a version of vllm bench serve that serverctl/vllmlab/setup.sh has installed.
type vllmBench struct {
	version, dir string
}

// installedVLLMs returns the newest of the installed versions, if there is one. One version is enough, because 0.14.1
// and 0.32.0 do not differ in what the table shows.
func installedVLLMs(t *testing.T) []contestant {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Log(err)
		return nil
	}
	for _, version := range []string{"0.32.0", "0.14.1"} {
		v := &vllmBench{version: version, dir: filepath.Join(cache, "tuner-vllm-"+version)}
		if _, err := os.Stat(v.command()); err == nil {
			return []contestant{{"vllm bench serve " + version, v.run}}
		}
	}
	t.Log("no vLLM is installed, so only our own client is measured; make vllm VER=0.32.0 installs it")
	return nil
}

func (v *vllmBench) command() string { return filepath.Join(v.dir, "venv/bin/vllm") }

// run runs vllm bench serve with the load of a row and returns the figures.
func (v *vllmBench) run(ctx context.Context, t *testing.T, r row) figures {
	t.Helper()
	requests := r.leadIn() + r.requests()
	samples, c, report := v.measure(ctx, t, r, requests)
	f := figures{Memory: float64(c.memory) / (1 << 20), ServerCPU: perToken(report.CPU, report.Tokens)}
	known := indexed(report, "")
	f.CPU = perToken(c.between(loadPeriod(report, known)), report.Tokens)
	var pairs []pair
	var gaps []time.Duration
	for i, s := range samples[r.leadIn():] {
		q, ok := known[r.leadIn()+i]
		switch tpot, _ := s.TPOT(); {
		case !s.OK():
			f.Failed++
		case !ok || len(q.Writes) != r.tokens:
			f.Unpaired++
		default:
			pairs, gaps = append(pairs, pair{ttft: s.TTFT(), tpot: tpot, truth: q}), append(gaps, s.Gaps...)
		}
	}
	f.compare(pairs)
	f.ITL = statsOf(gaps)
	return f
}

// loadPeriod returns the start and the end of the load. It leaves out three things: start-up, the first request (a test
// of the server), and writing the result.
func loadPeriod(report *truth.Report, requests map[int]truth.Request) (from, to time.Time) {
	first, last := int64(math.MaxInt64), int64(0)
	for _, q := range requests {
		first = min(first, q.Received)
		if n := len(q.Writes); n > 0 {
			last = max(last, q.Writes[n-1])
		}
	}
	return report.Began.Add(time.Duration(first) * time.Microsecond), report.Began.Add(time.Duration(last) * time.Microsecond)
}

// measure runs vllm bench serve once against a new server.
func (v *vllmBench) measure(ctx context.Context, t *testing.T, r row, requests int) ([]bench.Sample, cost, *truth.Report) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute+20*r.answer()*time.Duration(1+requests/r.streams))
	defer cancel()
	url, stop := startTruth(t, r.server())
	defer stop()
	dir := t.TempDir()
	command := exec.CommandContext(ctx, v.command(), "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
		"--model", "tiny", "--tokenizer", filepath.Join(v.dir, "tiny-qwen2"), "--dataset-name", "random", "--random-input-len", "32",
		"--random-output-len", strconv.Itoa(r.tokens), "--num-prompts", strconv.Itoa(requests), "--ignore-eos", "--seed", "7",
		"--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", dir, "--result-filename", "result.json")
	if r.open {
		command.Args = append(command.Args, "--request-rate", fmt.Sprint(r.rate()))
	} else {
		command.Args = append(command.Args, "--request-rate", "inf", "--max-concurrency", strconv.Itoa(r.streams))
	}
	command.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1")
	command.Dir = dir
	_, c, err := runChild(command, nil)
	if err != nil {
		t.Fatal(err)
	}
	report, err := truth.Fetch(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "result.json"))
	if err != nil {
		t.Fatal(err)
	}
	run, err := bench.ReadVLLMResult(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(run.Samples) != requests {
		t.Fatalf("vllm bench serve reports %d requests, want %d", len(run.Samples), requests)
	}
	return run.Samples, c, report
}
