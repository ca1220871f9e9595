package bench

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Measure sums up the counted samples of a run. start is the end of the lead-in and length the window's. A sample that is
// still pending is counted as a request, and neither as completed nor as failed.
func Measure(samples []Sample, rate float64, start, length time.Duration) Measurement {
	m := Measurement{Rate: rate, Window: length, Requests: len(samples)}
	var ttft, tpot, itl, e2e, lag []float64
	var last time.Duration
	for i := range samples {
		s := &samples[i]
		if s.Sent > 0 {
			lag = append(lag, milliseconds(s.SendLag()))
		}
		if s.Failure != "" {
			m.Failed++
			if m.Failures == nil {
				m.Failures = make(map[Failure]int)
			}
			m.Failures[s.Failure]++
		}
		if !s.OK() {
			continue
		}
		m.Completed++
		m.PromptTokens += s.PromptTokens
		m.CachedTokens += s.CachedTokens
		m.OutputTokens += s.OutputTokens
		m.WantTokens += s.WantTokens
		last = max(last, s.Last)
		ttft = append(ttft, milliseconds(s.TTFT()))
		e2e = append(e2e, milliseconds(s.E2E()))
		if d, ok := s.TPOT(); ok {
			tpot = append(tpot, milliseconds(d))
		}
		for _, gap := range s.Gaps {
			itl = append(itl, milliseconds(gap))
		}
	}
	m.TTFT, m.TPOT, m.ITL, m.E2E, m.SendLag = StatsOf(ttft), StatsOf(tpot), StatsOf(itl), StatsOf(e2e), StatsOf(lag)
	if took := (last - start).Seconds(); took > 0 {
		m.RequestThroughput = float64(m.Completed) / took
		m.OutputThroughput = float64(m.OutputTokens) / took
	}
	if length > 0 {
		m.MeanInFlight = m.E2E.Mean / 1000 * float64(m.E2E.N) / length.Seconds()
	}
	m.PeakInFlight = peakInFlight(samples)
	return m
}

// peakInFlight is the "peak concurrent requests" of vllm bench serve (calculate_metrics in vllm/benchmarks/serve.py,
// 0.14.1 and 0.33): the completed requests that touch the same whole second, counted from the first one's start.
// It is coarse: all that lived at any time within that second count.
func peakInFlight(samples []Sample) int {
	done := slices.DeleteFunc(slices.Clone(samples), func(s Sample) bool { return !s.OK() })
	if len(done) == 0 {
		return 0
	}
	first := slices.MinFunc(done, func(a, b Sample) int { return cmp.Compare(a.Sent, b.Sent) }).Sent
	changes := make(map[time.Duration]int) // by second: requests that begin in it less those that ended in the one before
	for _, s := range done {
		changes[(s.Sent-first)/time.Second]++
		changes[(s.Last-first)/time.Second+1]--
	}
	seconds := make([]time.Duration, 0, len(changes))
	for second := range changes {
		seconds = append(seconds, second)
	}
	slices.Sort(seconds)
	inFlight, peak := 0, 0
	for _, second := range seconds {
		inFlight += changes[second]
		peak = max(peak, inFlight)
	}
	return peak
}

// StatsOf returns the usual figures of latencies in milliseconds, in any order; ms is left as it is.
func StatsOf(ms []float64) Stats {
	if len(ms) == 0 {
		return Stats{}
	}
	sorted := slices.Sorted(slices.Values(ms))
	sum := 0.0
	for _, v := range sorted {
		sum += v
	}
	return Stats{
		N: len(sorted), Mean: sum / float64(len(sorted)),
		P50: Percentile(sorted, 50), P90: Percentile(sorted, 90), P95: Percentile(sorted, 95), P99: Percentile(sorted, 99),
		Max: sorted[len(sorted)-1],
	}
}

// Percentile returns the p-th percentile, p in [0, 100], of ascending values as numpy.percentile has it by default
// (linear interpolation, to the last bit). It is 0 when there are no values.
func Percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := p / 100 * float64(len(sorted)-1)
	below := min(max(int(math.Floor(at)), 0), len(sorted)-1)
	a, b := sorted[below], sorted[min(below+1, len(sorted)-1)]
	t := at - float64(below)
	if t >= 0.5 { // numpy interpolates from the nearer end
		return b - (b-a)*(1-t)
	}
	return a + (b-a)*t
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
