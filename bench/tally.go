package bench

import "time"

// Rules are whose definitions a measurement follows where the versions of vllm bench serve differ
// (vllm/benchmarks/lib/endpoint_request_func.py).
type Rules string

// The rules. They differ for chat alone: 0.14.1 takes the chunk that only names the role for the first token, and the usage
// chunk for the end.
const (
	Rules0141 Rules = "0.14.1"
	Rules033  Rules = "0.33"
)

// A Limit is one latency that a request may have at most.
type Limit struct {
	Metric string // ttft, tpot or e2el, as in vllm bench serve --goodput
	Max    time.Duration
}

// A Tally sums up requests without keeping them.
type Tally struct{}

// NewTally returns an empty Tally.
func NewTally(rules Rules, limits []Limit) *Tally { return &Tally{} }

// Add adds a counted request that has ended.
func (t *Tally) Add(s *Sample) {}
