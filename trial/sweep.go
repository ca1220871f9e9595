package trial

import (
	"context"
	"errors"
	"fmt"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/capacity"
)

// A Level is one load of a sweep: a rate, or so many requests always in flight.
type Level struct {
	Rate    float64 `json:"rate,omitempty"`    // requests per second; 0 in a closed loop
	Streams int     `json:"streams,omitempty"` // requests in flight; 0 in an open loop
}

// String names the level, such as "2 req/s".
func (l Level) String() string {
	if l.Streams > 0 {
		return fmt.Sprintf("concurrency %d", l.Streams)
	}
	return fmt.Sprintf("%g req/s", l.Rate)
}

// Load is the level as capacity.Sweep knows it: its rate, or its streams.
func (l Level) Load() float64 {
	if l.Streams > 0 {
		return float64(l.Streams)
	}
	return l.Rate
}

// Level is the load of the probe.
func (p Probe) Level() Level { return Level{Rate: p.Rate, Streams: p.Streams} }

// A Sweep is a manual sweep: a warm-up, then one load after the other on one server, as people ran it with vllm bench serve. Every
// level asks the same requests, all of them counted, without lead-in and run-out; the rates' arrivals are one pattern, stretched
// so that the last request is due at Requests/rate (vllm/benchmarks/serve.py, 0.14.1 and 0.33).
type Sweep struct {
	Levels   []Level
	Requests int // of each level

	WarmUp         int           // requests before the first level: the first ones of the levels; 0 means none
	WarmUpRate     float64       // requests per second
	WarmUpCooldown time.Duration // pause after them
	Cooldown       time.Duration // pause between two levels

	// Pause lets the server rest; nil waits on the clock. In virtual time nothing happens to an idle server.
	Pause func(ctx context.Context, d time.Duration) error
}

// Planned is how long a sweep of rates takes on a server that keeps up, without its start and stop. Of a closed loop only the
// pauses are known.
func (s Sweep) Planned() time.Duration {
	took := time.Duration(0)
	if s.WarmUp > 0 {
		took += time.Duration(float64(s.WarmUp)/s.WarmUpRate*float64(time.Second)) + s.WarmUpCooldown
	}
	for i, l := range s.Levels {
		if i > 0 {
			took += s.Cooldown
		}
		took += s.Takes(l)
	}
	return took
}

// Takes is how long the requests of a level are sent; 0 in a closed loop, where the server decides.
func (s Sweep) Takes(l Level) time.Duration {
	if l.Rate <= 0 {
		return 0
	}
	return time.Duration(float64(s.Requests) / l.Rate * float64(time.Second))
}

// Steps are the probes of a sweep as capacity.Highest reads them.
func Steps(probes []Probe) []capacity.Step {
	steps := make([]capacity.Step, len(probes))
	for i, p := range probes {
		steps[i] = capacity.Step{Rate: p.Level().Load(), Outcome: outcome(p)}
	}
	return steps
}

// Sweep measures a fixed list of loads on one server. Of the Runner's settings it uses those of the server, the workload and the
// SLO; the cache is Reset before each level, or else carried on. The result's capacity is that of capacity.Highest: a load of the
// grid. A server that failed on the way, and a sweep that was ended, have that of the levels before. Errors are those of Run.
func (r *Runner) Sweep(ctx context.Context, task Task, s Sweep) (Result, error) {
	warmed := *r
	warmed.PrimeRate = s.WarmUpRate
	return warmed.onServer(ctx, task, func(m *measuring, ctx context.Context) (capacity.Capacity, error) { return m.sweep(ctx, s) })
}

// sweep warms the server up and measures the levels. It ends at once when the server dies, with the server's own error.
func (m *measuring) sweep(ctx context.Context, s Sweep) (capacity.Capacity, error) {
	ctx, stop := until(ctx, m.server.Exited(), m.server.Err)
	defer stop()
	if err := m.prepareSweep(ctx, s); err != nil {
		return capacity.Capacity{}, m.cause(ctx, err)
	}
	grid := make([]float64, len(s.Levels))
	for i, l := range s.Levels {
		grid[i] = l.Load()
	}
	seq := 0
	steps, err := capacity.Sweep(ctx, grid, func(ctx context.Context, _ float64) (capacity.Outcome, error) {
		p, err := m.sweepLevel(ctx, s, seq)
		seq++
		return outcome(p), err
	})
	m.result.Capacity, _ = capacity.Highest(steps)
	return m.result.Capacity, m.cause(ctx, err)
}

// prepareSweep sends the warm-up, which is worth nothing half done.
func (m *measuring) prepareSweep(ctx context.Context, s Sweep) error {
	if s.WarmUp == 0 {
		return nil
	}
	return m.unlessFinished(ctx, func(ctx context.Context) error {
		m.progress("warming up with %d requests", s.WarmUp)
		if err := m.pass(ctx, workload.WindowStream, 0, s.WarmUp); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
		return m.pause(ctx, s, s.WarmUpCooldown)
	})
}

// sweepLevel measures one level after its pause.
func (m *measuring) sweepLevel(ctx context.Context, s Sweep, seq int) (Probe, error) {
	if seq > 0 {
		if err := m.unlessFinished(ctx, func(ctx context.Context) error { return m.pause(ctx, s, s.Cooldown) }); err != nil {
			return Probe{}, err
		}
	}
	select {
	case <-m.Finish:
		return Probe{}, ErrInterrupted
	default:
	}
	began := time.Now()
	p, err := m.inTime(func() (Probe, error) {
		return m.verified(func(bool) (Probe, error) { return m.measureLoad(ctx, seq, m.offerOf(s, s.Levels[seq])) })
	})
	if err != nil {
		m.result.GPUTime += time.Since(began) // spent all the same
		return p, err
	}
	m.result.GPUTime += p.GPUTime
	if err := m.Record(p); err != nil {
		return p, fmt.Errorf("record %s: %w", s.Levels[seq], err)
	}
	return p, nil
}

// inTime measures a level once more where the load generator was late, and the repetition replaces it. A cache that is carried on would find
// the same requests again, and is left as it is.
func (m *measuring) inTime(measure func() (Probe, error)) (Probe, error) {
	p, err := measure()
	limited := p.Verdict.ClientLimited
	if err != nil || limited == "" || m.Cache != Reset {
		return p, err
	}
	m.progress("again: %s", limited)
	first := p.GPUTime
	p, err = measure()
	if err != nil {
		m.result.GPUTime += first
		return p, err
	}
	p.GPUTime += first
	p.Replaced += first
	p.Note = join("measured again, because "+limited, p.Note)
	return p, nil
}

// offerOf is the load of a level.
func (m *measuring) offerOf(s Sweep, l Level) offer {
	o := offer{Level: l, planned: s.Requests}
	if l.Streams > 0 {
		o.schedule = workload.WithoutRunOut(workload.Loop{Source: m.Source, N: s.Requests}.Schedule())
		return o
	}
	plan := workload.Plan{Source: m.Source, Seed: m.Seed, Rate: l.Rate, MinRequests: s.Requests, Arrivals: m.Arrivals, Rescale: true}
	o.schedule = plan.Schedule()
	_, o.window = plan.Counted()
	return o
}

// pause lets the server rest.
func (m *measuring) pause(ctx context.Context, s Sweep, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	m.progress("cooling down for %s", d)
	pause := s.Pause
	if pause == nil {
		pause = rest
	}
	m.result.GPUTime += d
	return pause(ctx, d)
}

// rest waits on the clock.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// unlessFinished does what an orderly end does not wait for.
func (m *measuring) unlessFinished(ctx context.Context, do func(context.Context) error) error {
	ctx, stop := until(ctx, m.Finish, func() error { return ErrInterrupted })
	defer stop()
	err := do(ctx)
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		return ErrInterrupted
	}
	return err
}
