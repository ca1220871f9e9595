package bench

import (
	"maps"
	"slices"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
)

// Rules name a version of vllm bench serve. Where versions differ, a measurement follows the definitions of the named
// version (vllm/benchmarks/lib/endpoint_request_func.py).
type Rules string

// The rules differ only for chat. In 0.14.1 the chunk that only names the role is the first token, and the usage chunk
// is the end. The time from the role to the first token then counts as one more time between tokens. A measurement does
// not follow 0.14.1 in two other points. 0.14.1 counts a chat that failed under HTTP 200 as completed, and it counts
// prompts with its own tokenizer.
const (
	Rules0141 Rules = "0.14.1"
	Rules033  Rules = "0.33"
)

// For returns the rules to use at an endpoint. Only workload.Chat can have Rules0141. All other endpoints have
// Rules033.
func (r Rules) For(endpoint string) Rules {
	if r == Rules0141 && endpoint == workload.Chat {
		return Rules0141
	}
	return Rules033
}

// first returns when the first token came, or 0 if it has not come yet.
func (r Rules) first(s *Sample) time.Duration {
	if r == Rules0141 && s.Opened > 0 {
		return s.Opened
	}
	return s.First
}

// last returns when the answer was complete.
func (r Rules) last(s *Sample) time.Duration {
	if r == Rules0141 && s.Closed > 0 {
		return s.Closed
	}
	return s.Last
}

// ttft returns the time to first token, counted from the due time.
func (r Rules) ttft(s *Sample) time.Duration { return r.first(s) - s.Due }

// tpot is like Sample.TPOT, but uses the first and the last token of these rules.
func (r Rules) tpot(s *Sample) (time.Duration, bool) {
	if s.OutputTokens < 2 {
		return 0, false
	}
	return (r.last(s) - r.first(s)) / time.Duration(s.OutputTokens-1), true
}

// e2e returns the end-to-end latency, counted from the due time.
func (r Rules) e2e(s *Sample) time.Duration { return r.last(s) - s.Due }

// Apply returns samples whose First and Last follow the rules. If nothing changes, it returns the given slice itself.
func (r Rules) Apply(samples []Sample) []Sample {
	if r != Rules0141 {
		return samples
	}
	by := slices.Clone(samples)
	for i := range by {
		by[i].First, by[i].Last = r.first(&by[i]), r.last(&by[i])
	}
	return by
}

// WithoutQueue returns samples whose latencies count from the time when a slot was free, as in vllm bench serve
// --max-concurrency.
func WithoutQueue(samples []Sample) []Sample {
	from := slices.Clone(samples)
	for i := range from {
		from[i].Due += from[i].Queued
		from[i].Queued = 0
	}
	return from
}

// A Limit is the largest allowed value of one latency of a request.
type Limit struct {
	Metric string        `json:"metric"` // ttft, tpot or e2el, as in vllm bench serve --goodput
	Max    time.Duration `json:"max_ns"`
}

// The metrics of a Limit.
const (
	MetricTTFT = "ttft"
	MetricTPOT = "tpot"
	MetricE2EL = "e2el"
)

// over reports whether a completed request is over the limit. As in vLLM, a latency equal to the limit is not over it,
// and an answer without a TPOT is within every limit on TPOT.
func (l Limit) over(s *Sample, rules Rules) bool {
	switch l.Metric {
	case MetricTTFT:
		return rules.ttft(s) > l.Max
	case MetricTPOT:
		tpot, _ := rules.tpot(s)
		return tpot > l.Max
	}
	return rules.e2e(s) > l.Max
}

// Overdue reports whether a pending request is sure to end over the limit or to fail. That is sure if the request would
// be over the limit even if its last pinned token arrived now. For TTFT, the first token replaces the last one in this
// rule. For TPOT and E2EL, a request is not overdue if all its tokens have come and only the end of the answer is
// missing.
func (l Limit) Overdue(s *Sample, now time.Duration) bool {
	served := s.WantTokens > 0 && s.Chunks >= s.WantTokens
	switch l.Metric {
	case MetricTTFT:
		if s.First > 0 {
			return s.TTFT() > l.Max
		}
		return now-s.Due > l.Max
	case MetricTPOT:
		return s.First > 0 && s.WantTokens > 1 && !served && (now-s.First)/time.Duration(s.WantTokens-1) > l.Max
	}
	return now-s.Due > l.Max && !served
}

// A Tally sums up requests without keeping them. Its memory grows by a few bytes a second and does not depend on the
// number of requests. All figures are exact, with two exceptions. Percentiles are within 0.5 %. PeakInFlight is exact
// unless the request that started first ended after 8,192 others.
type Tally struct {
	rules Rules
	total totals
	over  []OverLimit
	exact bool

	ttft, tpot, itl, e2e, sendLag, readLag, connect, queue distribution
	inFlight                                               concurrency
	visibility                                             visibility

	roles map[int]int // by second: chunks that only named the role; they count only under the rules of 0.14.1
}

// totals are the sums of a Tally.
type totals struct {
	requests, completed, failed, good, turns, sessions int
	prompt, cached, output, want, chunks               int
	planned, offPlan                                   int // for answers that the server ended: pinned tokens, and tokens too many or too few
	end                                                time.Duration
	failures                                           map[Failure]int
}

// maxEarly is how many requests a Tally keeps to find the one that started first. They take 128 KiB.
const maxEarly = 8192

// newTally returns an empty Tally. Rules.For gives the rules of an endpoint; "" means Rules033.
func newTally(rules Rules, limits []Limit) *Tally {
	t := newExactTally(rules, limits)
	t.exact, t.inFlight.keep = false, maxEarly
	for _, d := range t.distributions() {
		d.sketch = newSketch()
	}
	return t
}

// newExactTally returns a Tally that keeps all latencies for exact percentiles.
func newExactTally(rules Rules, limits []Limit) *Tally {
	if rules == "" {
		rules = Rules033
	}
	t := &Tally{rules: rules, exact: true, roles: make(map[int]int)}
	for _, limit := range limits {
		t.over = append(t.over, OverLimit{Limit: limit})
	}
	return t
}

func (t *Tally) distributions() []*distribution {
	return []*distribution{&t.ttft, &t.tpot, &t.itl, &t.e2e, &t.sendLag, &t.readLag, &t.connect, &t.queue}
}

// Add adds a counted request. A request that has not ended counts as neither completed nor failed.
func (t *Tally) Add(s *Sample) {
	t.total.requests++
	t.total.end = max(t.total.end, s.End)
	if s.Sent > 0 || s.End > 0 {
		t.sendLag.add(render.InMilliseconds(s.SendLag()))
	}
	if s.Connected > s.Sent {
		t.connect.add(render.InMilliseconds(s.Connected - s.Sent))
	}
	if t.rules == Rules0141 && s.Role {
		t.roles[second(s.Opened)]++
	}
	if s.OK() || s.Failure == WrongLength {
		t.total.planned += s.WantTokens
		t.total.offPlan += max(s.OutputTokens-s.WantTokens, s.WantTokens-s.OutputTokens)
	}
	switch {
	case s.Failure != "":
		t.fail(s.Failure)
	case s.End > 0:
		t.complete(s)
	}
}

// series adds the role chunks to the chunks with output, if the rules count role chunks.
func (t *Tally) series(output Series) Series {
	if len(t.roles) == 0 {
		return output
	}
	all := slices.Clone(output)
	for second, n := range t.roles {
		if second < len(all) { // without a series there is no such second
			all[second].Chunks += n
		}
	}
	return all
}

func (t *Tally) fail(kind Failure) {
	t.total.failed++
	if t.total.failures == nil {
		t.total.failures = make(map[Failure]int)
	}
	t.total.failures[kind]++
}

// complete adds a request that ended well.
func (t *Tally) complete(s *Sample) {
	t.total.completed++
	t.total.prompt += s.PromptTokens
	t.total.cached += s.CachedTokens
	t.total.output += s.OutputTokens
	t.total.want += s.WantTokens
	t.total.chunks += s.Chunks
	if s.Turn > 0 {
		t.total.turns++
		if s.LastTurn {
			t.total.sessions++
		}
	}
	t.ttft.add(render.InMilliseconds(t.rules.ttft(s)))
	t.e2e.add(render.InMilliseconds(t.rules.e2e(s)))
	if tpot, ok := t.rules.tpot(s); ok {
		t.tpot.add(render.InMilliseconds(tpot))
	}
	if len(s.Gaps) > 0 && t.rules.first(s) < s.First { // the time from the role chunk of a chat to its first token
		t.itl.add(render.InMilliseconds(s.First - t.rules.first(s)))
	}
	for _, gap := range s.Gaps {
		t.itl.add(render.InMilliseconds(gap))
	}
	t.readLag.add(render.InMilliseconds(s.ReadLag))
	t.queue.add(render.InMilliseconds(s.Queued))
	t.inFlight.add(interval{s.Sent, t.rules.last(s)})
	t.visibility.add(s)
	t.judge(s)
}

// judge counts a completed request as good, or once for each limit that it is over.
func (t *Tally) judge(s *Sample) {
	good := len(t.over) > 0
	for i := range t.over {
		if t.over[i].over(s, t.rules) {
			t.over[i].Over++
			good = false
		}
	}
	if good {
		t.total.good++
	}
}

// measurement returns the figures of the requests. It uses the Rules and Limits of the Tally, not the scope's.
// Measure adds Lateness, Series and the figures of the Series.
func (t *Tally) measurement(scope Scope) Measurement {
	m := Measurement{
		Rate: scope.Rate, Window: scope.Length, Rules: t.rules, Exact: t.exact,
		Requests: t.total.requests, Completed: t.total.completed, Failed: t.total.failed, Failures: maps.Clone(t.total.failures),
		TTFT: t.ttft.stats(), TPOT: t.tpot.stats(), ITL: t.itl.stats(), E2E: t.e2e.stats(),
		SendLag: t.sendLag.stats(), ReadLag: t.readLag.stats(), Connect: t.connect.stats(),
		Over: slices.Clone(t.over), Good: t.total.good,
		PromptTokens: t.total.prompt, CachedTokens: t.total.cached, OutputTokens: t.total.output, WantTokens: t.total.want,
		PeakInFlight: t.inFlight.peak(), Sessions: Sessions{Turns: t.total.turns, Completed: t.total.sessions},
	}
	if scope.Sketches {
		m.Sketches = Sketches{t.ttft.histogram(), t.tpot.histogram(), t.itl.histogram(), t.e2e.histogram()}
	}
	if t.queue.max > 0 {
		m.Queue = t.queue.stats()
	}
	t.judgePlan(&m, scope)
	m.rates(t.total.end - scope.Start)
	if scope.Length > 0 {
		inServer := (m.E2E.Mean - t.queue.stats().Mean) / 1000 // mean time of a completed request in the server, in seconds
		over := scope.Length.Seconds()
		if inServer > over { // a window shorter than a request shows no steady state, so use the whole run
			over = m.Duration.Seconds()
		}
		m.MeanInFlight = inServer * float64(m.E2E.N) / over
	}
	return m
}
