package trial

import (
	"maps"
	"time"
)

// A Part is one use of a study's time. Its value is a key in the database and in JSON.
type Part string

// First come the parts of a trial in their order, then the parts of a study during which no server runs.
const (
	Starting  Part = "start"       // from the launch of a server until it can answer, or until its start has failed
	WarmingUp Part = "warm_up"     // load until a new server is warm
	Priming   Part = "priming"     // load that fills the prefix cache
	Emptying  Part = "cache_reset" // emptying the prefix cache before a probe
	LeadIn    Part = "lead_in"     // uncounted load before a window
	Windows   Part = "window"      // the counted part of a probe
	RunOut    Part = "run_out"     // from the end of a window until the server is idle
	WorstLoad Part = "worst_case"  // the largest load that a server admits, after the search
	Idling    Part = "idle"        // a server without load: the tuner judges and stores a probe, and chooses the next rate
	Stopping  Part = "stop"        // from the order to stop until the last process of a server is gone
	Releasing Part = "gpu_memory"  // waiting until a dead server's GPU memory is free
	Lost      Part = "lost"        // load without a result: a server died in a probe, or the run was stopped or killed

	Predicting Part = "predicting" // the simulator predicts the points of the space
	Choosing   Part = "choosing"   // the sampler chooses the next point, and the store writes
)

// Parts lists all parts.
var Parts = []Part{Starting, WarmingUp, Priming, Emptying, LeadIn, Windows, RunOut, WorstLoad, Idling, Stopping, Releasing, Lost, Predicting, Choosing}

// OnGPU reports whether a server holds the GPU during the part.
func (p Part) OnGPU() bool { return p != Predicting && p != Choosing }

// Spent has the time that was spent on each part. A part without time is absent.
type Spent map[Part]time.Duration

// Sum returns the time of all parts.
func (s Spent) Sum() (sum time.Duration) {
	for _, d := range s {
		sum += d
	}
	return sum
}

// GPU returns the time during which a server held the GPU.
func (s Spent) GPU() (sum time.Duration) {
	for part, d := range s {
		if part.OnGPU() {
			sum += d
		}
	}
	return sum
}

// Plus adds the times of each part.
func (s Spent) Plus(more Spent) Spent { return s.with(more, 1) }

// Minus returns s minus other. Every part in other must be in s too.
func (s Spent) Minus(other Spent) Spent { return s.with(other, -1) }

func (s Spent) with(other Spent, sign time.Duration) Spent {
	sum := maps.Clone(s)
	if sum == nil {
		sum = Spent{}
	}
	for part, d := range other {
		if sum[part] += sign * d; sum[part] == 0 {
			delete(sum, part)
		}
	}
	return sum
}

// GPUTimeOf returns the sum of the GPU times of probes.
func GPUTimeOf(probes []Probe) (sum time.Duration) {
	for i := range probes {
		sum += probes[i].GPUTime
	}
	return sum
}

// SpentOn returns the sum of what was spent on probes.
func SpentOn(probes []Probe) Spent {
	sum := Spent{}
	for _, p := range probes {
		sum = sum.Plus(p.Spent)
	}
	return sum
}

// Books book each second of a run or a trial exactly once. The zero Books are for virtual time, in which only added
// times pass. Books with a real clock begin with NewBooks. Their Settle books the time that nobody has added.
type Books struct {
	settled time.Time // everything before this moment is booked; zero in virtual time
	open    Spent     // what was added since settled
}

// NewBooks returns books that begin now. If virtual is true, they are for virtual time.
func NewBooks(virtual bool) *Books {
	if virtual {
		return &Books{}
	}
	return &Books{settled: time.Now()}
}

// Add books a time. It ignores a time that is not positive.
func (b *Books) Add(part Part, d time.Duration) { b.AddAll(Spent{part: max(0, d)}) }

// AddAll books what other books have settled.
func (b *Books) AddAll(s Spent) { b.open = b.open.Plus(s) }

// Took returns the time since a moment; 0 in virtual time.
func (b *Books) Took(since time.Time) time.Duration {
	if b.settled.IsZero() {
		return 0
	}
	return time.Since(since)
}

// Settle books the time since the last Settle that nobody has added. This time counts as the part rest. Settle returns
// everything booked since the last Settle.
func (b *Books) Settle(rest Part) Spent {
	if !b.settled.IsZero() {
		now := time.Now()
		b.Add(rest, now.Sub(b.settled)-b.open.Sum())
		b.settled = now
	}
	s := b.open
	b.open = nil
	return s
}
