package slo

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
)

const (
	// The headroom of a failed check is at most -minMiss. So it is negative even if the percentile of the completed
	// requests keeps the limit.
	minMiss = 0.005
	// A headroom is cut off at ±maxHeadroom, which only means that the value is far from the limit.
	maxHeadroom = 3
)

// Judge judges the counted samples of a probe. In the whole window plannedRequests were due. The probe ended at
// endTime. A probe with fewer samples than planned, or with pending requests, ended early and can only fail.
//
// A limit is kept if at most floor((1 - percentile/100) · n) requests break it, failed requests included. The
// numpy-linear percentile of the completed requests must keep the limit too: by interpolation it can exceed the limit
// even if few enough requests break it. A probe with fewer requests than MinRequests fails. A probe whose queue grows
// through the window fails too, because its latencies depend on the length of the window.
//
// ClientLimited says whether the lateness of the load generator could have changed the verdict. It could in two cases:
// a failed probe would have passed without the lateness, or a probe passed while late requests made its bursts smaller.
func (s SLO) Judge(samples []bench.Sample, plannedRequests int, endTime time.Duration) Verdict {
	v := s.judge(samples, plannedRequests, endTime)
	v.ClientLimited = s.clientLimited(v.Pass, samples, plannedRequests, endTime)
	return v
}

// maxLagPart is the highest allowed p99 lag of the load generator, as a fraction of each limit that counts from the due
// time. Late requests make bursts smaller, and bursts decide a p99.
const maxLagPart = 0.1

// maxLag is the highest allowed p99 lag if no limit counts from the due time. A TPOT is a mean over seconds, so a
// smaller lag does not change the bursts that matter for TPOT.
const maxLag = 100 * time.Millisecond

func (s SLO) clientLimited(pass bool, samples []bench.Sample, planned int, now time.Duration) string {
	var lags []float64
	onTime := slices.Clone(samples)
	for i := range onTime {
		if s := onTime[i]; s.Sent > 0 || s.End > 0 {
			onTime[i].Due = s.Sent - s.Queued
			onTime[i].First -= min(s.Blur, s.First)
			lags = append(lags, render.InMilliseconds(s.SendLag()))
		}
	}
	slices.Sort(lags)
	p99 := bench.Percentile(lags, 99)
	if !pass {
		if s.judge(onTime, planned, now).Pass {
			return fmt.Sprintf("the load generator was %s ms late at p99; without its lateness the probe would have passed", render.Number(p99))
		}
		return ""
	}
	fromDue := false
	for _, l := range s.Limits {
		if l.Metric != TTFT && l.Metric != E2E {
			continue
		}
		fromDue = true
		if limit := render.InMilliseconds(l.Max); p99 > maxLagPart*limit {
			return fmt.Sprintf("the load generator was %s ms late at p99, more than a tenth of the limit of %s ms for %s", render.Number(p99), render.Digits(limit, 4), l)
		}
	}
	if !fromDue && p99 > render.InMilliseconds(maxLag) {
		return fmt.Sprintf("the load generator was %s ms late at p99, more than %s", render.Number(p99), render.Took(maxLag))
	}
	return ""
}

func (s SLO) judge(samples []bench.Sample, planned int, now time.Duration) Verdict {
	v := Verdict{Pass: true, Headroom: maxHeadroom}
	failed, pending := 0, 0
	for i := range samples {
		if samples[i].Failure != "" {
			failed++
		} else if samples[i].End == 0 {
			pending++
		}
	}
	for _, l := range s.Limits {
		c, values := l.check(samples, planned, now)
		c.HeadroomSE, c.EffectiveN = standardError(values, l.Percentile)
		v.Checks = append(v.Checks, c)
		if c.Headroom < v.Headroom || v.Binding == "" {
			v.Binding, v.Headroom, v.Reason = c.Limit, c.Headroom, c.String()
		}
		v.Pass = v.Pass && !c.fails()
	}
	grown := growthOf(samples, grownAtEnd)
	least, limit := s.MinRequests()
	switch {
	case failed+pending == len(samples) && (v.Pass || pending == 0):
		v.Pass, v.Headroom, v.Reason = false, -maxHeadroom, "no request was completed"
		if failed > 0 {
			v.Binding = ErrorRate
		}
	case planned > 0 && float64(failed) > s.MaxErrorRate*float64(planned):
		v.Pass, v.Binding, v.Headroom = false, ErrorRate, min(v.Headroom, miss(failed, int(s.MaxErrorRate*float64(planned))))
		v.Reason = fmt.Sprintf("%s failed; at most %.3g %% may fail", render.Of(failed, planned, "request"), 100*s.MaxErrorRate)
	case v.Pass && grown.perSecond > 0:
		v.Pass, v.Binding, v.Headroom, v.Reason = false, overSaturated, grown.headroom(), grown.String()
	case v.Pass && (pending > 0 || len(samples) < planned):
		v.Pass, v.Headroom = false, -minMiss
		v.Reason = fmt.Sprintf("the probe ended after %s", render.Of(len(samples)-pending, planned, "request"))
	case v.Pass && len(samples) < least:
		v.Pass, v.Binding, v.Headroom = false, tooFew, -minMiss
		v.Reason = fmt.Sprintf("no verdict: %s too few for p%g, which needs %d", render.Are(len(samples), "request"), limit.Percentile, least)
	}
	return v
}

// earlyStop decides when a probe ends early: when earlyStop times as many requests have broken a limit as a fail needs.
// The factor is large, because a burst may break a dozen of the first hundred requests of a good server. A probe near
// the capacity should also see its whole window, because its headroom is compared with the headrooms of other servers.
// With whole windows the ratio of two servers had an error of 4 %. With windows that ended at 24 broken requests of 300
// the error was 7 % (standard deviations, simulated H200).
const earlyStop = 20

// Stop returns a bench.Stop that ends a probe when it has clearly failed. That is when earlyStop times as many requests
// have broken a limit as a fail needs, when too many requests have failed, or when the queue grows. It never ends a
// probe as passed.
func (s SLO) Stop(planned int) bench.Stop {
	return func(now time.Duration, counted []bench.Sample) bool {
		failed := 0
		for i := range counted {
			if counted[i].Failure != "" {
				failed++
			}
		}
		if float64(failed) > s.MaxErrorRate*float64(planned) && failed > 0 {
			return true
		}
		if growthOf(counted, grownEarly).perSecond > 0 {
			return true
		}
		return slices.ContainsFunc(s.Limits, func(l Limit) bool {
			if l.Metric == ITL {
				return false
			}
			c, _, _ := l.count(counted, planned, now)
			return c.Broken > earlyStop*(c.Allowed+1)
		})
	}
}

// check judges one limit, and returns the known latencies in the order of their requests.
func (l Limit) check(samples []bench.Sample, planned int, now time.Duration) (c Check, values []float64) {
	c, each, values := l.count(samples, planned, now)
	c.Limit = l.String()
	if l.Metric != ITL {
		if endedEarly(samples, planned) {
			l.undecide(each, samples, now)
		}
		c.Each = string(each)
	}
	c.ValueMS = bench.Percentile(slices.Sorted(slices.Values(values)), l.Percentile)
	c.Headroom = c.headroom()
	return c, values
}

// count counts the requests, or the gaps for ITL, that broke the limit, and how many may break it. It also returns a
// character for each request, see Check.Each, and the known latencies in the order of their requests.
func (l Limit) count(samples []bench.Sample, planned int, now time.Duration) (c Check, each []byte, values []float64) {
	limit := render.InMilliseconds(l.Max)
	c = Check{Metric: l.Metric, MaxMS: limit}
	each, values = make([]byte, len(samples)), make([]float64, 0, len(samples))
	for i := range samples {
		s, known := &samples[i], len(values)
		each[i] = Undecided
		switch {
		case s.Failure != "":
			n := 1
			if l.Metric == ITL {
				n = max(1, s.WantTokens-1)
			}
			c.N += n
			c.Broken += n
			c.Failed += n
			each[i] = Over
		case s.End == 0:
			// A pending request counts only when it is already over the limit, or must end over it.
			if least, ok := l.overdue(s, now); ok {
				values = append(values, least)
			}
		default:
			values = l.values(values, s)
		}
		for _, v := range values[known:] {
			if each[i] = Kept; v > limit {
				each[i] = Over
				c.Broken++
			}
		}
	}
	c.N += len(values)
	n := c.N
	if l.Metric != ITL {
		n = max(n, planned)
	}
	c.Allowed = int(math.Floor((100-l.Percentile)/100*float64(n) + 1e-9))
	return c, each, values
}

func endedEarly(samples []bench.Sample, planned int) bool {
	return len(samples) < planned || slices.ContainsFunc(samples, func(s bench.Sample) bool { return s.End == 0 })
}

// undecide marks the requests that had no time to break their limit before an early end. Among the last requests of the
// probe, the quick ones have ended and the slow ones have not. To count only the quick ones would be too favourable.
func (l Limit) undecide(each []byte, samples []bench.Sample, now time.Duration) {
	for i := range samples {
		s := &samples[i]
		if s.Failure != "" {
			continue
		}
		since, within := s.Due, l.Max
		if l.Metric == TPOT {
			since, within = s.First, time.Duration(cmp.Or(s.OutputTokens, s.WantTokens)-1)*l.Max
		}
		switch {
		case l.Metric == TPOT && s.First == 0, now-since < within:
			each[i] = Undecided
		case l.Metric == TTFT && s.First > 0 && s.TTFT() <= l.Max:
			each[i] = Kept // the first token came in time, and later tokens do not matter for TTFT
		}
	}
}

// values appends the latencies of one completed request.
func (l Limit) values(to []float64, s *bench.Sample) []float64 {
	switch l.Metric {
	case TTFT:
		return append(to, render.InMilliseconds(s.TTFT()))
	case TPOT:
		if tpot, ok := s.TPOT(); ok {
			return append(to, render.InMilliseconds(tpot))
		}
		return to
	case ITL:
		for _, gap := range s.Gaps {
			to = append(to, render.InMilliseconds(gap))
		}
		return to
	}
	return append(to, render.InMilliseconds(s.E2E()))
}

// overdue reports whether the latency of a pending request is certain to exceed the limit. If so, it also returns the
// lowest value that this latency can still have, in milliseconds.
func (l Limit) overdue(s *bench.Sample, now time.Duration) (float64, bool) {
	metric, ok := pinned[l.Metric]
	if !ok || !(bench.Limit{Metric: metric, Max: l.Max}).Overdue(s, now) {
		return 0, false
	}
	switch {
	case l.Metric == TPOT:
		return render.InMilliseconds(now-s.First) / float64(s.WantTokens-1), true
	case l.Metric == TTFT && s.First > 0:
		return render.InMilliseconds(s.TTFT()), true
	}
	return render.InMilliseconds(now - s.Due), true
}

// pinned has the metrics whose limits a pending request can already have broken.
var pinned = map[Metric]string{TTFT: bench.MetricTTFT, TPOT: bench.MetricTPOT, E2E: bench.MetricE2EL}

func (c Check) fails() bool { return c.Broken > c.Allowed || c.ValueMS > c.MaxMS }

func (c Check) headroom() float64 {
	h := float64(maxHeadroom)
	if c.ValueMS > 0 {
		h = max(-maxHeadroom, min(maxHeadroom, math.Log(c.MaxMS/c.ValueMS)))
	}
	if c.fails() && h >= 0 { // failed requests break the limit but have no latency, so h does not show them
		return miss(c.Broken, c.Allowed)
	}
	return h
}

// miss returns the headroom if too many requests broke a limit or failed. The more such requests there are, the lower
// the headroom is.
func miss(broken, allowed int) float64 {
	return max(-maxHeadroom, min(-minMiss, -math.Log(float64(broken)/float64(allowed+1))))
}

// String says in one line whether the limit was kept.
func (c Check) String() string {
	digits := func(ms float64) string { return render.Digits(ms, 4) }
	verb := "keeps"
	if c.fails() {
		verb = "breaks"
	}
	if c.Failed > 0 {
		return fmt.Sprintf("%s %s ms of %s ms (%d over the limit and %d failed of %d, %d allowed)", c.Limit, digits(c.ValueMS), digits(c.MaxMS), c.Broken-c.Failed, c.Failed, c.N, c.Allowed)
	}
	return fmt.Sprintf("%s %s ms %s %s ms (%d of %d over the limit, %d allowed)", c.Limit, digits(c.ValueMS), verb, digits(c.MaxMS), c.Broken, c.N, c.Allowed)
}

// NeedsITL reports whether a limit is on the time between tokens, which costs memory to record.
func (s SLO) NeedsITL() bool {
	return slices.ContainsFunc(s.Limits, func(l Limit) bool { return l.Metric == ITL })
}
