package bench

import (
	"slices"
	"time"
)

// A Progress is where a run is.
type Progress struct {
	Now      time.Duration // since the start of the schedule
	Counted  int           // requests that are due in the window and have been sent
	Ended    int           // of these
	Failed   int           // of those
	InFlight int           // requests of any phase
	RunOut   bool          // the last counted request was sent
	TTFT99   float64       // milliseconds, p99 of the last counted requests that ended well; 0 while there are none
}

// recentTTFTs is over how many requests the running percentile goes.
const recentTTFTs = 1000

// A gauge keeps what Progress tells. It is guarded by the flight's lock.
type gauge struct {
	counted, ended, failed int
	recent                 []float64 // a ring
	next                   int
}

// end notes a counted request that has ended.
func (g *gauge) end(s *Sample) {
	g.ended++
	if s.Failure != "" {
		g.failed++
		return
	}
	if len(g.recent) < recentTTFTs {
		g.recent = append(g.recent, milliseconds(s.TTFT()))
		return
	}
	g.recent[g.next] = milliseconds(s.TTFT())
	g.next = (g.next + 1) % recentTTFTs
}

// progress returns where the run is.
func (f *flight) progress() Progress {
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
