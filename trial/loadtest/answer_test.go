package loadtest

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"vllmtuner/trial/capacity"
)

func TestCapacityTextFitsATerminal(t *testing.T) {
	runs := []AnswerRun{{Rate: 1, Pass: true}, {Rate: 1.35}, {Rate: 2, Limited: "late"}, {Rate: 1.161, Pass: true}, {Rate: 1.162}, {Rate: 1.163}}
	floor := &AnswerRun{Rate: 0.0234, Reason: "p99 TTFT 1350 ms breaks 1000 ms (9 of 300 over it, 3 may be)", Binding: "p99 TTFT", InFlight: 12}
	for _, a := range []Answer{
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 1.234, Low: 1.1, High: 1.3, Lowest: 1.02, Highest: 1.4, StdErr: 0.1, Bound: capacity.Exact, Binding: "p99 TPOT",
			InFlight: 75.4, Probes: 6, Why: "known to ±4.9 %", Doubt: "one probe, at 3.1 req/s, contradicts this; it may be chance"}},
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 1.234, Low: 1.1, High: 1.3, Bound: capacity.Exact, Binding: "p99 TPOT", InFlight: 75.4, Probes: 1, Why: "bracketed to 16 %"}},
		{Met: true, Runs: runs, Capacity: capacity.Capacity{Rate: 32.9, Low: 18.1, High: 60, Bound: capacity.AtLeast, Binding: "p99 TTFT", Probes: 4, Limited: "late",
			Why: "at 32.9 req/s the load generator was 17.5 ms late at p99, more than a tenth of p99 TTFT's 40 ms"}},
		{Floor: floor, Capacity: capacity.Capacity{Rate: 0.0234, High: 0.0234, Bound: capacity.AtMost, Binding: "p99 TTFT", Probes: 9, Why: "failed at the lowest rate, 0.0234 req/s"}, lowest: 0.01, budget: time.Hour},
	} {
		text := a.text()
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
		{20, true, []string{"at least 20 req/s with the load generator in time", "advice    18 req/s"}},
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
