package serverctl

import (
	"math"
	"slices"
	"sync"
	"time"

	"vllmtuner/serverctl/gpu"
)

// A Series records what the server and its GPUs did over a period, about once a second. Every column has one value for
// each time in At; the columns of a GPU have their own At. A failed reading leaves no row, so the times show the gaps.
// Counters are totals since the server's start.
type Series struct {
	At         []float64 `json:"at_s"` // seconds since the beginning of the period
	Running    []float64 `json:"running"`
	Waiting    []float64 `json:"waiting"`
	KVUsage    []float64 `json:"kv_usage"`       // 0 to 1
	Hits       []float64 `json:"prefix_hits"`    // tokens
	Queries    []float64 `json:"prefix_queries"` // tokens
	Preempted  []float64 `json:"preemptions"`
	Prompt     []float64 `json:"prompt_tokens"`
	Generation []float64 `json:"generation_tokens"`
	Drafted    []float64 `json:"draft_tokens,omitempty"` // absent without speculation
	Accepted   []float64 `json:"accepted_tokens,omitempty"`

	GPUs []GPUSeries `json:"gpus,omitempty"`
}

// A GPUSeries is the part of a Series for one GPU.
type GPUSeries struct {
	Index int       `json:"index"`
	At    []float64 `json:"at_s"`
	// -1 means that the GPU does not tell the value.
	Utilization []float64 `json:"utilization_percent"`
	UsedMiB     []float64 `json:"used_mib"`
	PowerW      []float64 `json:"power_w"`
	SMClockMHz  []float64 `json:"sm_clock_mhz"`
	Throttle    []string  `json:"throttle,omitempty"` // the reasons to throttle that occurred, each listed once
}

// A recorder adds rows to the Series that Observe has begun, until that Series is ended.
type recorder struct {
	mu      sync.Mutex
	begin   time.Time
	current *Series // nil while no series is wanted
}

// Observe begins a series, with times relative to begin, and returns a function that ends it. A second series ends
// the first.
func (s *Server) Observe(begin time.Time) (end func() *Series) { return s.series.observe(begin) }

func (r *recorder) observe(begin time.Time) (end func() *Series) {
	series := &Series{}
	r.mu.Lock()
	r.begin, r.current = begin, series
	r.mu.Unlock()
	return func() *Series {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.current == series {
			r.current = nil
		}
		return series
	}
}

// seconds returns d in seconds, rounded to milliseconds. More digits would only make the store larger.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1000) / 1000 }

func (r *recorder) add(at time.Time, c Counters) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.current
	if s == nil {
		return
	}
	s.At = append(s.At, seconds(at.Sub(r.begin)))
	s.Running = append(s.Running, c.Running)
	s.Waiting = append(s.Waiting, c.Waiting)
	s.KVUsage = append(s.KVUsage, math.Round(c.KVUsage*1e4)/1e4)
	s.Hits = append(s.Hits, c.PrefixHits)
	s.Queries = append(s.Queries, c.PrefixQueries)
	s.Preempted = append(s.Preempted, c.Preemptions)
	s.Prompt = append(s.Prompt, c.PromptTokens)
	s.Generation = append(s.Generation, c.GenerationTokens)
	if len(c.AcceptedAt) > 0 {
		s.Drafted = append(s.Drafted, c.DraftTokens)
		s.Accepted = append(s.Accepted, c.AcceptedTokens)
	}
}

// addGPUs adds one reading of the GPUs.
func (r *recorder) addGPUs(reading gpu.Reading) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil {
		return
	}
	at := seconds(reading.At.Sub(r.begin))
	for _, g := range reading.GPUs {
		r.current.gpu(g.Index).add(at, g)
	}
}

// add appends a row. It also appends each reason to throttle that was not seen before.
func (s *GPUSeries) add(at float64, g gpu.GPU) {
	s.At = append(s.At, at)
	s.Utilization = append(s.Utilization, figure(g.Utilization))
	s.UsedMiB = append(s.UsedMiB, figure(g.UsedMiB))
	s.PowerW = append(s.PowerW, figure(g.PowerW))
	s.SMClockMHz = append(s.SMClockMHz, figure(g.SMClockMHz))
	for _, reason := range g.Throttle {
		if !slices.Contains(s.Throttle, reason) {
			s.Throttle = append(s.Throttle, reason)
		}
	}
}

// figure returns the value, or -1 if it is unknown.
func figure(told *float64) float64 {
	if told == nil {
		return -1
	}
	return *told
}

func (s *Series) gpu(index int) *GPUSeries {
	for i := range s.GPUs {
		if s.GPUs[i].Index == index {
			return &s.GPUs[i]
		}
	}
	s.GPUs = append(s.GPUs, GPUSeries{Index: index})
	return &s.GPUs[len(s.GPUs)-1]
}
