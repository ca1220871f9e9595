package trial

import (
	"cmp"
	"context"
	"errors"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/capacity"
)

// A searchRun is the search for one point's capacity on its server.
type searchRun struct {
	*session
	drafts drafts
	worst  worstCase
	probes int           // number of probes so far, including those from before an interruption
	runOut time.Duration // the longest run-out so far
	spent  time.Duration // GPU time before the first probe
	whole  bool          // whether every probe runs to its end. A whole probe shows where the boundary is; a probe that ends early shows only on which side of the boundary its rate lies.
}

func newSearchRun(s *session) *searchRun {
	return &searchRun{
		session: s, worst: worstCase{session: s},
		drafts: drafts{runner: s.runner, kvCacheGiB: s.result.Facts.KVCacheGiB},
	}
}

// run warms the server up, searches for the capacity, and then tests whether the server survives the largest load that
// it admits.
func (t *searchRun) run(ctx context.Context) (capacity.Capacity, error) {
	if err := t.task.unlessFinished(ctx, t.warmUp); err != nil {
		return capacity.Capacity{}, err
	}
	t.spent = t.result.GPUTime - GPUTimeOf(t.task.Done)
	known, err := t.takeOver(t.task.Done)
	if err != nil {
		return capacity.Capacity{}, err
	}
	found, err := t.search(known).Find(ctx, t.measureRate)
	if err != nil || !found.Met() {
		return found, err
	}
	return found, t.task.unlessFinished(ctx, t.worst.survive)
}

func (t *searchRun) warmUp(ctx context.Context) error {
	return warmUp{t.session, &t.drafts, cmp.Or(t.runner.PrimeRate, t.firstRate)}.run(ctx)
}

// takeOver adds the probes that were measured before an interruption. It returns as steps the probes that still count.
func (t *searchRun) takeOver(probes []Probe) (steps []capacity.Step, err error) {
	for _, p := range probes {
		t.probes++
		if p.Verdict.ClientLimited == "" || p.Attempt == t.task.Attempt {
			steps = append(steps, capacity.Step{Rate: p.Rate, Outcome: t.outcome(p)})
		}
		err = errors.Join(err, t.add(p))
	}
	return steps, err
}

// search returns the Runner's Search with the known steps and with the first rate of this trial.
func (t *searchRun) search(known []capacity.Step) capacity.Search {
	search := t.runner.Search
	search.Known, search.Population, search.Cost = known, t.runner.SharedLongRun().Population, t.cost
	search.Plan = func(f capacity.Forecast) {
		t.whole = f.Probes > 0
		if told := t.runner.Search.Plan; told != nil {
			told(f)
		}
	}
	search.Hint, search.MaxFails = t.firstRate, t.task.MaxFails
	if t.task.Hint != nil {
		search.Hint = cmp.Or(t.task.Hint(), t.firstRate)
	}
	if t.task.Confirm {
		search.Factor, search.Tolerance = confirmStep, confirmStep-1
	}
	if t.task.Best != nil {
		rival := t.task.Best()
		search.Race.Best, search.Race.Unit = rival.Capacity, rival.Unit
		for _, p := range rival.Probes {
			search.Race.Steps = append(search.Race.Steps, capacity.Step{Rate: p.Rate, Outcome: t.outcome(p)})
		}
	}
	if t.task.Budget > 0 {
		search.Budget = max(1, t.task.Budget-t.spent)
	}
	return search
}

// confirmStep is the factor between the rates of a confirmation. The capacity is already known to within about 10 %.
const confirmStep = 1.12

// measureRate probes a rate and records the probe.
func (t *searchRun) measureRate(ctx context.Context, rate float64) (capacity.Outcome, error) {
	p, err := t.recorded(func() (Probe, error) {
		return t.verified(func(again bool) (Probe, error) { return t.probeOf(ctx, t.probes, rate, again) })
	})
	if err != nil {
		return capacity.Outcome{}, err
	}
	t.probes++
	t.result.GPUTime += p.GPUTime
	return t.outcome(p), t.add(p)
}

// probeOf measures a rate. If isRepeat is true, the probe replaces an earlier one.
func (t *searchRun) probeOf(ctx context.Context, seq int, rate float64, isRepeat bool) (Probe, error) {
	plan := t.plan(t.cache.draw(seq, isRepeat), rate)
	n, window := plan.Counted()
	o := offer{Level: Level{Rate: rate}, schedule: plan.Schedule(), planned: n, leadIn: plan.LeadIn, window: window}
	if t.runner.Cache == Reset {
		o.schedule = workload.WithColdLeadIn(o.schedule, t.runner.Source)
	}
	if !t.whole {
		o.stop = t.runner.SLO.Stop(n)
	}
	return t.probe(ctx, seq, o)
}

// add adds a probe to what the trial knows. It returns an error if the server accepts too few drafts; the error ends
// the trial.
func (t *searchRun) add(p Probe) error {
	if !p.Stopped {
		t.runOut = max(t.runOut, p.GPUTime-p.Replaced-t.lengths().LeadIn-p.Measurement.Window)
	}
	t.worst.saw(p)
	return t.drafts.judge(p.Speculation)
}

// outcome returns a probe for the search, with its evidence.
func (t *searchRun) outcome(p Probe) capacity.Outcome {
	o := p.Outcome()
	plan := t.plan(t.cache.draw(p.Seq, p.Replaced > 0), p.Rate)
	if planned, _ := plan.Counted(); p.Stopped && len(p.Verdict.Checks) > 0 {
		o.Seen = float64(len(p.Verdict.Checks[0].Each)) / float64(planned)
	}
	o.Evidence = t.runner.SharedLongRun().Evidence(plan.Schedule(), p.Rate, plan.Draw, t.runner.SLO, p.Verdict)
	return o
}

// maxBehind limits how late the load generator may be at p99, as a fraction of the window. If it was later, the planned
// rate was not offered: a generator that falls behind during the whole window offers a lower rate. A pass then says
// nothing about the planned rate.
const maxBehind = 0.01

// Outcome returns a probe for a sweep, without evidence. A probe passed if it kept the SLO at the planned rate. The
// load generator may have sent single requests late, but it must have offered the planned rate.
func (p Probe) Outcome() capacity.Outcome {
	v, m := p.Verdict, p.Measurement
	offered := v.ClientLimited == "" || m.Window <= 0 || m.SendLag.P99 <= maxBehind*m.Window.Seconds()*1000
	return capacity.Outcome{
		Pass: v.Pass && offered, Headroom: v.Headroom, Binding: v.Binding, InFlight: m.MeanInFlight, Limited: v.ClientLimited,
		Seen: 1, Took: p.GPUTime,
	}
}

// plan returns the load of a probe at a rate. The number draw chooses one set of random requests, and each probe has a
// draw of its own. If all probes used the same draw, their load would have more or fewer bursts than the long run.
// Later probes would also find their own requests in the cache. Every trial has the same draws, so two trials differ by
// their servers alone.
func (t *searchRun) plan(draw int, rate float64) workload.Plan {
	r, lengths := t.runner, t.lengths()
	return workload.Plan{
		Source: r.Source, Seed: r.Seed, Rate: rate, Draw: t.task.Draw + draw,
		LeadIn: lengths.LeadIn, Window: lengths.Window, MinRequests: lengths.MinRequests, Arrivals: r.Arrivals,
	}
}

// cost is the time that a probe takes, if its run-out is as long as the longest so far.
func (t *searchRun) cost(rate float64) time.Duration {
	_, window := t.plan(0, rate).Counted()
	return t.lengths().LeadIn + window + t.runOut
}

// lengths returns the lengths of the task's probes.
func (t *searchRun) lengths() Lengths {
	if t.task.Confirm {
		return t.runner.Confirm
	}
	return t.runner.Lengths
}
