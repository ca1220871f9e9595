package trial

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial/capacity"
)

// A Level is one load of a sweep: a request rate, or a fixed number of requests in flight.
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

// Load returns the level as one number, its rate or its streams, because capacity.Highest needs one number.
func (l Level) Load() float64 {
	if l.Streams > 0 {
		return float64(l.Streams)
	}
	return l.Rate
}

// Level returns the load of the probe.
func (p Probe) Level() Level { return Level{Rate: p.Rate, Streams: p.Streams} }

// A Sweep is the plan for one server: a warm-up, then one load after the other. It does what people did by hand with
// vllm bench serve. Every level sends the same requests and counts all of them: there is no lead-in and no run-out. All
// rates use the same pattern of arrivals. The pattern is stretched so that the last request is due at Requests/rate
// (vllm/benchmarks/serve.py, 0.14.1 and 0.33).
type Sweep struct {
	Levels   []Level
	Requests int // number of requests of each level

	WarmUp         int           // number of warm-up requests, the first ones of a level; 0 means no warm-up
	WarmUpRate     float64       // requests per second
	WarmUpCooldown time.Duration // pause after the warm-up
	Cooldown       time.Duration // pause between two levels

	// Pause waits for d while the server is idle; nil waits in real time. In virtual time it can return at once,
	// because an idle server does not change.
	Pause func(ctx context.Context, d time.Duration) error
}

// Planned returns how long the sweep takes if the server keeps up with every rate. It does not count the start and stop
// of the server. For a closed loop it counts only the warm-up and the pauses.
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

// Takes returns for how long a level sends its requests. It returns 0 for a closed loop, because the server decides how
// long that takes.
func (s Sweep) Takes(l Level) time.Duration {
	if l.Rate <= 0 {
		return 0
	}
	return time.Duration(float64(s.Requests) / l.Rate * float64(time.Second))
}

// Steps converts the probes of a sweep into the form that capacity.Highest reads.
func Steps(probes []Probe) []capacity.Step {
	steps := make([]capacity.Step, len(probes))
	for i, p := range probes {
		steps[i] = capacity.Step{Rate: p.Level().Load(), Outcome: p.Outcome()}
	}
	return steps
}

// Sweep measures a fixed list of loads on one server, with the Runner's server, workload and SLO. With the cache
// protocol Reset it empties the cache before each level; otherwise the cache keeps its content. The capacity is what
// capacity.Highest finds among the loads. If the server fails or the sweep is interrupted, the capacity comes from the
// levels measured so far. Sweep returns the same errors as Run.
func (r *Runner) Sweep(ctx context.Context, task Task, s Sweep) (Result, error) {
	return r.onServer(ctx, task, func(ctx context.Context, on *session) (capacity.Capacity, error) {
		return sweepRun{on, s}.run(ctx)
	})
}

// A sweepRun measures a Sweep on the server of a session.
type sweepRun struct {
	*session
	Sweep
}

// run warms the server up and measures the levels.
func (s sweepRun) run(ctx context.Context) (capacity.Capacity, error) {
	if s.WarmUp > 0 {
		if err := s.task.unlessFinished(ctx, s.warmUp); err != nil {
			return capacity.Capacity{}, err
		}
	}
	var probes []Probe
	var err error
	for seq := 0; seq < len(s.Levels) && err == nil; seq++ {
		var p Probe
		if p, err = s.level(ctx, seq); err == nil {
			probes = append(probes, p)
		}
	}
	s.result.Capacity, _ = capacity.Highest(Steps(probes))
	return s.result.Capacity, err
}

func (s sweepRun) warmUp(ctx context.Context) error {
	s.task.progress("warming up with %s", render.Count(s.WarmUp, "request"))
	if err := s.sendPass(ctx, workload.WindowStream, 0, s.WarmUp, cmp.Or(s.WarmUpRate, s.firstRate)); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	return s.pause(ctx, s.WarmUpCooldown)
}

// level measures and records one level. Before every level except the first, it pauses.
func (s sweepRun) level(ctx context.Context, seq int) (Probe, error) {
	if seq > 0 {
		err := s.task.unlessFinished(ctx, func(ctx context.Context) error { return s.pause(ctx, s.Cooldown) })
		if err != nil {
			return Probe{}, err
		}
	}
	p, err := s.recorded(func() (Probe, error) {
		return s.inTime(func() (Probe, error) {
			return s.verified(func(bool) (Probe, error) { return s.probe(ctx, seq, s.offerOf(s.Levels[seq])) })
		})
	})
	if err == nil {
		s.result.GPUTime += p.GPUTime
	}
	return p, err
}

// inTime measures a level, and repeats it once if the load generator was late. It repeats no level if the cache is kept
// between levels: the cache would already hold the prompts of the repeated requests.
func (s sweepRun) inTime(measure func() (Probe, error)) (Probe, error) {
	p, err := measure()
	late := p.Verdict.ClientLimited
	if err != nil || late == "" || s.runner.Cache != Reset {
		return p, err
	}
	p, err = s.repeat(p, late, measure)
	if err == nil {
		p.Note = join("measured again, because "+late, p.Note)
	}
	return p, err
}

func (s sweepRun) offerOf(l Level) offer {
	r, o := s.runner, offer{Level: l, planned: s.Requests}
	if l.Streams > 0 {
		o.schedule = workload.WithoutRunOut(workload.Loop{Source: r.Source, N: s.Requests}.Schedule())
		return o
	}
	plan := workload.Plan{Source: r.Source, Seed: r.Seed, Rate: l.Rate, MinRequests: s.Requests, Arrivals: r.Arrivals, Rescale: true}
	o.schedule = plan.Schedule()
	_, o.window = plan.Counted()
	return o
}

func (s sweepRun) pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	s.task.progress("cooling down for %s", render.Took(d))
	s.spend(Idling, d)
	if s.Pause != nil {
		return s.Pause(ctx, d)
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
