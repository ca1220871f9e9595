package calibrate

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

// A metric is a figure of a probe that is fitted.
type metric struct {
	name  string
	of    func(m bench.Measurement) float64
	noise float64 // standard deviation of its logarithm in a probe of 300 requests, from run to run
}

// The noise is that of two manual sweeps of one configuration on an H200, which asked the same 300 requests at the same times:
// p99 TTFT differed by up to 1 % and once by 6 %, p99 TPOT by up to 2 %, throughput by up to 1.2 %. Of the medians nothing is
// known but that they move less.
var metrics = []metric{
	{"p50 TTFT", func(m bench.Measurement) float64 { return m.TTFT.P50 }, 0.02},
	{"p99 TTFT", func(m bench.Measurement) float64 { return m.TTFT.P99 }, 0.04},
	{"p50 TPOT", func(m bench.Measurement) float64 { return m.TPOT.P50 }, 0.005},
	{"p99 TPOT", func(m bench.Measurement) float64 { return m.TPOT.P99 }, 0.01},
	{"output tok/s", func(m bench.Measurement) float64 { return m.OutputThroughput }, 0.006},
}

const (
	// difference is the step of the numeric derivatives: the scheduler makes predictions jump, by as much for a
	// small change as for a larger one.
	difference = 0.04
	// usualReplays is how many replays a fit mostly takes, for each constant.
	usualReplays = 12
	// leastReplays is how many it takes at least: a step, and a look at what all constants do.
	leastReplays = 4
	// roughPart is the part of the time limit that the first go may take.
	roughPart = 0.5
	// leastScale is the least part of the known noise that a fit may find: a few probes can agree by luck.
	leastScale = 0.25
)

// noiseOf is the noise of a metric in a probe.
func (m metric) noiseOf(p trial.Probe) float64 {
	return m.noise * max(0.5, min(3, math.Sqrt(300/float64(max(1, p.Measurement.Completed)))))
}

// A row is one figure that is compared.
type row struct {
	candidate, probe int
	metric           int
	observed         float64
}

// rows returns the figures of the fitted probes, or of those held out.
func rows(chosen []*candidate, heldOut bool) (all []row) {
	for i, c := range chosen {
		for j, p := range c.probes {
			if !c.used[j] || c.heldOut[j] != heldOut {
				continue
			}
			for k, m := range metrics {
				if v := m.of(p.Measurement); v > 0 {
					all = append(all, row{i, j, k, v})
				}
			}
		}
	}
	return all
}

// quiet is the profile without chance. The mean of its jitter stays, for it is a part of each step.
func quiet(p *sim.Profile) *sim.Profile {
	q := *p
	q.Noise = sim.Noise{Jitter: p.Noise.Jitter}
	return &q
}

// fitSteps fits the constants of step time and latency, and compares before and after.
func (c *calibration) fitSteps(ctx context.Context, p *sim.Profile, chosen []*candidate) error {
	list := fittable(p, stepConstants)
	c.most = usualReplays * len(list)
	began := time.Now()
	before, beforeErrs, err := c.predict(ctx, quiet(c.From), chosen)
	if err != nil {
		return err
	}
	replay := time.Since(began)
	if need := replay * time.Duration(leastReplays*len(list)); c.Limit > 0 && need > c.Limit {
		return c.tooShort(replay)
	}
	f := newFit(list, logs(p, list))
	if err := c.move(ctx, f, p, chosen); err != nil {
		return err
	}
	if f.reading.told == nil {
		return c.tooShort(replay)
	}
	c.result.Converged = f.converged && !c.result.TimeUp
	fitted, heldOut := rows(chosen, false), rows(chosen, true)
	c.record(p, f, "fit", fmt.Sprintf("fit to %d probes of %d trials", c.result.Fitted, len(chosen)), "the probes")
	after, afterErrs, err := c.predict(ctx, quiet(p), chosen)
	if err != nil {
		return err
	}
	for k, m := range metrics {
		c.result.Metrics = append(c.result.Metrics, Errors{
			Metric: m.name,
			Before: spread(errorsOf(slices.Concat(fitted, heldOut), k, before, beforeErrs)),
			After:  spread(errorsOf(fitted, k, after, afterErrs)), HeldOut: spread(errorsOf(heldOut, k, after, afterErrs)),
		})
	}
	c.compareCaches(chosen, after)
	return nil
}

// tooShort refuses a time limit, with one that would do.
func (c *calibration) tooShort(replay time.Duration) error {
	wants := max(time.Second, 2*replay*time.Duration(c.most)).Round(time.Second)
	return refuse("the time limit of %s is too short to see what %d probes tell: a replay of them takes %s; give --time-limit %s",
		c.Limit, c.result.Fitted+c.result.HeldOut, replay.Round(time.Millisecond), wants)
}

// limited runs do until a part of the limit has passed. That end is no error: what was found stands.
func (c *calibration) limited(ctx context.Context, part float64, do func(ctx context.Context) error) error {
	within := ctx
	if c.Limit > 0 {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeoutCause(ctx, time.Duration(part*float64(c.Limit)), errTimeUp)
		defer cancel()
	}
	err := do(within)
	if timeUp(ctx, err) {
		c.result.TimeUp = true
		return nil
	}
	return err
}

// move fits in two goes: first with the noise that is known beforehand, then with that which the first one has found.
func (c *calibration) move(ctx context.Context, f *fit, p *sim.Profile, chosen []*candidate) error {
	low, high := bounds(f.first, f.list)
	fitted := rows(chosen, false)
	scales := make([]float64, len(metrics))
	for k := range scales {
		scales[k] = 1
	}
	problem := problem{low: low, high: high, step: difference, residuals: func(ctx context.Context, logs []float64) ([]float64, error) {
		return c.residuals(ctx, quiet(with(p, f.list, logs)), chosen, fitted, scales)
	}}
	if err := c.limited(ctx, roughPart, func(ctx context.Context) error { return f.rough(ctx, problem) }); err != nil {
		return err
	}
	for k := range scales {
		var sizes []float64
		for i, r := range fitted {
			if r.metric == k && f.residuals != nil {
				sizes = append(sizes, math.Abs(f.residuals[i]))
			}
		}
		if len(sizes) > 0 { // the median of normal residuals is 0.6745 of their deviation
			scales[k] = max(leastScale, median(sizes)/0.6745)
		}
	}
	return c.limited(ctx, 1-roughPart, func(ctx context.Context) error { return f.settle(ctx, problem) })
}

// residuals are the differences of the logs of what is predicted and what was measured, over their noise.
func (c *calibration) residuals(ctx context.Context, p *sim.Profile, chosen []*candidate, of []row, scales []float64) ([]float64, error) {
	predicted, errs, err := c.predict(ctx, p, chosen)
	if err != nil {
		return nil, err
	}
	residuals := make([]float64, len(of))
	for i, r := range of {
		if err := errs[r.candidate]; err != nil {
			return nil, fmt.Errorf("replay trial %d: %w", chosen[r.candidate].trial.Number, err)
		}
		m := metrics[r.metric]
		was := chosen[r.candidate].probes[r.probe]
		is := max(m.of(predicted[r.candidate][r.probe].Measurement), 1e-6) // of answers that all failed there is none
		residuals[i] = math.Log(is/r.observed) / m.noiseOf(was) / scales[r.metric]
	}
	return residuals, nil
}

// Errors are how far predictions of one metric are from the measurements.
type Errors struct {
	Metric                 string
	Before, After, HeldOut Spread // of all probes on the first profile; of the fitted and of the held-out ones on the new one
}

// A Spread is a distribution of relative errors without their signs.
type Spread struct {
	N                int // 0 means that there are none
	Median, P90, Max float64
}

func spread(errs []float64) Spread {
	if len(errs) == 0 {
		return Spread{}
	}
	slices.Sort(errs)
	return Spread{N: len(errs), Median: bench.Percentile(errs, 50), P90: bench.Percentile(errs, 90), Max: errs[len(errs)-1]}
}

// errorsOf returns the relative errors of one metric. Trials that a profile did not start have none.
func errorsOf(of []row, metric int, predicted [][]trial.Probe, refused []error) (errs []float64) {
	for _, r := range of {
		if r.metric == metric && refused[r.candidate] == nil {
			is := metrics[metric].of(predicted[r.candidate][r.probe].Measurement)
			errs = append(errs, math.Abs(is/r.observed-1))
		}
	}
	return errs
}

// compareCaches says how far the prefix cache and the prompts themselves are from what was measured.
func (c *calibration) compareCaches(chosen []*candidate, predicted [][]trial.Probe) {
	var off []float64
	is, was := 0, 0
	for i, one := range chosen {
		for j, p := range one.probes {
			if !one.used[j] {
				continue
			}
			again := predicted[i][j]
			if p.HitRate >= 0 && again.HitRate >= 0 {
				off = append(off, math.Abs(again.HitRate-p.HitRate))
			}
			is, was = is+again.Measurement.PromptTokens, was+p.Measurement.PromptTokens
		}
	}
	c.result.HitRate = -1
	if len(off) > 0 {
		c.result.HitRate = median(off)
	}
	if was > 0 {
		c.result.Prompts = float64(is) / float64(was)
	}
	if was > 0 && math.Abs(c.result.Prompts-1) > 0.02 {
		c.note("the simulator's prompts have %.0f %% of the tokens that the server counted: it does not know the model's tokenizer, so that the cost of a prompt's token is that much off", 100*c.result.Prompts)
	}
}
