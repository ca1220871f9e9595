package simload

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A variant is our estimate of the capacity with one part of the method left out. All variants use the same probes. The
// function reduce changes what the estimate gets: the steps and the population.
type variant struct {
	name   string
	reduce func(steps []capacity.Step, p *capacity.Population, rate float64) ([]capacity.Step, *capacity.Population)
}

func variants() []variant {
	return []variant{
		{"whole", func(steps []capacity.Step, p *capacity.Population, _ float64) ([]capacity.Step, *capacity.Population) {
			return steps, p
		}},
		{"the rate instead of the load", flat},
		{"the two probes of the bracket", nearest},
		{"headroom, interpolated", func(steps []capacity.Step, p *capacity.Population, _ float64) ([]capacity.Step, *capacity.Population) {
			for i := range steps {
				steps[i].Evidence = nil
			}
			return steps, p
		}},
	}
}

// flat gives every request the same load, so that the estimate knows only the rate of each probe.
func flat(steps []capacity.Step, p *capacity.Population, _ float64) ([]capacity.Step, *capacity.Population) {
	for i := range steps {
		e := steps[i].Evidence
		steps[i].Evidence = &capacity.Evidence{Rate: e.Rate, Draw: e.Draw, Stretch: even(e.Stretch, 1/e.Rate), Limits: e.Limits}
	}
	long := even(capacity.Stretch{Due: p.Due}, 1)
	return steps, &capacity.Population{Due: long.Due, Prompt: long.Prompt, Answer: long.Answer}
}

// even gives the requests of a stretch equal gaps and equal lengths.
func even(s capacity.Stretch, gap float64) capacity.Stretch {
	n := len(s.Due)
	s.Due, s.Prompt, s.Answer = make([]float64, n), make([]float64, n), make([]float64, n)
	for i := range n {
		s.Due[i], s.Prompt[i], s.Answer[i] = float64(i)*gap, 1, 1
	}
	return s
}

// nearest keeps two probes: the passing one and the failing one that are closest to the answer.
func nearest(steps []capacity.Step, p *capacity.Population, rate float64) ([]capacity.Step, *capacity.Population) {
	var kept []capacity.Step
	for _, pass := range []bool{true, false} {
		best := -1
		for i, step := range steps {
			if step.Pass == pass && (best < 0 || math.Abs(math.Log(step.Rate/rate)) < math.Abs(math.Log(steps[best].Rate/rate))) {
				best = i
			}
		}
		if best >= 0 {
			kept = append(kept, steps[best])
		}
	}
	return kept, p
}

// A part (one row of the table) has the errors of one variant in all worlds.
type part struct {
	setting, name string
	bias, rmse    []float64 // one value for each world, %
}

// parts computes the errors of every variant from the probes that our search made in the given settings.
func parts(studies []study, settings []string) ([]part, error) {
	var all []part
	for _, setting := range settings {
		for _, v := range variants() {
			p := part{setting: setting, name: v.name}
			for _, s := range studies {
				i := slices.IndexFunc(s.results, func(f methodResult) bool { return f.method == setting })
				errs, err := s.reestimate(s.results[i], v)
				if err != nil {
					return nil, err
				}
				bias, _ := meanSD(errs)
				p.bias, p.rmse = append(p.bias, bias), append(p.rmse, rms(errs))
			}
			all = append(all, p)
		}
	}
	return all, nil
}

// reestimate computes the estimates of a methodResult again, with a variant and from the same probes. It returns the
// errors in per cent.
func (s study) reestimate(f methodResult, v variant) ([]float64, error) {
	population := trial.NewLongRun(workload.Plan{Source: s.source, Seed: 1}).Population
	errs := make([]float64, len(f.answers))
	err := inParallel(len(f.answers), func(i int) error {
		a := f.answers[i]
		steps, p := v.reduce(slices.Clone(a.found.Steps), population, a.rate)
		search := capacity.Search{Min: 0.05, Max: 1000, Factor: 1.35, Tolerance: 0.2, MaxProbes: 1, Known: steps, Population: p}
		c, err := search.Find(context.Background(), func(context.Context, float64) (capacity.Outcome, error) {
			return capacity.Outcome{}, errors.New("no probe is left to make")
		})
		errs[i] = 100 * math.Log(c.Rate/s.capacity)
		return err
	})
	return errs, err
}

const partsHead = `
## What each part of the estimate buys

The same probes, estimated again: with the rate of the probe instead of the load that each request met; from only the two probes
next to the boundary; and by interpolation between the headrooms of these two probes. The bias is the mean over the worlds, and the
RMSE the root mean square, both in %.

| setting | estimate | bias | RMSE | worst RMSE |
|---|---|---|---|---|
`

func (r report) bought(b *strings.Builder) {
	if len(r.parts) == 0 {
		return
	}
	b.WriteString(partsHead)
	for _, p := range r.parts {
		fmt.Fprintf(b, "| %s | %s | %+.1f | %.1f | %.1f |\n", p.setting, p.name, mean(p.bias), rms(p.rmse), slices.Max(p.rmse))
	}
}

const forecastsHead = `
## ±5 %: what was said beforehand, and what it took

Each search forecasts how many seconds of load it still needs. The table has the quotient of the seconds that it took and the
seconds that it forecast, and the share of repetitions in which the two differ by at most 30 %. ± is half the width of the interval
at the end.

| world | said, s | took/said 10 % | median | 90 % | within 30 % | ± at the end, median | RMSE |
|---|---|---|---|---|---|---|---|
`

// forecasts compares the forecast time of each search with the time that it took.
func (r report) forecasts(b *strings.Builder) {
	b.WriteString(forecastsHead)
	for _, s := range r.studies {
		i := slices.IndexFunc(s.results, func(f methodResult) bool { return f.method == "ours, ±5 %" })
		var said, ratio, half []float64
		within := 0
		for _, a := range s.results[i].answers {
			if a.hi > 0 {
				half = append(half, 100*(math.Sqrt(a.hi/a.lo)-1))
			}
			if a.forecast.Probes == 0 {
				continue
			}
			took := (a.total() - a.then.total()).Seconds() / a.forecast.Takes.Seconds()
			said, ratio = append(said, a.forecast.Takes.Seconds()), append(ratio, took)
			if took > 0.7 && took < 1.3 {
				within++
			}
		}
		if len(ratio) == 0 {
			continue
		}
		slices.Sort(ratio)
		slices.Sort(half)
		n := len(ratio)
		fmt.Fprintf(b, "| %s | %.0f | %.2f | %.2f | %.2f | %.0f %% of %d | %.1f %% | %.1f |\n", s.name, mean(said), ratio[n/10], ratio[n/2], ratio[n*9/10],
			100*float64(within)/float64(n), n, half[len(half)/2], rms(s.results[i].errors(s.capacity)))
	}
}
