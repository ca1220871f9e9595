package report

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

var update = flag.Bool("update", false, "rewrite the golden files; read the diff")

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// studyOf makes a study of trials. It sets their numbers and times.
func studyOf(state studies.State, note string, trials ...studies.Trial) studies.Study {
	for i := range trials {
		trials[i].Number = i
		trials[i].Began = start.Add(time.Duration(i) * 15 * time.Minute)
		if trials[i].State == "" {
			trials[i].State, trials[i].Ended = studies.Done, trials[i].Began.Add(14*time.Minute)
		}
	}
	return studies.Study{
		ID: "abcdefghijklmnopqrstuvwxyz", Name: "llama70b", Seed: 7, State: state, Note: note,
		Created: start, Updated: start.Add(time.Duration(len(trials)) * 15 * time.Minute), Trials: trials,
	}
}

// probe makes a probe whose p99 TPOT is tpot, in ms. The limit is 60 ms.
func probe(seq int, rate, tpot float64) trial.Probe {
	v := slo.Verdict{
		Pass: tpot <= 60, Binding: "p99 TPOT", Headroom: math.Log(60 / tpot), Reason: fmt.Sprintf("p99 TPOT %.1f of 60 ms", tpot),
		Checks: []slo.Check{{Limit: "p99 TTFT", MaxMS: 1000, ValueMS: 711.4}, {Limit: "p99 TPOT", MaxMS: 60, ValueMS: tpot}},
	}
	return trial.Probe{Seq: seq, Rate: rate, Verdict: v, GPUTime: 3 * time.Minute}
}

// exact makes a trial whose capacity has a bracket (a rate that passed and a rate that failed) and no interval.
func exact(rate float64) studies.Trial {
	low, high := 0.97*rate, 1.05*rate
	return studies.Trial{
		Origin: studies.Sampled, Probes: []trial.Probe{probe(0, high, 63.2), probe(1, low, 58.1)},
		Result: trial.Result{Outcome: trial.Measured, GPUTime: 11 * time.Minute, Capacity: capacity.Capacity{
			Rate: rate, Low: low, High: high, Bound: capacity.Exact, Binding: "p99 TPOT", InFlight: 52.6 * rate, Probes: 2, Why: "bracketed to 8 %",
		}},
	}
}

// sure makes a trial whose capacity has an interval.
func sure(rate, stdErr float64) studies.Trial {
	t := exact(rate)
	c := &t.Result.Capacity
	c.StdErr, c.Lowest, c.Highest = stdErr, rate*math.Exp(-1.96*stdErr), rate*math.Exp(1.96*stdErr)
	c.Steps = []capacity.Step{{Rate: c.High}, {Rate: c.Low}}
	return t
}

// doubted gives a trial's capacity a Doubt: one probe contradicts the capacity.
func doubted(t studies.Trial) studies.Trial {
	t.Result.Capacity.Doubt = "one probe, at 3.1 req/s, contradicts this; it may be chance"
	return t
}

// estimated makes a trial that lost the race.
func estimated(rate, stdErr float64) studies.Trial {
	t := sure(rate, stdErr)
	t.Result.Outcome, t.Result.Class, t.Result.Capacity.Bound = trial.Dropped, serverctl.DroppedByRace, capacity.Estimated
	return t
}

func atLeast(rate float64) studies.Trial {
	t := exact(rate)
	t.Probes = []trial.Probe{probe(0, rate, 31)}
	t.Result.Capacity = capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast, Binding: "p99 TPOT", InFlight: 100, Probes: 1,
		Why: fmt.Sprintf("passed at the highest rate, %g req/s", rate)}
	return t
}

func atMost(rate, tpot float64) studies.Trial {
	t := exact(rate)
	t.Probes = []trial.Probe{probe(0, 2*rate, 2*tpot), probe(1, rate, tpot)}
	t.Result.Capacity = capacity.Capacity{Rate: rate, High: rate, Bound: capacity.AtMost, Binding: "p99 TPOT", Probes: 2,
		Why: "failed at the lowest rate, 0.5 req/s"}
	return t
}

// late makes a trial that passed only while the load generator was late.
func late(rate float64) studies.Trial {
	t := atLeast(rate)
	t.Result.Class = serverctl.ClientLimited
	c := &t.Result.Capacity
	c.Low, c.Limited = 0, "the load generator was 17.5 ms late at p99, more than a tenth of the limit of 40 ms for p99 TTFT"
	c.Why = fmt.Sprintf("at %g req/s %s", rate, c.Limited)
	return t
}

func failed(outcome trial.Outcome, class serverctl.Class, evidence string) studies.Trial {
	return studies.Trial{Origin: studies.Sampled, Result: trial.Result{
		Outcome: outcome, Class: class, Evidence: evidence, Tail: []string{evidence}, GPUTime: 2 * time.Minute,
	}}
}

// withArgs sets the origin, args and point of a trial. In the args, each flag is followed by its value. The point has
// the same flags.
func withArgs(t studies.Trial, origin studies.Origin, args ...string) studies.Trial {
	t.Origin, t.Args, t.Point = origin, args, space.Point{}
	for i := 0; i+1 < len(args); i += 2 {
		t.Point[strings.TrimPrefix(args[i], "--")] = args[i+1]
	}
	return t
}

// withPriors adds priors to a study. The words are the name of a source, then its trials, then the name of the next
// source, and so on.
func withPriors(study studies.Study, words ...any) studies.Study {
	source := ""
	for _, word := range words {
		switch word := word.(type) {
		case string:
			source = word
		case studies.Trial:
			word.Number, word.Origin, word.State, word.Source = -1, studies.Prior, studies.Done, source
			study.Prior = append(study.Prior, word)
		}
	}
	return study
}

func running(probes ...trial.Probe) studies.Trial {
	return studies.Trial{State: studies.Running, Probes: probes}
}

func simulated(trials ...studies.Trial) []studies.Trial {
	for i := range trials {
		trials[i].Result.Facts.Simulated = true
	}
	return trials
}

func with128(t studies.Trial) studies.Trial {
	return withArgs(t, studies.Sampled, "--gpu-memory-utilization", "0.95", "--max-num-seqs", "128", "--max-num-batched-tokens", "4096")
}

func with512(t studies.Trial) studies.Trial {
	return withArgs(t, studies.Sampled, "--gpu-memory-utilization", "0.97", "--max-num-seqs", "512", "--max-num-batched-tokens", "16384")
}

// written returns a report as text.
func written(t *testing.T, write func(io.Writer, studies.Study, Options) error, study studies.Study, o Options) string {
	t.Helper()
	var text strings.Builder
	if err := write(&text, study, o); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

var cases = []struct {
	name, why string
	study     studies.Study
	options   Options
}{
	{
		"done", "the ordinary end: the winner beats the default beyond doubt",
		studyOf(studies.Done, "all 5 trials are done", withArgs(sure(2.28, 0.04), studies.Default),
			withArgs(sure(2.2, 0.05), studies.Current, "--max-num-seqs", "256"), with128(sure(2.71, 0.036)),
			with512(failed(trial.Infeasible, serverctl.OOMStart, "torch.OutOfMemoryError: CUDA out of memory.")),
			with128(sure(2.5, 0.04))),
		Options{Planned: 5, Now: start.Add(2 * time.Hour)},
	}, {
		"running", "half-way: a trial runs, the gain may be chance, and a probe contradicts the best capacity",
		studyOf(studies.Running, "", withArgs(sure(2.6, 0.07), studies.Default), with128(doubted(sure(2.7, 0.07))),
			with512(failed(trial.Unknown, serverctl.Infrastructure, "the disk is gone")),
			with512(running(probe(0, 2.7, 49), probe(1, 4.05, 77)))),
		Options{Planned: 30, Now: start.Add(50 * time.Minute), Margin: 0.8},
	}, {
		"begun", "nothing is finished yet, and nobody said how many trials there will be",
		studyOf(studies.Running, "", withArgs(running(), studies.Default)), Options{},
	}, {
		"nothing-met", "every trial failed at every rate: the report must say which came nearest",
		studyOf(studies.Done, "all 3 trials are done", withArgs(atMost(0.5, 90), studies.Default), with128(atMost(0.5, 66)),
			with512(failed(trial.Infeasible, serverctl.KVTooSmall, "ValueError: the KV cache is too small"))),
		Options{Planned: 3},
	}, {
		"default-unmet", "the default keeps the SLO at no rate, so no gain is stated",
		studyOf(studies.Done, "", withArgs(atMost(1, 66), studies.Default), with128(exact(2.7))), Options{},
	}, {
		"default-infeasible", "the default cannot start, so the current args are the reference",
		studyOf(studies.Stopped, "interrupted", withArgs(failed(trial.Infeasible, serverctl.KVTooSmall, "the KV cache is too small"), studies.Default),
			withArgs(exact(2), studies.Current, "--max-model-len", "16384"), with128(exact(2.7))),
		Options{Planned: 30},
	}, {
		"all-infeasible", "no server ever started: the report must show the evidence of each class",
		studyOf(studies.Failed, "the server fails whatever the flags are",
			withArgs(failed(trial.Infeasible, serverctl.OOMStart, "CUDA out of memory"), studies.Default),
			with128(failed(trial.Infeasible, serverctl.OOMStart, "CUDA out of memory, again")),
			with512(failed(trial.Infeasible, serverctl.StartCrash, ""))),
		Options{},
	}, {
		"json-args", "values that are JSON and quotes reach the shell, YAML and JSON unharmed; the winner is a lower bound",
		studyOf(studies.Done, "", withArgs(atLeast(3), studies.Default), withArgs(atLeast(4), studies.Sampled,
			"--speculative-config", `{"method": "ngram", "num_speculative_tokens": 3}`, "--served-model-name", "it's <a> & b",
			"--no-enable-prefix-caching")),
		Options{},
	}, {
		"dropped", "one trial had its drafts refused: it is listed as dropped with a diagnosis, not as failed",
		studyOf(studies.Done, "all 3 trials are done", withArgs(exact(2.28), studies.Default), with128(exact(2.71)),
			with512(studies.Trial{Result: trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero, GPUTime: 3 * time.Minute,
				Evidence: "2 of 25,182 drafted tokens were accepted (0.0079 %, less than 2 %): the drafter belongs to another model, " +
					"tokenizer or chat template, or the answers cannot be predicted. Each step of an answer drafts and verifies 3.0 tokens to gain 0.00024."}})),
		Options{Planned: 3},
	}, {
		"only-dropped", "nothing met the SLO, and one trial was dropped: it does not count as failed",
		studyOf(studies.Done, "all 2 trials are done", withArgs(atMost(0.5, 90), studies.Default),
			with512(studies.Trial{Result: trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero, Evidence: "0 of 1,000 drafted tokens were accepted"}})),
		Options{Planned: 2},
	}, {
		"priors", "priors are listed by source with their best rate, there and here, and never win",
		withPriors(studyOf(studies.Running, "", withArgs(exact(2.28), studies.Default), with128(exact(2.71)), with512(atMost(0.5, 90))),
			"auto/2026_03_01/result.txt", with128(exact(9)), with512(exact(8)), "runs/*.json", with512(exact(3)), "old.db", withArgs(exact(4), studies.Prior, "--max-num-seqs", "64"),
			"failed.db", withArgs(atMost(4, 90), studies.Prior, "--max-num-seqs", "64")),
		Options{Planned: 30},
	}, {
		"client-limited", "the load generator was late for the default: its capacity is a lower bound, so no gain over it is stated",
		studyOf(studies.Done, "", withArgs(late(33), studies.Default), with128(sure(24, 0.04)), with512(late(40)),
			with512(failed(trial.Unknown, serverctl.ClientLimited, "the load generator is the limit, not the server, already at 20 req/s: the load generator was 60 ms late at p99"))),
		Options{Planned: 4},
	}, {
		"simulated", "the servers were simulated: every figure says so; the default wins",
		studyOf(studies.Done, "", simulated(withArgs(sure(2.7, 0.05), studies.Default), with128(sure(2.3, 0.05)))...), Options{Planned: 2},
	}, {
		"insight", "it is said which flags mattered, how flat the optimum is, and which simpler trial is nearly as good",
		studyOf(studies.Done, "", withArgs(sure(2.28, 0.03), studies.Default), with128(sure(2.71, 0.03)), withArgs(estimated(2.69, 0.04), studies.Sampled, "--max-num-seqs", "128")),
		Options{Planned: 3, Insight: &Insight{
			Mattered: &Mattered{Trials: 12, Variation: 0.2, Flags: []FlagShare{
				{Flag: "max-num-seqs", Share: 0.602, Lowest: 0.41, Highest: 0.79, First: 0.5, Total: 0.7, Known: 0.8, Matters: true},
				{Flag: "gpu-memory-utilization", Share: 0.35, Lowest: 0.16, Highest: 0.52, First: 0.2, Total: 0.5, Known: 0.7, Matters: true},
				{Flag: "max-num-batched-tokens", Share: 0.048, Highest: 0.2, First: 0.02, Total: 0.07, Known: 0.1},
			}},
			Flat: &Flat{Within: 0.02, Sure: 0.8, Flags: []FlatFlag{
				{Flag: "gpu-memory-utilization", Best: "0.95", Lowest: "0.95", Highest: "0.96", Part: 0.04},
				{Flag: "max-num-seqs", Best: "128", Lowest: "90", Highest: "190", Part: 0.18},
				{Flag: "max-num-batched-tokens", Best: "4096", Lowest: "1024", Highest: "32768", Part: 1},
				{Flag: "enable-prefix-caching", Best: "true", Values: []string{"true", "false"}, Part: 1},
				{Flag: "attention-backend", Best: "A", Values: []string{"A", "C"}, Part: 0.67},
			}},
			Nearly: &Nearly{Trial: 2, Origin: studies.Sampled, Args: []string{"--max-num-seqs", "128"}, Changes: 1, Best: 3,
				Rate: 2.69, Estimated: true, Ratio: 0.9926, Within: 0.01, Probable: 0.52},
		}},
	},
}

func TestReports(t *testing.T) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var got bytes.Buffer
			fmt.Fprintf(&got, "%s\n", c.why)
			section := func(name string, render func(io.Writer) error) {
				fmt.Fprintf(&got, "-- %s --\n", name)
				if err := render(&got); errors.Is(err, ErrNothingMet) {
					fmt.Fprintf(&got, "error: %v\n", err)
				} else if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			section("best", func(w io.Writer) error { return BestText(w, c.study, c.options) })
			section("best --shell", func(w io.Writer) error { return BestShell(w, c.study) })
			section("best -o yaml", func(w io.Writer) error { return BestYAML(w, c.study, c.options) })
			section("best -o json", func(w io.Writer) error { return BestJSON(w, c.study, c.options) })
			section("status", func(w io.Writer) error { return StatusText(w, c.study, c.options) })
			section("log", func(w io.Writer) error {
				for _, trial := range c.study.Trials {
					for _, line := range TrialLines(trial, render.ShortNames(searched(c.study.Trials)), "", 80) {
						fmt.Fprintln(w, line)
					}
					for _, line := range LastWords(trial, 70) {
						fmt.Fprintln(w, "         ", line)
					}
				}
				return nil
			})
			golden(t, c.name, got.Bytes())
		})
	}
}

// If a server answers with errors, the report does not advise other limits or rates, because they would not help.
func TestNoLimitIsAdvisedWhereRequestsFail(t *testing.T) {
	for failed, want := range map[int]bool{0: true, 3: false} {
		unmet := atMost(0.5, 90)
		for i := range unmet.Probes {
			unmet.Probes[i].Measurement.Failed = failed
		}
		text := written(t, BestText, studyOf(studies.Done, "", withArgs(unmet, studies.Default)), Options{})
		if got := strings.Contains(text, "limits that this GPU can keep"); got != want {
			t.Errorf("with %d failed requests, other limits are advised: %v, want %v in\n%s", failed, got, want, text)
		}
	}
}

// The report prints the remedy for the cause of a failure. For a cause without a remedy it prints no remedy.
func TestEachFailureHasItsRemedy(t *testing.T) {
	for cause, want := range map[serverctl.Cause]string{
		serverctl.HostOOM: "try       " + serverctl.Remedy(serverctl.Infrastructure, serverctl.HostOOM), serverctl.Segfault: "",
	} {
		dead := failed(trial.Unknown, serverctl.Infrastructure, "gone")
		dead.Result.Cause = cause
		got := written(t, BestText, studyOf(studies.Done, "", withArgs(dead, studies.Default)), Options{})
		if !strings.Contains(got, want) || want == "" && strings.Contains(got, "try ") {
			t.Errorf("%s: want %q in\n%s", cause, want, got)
		}
	}
}

// The remedy of a failed study is printed exactly once, even if no trial has this remedy.
func TestTheRemedyOfAStudyIsPrintedOnce(t *testing.T) {
	remedy := serverctl.Remedy(serverctl.Infrastructure, serverctl.HostOOM)
	for _, cause := range []serverctl.Cause{serverctl.HostOOM, serverctl.Segfault} {
		dead := failed(trial.Unknown, serverctl.Infrastructure, "gone")
		dead.Result.Cause = cause
		study := studyOf(studies.Failed, "nothing starts", withArgs(dead, studies.Default))
		study.Remedy = remedy
		got := written(t, BestText, study, Options{Width: 200})
		if strings.Count(got, remedy) != 1 {
			t.Errorf("%s: want %q once in\n%s", cause, remedy, got)
		}
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}

func TestStatusJSON(t *testing.T) {
	running := cases[1]
	got := written(t, StatusJSON, running.study, running.options) + "---\n" + written(t, StatusYAML, running.study, running.options)
	golden(t, "status-documents", []byte(got))
}

func TestStatusFitsATerminal(t *testing.T) {
	study := studyOf(studies.Failed, strings.Repeat("a long story ", 20))
	for range 12 {
		trial := with512(exact(1234.5678))
		trial.Point["speculative-config"] = `{"method": "ngram", "num_speculative_tokens": 3}`
		trial.Point["swap-space"] = "4"
		study.Trials = append(study.Trials, trial)
	}
	got := written(t, StatusText, study, Options{})
	rows := 0
	for line := range strings.Lines(got) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
		if strings.Contains(line, "  sampler  ") {
			rows++
		}
	}
	if rows != defaultRows {
		t.Errorf("%d rows, want %d:\n%s", rows, defaultRows, got)
	}
}

// Only flags and lines of a server's log may be wider than the terminal.
func TestBestFitsATerminal(t *testing.T) {
	oom := with512(failed(trial.Infeasible, serverctl.OOMStart, strings.Repeat("CUDA out of memory, and more words of it. ", 5)))
	far := atMost(0.5, 90)
	far.Probes[1].Verdict.Reason = "p99 TTFT 5514 ms breaks 1000 ms (11 of 11 over it, 3 may be), and p99 TPOT 90 ms breaks 60 ms (11 of 11)"
	unlike := []studies.Trial{oom, far}
	for _, class := range []serverctl.Class{serverctl.KVTooSmall, serverctl.StartCrash, serverctl.FlagsRejected, serverctl.Infrastructure} {
		unlike = append(unlike, failed(trial.Infeasible, class, "a word"))
	}
	for name, study := range map[string]studies.Study{
		"met":         studyOf(studies.Done, "", withArgs(doubted(sure(1233.5, 0.07)), studies.Default), with128(doubted(sure(1234.5, 0.07)))),
		"nothing met": studyOf(studies.Failed, strings.Repeat("a long story ", 20), unlike...),

		"both passed everywhere":           studyOf(studies.Done, "", withArgs(atLeast(1233.5), studies.Default), with128(atLeast(1234.5))),
		"the default failed everywhere":    studyOf(studies.Done, "", withArgs(atMost(1200.5, 90), studies.Default), with128(atLeast(1234.5))),
		"the default could not be started": studyOf(studies.Done, "", withArgs(oom, studies.Default), withArgs(atLeast(1233.5), studies.Current), with128(atLeast(1234.5))),
	} {
		if text, _, _ := strings.Cut(written(t, StatusText, study, Options{}), "\n\n"); name != "nothing met" && strings.Contains(text, "…") {
			t.Errorf("%s: the status is cut off:\n%s", name, text)
		}
		for line := range strings.Lines(written(t, BestText, study, Options{})) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
	}
}

// JSON and YAML contain the accepted changes of the world.
func TestDocumentsHaveDrifts(t *testing.T) {
	study := studyOf(studies.Done, "", withArgs(exact(2), studies.Default))
	study.Events = []studies.Event{{Time: start, Kind: "resumed"}, {Time: start.Add(time.Hour), Kind: studies.Drift,
		Changes: studies.Changes{{Fact: "slo", Was: new("120 ms"), Is: new("20 ms")}, {Fact: "seed", Was: new("1"), Is: new("2")}}}}
	for name, write := range map[string]func(io.Writer, studies.Study, Options) error{"best": BestJSON, "status": StatusJSON, "status as YAML": StatusYAML} {
		var got struct {
			Drifts []driftItem `json:"drifts"`
		}
		if err := yaml.Unmarshal([]byte(written(t, write, study, Options{})), &got); err != nil {
			t.Fatal(err)
		}
		if want := []driftItem{{start.Add(time.Hour), "slo: 120 ms → 20 ms\nseed: 1 → 2"}}; !slices.Equal(got.Drifts, want) {
			t.Errorf("%s: drifts %v, want %v", name, got.Drifts, want)
		}
	}
}

// A change that was undone before the next trial is not reported, and trials before and after it are compared.
func TestAnUndoneChangeIsNotReported(t *testing.T) {
	study := studyOf(studies.Done, "", withArgs(exact(2), studies.Default), exact(3))
	gpu := func(was, is string) studies.Changes { return studies.Changes{{Fact: "gpu", Was: &was, Is: &is}} }
	for i, changes := range []studies.Changes{gpu("H200", "L4"), gpu("L4", "H200")} {
		study.Events = append(study.Events, studies.Event{Time: start.Add(time.Duration(i) * time.Hour), Kind: studies.Drift, Trial: 1, Changes: changes})
	}
	best, ok := Best(study)
	if !ok || best.Trial.Number != 1 {
		t.Fatalf("the best is trial %d, %t; want trial 1", best.Trial.Number, ok)
	}
	if lines, items := Outdated(study, best), bestOf(study, Options{}).Drifts; len(lines)+len(items) > 0 {
		t.Errorf("Outdated = %q, and the drifts are %v; want nothing", lines, items)
	}
	study.Events = append(study.Events, studies.Event{Time: start.Add(2 * time.Hour), Kind: studies.Drift, Trial: 2, Changes: gpu("H200", "L4")},
		studies.Event{Time: start.Add(3 * time.Hour), Kind: studies.Drift, Trial: 2, Changes: gpu("L4", "L40")})
	want := []driftItem{{start.Add(3 * time.Hour), "gpu: H200 → L40"}}
	if items := bestOf(study, Options{}).Drifts; !slices.Equal(items, want) {
		t.Errorf("the drifts are %v, want the sum of both changes: %v", items, want)
	}
}

// The probes of a long study take seconds to read, so Whole returns few trials.
func TestWholeReturnsFewTrials(t *testing.T) {
	many := func(make func(i int) studies.Trial) (trials []studies.Trial) {
		for i := range 100 {
			trials = append(trials, make(i))
		}
		trials[0].Origin = studies.Default
		return trials
	}
	unmet := func(int) studies.Trial { return atMost(0.5, 90) }
	met := func(i int) studies.Trial {
		switch i {
		case 20:
			return exact(3)
		case 40:
			return running()
		}
		return exact(2)
	}
	for _, c := range []struct {
		name   string
		trials []studies.Trial
		rows   int
		want   []int
	}{
		{"the reference, the best, the running and the newest trials", many(met), 3, []int{0, 20, 40, 97, 98, 99}},
		{"if none met the SLO, the nearest and the newest trials", many(unmet), 3, []int{studies.Nearest, 97, 98, 99}},
		{"ten rows by default", many(unmet), 0, []int{studies.Nearest, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99}},
		{"no trials", nil, 3, []int{studies.Nearest}},
	} {
		if got := Whole(c.rows)(studyOf(studies.Running, "", c.trials...)); !slices.Equal(got, c.want) {
			t.Errorf("%s: Whole(%d) = %v, want %v", c.name, c.rows, got, c.want)
		}
	}
}

func TestBestDecidesTies(t *testing.T) {
	better := exact(2.7)
	better.Result.Capacity.Low = 2.65
	fewer := withArgs(exact(2.7), studies.Sampled, "--a", "1")
	more := withArgs(exact(2.7), studies.Sampled, "--a", "1", "--b", "2")
	for _, c := range []struct {
		name   string
		trials []studies.Trial
		want   int
	}{
		{"the higher capacity", []studies.Trial{exact(2), exact(3), exact(2.5)}, 1},
		{"then the higher rate that passed", []studies.Trial{exact(2.7), better}, 1},
		{"then fewer args", []studies.Trial{more, fewer}, 1},
		{"then the older one", []studies.Trial{exact(2.7), exact(2.7)}, 0},
		{"a pass with a late client loses to a pass in time", []studies.Trial{exact(2), late(3)}, 0},
		{"of passes with a late client, the highest", []studies.Trial{late(2), late(3)}, 1},
		{"a rate that failed is no capacity", []studies.Trial{exact(2), atMost(5, 90)}, 0},
		{"a running trial has no capacity yet", []studies.Trial{exact(2), {State: studies.Running, Result: exact(3).Result}}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if best, ok := Best(studyOf(studies.Done, "", c.trials...)); !ok || best.Trial.Number != c.want {
				t.Errorf("Best = trial %d, %t; want trial %d", best.Trial.Number, ok, c.want)
			}
		})
	}
}

func TestGain(t *testing.T) {
	for _, c := range []struct {
		name          string
		reference     studies.Trial
		best          studies.Trial
		ratio         float64
		bound         capacity.Bound
		distinguished bool
		trust         string
	}{
		{"both are known well", sure(2, 0.03), sure(3, 0.03), 0.5, capacity.Exact, true, "95 %: +38 % to +63 %; over 99.9 % likely better"},
		{"the errors are larger than the gain", sure(2, 0.07), sure(2.1, 0.07), 0.05, capacity.Exact, false,
			"95 %: -14 % to +27 %; not distinguishable from the default: chance gives equally good flags such a gain in 31 of 100 studies"},
		{"the best has no interval", sure(2, 0.03), exact(3), 0.5, capacity.Exact, false, "the certainty of this gain is not known: the capacity of the best has no interval"},
		{"the reference has no interval", exact(2), sure(3, 0.03), 0.5, capacity.Exact, false, "the certainty of this gain is not known: the capacity of trial 0 has no interval"},
		{"the best passed everywhere", sure(2, 0.03), atLeast(3), 3/(2*math.Exp(1.96*0.03)) - 1, capacity.AtLeast, false, ""},
		{"the best passed everywhere, and the reference has only a bracket", exact(2), atLeast(3), 0, "", false, ""},
		{"the best passed no more than the reference may carry", sure(2, 0.03), atLeast(2.05), 0, "", false, ""},
		{"the reference passed everywhere", atLeast(2), sure(3, 0.03), 0, "", false, ""},
		{"both passed everywhere", atLeast(2), atLeast(3), 0, "", false, ""},
		{"the reference failed everywhere", atMost(2, 70), sure(3, 0.03), 0, "", false, ""},
		{"the client was late in the reference", late(2), sure(3, 0.03), 0, "", false, ""},
		{"the client was late in the best", sure(2, 0.03), late(3), 0, "", false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			study := studyOf(studies.Done, "", withArgs(c.reference, studies.Default), c.best)
			best := Winner{Trial: study.Trials[1], Found: study.Trials[1], Gain: gainOf(studies.TotalCapacity, study.Trials[1], study.Trials, 2)}
			g := best.Gain
			if g == nil {
				t.Fatal("gainOf = nil")
			}
			if math.Abs(g.Ratio-c.ratio) > 1e-9 || g.Bound != c.bound || g.Distinguishable != c.distinguished {
				t.Errorf("gain %+v; want %g, %q, distinguishable %t", g, c.ratio, c.bound, c.distinguished)
			}
			if got := trustText(best); got != c.trust {
				t.Errorf("trust %q, want %q", got, c.trust)
			}
		})
	}
}

// After an accepted change of the world, older trials are neither the best nor the reference. If no trial was measured
// since, the report says that the best one was measured before the change.
func TestWorldsAreNotCompared(t *testing.T) {
	of := func(number int, rate float64) studies.Trial {
		return studies.Trial{Number: number, State: studies.Done, Result: trial.Result{Outcome: trial.Measured,
			Capacity: capacity.Capacity{Rate: rate, Low: 0.95 * rate, High: 1.05 * rate, Bound: capacity.Exact}}}
	}
	const before = "was measured before an accepted change, and has not been measured again: gpu: H200 → L4; seed: 1 → 2"
	for _, c := range []struct {
		name   string
		trials []studies.Trial
		drift  int // number of the first trial after the change
		best   string
		gain   string
		said   bool // the report says that the best trial is from before the change
	}{
		{"nothing measured since", []studies.Trial{of(0, 2), of(1, 3)}, 2, "trial 1: 3 req/s", "+50 % as measured, over trial 0", true},
		{"the default measured again", []studies.Trial{of(0, 20), of(1, 30), of(2, 2)}, 2, "trial 2: 2 req/s", "none: the best is trial 2", false},
		{"a better trial since", []studies.Trial{of(0, 20), of(1, 30), of(2, 2), of(3, 2.5)}, 2, "trial 3: 2.5 req/s", "+25 % as measured, over trial 2", false},
		{"all trials since", []studies.Trial{of(0, 2), of(1, 3)}, 0, "trial 1: 3 req/s", "+50 % as measured, over trial 0", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			study := studies.Study{Name: "s", State: studies.Done, Trials: c.trials, Events: []studies.Event{
				{Kind: "resumed", Trial: 1}, {Kind: studies.Drift, Trial: c.drift,
					Changes: studies.Changes{{Fact: "gpu", Was: new("H200"), Is: new("L4")}, {Fact: "seed", Was: new("1"), Is: new("2")}}}}}
			for name, write := range map[string]func(io.Writer, studies.Study, Options) error{"best": BestText, "status": StatusText} {
				whole := written(t, write, study, Options{})
				text := strings.Join(strings.Fields(whole), " ")
				if !strings.Contains(text, "gain "+c.gain) || name == "status" && !strings.Contains(text, c.best) || strings.Contains(text, before) != c.said ||
					strings.Contains(text, "the trials before trial 2 are not compared with it") != (c.drift == 2 && !c.said) {
					t.Errorf("%s: want %q, %q and a note that the best is from before: %t; got\n%s", name, c.best, c.gain, c.said, whole)
				}
			}
		})
	}
}

// After a change of the world, the default need not be the first trial. A sampled trial may be the first, because it
// noticed the change.
func TestTheReferenceIsTheDefaultWhereverItIs(t *testing.T) {
	sampled, reference, best := exact(2), exact(3), exact(4)
	reference.Origin = studies.Default
	trials := []studies.Trial{exact(9), sampled, reference, best}
	trials[0].Origin = studies.Default
	study := studyOf(studies.Done, "", trials...)
	study.Events = []studies.Event{{Kind: studies.Drift, Trial: 1, Changes: studies.Changes{{Fact: "server version", Was: new("1"), Is: new("2")}}}}
	got, ok := Best(study)
	if !ok || got.Trial.Number != 3 || got.Gain == nil || got.Gain.Trial != 2 || got.Gain.Why != "" {
		t.Errorf("the best is trial %d, compared with %+v; want trial 3, compared with trial 2, the default", got.Trial.Number, got.Gain)
	}
	study.Trials = study.Trials[:2]
	if got, _ := Best(study); got.Gain != nil {
		t.Errorf("before the default is measured again, trial %d is compared with %+v", got.Trial.Number, got.Gain)
	}
}

// Evidence is shown without the prefix of the log line.
func TestEvidenceIsTheMessage(t *testing.T) {
	for line, want := range map[string]string{
		"(EngineCore_DP0 pid=123) ERROR 11-23 12:00:00 [core.py:708] torch.OutOfMemoryError: CUDA out of memory.": "torch.OutOfMemoryError: CUDA out of memory.",
		"(APIServer pid=7) RuntimeError: Engine core initialization failed.":                                      "RuntimeError: Engine core initialization failed.",
		"INFO 03-01 10:00:00 [api_server.py:1] starting":                                                          "starting",
		"ERROR 03-01 10:00:00 out of memory":                                                                      "out of memory",
		"(VllmWorker rank=0 pid=9) no prefix of vLLM's":                                                           "(VllmWorker rank=0 pid=9) no prefix of vLLM's",
		"ValueError: the KV cache is too small":                                                                   "ValueError: the KV cache is too small",
		"(EngineCore_DP0 pid=123)":                                                                                "(EngineCore_DP0 pid=123)",
		"":                                                                                                        "",
	} {
		if got := message(line); got != want {
			t.Errorf("message(%q) = %q, want %q", line, got, want)
		}
	}
	oom := failed(trial.Infeasible, serverctl.OOMStart, "(EngineCore_DP0 pid=123) ERROR 11-23 12:00:00 [core.py:708] CUDA out of memory.")
	oom.State = studies.Done
	for _, line := range LastWords(oom, 70) {
		if strings.Contains(line, "pid=") || !strings.Contains(line, "CUDA out of memory.") {
			t.Errorf("the last words are %q", line)
		}
	}
	oom.Result.Tail = []string{"loading", oom.Result.Evidence, "exit"}
	if got := LastWords(oom, 70); !slices.Equal(got, []string{"oom-start: CUDA out of memory.", "| loading", "| exit"}) {
		t.Errorf("the last words are %q, want the evidence once", got)
	}
	if best := written(t, BestText, studyOf(studies.Done, "", oom), Options{}); strings.Contains(best, "pid=") {
		t.Errorf("best says\n%s", best)
	}
}

// If a study's owner shows no sign of life, the report calls neither the study nor its unfinished trial running.
func TestAStudyWithoutALivingOwnerIsNotCalledRunning(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*studies.Study)
		want string
	}{
		{"its lock is free", func(s *studies.Study) { s.State, s.Life.Gone = studies.Stopped, true }, "stopped: 0 of 3 trials done, its owner is gone; `tuner run` continues it"},
		{"its heartbeats are old", func(s *studies.Study) { s.Life.Silent = 130 * time.Second }, "silent for 2 min 10 s; its owner may be gone: 0 of 3 trials done"},
		{"its lock cannot be read", func(s *studies.Study) { s.Unseen = "permission denied" }, "unknown: 0 of 3 trials done, it was running when it was last published; it is not known whether"},
		{"its start was refused", func(s *studies.Study) { s.State, s.Note = studies.NotBegun, "no weights" }, "not begun: 0 of 3 trials done, no weights"},
	} {
		study := studyOf(studies.Running, "", withArgs(running(probe(0, 2, 50)), studies.Default))
		c.set(&study)
		text := written(t, StatusText, study, Options{Planned: 3, Width: 200})
		if !strings.Contains(text, c.want) || strings.Contains(strings.ReplaceAll(text, "it was running when", ""), "running") ||
			!strings.Contains(text, "half done") {
			t.Errorf("%s: want %q, and no running trial:\n%s", c.name, c.want, text)
		}
	}
}

// A study may seem to be stored in the future, because the clock of another host is ahead.
func TestAnAgeIsNeverNegative(t *testing.T) {
	list := List{Studies: []Entry{{Name: "s", Updated: time.Now().Add(time.Hour)}}}
	if text := list.Text(80); !strings.Contains(text, " 0 s ago") {
		t.Errorf("want 0 s ago in\n%s", text)
	}
}

func TestBestReportsThePrefixCache(t *testing.T) {
	probe := func(rate, hits float64, pass bool) trial.Probe {
		return trial.Probe{Rate: rate, HitRate: hits, Verdict: slo.Verdict{Pass: pass}}
	}
	for _, row := range []struct {
		cache  trial.Protocol
		old    trial.Protocol
		probes []trial.Probe
		want   string
	}{
		{trial.Reset, "", []trial.Probe{probe(1, 0.2, true), probe(2, 0.431, true), probe(4, 0.9, false)},
			"cache     emptied before each probe; at 2 req/s it held 43 % of the prompt\n          tokens\n"},
		{trial.Carried, "", []trial.Probe{probe(2.618, 0, true)},
			"cache     carried from probe to probe; at 2.62 req/s it held none of the prompt\n          tokens\n"},
		{trial.Steady, "", []trial.Probe{probe(2, -1, true)},
			"cache     carried from probe to probe; the server does not report its hit rate\n"},
		{trial.Primed, "", nil, "cache     carried from probe to probe\n"},
		{"", trial.Reset, nil, "cache     emptied before each probe\n"},
		{trial.Steady, trial.Reset, nil, "cache     carried from probe to probe\n"},
		{"", trial.Carried, nil, "cache     carried from probe to probe\n"},
		{"", "", []trial.Probe{probe(2, 0.5, true)}, ""},
	} {
		var l lines
		l.addCache(studies.Study{OldCache: row.old}, studies.Trial{Probes: row.probes, Result: trial.Result{Cache: row.cache}})
		if got := l.String(); got != row.want {
			t.Errorf("%q, %q: cached = %q, want %q", row.cache, row.old, got, row.want)
		}
	}
}

// In each order of the rows, the status shows the best trial.
func TestTheBestTrialIsAlwaysShown(t *testing.T) {
	trials := slices.Repeat([]studies.Trial{exact(1)}, 30)
	trials[14] = exact(2)
	study := studyOf(studies.Done, "", trials...)
	for _, order := range Orders {
		var text strings.Builder
		err := StatusText(&text, study, Options{Sort: order})
		if got := text.String(); err != nil || !strings.Contains(got, "\n14  ") || !strings.Contains(got, "(20 trials more: --all)") {
			t.Errorf("sorted by %s, the status is %v\n%s", order, err, got)
		}
	}
}
