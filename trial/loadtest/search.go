package loadtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A Search looks for the highest rate that keeps the SLO.
type Search struct {
	capacity.Search
	Margin float64 // the advised rate divided by the lower end of the interval
	Prime  bool    // whether to send the workload once before the first run, to fill the prefix cache

	primed  time.Duration  // how long the priming took
	refines bool           // whether the search makes its estimate more precise; then every request helps, so no run ends early
	longRun *trial.LongRun // long run of the workload
	runs    []trial.Probe  // each with its number, rate, verdict, measurement and time
	runOut  time.Duration  // the longest run-out so far
}

// inFlight is the mean number of requests in the server. It is computed by Little's law from the completed requests, so
// it is correct even for a probe that ended early.
func inFlight(p trial.Probe) float64 { return p.Rate * p.Measurement.E2E.Mean / 1000 }

// spent is the time that the priming and all runs took.
func (s *Search) spent() time.Duration { return s.primed + trial.GPUTimeOf(s.runs) }

// cost is how long a run at a rate will take. It assumes a run-out as long as the longest so far.
func (b *Bench) cost(rate float64) time.Duration { return b.Load.Planned(rate) + b.Search.runOut }

// FindCapacity searches for the highest rate that keeps the SLO. If no probe is near the rate that it advises, it
// measures the advised rate too, if the budget allows. It reports both rates.
func (b *Bench) FindCapacity(ctx context.Context, report *Report) error {
	s := b.Search
	s.longRun = trial.NewLongRun(b.Load.plan(s.Hint, 0))
	s.Population, s.Cost, s.Plan = s.longRun.Population, b.cost, b.sayForecast
	b.Client.MaxSamples = math.MaxInt // a verdict needs the samples of all requests
	if err := b.prime(ctx); err != nil {
		return err
	}
	found, err := s.Find(ctx, func(ctx context.Context, rate float64) (capacity.Outcome, error) {
		return b.probe(ctx, report, rate, true)
	})
	if errors.Is(err, capacity.ErrLimited) {
		err = fmt.Errorf("%w; %s", err, MoreCores)
	}
	if err != nil {
		return b.reportSoFar(report, found, err)
	}
	a := newAnswer(found, s)
	if a.Advice != nil && !a.Advice.Near() {
		switch takes := b.cost(a.Advice.Rate); {
		case s.spent()+takes > s.Budget:
			b.say(fmt.Sprintf("the advised rate is not measured: that takes %s more, and --budget is %s", render.Span(takes), render.Span(s.Budget)))
		default:
			if _, err := b.probe(ctx, report, a.Advice.Rate, false); err != nil {
				return b.reportSoFar(report, found, err)
			}
			a = newAnswer(found, s)
		}
	}
	return report.capacity(a)
}

// say writes a note, with line breaks between words.
func (b *Bench) say(text string) {
	fmt.Fprint(b.Notes, render.Paragraph(text, "  ", render.Columns(b.Notes)))
}

// maxPriming is the fraction of the budget that may be spent before the first run.
const maxPriming = 0.1

// prime fills the prefix cache, because the first run would otherwise find a colder cache than later runs. It sends
// each request of the workload once, or MinRequests of an endless workload.
func (b *Bench) prime(ctx context.Context) error {
	s := b.Search
	if !s.Prime {
		return nil
	}
	n := cmp.Or(b.Load.Source.Len(), b.Load.MinRequests())
	n = min(n, int(maxPriming*s.Budget.Seconds()*s.Hint))
	if n == 0 {
		return nil
	}
	pass := workload.Pass{Source: b.Load.Source, Seed: b.Load.Seed, Stream: workload.PrimeStream, Rate: s.Hint, N: n}
	r, err := b.measure(ctx, Run{Level: trial.Level{Rate: s.Hint}, primes: true, planned: n, schedule: pass.Schedule()}, nil)
	s.primed = r.took
	if err == nil && r.Measurement.Failed > 0 {
		fmt.Fprintf(b.Notes, "before the first run, %s failed\n", render.Of(r.Measurement.Failed, r.Measurement.Requests, "request"))
	}
	return err
}

// reportSoFar reports what is known when the user or an error ends a search, and returns why it ended.
func (b *Bench) reportSoFar(report *Report, found capacity.Capacity, why error) error {
	if found.Probes == 0 {
		return why
	}
	a := newAnswer(found, b.Search)
	a.ended = true
	if err := report.capacity(a); err != nil && !errors.Is(err, ErrNoRunKept) {
		return errors.Join(why, err)
	}
	return why
}

// probe measures one rate with requests and arrival times of its own, because the bursts of a single draw (one set of
// random requests) could decide the whole search. If the parameter early is true, a run ends once it has clearly
// failed.
func (b *Bench) probe(ctx context.Context, report *Report, rate float64, early bool) (capacity.Outcome, error) {
	s := b.Search
	planned := b.Load.Open(rate, len(s.runs))
	var stop bench.Stop
	if early && !s.refines {
		stop = b.SLO.Stop(planned.planned)
	}
	r, err := b.measure(ctx, planned, stop)
	if err != nil {
		return capacity.Outcome{}, err
	}
	if err := report.add(r); err != nil {
		return capacity.Outcome{}, err
	}
	if r.Measurement.Void != "" {
		return capacity.Outcome{}, fmt.Errorf("%s is void: %s", planned, r.Measurement.Void)
	}
	if r.Verdict == nil {
		return capacity.Outcome{}, InputError{fmt.Errorf("%d requests at %g req/s are too many to be judged; lower --requests or --seconds", planned.planned, rate)}
	}
	s.runs = append(s.runs, trial.Probe{Seq: len(s.runs), Rate: rate, Verdict: *r.Verdict, Measurement: r.Measurement, GPUTime: r.took})
	if stop == nil || r.Verdict.Pass { // the run did not end early
		s.runOut = max(s.runOut, r.took-b.Load.Planned(rate))
	}
	o := r.outcome()
	if len(s.runs) == 1 {
		o.Took += s.primed
	}
	o.Evidence = s.longRun.Evidence(planned.schedule, rate, len(s.runs)-1, *b.SLO, *r.Verdict)
	return o, nil
}

// sayForecast tells the user how long the search will take to reach the wanted precision.
func (b *Bench) sayForecast(f capacity.Forecast) {
	s := b.Search
	known := fmt.Sprintf("about %s req/s, known to ±%.2g %%", render.Number(f.Rate), 100*f.Precision)
	if f.Probes == 0 {
		fmt.Fprintf(b.Notes, "%s\n", known)
		return
	}
	s.refines = true
	aim := fmt.Sprintf("±%.3g %%", 100*s.Precision)
	if f.Reaches > 1.05*s.Precision {
		aim = fmt.Sprintf("%s cannot be reached on this server; ±%.2g %%", aim, 100*f.Reaches)
	}
	text := fmt.Sprintf("%s; %s takes about %s more, %s", known, aim, render.Count(f.Probes, "run"), render.Span(f.Takes))
	if left := s.Budget - s.spent(); f.Takes > left {
		text += fmt.Sprintf("; --budget ends it in %s", render.Span(max(0, left)))
	}
	b.say(text)
}
