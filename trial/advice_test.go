package trial

import (
	"testing"

	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

func TestAdvise(t *testing.T) {
	at := func(rate, ttft float64) Probe {
		v := slo.Verdict{Pass: ttft <= 1000, Checks: []slo.Check{{Limit: "p99 TTFT", MaxMS: 1000, ValueMS: ttft}}}
		return Probe{Rate: rate, Verdict: v}
	}
	limited := at(1.8, 700)
	limited.Verdict.ClientLimited = "the load generator was late"
	sure := capacity.Capacity{Rate: 2.2, Low: 2.1, High: 2.4, Lowest: 2, Highest: 2.5, Bound: capacity.Exact}
	unsure := capacity.Capacity{Rate: 2.2, Low: 2, High: 2.4, Bound: capacity.Exact}
	for _, row := range []struct {
		name     string
		capacity capacity.Capacity
		probes   []Probe
		want     string
	}{
		{"a probe was there", sure, []Probe{at(2.1, 900), at(1.82, 512)}, "1.8 req/s = 0.9 × 2, the lower end; there p99 TTFT 512 of 1000 ms"},
		{"the nearest of two, whatever came first", sure, []Probe{at(1.81, 512), at(1.85, 600)}, "1.8 req/s = 0.9 × 2, the lower end; there p99 TTFT 512 of 1000 ms"},
		{"the next above that passed", sure, []Probe{at(2.4, 1100), at(2.1, 900), at(1, 90)}, "1.8 req/s = 0.9 × 2, the lower end; at 2.1 req/s, which passed, p99 TTFT 900 of 1000 ms"},
		{"the probe there failed", sure, []Probe{at(1.8, 1300), at(2.1, 900)}, "1.8 req/s = 0.9 × 2, the lower end; but 1.8 req/s failed: p99 TTFT 1300 of 1000 ms"},
		{"a late generator shows nothing", sure, []Probe{limited, at(2.1, 900)}, "1.8 req/s = 0.9 × 2, the lower end; at 2.1 req/s, which passed, p99 TTFT 900 of 1000 ms"},
		{"nothing passed above", sure, []Probe{at(2.1, 1010), at(1, 90)}, "1.8 req/s = 0.9 × 2, the lower end; no probe at or above this rate passed"},
		{"no interval", unsure, []Probe{at(2, 900)}, "1.8 req/s = 0.9 × 2, the highest rate that passed; at 2 req/s, which passed, p99 TTFT 900 of 1000 ms"},
		{"a closed loop has no rate", sure, []Probe{{Streams: 8, Verdict: slo.Verdict{Pass: true}}}, "1.8 req/s = 0.9 × 2, the lower end; no probe at or above this rate passed"},
		{"only a late generator passed", capacity.Capacity{Rate: 2, Bound: capacity.AtLeast, Limited: "late"}, []Probe{limited}, ""},
		{"a late generator passed higher", capacity.Capacity{Rate: 2.4, Low: 2, Bound: capacity.AtLeast, Limited: "late"}, []Probe{limited, at(2, 900)},
			"1.8 req/s = 0.9 × 2, the highest rate that passed; at 2 req/s, which passed, p99 TTFT 900 of 1000 ms"},
		{"nothing kept the SLO", capacity.Capacity{Rate: 1, High: 1, Bound: capacity.AtMost}, nil, ""},
	} {
		a, ok := Advise(row.capacity, 0.9, row.probes)
		got := ""
		if ok {
			got = a.String()
		}
		if got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}
