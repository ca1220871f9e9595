package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/simload"
)

// benchOn runs tuner bench --find-capacity on the simulated H200 in virtual time. It checks that the notes and the
// answer fit 80 columns.
func benchOn(t *testing.T, flags ...string) (stdout, stderr string, err error) {
	t.Helper()
	profile, loadErr := sim.LoadProfile("h200-llama70b-fp8")
	if loadErr != nil {
		t.Fatal(loadErr)
	}
	_, load, startErr := (&simload.Rig{Profile: profile}).Start(t.Context(), trial.Launch{Args: strings.Fields("--max-model-len 16384"), Progress: func(string) {}})
	if startErr != nil {
		t.Fatal(startErr)
	}
	sender, ok := load.(trial.ClosedLoad)
	if !ok {
		t.Fatal("the simulated load has no RunClosed")
	}
	var out, words bytes.Buffer
	command := benchCommand(nil)
	command.Action = func(c *cli.Context) error {
		b, err := newBench(c)
		if err != nil {
			return err
		}
		b.Sender = sender
		report, err := newBenchReport(c, b)
		if err != nil {
			return err
		}
		return b.FindCapacity(t.Context(), report)
	}
	command.HideHelp = true // the flag --help is a variable of package cli, and these tests run side by side
	app := &cli.App{HideHelp: true, Commands: []*cli.Command{command}, Writer: &out, ErrWriter: &words, ExitErrHandler: func(*cli.Context, error) {}}
	args := []string{"tuner", "bench", "--url", "http://127.0.0.1:1", "--find-capacity", "--workload", "phase1", "--lead-in", "30s"}
	err = app.Run(append(args, flags...))
	_, ours, _ := strings.Cut(words.String(), "--reset-cache\n") // skips the note about repeats, which is longer than 80 columns
	if !slices.Contains(flags, "json") {
		ours += out.String()
	}
	for line := range strings.Lines(ours) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	return out.String(), words.String(), err
}

// answerOf returns the last JSON object of the output, which is the answer, and the number of objects before it.
func answerOf(t *testing.T, stdout string) (answer loadtest.Answer, runs int) {
	t.Helper()
	for d := json.NewDecoder(strings.NewReader(stdout)); ; runs++ {
		var object struct {
			Date string `json:"date"` // only runs have a date
			loadtest.Answer
		}
		if err := d.Decode(&object); err != nil {
			t.Fatalf("no answer after %d runs: %v", runs, err)
		}
		if object.Date == "" {
			if d.More() {
				t.Error("the answer is not the last object")
			}
			return object.Answer, runs
		}
	}
}

const defaultLimits = "p99 ttft <= 1000ms, p99 tpot <= 60ms"

func TestFindCapacityReachesThePrecision(t *testing.T) {
	t.Parallel()
	stdout, stderr, err := benchOn(t, "--slo", defaultLimits, "--rate", "2", "--precision", "8%", "--budget", "20h", "-o", "json")
	must(t, err)
	a, runs := answerOf(t, stdout)
	c := a.Capacity
	if !a.Met || c.Bound != capacity.Exact || c.Lowest <= 0 || c.Lowest >= c.Rate || c.Highest <= c.Rate || c.Binding == "" || c.InFlight <= 0 {
		t.Errorf("the answer is %+v, want a capacity with its interval, limit and requests in flight", c)
	}
	// The search ends within the time that it announced. If this time was too short for the wanted precision, the
	// answer says so.
	if half := math.Exp(1.96*c.StdErr) - 1; half > 0.11 || half > 0.08 && !strings.HasSuffix(c.Why, "after the time that was planned") || !strings.HasPrefix(c.Why, "known to ±") {
		t.Errorf("the capacity is known to ±%.1f %%, %q; want ±8 %%, or at most ±11 %% after the planned time", 100*half, c.Why)
	}
	if !strings.Contains(stderr, "±8 % takes about ") || !strings.Contains(stderr, "\ncapacity  ") {
		t.Errorf("standard error says %q, want the time that the precision takes, and the answer", stderr)
	}
	if len(a.Runs) != runs || runs < c.Probes || runs > c.Probes+1 {
		t.Errorf("the answer lists %d runs; %d were printed, %d of them by the search", len(a.Runs), runs, c.Probes)
	}
	if a.Advice == nil || !a.Advice.Near() || math.Abs(a.Advice.Rate/(0.9*c.Lowest)-1) > 0.01 || len(a.Advice.Measured) != 2 {
		t.Errorf("the advice is %+v, want a measured rate at 0.9 of %g", a.Advice, c.Lowest)
	}
}

func TestFindCapacityAsText(t *testing.T) {
	t.Parallel()
	stdout, _, err := benchOn(t, "--slo", defaultLimits, "--rate", "2", "--margin", "0.5", "--budget", "20h")
	must(t, err)
	stdout = strings.ReplaceAll(stdout, "\n          ", " ") // join continued lines
	for _, want := range []string{"\ncapacity  ", " req/s, 95 %: ", " requests in flight\n", "\nproof     passed ", " breaks first\n", "\nsearch    ", " = 0.5 × ", ", the lower end; there p99 "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is not in the answer:\n%s", want, stdout)
		}
	}
}

// A search that finds no capacity ends within its budget. The answer says why, and what was measured.
func TestFindCapacityWithoutACapacity(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		flags []string
		want  []string
	}{
		{"a single request breaks the limit", []string{"--slo", "p99 tpot <= 1ms, p99 ttft <= 60s", "--budget", "40h"},
			[]string{"capacity  none: even at 0.02 req/s, the lowest rate that was tried, p99 TPOT", "even a request that runs alone takes too long", "raise the limit of p99 TPOT", "failed at the lowest rate"}},
		{"a single request breaks the limit, and the budget is too short for lower rates", []string{"--slo", "p99 tpot <= 1ms", "--budget", "15m"},
			[]string{"capacity  none: even at ", "begin lower with --rate, or raise --budget, now 15 min", "the time for probes, 15 min, is spent"}},
	} {
		stdout, _, err := benchOn(t, append(row.flags, "--rate", "2")...)
		if !errors.Is(err, loadtest.ErrNoRunKept) {
			t.Errorf("%s: %v, want %v", row.name, err, loadtest.ErrNoRunKept)
		}
		text := strings.Join(strings.Fields(stdout), " ")
		for _, want := range row.want {
			if !strings.Contains(text, strings.Join(strings.Fields(want), " ")) {
				t.Errorf("%s: %q is not in the answer:\n%s", row.name, want, stdout)
			}
		}
	}
}

// A search sends the workload once before its first run. Without that, only the first run would find an empty prefix
// cache.
func TestFindCapacityFillsTheCache(t *testing.T) {
	t.Parallel()
	first := func(flags ...string) (value float64) {
		stdout, _, err := benchOn(t, append(flags, "--slo", defaultLimits, "--rate", "1.3", "--max-rate", "1.3", "-o", "json")...)
		if err != nil && !errors.Is(err, loadtest.ErrNoRunKept) {
			t.Fatal(err)
		}
		a, _ := answerOf(t, stdout)
		return a.Runs[0].Measured[1].ValueMS
	}
	if cold, primed := first("--no-prime"), first(); primed > 0.9*cold {
		t.Errorf("p99 TPOT of the first run is %.1f ms with a filled cache and %.1f ms with an empty one, want a tenth less", primed, cold)
	}
}
