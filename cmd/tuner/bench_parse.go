package main

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// Limits of the flags of tuner bench.
const (
	maxRate        = 100_000 // requests per second; no server carries more, and a mistyped higher rate would exhaust this machine
	minRate        = 0.001   // requests per second, which is one request in 17 minutes; at a lower rate a run would hardly ever end
	maxConcurrency = 100_000
	maxRuns        = 1000
)

// parseRates reads rates in requests per second. A word is a number or a range from:to:step.
func parseRates(words []string) ([]float64, error) {
	var rates []float64
	for _, word := range words {
		parts := strings.Split(strings.TrimSpace(word), ":")
		numbers := make([]float64, len(parts))
		for i, part := range parts {
			v, err := strconv.ParseFloat(part, 64)
			if err != nil {
				return nil, usage("--rate %s: %q is not a number; write 4, or 1,2,4, or a range from:to:step such as 1:4:0.5", word, part)
			}
			if math.IsInf(v, 1) {
				return nil, usage("--rate %s: must be at least %g and at most %d; without a rate, write --concurrency N", word, minRate, maxRate)
			}
			if !(v >= minRate && v <= maxRate) {
				return nil, usage("--rate %s: must be at least %g and at most %d", word, minRate, maxRate)
			}
			numbers[i] = v
		}
		switch {
		case len(numbers) == 1:
			rates = append(rates, numbers[0])
		case len(numbers) == 3 && numbers[0] <= numbers[1] && (numbers[1]-numbers[0])/numbers[2] < maxRuns:
			for i := range int((numbers[1]-numbers[0])/numbers[2]+1e-9) + 1 {
				rate := numbers[0] + float64(i)*numbers[2]
				rates = append(rates, math.Round(rate*1e9)/1e9) // rounding makes 0.1 + 0.2 equal to 0.3
			}
		default:
			return nil, usage("--rate %s: a range is from:to:step, upwards and with fewer than %d steps, such as 1:4:0.5", word, maxRuns)
		}
	}
	return rates, nil
}

// parseConcurrencies reads the numbers of requests that are kept in flight.
func parseConcurrencies(words []string) ([]int, error) {
	var all []int
	for _, word := range words {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 1 || n > maxConcurrency {
			return nil, usage("--concurrency %s: write whole numbers from 1 to %d, such as 1,2,4", word, maxConcurrency)
		}
		all = append(all, n)
	}
	return all, nil
}

// parseSLO reads the limits of --slo. It returns nil if there are none.
func parseSLO(lines []string) (*slo.SLO, error) {
	if len(lines) == 0 {
		return nil, nil
	}
	s, err := studyfile.ParseSLO(lines)
	if err != nil {
		return nil, usage("--slo %w", err)
	}
	if len(s.Limits) == 0 {
		return nil, usage("--slo limits no latency; %s", studyfile.LimitExample)
	}
	return &s, nil
}

// parseGoodput reads --goodput as vllm bench serve does: ttft:1000 tpot:50, in milliseconds.
func parseGoodput(words []string) ([]bench.Limit, error) {
	known := []string{"ttft", "tpot", "e2el"}
	var limits []bench.Limit
	for word := range strings.FieldsSeq(strings.Join(words, " ")) {
		metric, text, ok := strings.Cut(word, ":")
		ms, err := strconv.ParseFloat(text, 64)
		if !ok || err != nil || !(ms >= 0) || math.IsInf(ms, 1) {
			return nil, usage("--goodput %s: write a latency and milliseconds, such as ttft:1000", word)
		}
		if !slices.Contains(known, metric) {
			return nil, usage("--goodput %s: there is no latency %q; %s", word, metric, space.DidYouMean(metric, known))
		}
		if slices.ContainsFunc(limits, func(l bench.Limit) bool { return l.Metric == metric }) {
			return nil, usage("--goodput %s: %s is given twice", word, metric)
		}
		limits = append(limits, bench.Limit{Metric: metric, Max: time.Duration(ms * float64(time.Millisecond))})
	}
	return limits, nil
}

// A headerFlag collects HTTP headers. Unlike a slice flag it does not split values at commas.
type headerFlag struct{ lines []string }

// Set adds one header.
func (h *headerFlag) Set(line string) error {
	h.lines = append(h.lines, line)
	return nil
}

// String returns an empty text, because help prints the result and a header may be a secret.
func (h *headerFlag) String() string { return "" }
