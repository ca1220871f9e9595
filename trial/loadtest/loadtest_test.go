package loadtest

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A void (unusable) run is not blamed on the load generator, and a run whose requests all failed is not blamed on a
// latency.
func TestASweepBlamesNeitherClientNorLatency(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: time.Second}}}
	failed := limits.Judge([]bench.Sample{{Failure: bench.Status, End: 1}}, 1, time.Second)
	for _, row := range []struct {
		name      string
		result    Result
		want, not string
	}{
		{"void", Result{Measurement: bench.Measurement{Completed: 1, Void: "not streamed"}}, "not decided at 10 (the run is void)", "client"},
		{"all failed", Result{Measurement: bench.Measurement{Failed: 1}, Verdict: &failed}, "failed at the lowest load, 10, by error rate", "TTFT"},
	} {
		text := HighestText([]capacity.Step{{Rate: 10, Outcome: row.result.outcome()}}, false)
		if !strings.Contains(text, row.want) || strings.Contains(text, row.not) {
			t.Errorf("%s: %q, want %q and nothing of %q", row.name, text, row.want, row.not)
		}
	}
}

// If failed requests decide the verdict, the answer counts them and does not advise to raise a latency limit.
func TestFailuresAreNamedWhereTheyDecide(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: time.Second}}}
	samples := make([]bench.Sample, 40)
	for i := range samples {
		samples[i] = bench.Sample{Sent: 1, First: 2, Last: 3, End: 3, OutputTokens: 1, WantTokens: 1}
	}
	if text := failing(limits.Judge(samples, 40, time.Second)); text != "" {
		t.Errorf("without failures it says %q", text)
	}
	samples[0].Failure = bench.TimedOut
	if text := failing(limits.Judge(samples, 40, time.Second)); text != "1 of 40 requests failed" {
		t.Errorf("failing = %q for one failure where none is allowed", text)
	}
}

// Only some failures keep a detail. The notes show the first failure that has one.
func TestNotesShowTheFirstFailureWithADetail(t *testing.T) {
	b := &Bench{Client: &bench.Client{}}
	samples := []bench.Sample{{Failure: bench.TimedOut, End: 9}, {Failure: bench.TimedOut, Detail: "no byte came for 8s", End: 8}}
	notes := b.notes(Result{}, bench.Run{Samples: samples})
	if len(notes) != 1 || notes[0] != "first failure, timed-out: no byte came for 8s" {
		t.Errorf("notes are %q", notes)
	}
	stopped := b.notes(Result{stopped: true}, bench.Run{})
	if len(stopped) != 1 || !strings.HasSuffix(stopped[0], "no request was completed") {
		t.Errorf("notes of a run that ended before an answer are %q", stopped)
	}
}

// Each run of a search sends its own requests at its own times, so that no run finds the prompts of another in the cache.
func TestRunsOfASearchAreIndependent(t *testing.T) {
	source, err := workload.Open(workload.Spec{Kind: "random"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	l := Load{Source: source, Seed: 1, LeadIn: 5 * time.Second, Window: 2 * time.Minute, Arrivals: workload.Arrivals{Burstiness: 1}}
	first, second := l.Open(2, 0), l.Open(2, 1)
	for a := range first.schedule {
		for other := range second.schedule {
			if a.Due == other.Due || slices.Equal(a.Request.Tokens, other.Request.Tokens) {
				t.Errorf("both draws begin with %v", a)
			}
			return
		}
	}
	t.Error("a schedule is empty")
}

func TestRatesInTables(t *testing.T) {
	for rate, want := range map[float64]string{0.5: "0.50", 2: "2.00", 0.75: "0.75", 0.125: "0.125", 12: "12.00"} {
		if got := RateText(rate); got != want {
			t.Errorf("RateText(%g) = %s, want %s", rate, got, want)
		}
	}
}

// A row says if the load generator decided the verdict. If the run ended early, the row shows the p99 that the verdict used.
func TestARowShowsWhatItsVerdictRead(t *testing.T) {
	v := slo.Verdict{Reason: "p99 TTFT 196.4 ms breaks 40 ms", Checks: []slo.Check{{Limit: "p99 TTFT", MaxMS: 40, ValueMS: 196.4}}}
	r := Result{Run: Run{Level: trial.Level{Rate: 20}}, Verdict: &v, stopped: true}
	r.Measurement.TTFT, r.Measurement.Completed = bench.Stats{N: 130, P50: 20, P99: 68.1}, 130
	r.notes = (&Bench{Client: &bench.Client{}}).notes(r, bench.Run{Stopped: true})
	var out bytes.Buffer
	o := &Report{Out: &out, rows: 2}
	if err := o.writeRow(r); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); !strings.Contains(text, " 196 ") || !strings.Contains(strings.Join(strings.Fields(text), " "), "over the 130 completed requests alone they are 68.1 and - ms") {
		t.Errorf("the row does not show both figures:\n%s", text)
	}
	none := r
	none.Measurement = bench.Measurement{}
	out.Reset()
	if err := o.writeRow(none); err != nil || !strings.HasPrefix(strings.Join(strings.Fields(out.String()), " "), "20 0.00 0 - 196 - - - - 0 failed") {
		t.Errorf("where no request was completed, the row is %v\n%s\nwant the p99 that the verdict used, and no other latency", err, &out)
	}
	late := r
	late.Verdict, late.Limited = &slo.Verdict{Pass: true, ClientLimited: "late"}, "late"
	if word := verdictWord(late); word != "client-limited" {
		t.Errorf("the row says %q, want client-limited", word)
	}
	if err := keptAny([]capacity.Step{{Rate: 20, Outcome: late.outcome()}}); !errors.Is(err, ErrNoRunKept) {
		t.Errorf("one late pass gives %v, want that no run kept the SLO", err)
	}
	in := Result{Run: Run{Level: trial.Level{Rate: 20}}, Verdict: &slo.Verdict{Pass: true}}
	in.Measurement.SendLag.P99, in.Measurement.Window = 147, 2*time.Second
	if !in.outcome().Pass {
		t.Error("slow sending turned a pass into a fail, although the verdict does not blame the load generator")
	}
}

func TestCapacityTextFitsATerminal(t *testing.T) {
	runs := []AnswerRun{{Rate: 1, Pass: true}, {Rate: 1.35}, {Rate: 2, Limited: "late"}, {Rate: 1.161, Pass: true}, {Rate: 1.162}, {Rate: 1.163}}
	floor := &AnswerRun{Rate: 0.0234, Reason: "p99 TTFT 1350 ms breaks 1000 ms (9 of 300 over it, 3 may be)", Binding: "p99 TTFT", InFlight: 12}
	for _, a := range []Answer{
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 1.234, Low: 1.1, High: 1.3, Lowest: 1.02, Highest: 1.4, StdErr: 0.1, Bound: capacity.Exact, Binding: "p99 TPOT",
			InFlight: 75.4, Probes: 6, Why: "known to ±4.9 %", Doubt: "one probe, at 3.1 req/s, contradicts this; it may be chance"}},
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 1.234, Low: 1.1, High: 1.3, Bound: capacity.Exact, Binding: "p99 TPOT", InFlight: 75.4, Probes: 1, Why: "bracketed to 16 %"}},
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 32.9, Low: 18.1, High: 60, Bound: capacity.AtLeast, Binding: "p99 TTFT", Probes: 4, Limited: "late",
			Why: "at 32.9 req/s the load generator was 17.5 ms late at p99, more than a tenth of the limit of 40 ms for p99 TTFT"}},
		{Floor: floor, Capacity: capacity.Capacity{Rate: 0.0234, High: 0.0234, Bound: capacity.AtMost, Binding: "p99 TTFT", Probes: 9, Why: "failed at the lowest rate, 0.0234 req/s"}, lowest: 0.01, budget: time.Hour},
	} {
		text := a.text(80)
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%d columns: %s", n, line)
			}
		}
		if !strings.HasPrefix(text, "capacity  ") || !strings.Contains(text, "\nsearch    ") {
			t.Errorf("the answer lacks the line capacity or search:\n%s", text)
		}
	}
}

// A rate that passed only with a late load generator is a lower bound. It is neither proof nor success.
func TestALateSearchDoesNotSucceed(t *testing.T) {
	const why = "the load generator was 17.5 ms late at p99"
	for _, row := range []struct {
		low  float64
		kept bool
		want []string
	}{
		{0, false, []string{"capacity  at least about 32.9 req/s, passed while the load generator was late: " + why, "remedy    " + MoreCores}},
		{20, true, []string{"at least 20 req/s with the load generator on time", "advice    18 req/s"}},
	} {
		var out bytes.Buffer
		report := &Report{Out: &out, Format: FormatText, Bench: &Bench{}}
		found := capacity.Capacity{Rate: 32.9, Low: row.low, High: 60, Bound: capacity.AtLeast, Binding: "p99 TTFT", Limited: why, Why: why}
		err := report.capacity(newAnswer(found, &Search{Margin: 0.9}))
		if (err == nil) != row.kept || err != nil && (!errors.Is(err, ErrNoRunKept) || !strings.Contains(err.Error(), MoreCores)) {
			t.Errorf("passed %g in time: %v, want success %t, or a remedy", row.low, err, row.kept)
		}
		text := strings.Join(strings.Fields(out.String()), " ")
		for _, want := range row.want {
			if !strings.Contains(text, strings.Join(strings.Fields(want), " ")) {
				t.Errorf("passed %g in time: no %q in\n%s", row.low, want, &out)
			}
		}
	}
}
