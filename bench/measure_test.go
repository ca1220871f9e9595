package bench

import (
	"encoding/json"
	"math"
	"testing"
	"time"
)

// The wanted values are numpy.percentile's of numpy 2.
func TestPercentileIsNumpys(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	tests := []struct {
		name   string
		values []float64
		p      float64
		want   float64
	}{
		{"the median of an even number lies between the middle two", []float64{1, 2, 3, 4}, 50, 2.5},
		{"p99 of one to a hundred", hundred, 99, 99.01},
		{"p95 of one to a hundred", hundred, 95, 95.05},
		{"p99.9 of one to a hundred", hundred, 99.9, 99.901},
		{"p25 of three", []float64{10, 20, 40}, 25, 15},
		{"p90 of three", []float64{10, 20, 40}, 90, 36},
		{"the only value is every percentile", []float64{7}, 99, 7},
		{"p0 is the least", []float64{1, 5}, 0, 1},
		{"p100 is the greatest", []float64{1, 5}, 100, 5},
		{"of nothing it is zero", nil, 99, 0},
	}
	for _, test := range tests {
		if got := Percentile(test.values, test.p); math.Abs(got-test.want) > 1e-12*test.want {
			t.Errorf("%s: Percentile(p%g) = %v, want %v", test.name, test.p, got, test.want)
		}
	}
}

func TestStatsLeaveTheirInputAsItIs(t *testing.T) {
	values := []float64{30, 10, 20}
	got := StatsOf(values)
	want := Stats{N: 3, Mean: 20, P50: 20, P90: 28, P95: 29, P99: 29.8, Max: 30}
	if got != want || values[0] != 30 {
		t.Errorf("StatsOf(30, 10, 20) = %+v and left %v, want %+v", got, values, want)
	}
	if got := StatsOf(nil); got != (Stats{}) {
		t.Errorf("StatsOf(nil) = %+v, want zero", got)
	}
}

// sample returns a good one of 11 tokens, due and sent at the same time, in milliseconds.
func sample(due, first, last int) Sample {
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	return Sample{
		Due: ms(due), Sent: ms(due), First: ms(first), Last: ms(last), End: ms(last + 1),
		PromptTokens: 100, CachedTokens: 60, OutputTokens: 11, WantTokens: 11,
	}
}

func TestMeasureCountsByVLLMsRules(t *testing.T) {
	samples := []Sample{sample(10000, 10100, 10600), sample(11000, 11300, 14000), sample(12000, 12200, 13200)}
	one := sample(12500, 12600, 12600)
	one.OutputTokens, one.WantTokens = 1, 1
	failed := sample(12600, 12700, 0)
	failed.Failure = Reset
	pending := Sample{Due: 13 * time.Second, WantTokens: 11}
	m := Measure(append(samples, one, failed, failed, pending), 1.5, 10*time.Second, 4*time.Second)

	if m.Requests != 7 || m.Completed != 4 || m.Failed != 2 || m.Failures[Reset] != 2 {
		t.Errorf("requests %d, completed %d, failed %d %v, want 7, 4, 2", m.Requests, m.Completed, m.Failed, m.Failures)
	}
	if m.TPOT.N != 3 || m.TPOT.Max != 270 {
		t.Errorf("TPOT %+v, want three, without the answer of one token, 270 ms at most", m.TPOT)
	}
	if m.TTFT.N != 4 || m.TTFT.Max != 300 || m.E2E.Max != 3000 || m.SendLag.N != 6 {
		t.Errorf("TTFT %+v, E2E %+v, send lag %+v, want completed requests only, and all that were sent", m.TTFT, m.E2E, m.SendLag)
	}
	if m.PromptTokens != 400 || m.CachedTokens != 240 || m.OutputTokens != 34 || m.WantTokens != 34 {
		t.Errorf("tokens %d/%d/%d/%d, want 400, 240, 34, 34", m.PromptTokens, m.CachedTokens, m.OutputTokens, m.WantTokens)
	}
	if m.RequestThroughput != 1 || m.OutputThroughput != 34.0/4 {
		t.Errorf("throughput %v requests, %v tokens per second, want 1 and 8.5 from 10 s to the last token at 14 s", m.RequestThroughput, m.OutputThroughput)
	}
	if want := (0.6 + 3 + 1.2 + 0.1) / 4; math.Abs(m.MeanInFlight-want) > 1e-9 {
		t.Errorf("mean in flight %v, want %v", m.MeanInFlight, want)
	}
	if m.PeakInFlight != 3 {
		t.Errorf("peak in flight %d, want the three that touch the third second", m.PeakInFlight)
	}
}

func TestPeakInFlightCountsWholeSeconds(t *testing.T) {
	tests := []struct {
		name    string
		samples []Sample
		want    int
	}{
		{"nothing completed", []Sample{{Due: 1}}, 0},
		{"one after the other within a second are two", []Sample{sample(500, 550, 600), sample(900, 950, 1200)}, 2},
		{"seconds count from the first start", []Sample{sample(900, 950, 1000), sample(1100, 1150, 1200)}, 2},
		{"in different seconds it is one", []Sample{sample(0, 10, 900), sample(1000, 1100, 1900)}, 1},
		{"an end on the second still touches it", []Sample{sample(0, 10, 1000), sample(1500, 1600, 1900)}, 2},
	}
	for _, test := range tests {
		if got := peakInFlight(test.samples); got != test.want {
			t.Errorf("%s: peakInFlight = %d, want %d", test.name, got, test.want)
		}
	}
}

func TestAMeasurementOfNothingIsStillJSON(t *testing.T) {
	for _, samples := range [][]Sample{nil, {{Failure: Refused, End: 1}}} {
		m := Measure(samples, 0, 0, 0)
		if _, err := json.Marshal(m); err != nil {
			t.Errorf("Measure(%v): %v", samples, err)
		}
	}
}
