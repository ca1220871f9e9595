package workload

import (
	"math"
	"time"
)

// A Ramp is load whose rate rises or falls from request to request. All N requests are counted. A run-out at the last
// rate goes on until the caller stops reading. The rates are as in vllm bench serve (_get_current_request_rate in
// vllm/benchmarks/serve.py, 0.14.1 and 0.33), but times are not rescaled. vLLM has no run-out.
type Ramp struct {
	Source      Source
	Seed        uint64  // seed of the arrivals
	From, To    float64 // requests per second at the first and the last request, both > 0
	Exponential bool    // the rate grows by a constant factor; otherwise it grows by a constant amount
	N           int     // counted requests
	Burstiness  float64 // as in Arrivals
}

// rate returns the rate at the i-th request. The gap before that request is drawn for this rate.
func (r Ramp) rate(i int) float64 {
	progress := float64(i) / float64(max(r.N-1, 1))
	if r.Exponential {
		return r.From * math.Pow(r.To/r.From, progress)
	}
	return r.From + (r.To-r.From)*progress
}

func (r Ramp) valid() bool { return r.From > 0 && r.To > 0 && r.N > 0 }

func (r Ramp) gaps(stream Stream) func() float64 {
	return Arrivals{Burstiness: r.Burstiness}.gaps(chance(r.Seed, gapDraws, stream, 0))
}

// Counted returns how many requests are counted, and when the last of them is due. Both are zero unless the rates and N
// are positive.
func (r Ramp) Counted() (n int, length time.Duration) {
	if !r.valid() {
		return 0, 0
	}
	due := r.due()
	for range r.N {
		length = due()
	}
	return r.N, length
}

// due returns a function. Each call of the function returns the due time of the next counted request.
func (r Ramp) due() func() time.Duration {
	gap, at, i := r.gaps(WindowStream), 0.0, 0
	return func() time.Duration {
		at += gap() / r.rate(i)
		i++
		return time.Duration(at * float64(time.Second))
	}
}

// Schedule returns the arrivals. The run-out goes on for ever. The schedule is empty unless the rates and N are positive.
func (r Ramp) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		if n, length := r.Counted(); n > 0 {
			out := &clock{gap: r.gaps(runOutStream), rate: r.To}
			send(yield, r.Source, part{Window, WindowStream, 0, n, r.due()}, part{RunOut, runOutStream, 0, forEver, out.dueTimes(length)})
		}
	}
}

// A Loop is load in a closed loop: each request is due as soon as a request in flight has ended. The client decides how
// many are in flight. With a live source (OpenLive), each conversation starts when another has ended.
type Loop struct {
	Source Source
	LeadIn int // uncounted requests before the counted ones
	N      int // counted requests
}

// Schedule returns the arrivals, all due Asap. The run-out goes on for ever.
func (l Loop) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		asap := func() time.Duration { return Asap }
		send(yield, l.Source, part{LeadIn, leadInStream, 0, l.LeadIn, asap}, part{Window, WindowStream, 0, l.N, asap},
			part{RunOut, runOutStream, 0, forEver, asap})
	}
}

// A Replay is load at the times of recorded traffic, beginning with the first request. Speed may stretch or shrink all
// times. The requests after the N counted ones are the run-out. The schedule ends with the trace.
type Replay struct {
	Trace  *Trace
	Source Source  // the requests to send; nil means the requests of the trace, in its order
	Speed  float64 // how many times as fast as recorded; 0 means 1
	N      int     // counted requests; 0 means all
}

func (r Replay) due(i int) time.Duration {
	if r.Speed > 0 {
		return time.Duration(float64(r.Trace.times[i]) / r.Speed)
	}
	return r.Trace.times[i]
}

// Counted returns how many requests are counted, and when the last of them is due.
func (r Replay) Counted() (n int, length time.Duration) {
	if n = r.Trace.Len(); r.N > 0 {
		n = min(n, r.N)
	}
	if n == 0 {
		return 0, 0
	}
	return n, r.due(n - 1)
}

// Schedule returns the arrivals, first the counted ones and then the run-out.
func (r Replay) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		n, _ := r.Counted()
		for i := range r.Trace.Len() {
			a := Arrival{Due: r.due(i), Phase: Window, Index: i}
			stream := WindowStream
			if i >= n {
				a.Phase, a.Index, stream = RunOut, i-n, runOutStream
			}
			if r.Source != nil {
				a.Request = r.Source.Request(stream, a.Index)
			} else {
				a.Request = r.Trace.request(i)
			}
			if !yield(a) {
				return
			}
		}
	}
}

// WithoutRunOut returns the schedule without its run-out, as in vllm bench serve. The last requests then run under a
// falling load.
func WithoutRunOut(schedule Schedule) Schedule {
	return func(yield func(Arrival) bool) {
		for a := range schedule {
			if a.Phase == RunOut || !yield(a) {
				return
			}
		}
	}
}
