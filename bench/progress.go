package bench

import (
	"slices"
	"time"

	"vllmtuner/render"
)

// A Progress says how far a run has come.
type Progress struct {
	Now      time.Duration // since the start of the schedule
	Counted  int           // counted requests that have been sent
	Ended    int           // counted requests that have ended
	Failed   int           // counted requests that have failed; they are in Ended too
	InFlight int           // requests of any phase in flight
	RunOut   bool          // all counted requests have been sent
	TTFT99   float64       // p99 of TTFT in milliseconds, over the last 1,000 counted requests that ended well; 0 if there are none
}

// recentTTFTs is how many requests TTFT99 covers.
const recentTTFTs = 1000

// A gauge collects the figures of Progress. runState.mu guards it.
type gauge struct {
	counted, ended, failed int
	recent                 []float64 // ring buffer of TTFTs in milliseconds
	next                   int
}

// end adds a counted request that has ended.
func (g *gauge) end(s *Sample) {
	g.ended++
	if s.Failure != "" {
		g.failed++
		return
	}
	if len(g.recent) < recentTTFTs {
		g.recent = append(g.recent, render.InMilliseconds(s.TTFT()))
		return
	}
	g.recent[g.next] = render.InMilliseconds(s.TTFT())
	g.next = (g.next + 1) % recentTTFTs
}

// progress returns how far the run has come.
func (f *runState) progress() Progress {
	now, inFlight := f.now(), f.pool.inFlight()
	f.mu.Lock()
	g := f.gauge
	recent := slices.Clone(g.recent)
	p := Progress{Now: now, Counted: g.counted, Ended: g.ended, Failed: g.failed, InFlight: inFlight, RunOut: f.runOut}
	f.mu.Unlock()
	slices.Sort(recent)
	p.TTFT99 = Percentile(recent, 99)
	return p
}
