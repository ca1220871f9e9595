package main

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
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

const percentileForm = `([0-9]{1,3}(?:\.[0-9]{1,6})?)`

// limitForm matches "p99 ttft <= 1000ms" and "ttft_p99: 1000ms".
var limitForm = regexp.MustCompile(`^(?:p` + percentileForm + `[ _]+([a-z0-9]+)|([a-z0-9]+)_p` + percentileForm + `)` +
	` *(?:<=|<|=|:) *(.+)$`)

const limitExample = `write "p99 ttft <= 1000ms", or as in a study file ttft_p99=1000ms; error_rate=1% lets 1 % of the requests fail`

// parseSLO reads limits in two forms: "p99 ttft <= 1000ms", and the form of a study file, "ttft_p99: 1000ms". It
// returns nil if there are no words.
func parseSLO(words []string) (*slo.SLO, error) {
	var s slo.SLO
	for _, word := range words {
		word = strings.ToLower(strings.TrimSpace(word))
		if share, ok := strings.CutPrefix(word, "error_rate"); ok {
			if err := parseErrorRate(&s, word, share); err != nil {
				return nil, err
			}
			continue
		}
		limit, err := parseLimit(word)
		if err != nil {
			return nil, usage("--slo %q: %w", word, err)
		}
		if slices.ContainsFunc(s.Limits, func(l slo.Limit) bool { return l.String() == limit.String() }) {
			return nil, usage("--slo %q: the limit of %s is given twice", word, limit)
		}
		s.Limits = append(s.Limits, limit)
	}
	switch {
	case len(words) == 0:
		return nil, nil
	case len(s.Limits) == 0:
		return nil, usage("--slo limits no latency; %s", limitExample)
	}
	return &s, nil
}

func parseErrorRate(s *slo.SLO, word, share string) error {
	v, err := parseShare(strings.Trim(share, " <=:"))
	if err != nil || !(v >= 0 && v <= 1) {
		return usage("--slo %q: write a share of the requests, such as error_rate=1%%", word)
	}
	s.MaxErrorRate = v
	return nil
}

// parseShare reads a share such as 5% or 0.05, and returns it as a number such as 0.05.
func parseShare(text string) (float64, error) {
	digits, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(digits), 64)
	if percent {
		v /= 100
	}
	return v, err
}

// parseLimit reads one limit. It requires a unit, because 1000 could mean seconds or milliseconds.
func parseLimit(word string) (slo.Limit, error) {
	parts := limitForm.FindStringSubmatch(word)
	if parts == nil {
		return slo.Limit{}, fmt.Errorf("is no limit; %s", limitExample)
	}
	percentile, metric, max := parts[1]+parts[4], parts[2]+parts[3], parts[5]
	if metric == "e2el" {
		metric = string(slo.E2E)
	}
	limit := slo.Limit{Metric: slo.Metric(metric)}
	known := []string{string(slo.TTFT), string(slo.TPOT), string(slo.ITL), string(slo.E2E)}
	if !slices.Contains(known, metric) {
		return limit, fmt.Errorf("there is no latency %q; %s", metric, space.DidYouMean(metric, known))
	}
	var err error
	if limit.Percentile, err = strconv.ParseFloat(percentile, 64); err != nil || limit.Percentile <= 0 || limit.Percentile >= 100 {
		return limit, fmt.Errorf("the percentile must be above 0 and below 100; write p99")
	}
	if _, err := strconv.ParseFloat(max, 64); err == nil {
		return limit, fmt.Errorf("%s has no unit; write %sms", max, max)
	}
	if limit.Max, err = time.ParseDuration(strings.ReplaceAll(max, " ", "")); err != nil || limit.Max <= 0 {
		return limit, fmt.Errorf("%q is no time above 0; write a number with its unit, such as 1000ms", max)
	}
	return limit, nil
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
