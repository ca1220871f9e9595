package bench

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"vllmtuner/bench/workload"
)

// A flight is the state of one Run.
type flight struct {
	client   Client
	target   string
	http     http.Client
	start    time.Time
	end      context.CancelCauseFunc // withdraws all requests; the first cause stands
	requests sync.WaitGroup
	tooLong  *time.Timer // nil until all counted requests are due; used by the pacer alone

	mu      sync.Mutex
	run     Run
	pending int  // counted requests that have not ended
	runOut  bool // the first request of the run-out is due
	details int  // failures whose text was kept
}

// A departure is a request that is ready to leave.
type departure struct {
	workload.Arrival
	body []byte
}

func (f *flight) now() time.Duration { return time.Since(f.start) }

// prepare writes the bodies ahead of their due times, until the schedule or ctx ends.
func (f *flight) prepare(ctx context.Context, schedule workload.Schedule, ready chan<- departure) {
	defer close(ready)
	size := 0
	for arrival := range schedule {
		body, err := f.client.appendBody(make([]byte, 0, size), arrival.Request)
		if err != nil {
			f.end(fmt.Errorf("request %d of the %s: %w", arrival.Index, arrival.Phase, err))
			return
		}
		size = max(size, len(body))
		select {
		case ready <- departure{arrival, body}:
		case <-ctx.Done():
			return
		}
	}
}

// pace starts each request when it is due, until the departures or ctx end.
func (f *flight) pace(ctx context.Context, ready <-chan departure) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for d := range ready {
		timer.Reset(d.Due - f.now())
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		if d.Phase == workload.RunOut && f.enough() {
			return
		}
		at := f.depart(d)
		f.requests.Go(func() { f.request(ctx, d, at) })
	}
}

// enough notes that the run-out has begun, and ends the run if all counted requests have ended.
func (f *flight) enough() bool {
	f.limit()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runOut = true
	if f.pending == 0 {
		f.end(errEnough)
	}
	return f.pending == 0
}

// limit begins the time in which the last answers must end.
func (f *flight) limit() {
	if f.tooLong == nil {
		f.tooLong = time.AfterFunc(orDefault(f.client.RunLimit, defaultRunLimit), func() { f.end(errTooLong) })
	}
}

// depart enters a request into the run and returns the place of its sample, -1 when it is not counted.
func (f *flight) depart(d departure) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.Phase != workload.Window {
		f.run.Others++
		return -1
	}
	f.pending++
	f.run.Samples = append(f.run.Samples, d.sample())
	return len(f.run.Samples) - 1
}

// sample returns the sample of a request that has not been sent.
func (d departure) sample() Sample {
	return Sample{Phase: d.Phase, Index: d.Index, Due: d.Due, WantTokens: d.Request.OutputTokens}
}

// progress publishes a sample that has not ended, so that stop sees its first token.
func (f *flight) progress(at int, s Sample) {
	if at < 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.run.Samples[at] = s
}

// mostDetails is of how many failures the text is kept: the first few tell what is wrong.
const mostDetails = 8

// arrive enters the end of a request. One that was withdrawn has no End.
func (f *flight) arrive(at int, s Sample) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if at < 0 {
		if s.Failure != "" {
			f.run.Broken++
			if f.run.BrokenDetail == "" {
				f.run.BrokenDetail = string(s.Failure) + ": " + s.Detail
			}
		}
		return
	}
	if s.Failure != "" {
		if f.details++; f.details > mostDetails {
			s.Detail = ""
		}
	}
	f.run.Samples[at] = s
	if f.pending--; f.pending == 0 && f.runOut {
		f.end(errEnough)
	}
}

// watch asks once a second whether the run may end early.
func (f *flight) watch(ctx context.Context, stop Stop) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f.mu.Lock()
		counted := slices.Clone(f.run.Samples)
		f.mu.Unlock()
		if stop(f.now(), counted) {
			f.end(errStopped)
			return
		}
	}
}
