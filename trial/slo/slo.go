// Package slo judges a measurement by limits. It gives the verdict, the headroom, and the limit that breaks first.
package slo

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/render"
)

// A Metric is one of the four latencies that vLLM's users know.
type Metric string

// The metrics.
const (
	TTFT Metric = "ttft" // time to first token, from the due time
	TPOT Metric = "tpot" // mean time per output token after the first, per request
	ITL  Metric = "itl"  // time between tokens, pooled over requests
	E2E  Metric = "e2e"  // end to end, from the due time
)

// A Limit is a promise such as "p99 TTFT at most 1000 ms".
type Limit struct {
	Metric     Metric        `json:"metric"`
	Percentile float64       `json:"percentile"` // greater than 0 and less than 100
	Max        time.Duration `json:"max_ns"`
}

// String returns the limit's short name, such as "p99 TTFT".
func (l Limit) String() string {
	return "p" + strconv.FormatFloat(l.Percentile, 'f', -1, 64) + " " + strings.ToUpper(string(l.Metric))
}

// MinRequests is the number of requests that a verdict needs. With this number, one request may break the limit; with
// fewer, a single slow request decides. It is 100 for p99 and 1,000 for p99.9.
func (l Limit) MinRequests() int { return minRequests(l.Percentile) }

// An SLO has the limits that a server must keep.
type SLO struct {
	Limits       []Limit `json:"limits"`         // at least one
	MaxErrorRate float64 `json:"max_error_rate"` // failed / requests, 0 to 1
}

// MinRequests returns the number of requests that a verdict needs, and the limit that needs them. A limit on ITL needs
// no minimum, because each request has many gaps between tokens.
func (s SLO) MinRequests() (n int, limit Limit) {
	for _, l := range s.Limits {
		if least := l.MinRequests(); l.Metric != ITL && least > n {
			n, limit = least, l
		}
	}
	return n, limit
}

// MayTake returns how long an answer with this number of tokens may take within the tightest limits. If no limit bounds
// this time, MayTake returns 0.
func (s SLO) MayTake(tokens float64) time.Duration {
	tightest := make(map[Metric]time.Duration)
	for _, l := range s.Limits {
		if is, ok := tightest[l.Metric]; !ok || l.Max < is {
			tightest[l.Metric] = l.Max
		}
	}
	each, known := tightest[TPOT]
	if !known {
		each, known = tightest[ITL]
	}
	whole := tightest[TTFT] + time.Duration(max(0, tokens-1)*float64(each))
	switch e2e, ok := tightest[E2E]; {
	case ok && (!known || e2e < whole):
		return e2e
	case known:
		return whole
	}
	return 0
}

// String returns the limits in one line, such as "p99 TTFT <= 1000 ms, p99 TPOT <= 60 ms".
func (s SLO) String() string {
	words := make([]string, len(s.Limits))
	for i, l := range s.Limits {
		words[i] = fmt.Sprintf("%s <= %g ms", l, render.InMilliseconds(l.Max))
	}
	return strings.Join(words, ", ")
}

// A Verdict says whether a measurement keeps an SLO, and by how much.
type Verdict struct {
	Pass     bool    `json:"pass"`
	Reason   string  `json:"reason"`   // one line for a human: why it failed, or what was nearest to failing
	Binding  string  `json:"binding"`  // the limit with the least headroom, such as "p99 TTFT", or another reason to fail
	Headroom float64 `json:"headroom"` // ln(limit/value) of that limit; negative when it is broken
	Checks   []Check `json:"checks"`

	// ClientLimited says why the lateness of the load generator could have changed the verdict; "" when it could not.
	ClientLimited string `json:"client_limited,omitempty"`
}

// A Check says whether the samples keep one limit.
type Check struct {
	Limit    string  `json:"limit"`
	Metric   Metric  `json:"metric,omitempty"` // metric of the limit; "" in probes that older tuners stored
	MaxMS    float64 `json:"max_ms"`
	ValueMS  float64 `json:"value_ms"`         // numpy-linear percentile of the completed requests
	N        int     `json:"n"`                // number of requests (for ITL: of gaps between tokens) that count
	Broken   int     `json:"broken"`           // requests that break the limit, failed ones among them
	Failed   int     `json:"failed,omitempty"` // failed requests
	Allowed  int     `json:"allowed"`          // requests that may break it: floor((1 - percentile/100) * n)
	Headroom float64 `json:"headroom"`         // ln(max/value)

	// HeadroomSE is the standard error of Headroom as an estimate of the server's headroom in the long run. Slow
	// requests come in clusters, so it is larger than for independent requests. EffectiveN is the number of independent
	// requests that would have the same error. Both are 0 if too few requests were completed.
	HeadroomSE float64 `json:"headroom_se,omitempty"`
	EffectiveN float64 `json:"effective_n,omitempty"`

	// Each has one character for every counted request, in order of Index: Kept, Over or Undecided. It is "" for ITL,
	// because a request has many gaps between tokens.
	Each string `json:"each,omitempty"`
}

// The characters of Check.Each.
const (
	Kept      = '.'
	Over      = 'x' // over the limit, or failed, or certain to end over the limit
	Undecided = '?' // the probe ended too early to tell, or the answer is a single token and the limit is on TPOT
)

// The values of Verdict.Binding that are not names of limits.
const (
	ErrorRate     = "error rate"     // too many requests failed
	overSaturated = "over-saturated" // the queue grows
	tooFew        = "too few"        // fewer than MinRequests
)

// Word returns the verdict in one word: "passed", "failed" or "client-limited".
func (v Verdict) Word() string {
	switch {
	case v.ClientLimited != "":
		return "client-limited"
	case v.Pass:
		return "passed"
	}
	return "failed"
}

// Broken names what a failed verdict broke, for reports of sweeps. It lists latencies such as TTFT and TPOT in the
// order of the limits, and "errors" if too many requests failed. It is empty for a pass. It is also empty if the probe
// failed for another reason, such as an early end. Reason names that reason.
func (v Verdict) Broken() []string {
	if v.Pass {
		return nil
	}
	var names []string
	for _, c := range v.Checks {
		if name := strings.ToUpper(string(c.Metric)); c.fails() && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if v.Binding == ErrorRate {
		names = append(names, "errors")
	}
	return names
}
