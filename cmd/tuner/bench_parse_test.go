package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/trial/slo"
)

func TestParseRates(t *testing.T) {
	for _, row := range []struct {
		words []string
		want  []float64
		says  string
	}{
		{[]string{"4"}, []float64{4}, ""},
		{[]string{"1", " 2 ", "0.5"}, []float64{1, 2, 0.5}, ""},
		{[]string{"1:2:0.25"}, []float64{1, 1.25, 1.5, 1.75, 2}, ""},
		{[]string{"0.1:0.3:0.1", "9"}, []float64{0.1, 0.2, 0.3, 9}, ""},
		{[]string{"1:2:0.4"}, []float64{1, 1.4, 1.8}, ""},
		{[]string{"2:2:1"}, []float64{2}, ""},
		{[]string{"fast"}, nil, `"fast" is not a number; write 4`},
		{[]string{"inf"}, nil, "without a rate, write --concurrency N"},
		{[]string{"0"}, nil, "must be at least 0.001 and at most 100000"},
		{[]string{"nan"}, nil, "must be at least 0.001"}, {[]string{"1e-9"}, nil, "must be at least 0.001"},
		{[]string{"3:1:1"}, nil, "a range is from:to:step, upwards"},
		{[]string{"1:2"}, nil, "a range is from:to:step"},
		{[]string{"1:100000:0.001"}, nil, "fewer than 1000 steps"},
		{[]string{""}, nil, `"" is not a number`},
	} {
		got, err := parseRates(row.words)
		if !slices.Equal(got, row.want) || !says(err, row.says) {
			t.Errorf("parseRates(%q) = %v, %v; want %v, %q", row.words, got, err, row.want, row.says)
		}
	}
}

// says reports whether err is a usage error that contains text. For an empty text it reports whether err is nil.
func says(err error, text string) bool {
	if err == nil || text == "" {
		return err == nil && text == ""
	}
	return strings.Contains(err.Error(), text) && exitCode(err) == exitUsage
}

func TestParseSLO(t *testing.T) {
	ttft := slo.Limit{Metric: slo.TTFT, Percentile: 99, Max: time.Second}
	for _, row := range []struct {
		words []string
		want  []slo.Limit
		share float64
		says  string
	}{
		{[]string{"p99 ttft <= 1000ms"}, []slo.Limit{ttft}, 0, ""},
		{[]string{"ttft_p99=1s"}, []slo.Limit{ttft}, 0, ""},
		{[]string{"ttft_p99: 1000ms"}, []slo.Limit{ttft}, 0, ""},
		{[]string{"P99 TTFT < 1 s", "error_rate 1%"}, []slo.Limit{ttft}, 0.01, ""},
		{[]string{"p99_e2el_ms=5s", "itl_p50<9ms"}, []slo.Limit{{Metric: slo.E2E, Percentile: 99, Max: 5 * time.Second}, {Metric: slo.ITL, Percentile: 50, Max: 9 * time.Millisecond}}, 0, ""},
		{[]string{"P99 TTFT < 1 s", "error_rate=1%"}, []slo.Limit{ttft}, 0.01, ""},
		{[]string{"p99 ttft<=1s", " p99.9 e2el <= 2m"}, []slo.Limit{ttft, {Metric: slo.E2E, Percentile: 99.9, Max: 2 * time.Minute}}, 0, ""},
		{[]string{"p99 ttft <= 1000"}, nil, 0, `"1000" has no unit; write 1000ms`},
		{[]string{"p99 tftt <= 1s"}, nil, 0, `there is no latency "p99 tftt"; did you mean "ttft_p99"?`},
		{[]string{"p100 ttft <= 1s"}, nil, 0, "the percentile must be above 0 and below 100"},
		{[]string{"p99 ttft <= soon"}, nil, 0, `"soon" is not a duration; write a number with its unit, such as 30ms`},
		{[]string{"p99 ttft <= -1s"}, nil, 0, "p99 ttft is -1s; write a duration from 1µs to a year"},
		{[]string{"p99ttft"}, nil, 0, `--slo "p99ttft": has no time; write "p99 ttft <= 1000ms"`},
		{[]string{"speed=1s"}, nil, 0, `there is no latency "speed"; write ttft, tpot, itl or e2e with a percentile`},
		{[]string{"quick"}, nil, 0, `is no limit; write "p99 ttft <= 1000ms"`},
		{[]string{"p99 ttft <= 1s", "ttft_p99=2s"}, nil, 0, "the limit on p99 TTFT is given twice; remove one"},
		{[]string{"error_rate=1%"}, nil, 0, "--slo limits no latency"},
		{[]string{"p99 ttft<1s", "error_rate=5"}, nil, 0, "write 5%"},
		{[]string{"error_rate=many"}, nil, 0, `"many" is not a percentage; write 1% or 0.01`},
	} {
		got, err := parseSLO(row.words)
		if !says(err, row.says) || err == nil && (!slices.Equal(got.Limits, row.want) || got.MaxErrorRate != row.share) {
			t.Errorf("parseSLO(%q) = %v, %v; want %v, %q", row.words, got, err, row.want, row.says)
		}
	}
	if got, err := parseSLO(nil); got != nil || err != nil {
		t.Errorf("without limits: %v, %v", got, err)
	}
}

func TestParseGoodput(t *testing.T) {
	for _, row := range []struct {
		words []string
		want  []bench.Limit
		says  string
	}{
		{[]string{"ttft:1000 tpot:50.5"}, []bench.Limit{{Metric: "ttft", Max: time.Second}, {Metric: "tpot", Max: 50500 * time.Microsecond}}, ""},
		{[]string{"e2el:0"}, []bench.Limit{{Metric: "e2el"}}, ""},
		{[]string{"e2e:5"}, nil, `did you mean "e2el"?`},
		{[]string{"ttft"}, nil, "write a latency and milliseconds"},
		{[]string{"ttft:1s"}, nil, "write a latency and milliseconds"},
		{[]string{"ttft:1", "ttft:2"}, nil, "given twice"},
	} {
		got, err := parseGoodput(row.words)
		if !slices.Equal(got, row.want) || !says(err, row.says) {
			t.Errorf("parseGoodput(%q) = %v, %v; want %v, %q", row.words, got, err, row.want, row.says)
		}
	}
}
