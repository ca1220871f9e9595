package export

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"iter"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

var update = flag.Bool("update", false, "rewrite the golden file; read the diff")

// example has four trials: one met the SLO, one failed at every rate, one could not start, and one is running.
func example() studies.Study {
	began := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	probe := trial.Probe{Rate: 2, HitRate: -1, GPUTime: 3 * time.Minute, Spent: trial.Spent{trial.LeadIn: time.Minute, trial.Windows: 2 * time.Minute}, Verdict: slo.Verdict{Pass: true, Headroom: 0.1, Binding: "p99 TPOT", Reason: "p99 TPOT 54 ms, of 60 ms"},
		Measurement: bench.Measurement{Requests: 300, Completed: 300, TTFT: bench.Stats{N: 300, Mean: 200, P50: 180, P95: 400, P99: 700}}}
	return studies.Study{
		ID: "abc", Name: "llama70b", Seed: 1<<64 - 1, State: studies.Running, Created: began, Updated: began.Add(time.Hour), Commits: 9,
		Spent: trial.Spent{trial.Starting: 90 * time.Second, trial.Choosing: 1500 * time.Millisecond},
		World: map[string]string{"model": "m"}, Found: map[string]string{"gpu": "1 × NVIDIA H200"}, File: "version: 1\n",
		Events: []studies.Event{{Time: began, Kind: "begun", Note: "pid 7 on node-a"}, {Time: began, Kind: studies.Drift, Trial: 2,
			Changes: studies.Changes{{Fact: "model length", Was: new("2048"), Is: new("4096")}}}},
		Trials: []studies.Trial{
			{Origin: studies.Default, State: studies.Done, Began: began, Ended: began.Add(time.Minute), Probes: []trial.Probe{probe},
				Result: trial.Result{Outcome: trial.Measured, GPUTime: time.Minute, Spent: trial.Spent{trial.Starting: 40 * time.Second, trial.Stopping: 20 * time.Second}, Capacity: capacity.Capacity{Rate: 2.25, Low: 2, High: 2.5, Bound: capacity.Exact, Binding: "p99 TPOT", InFlight: 60}}},
			{Number: 1, Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "16", "block-size": "32"}, Args: []string{"--max-num-seqs", "16"}, State: studies.Done,
				Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 0.5, High: 0.5, Bound: capacity.AtMost, Binding: "p99 TTFT"}}},
			{Number: 2, Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "1024"}, State: studies.Done,
				Result: trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: `"CUDA, out of memory"`}},
			{Number: 3, Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "64"}, State: studies.Running, Began: began, Probes: []trial.Probe{probe}},
		},
		Prior: []studies.Trial{{Number: -1, Origin: studies.Prior, Source: "result.txt", State: studies.Done, Point: space.Point{"max-num-seqs": "128"},
			Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 2.4, Low: 2.4, Bound: capacity.AtLeast}}}},
	}
}

func table(t *testing.T, write func(*bytes.Buffer) error) [][]string {
	t.Helper()
	var text bytes.Buffer
	if err := write(&text); err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(&text).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func TestTrialsAreRows(t *testing.T) {
	rows := table(t, func(b *bytes.Buffer) error {
		return WriteTrials(b, example(), example().Each(), []string{"max-num-seqs"})
	})
	if len(rows) != 5 {
		t.Fatalf("%d rows, want a head and four trials", len(rows))
	}
	for _, c := range []struct {
		what  string
		trial int
		want  map[string]string
	}{
		{"a capacity with its bracket", 0, map[string]string{"number": "0", "max-num-seqs": "", "capacity_rps": "2.25", "passed_rps": "2", "failed_rps": "2.5", "gpu_seconds": "60",
			"lowest_rps": "", "ended": "2026-03-01T12:01:00Z", "probes": "1", "world": "1"}},
		{"a trial that failed at every rate has no capacity", 1, map[string]string{"capacity_rps": "", "failed_rps": "0.5", "bound": "at most", "block-size": "32", "args": "--max-num-seqs 16"}},
		{"why a server could not start", 2, map[string]string{"outcome": "infeasible", "class": "oom-start", "evidence": `"CUDA, out of memory"`, "capacity_rps": "", "world": "2"}},
		{"a running trial has no result", 3, map[string]string{"state": "running", "outcome": "", "simulated": "", "gpu_seconds": "", "probes": "1", "ended": ""}},
	} {
		for name, want := range c.want {
			if i := slices.Index(rows[0], name); i < 0 || rows[c.trial+1][i] != want {
				t.Errorf("%s: the row is %q, want %s %q", c.what, rows[c.trial+1], name, want)
			}
		}
	}
}

func TestProbesAreRows(t *testing.T) {
	rows := table(t, func(b *bytes.Buffer) error {
		return WriteProbes(b, example(), example().Each(), []string{"max-num-seqs"})
	})
	if len(rows) != 3 {
		t.Fatalf("%d rows, want a head and two probes", len(rows))
	}
	for name, want := range map[string]string{"trial": "3", "seq": "0", "world": "2", "max-num-seqs": "64", "rate": "2", "pass": "true", "ttft_p99_ms": "700", "tpot_p99_ms": "",
		"hit_rate": "", "gpu_seconds": "180", "reason": "p99 TPOT 54 ms, of 60 ms"} {
		if i := slices.Index(rows[0], name); i < 0 || rows[2][i] != want {
			t.Errorf("the row is %q, want %s %q", rows[2], name, want)
		}
	}
}

// The keys of the JSON document never change.
func TestJSONIsStable(t *testing.T) {
	var got bytes.Buffer
	if err := WriteJSON(&got, example(), example().Each()); err != nil {
		t.Fatal(err)
	}
	const path = "testdata/study.json"
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("%s differs; got:\n%s", path, &got)
	}
	var d struct {
		Trials []trialItem
		Priors []priorItem
	}
	if err := json.Unmarshal(got.Bytes(), &d); err != nil || len(d.Trials) != 4 || d.Trials[3].Result != nil || d.Priors[0].Source != "result.txt" {
		t.Errorf("it reads back as %+v, %v", d, err)
	}
}

// An export ends at the first trial that cannot be read or written.
func TestAnExportEndsAtTheFirstError(t *testing.T) {
	gone := errors.New("the disk is gone")
	for name, write := range map[string]func(io.Writer, studies.Study, iter.Seq2[studies.Trial, error]) error{
		"json": WriteJSON,
		"trials": func(w io.Writer, s studies.Study, all iter.Seq2[studies.Trial, error]) error {
			return WriteTrials(w, s, all, nil)
		},
		"probes": func(w io.Writer, s studies.Study, all iter.Seq2[studies.Trial, error]) error {
			return WriteProbes(w, s, all, nil)
		},
	} {
		const many = 10000
		asked := 0
		trials := func(unread error) iter.Seq2[studies.Trial, error] {
			asked = 0
			return func(yield func(studies.Trial, error) bool) {
				for asked < many && yield(example().Trials[0], unread) {
					asked++
				}
			}
		}
		if err := write(io.Discard, example(), trials(gone)); !errors.Is(err, gone) || asked != 0 {
			t.Errorf("%s with unreadable trials: %v after %d trials, want %v at the first", name, err, asked, gone)
		}
		if err := write(brokenPipe{}, example(), trials(nil)); !errors.Is(err, syscall.EPIPE) || asked == many {
			t.Errorf("%s into a broken pipe: %v after %d trials, want %v before the end", name, err, asked, syscall.EPIPE)
		}
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }
