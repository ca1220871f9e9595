package calibrate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

// A metric is one figure of a probe that the fit tries to predict.
type metric struct {
	name  string
	of    func(m bench.Measurement) float64
	noise float64 // standard deviation of the figure's logarithm when a probe of 300 requests is repeated
}

// The noise was measured with two sweeps that were made by hand. Both sweeps measured one configuration on an H200 with
// the same 300 requests at the same times. The sweeps differed in p99 TTFT by up to 1 % and once by 6 %. They differed
// in p99 TPOT by up to 2 %, and in throughput by up to 1.2 %. The noise of the medians was not measured; it is smaller.
var metrics = []metric{
	{"p50 TTFT", func(m bench.Measurement) float64 { return m.TTFT.P50 }, 0.02},
	{"p99 TTFT", func(m bench.Measurement) float64 { return m.TTFT.P99 }, 0.04},
	{"p50 TPOT", func(m bench.Measurement) float64 { return m.TPOT.P50 }, 0.005},
	{"p99 TPOT", func(m bench.Measurement) float64 { return m.TPOT.P99 }, 0.01},
	{"output tok/s", func(m bench.Measurement) float64 { return m.OutputThroughput }, 0.006},
}

const (
	// difference is the step of the numeric derivatives. The scheduler makes predictions jump, and these jumps are as
	// large for a small step as for a large one. The jumps matter less if the step is large.
	difference = 0.04
	// typicalReplays is how many replays a fit usually needs for each constant. It is used only to predict the time.
	typicalReplays = 12
	// minReplays is the smallest number of replays for each constant that a fit needs: enough for one slope and one
	// step.
	minReplays = 4
	// firstPart is the share of the time limit for the first pass.
	firstPart = 0.5
	// minScale is the smallest noise that the second pass uses, as a fraction of the expected noise. The first pass may
	// find less noise, because a few probes can agree by chance.
	minScale = 0.25
)

// noiseOf returns the noise of a metric in a probe. It is the noise for 300 requests times a factor. The factor goes
// from 0.5 for many requests to 3 for few requests.
func (m metric) noiseOf(p trial.Probe) float64 {
	return m.noise * max(0.5, min(3, math.Sqrt(300/float64(max(1, p.Measurement.Completed)))))
}

// A row is one measured figure that is compared with its prediction.
type row struct {
	candidate, probe int
	metric           int
	observed         float64
}

// rows returns the figures of the fitted probes, or of the held-out probes.
func rows(chosen []*candidate, heldOut bool) (all []row) {
	for i, c := range chosen {
		for j, p := range c.probes {
			if !p.used || p.heldOut != heldOut {
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

// Quiet returns the profile without noise. It keeps the jitter, because the mean jitter is part of every step.
func Quiet(p *sim.Profile) *sim.Profile {
	q := *p
	q.Noise = sim.Noise{Jitter: p.Noise.Jitter}
	return &q
}

// A stepFit fits the step constants of a profile to the probes of the chosen trials.
type stepFit struct {
	*calibration
	*replayer
	profile *sim.Profile
}

func newStepFit(c *calibration, p *sim.Profile, chosen []*candidate) *stepFit {
	return &stepFit{c, newReplayer(c.Runner, chosen, c.Progress), p}
}

// run fits the constants, and stores the prediction errors before and after the fit.
func (c *stepFit) run(ctx context.Context) error {
	p := c.profile
	list := fittable(p, stepConstants)
	c.planned = typicalReplays * len(list)
	began := time.Now()
	before, beforeErrs, err := c.predict(ctx, Quiet(c.From))
	if err != nil {
		return err
	}
	replay := time.Since(began)
	if need := replay * time.Duration(minReplays*len(list)); c.Limit > 0 && need > c.Limit {
		return c.tooShort(replay)
	}
	f := newFit(list, logs(p, list))
	if err := c.move(ctx, f); err != nil {
		return err
	}
	if f.separation.known == nil {
		return c.tooShort(replay)
	}
	c.result.Converged = f.converged && !c.result.TimeUp
	fitted, heldOut := rows(c.chosen, false), rows(c.chosen, true)
	c.record(p, f, "fit", fmt.Sprintf("fit to %s of %s", render.Count(c.result.Fitted, "probe"), render.Count(len(c.chosen), "trial")), "the probes")
	after, afterErrs, err := c.predict(ctx, Quiet(p))
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
	c.compareCaches(after)
	c.result.Replays = c.replays
	return nil
}

// tooShort returns an *InputError that suggests a longer time limit.
func (c *stepFit) tooShort(replay time.Duration) error {
	wanted := max(time.Second, 2*replay*time.Duration(c.planned)).Round(time.Second)
	return refuse("the time limit of %s is too short for a fit to %s: one replay of them takes %s; give --time-limit %s",
		render.Took(c.Limit), render.Count(c.result.Fitted+c.result.HeldOut, "probe"), render.Took(replay), wanted)
}

// limited calls a function with a context that ends after the given fraction of the time limit. If the time is up,
// limited returns no error, because the best result so far is used.
func (c *stepFit) limited(ctx context.Context, part float64, do func(ctx context.Context) error) error {
	within := ctx
	if c.Limit > 0 {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeoutCause(ctx, time.Duration(part*float64(c.Limit)), errTimeUp)
		defer cancel()
	}
	err := do(within)
	if errors.Is(err, errTimeUp) && ctx.Err() == nil {
		c.result.TimeUp = true
		return nil
	}
	return err
}

// move fits in two passes. The first pass uses the expected noise, and the second pass uses the noise that the first
// pass has found.
func (c *stepFit) move(ctx context.Context, f *fit) error {
	low, high := bounds(f.first, f.list)
	fitted := rows(c.chosen, false)
	scales := make([]float64, len(metrics))
	for k := range scales {
		scales[k] = 1
	}
	problem := problem{low: low, high: high, step: difference, residuals: func(ctx context.Context, logs []float64) ([]float64, error) {
		return c.residuals(ctx, Quiet(withLogs(c.profile, f.list, logs)), fitted, scales)
	}}
	if err := c.limited(ctx, firstPart, func(ctx context.Context) error { return f.fitAll(ctx, problem) }); err != nil {
		return err
	}
	for k := range scales {
		var sizes []float64
		for i, r := range fitted {
			if r.metric == k && f.residuals != nil {
				sizes = append(sizes, math.Abs(f.residuals[i]))
			}
		}
		if len(sizes) > 0 { // the median of normal residuals is 0.6745 standard deviations
			scales[k] = max(minScale, median(sizes)/0.6745)
		}
	}
	return c.limited(ctx, 1-firstPart, func(ctx context.Context) error { return f.refit(ctx, problem) })
}

// residuals returns log(predicted / measured) / noise for each row. A row is one measured figure.
func (c *stepFit) residuals(ctx context.Context, p *sim.Profile, of []row, scales []float64) ([]float64, error) {
	predicted, errs, err := c.predict(ctx, p)
	if err != nil {
		return nil, err
	}
	residuals := make([]float64, len(of))
	for i, r := range of {
		if err := errs[r.candidate]; err != nil {
			return nil, fmt.Errorf("replay trial %d: %w", c.chosen[r.candidate].trial.Number, err)
		}
		m := metrics[r.metric]
		was := c.chosen[r.candidate].probes[r.probe]
		is := max(m.of(predicted[r.candidate][r.probe].Measurement), 1e-6) // if all answers of a probe failed, its latency is 0
		residuals[i] = math.Log(is/r.observed) / m.noiseOf(was.Probe) / scales[r.metric]
	}
	return residuals, nil
}

// Errors are the errors of the predictions of one metric.
type Errors struct {
	Metric                 string
	Before, After, HeldOut Spread // Before: all probes, first profile; After: fitted probes, new profile; HeldOut: held-out probes, new profile
}

// A Spread summarises absolute relative errors.
type Spread struct {
	N                int // number of errors; 0 means that there is nothing to summarise
	Median, P90, Max float64
}

func spread(errs []float64) Spread {
	if len(errs) == 0 {
		return Spread{}
	}
	slices.Sort(errs)
	return Spread{N: len(errs), Median: bench.Percentile(errs, 50), P90: bench.Percentile(errs, 90), Max: errs[len(errs)-1]}
}

// errorsOf returns the absolute relative errors of one metric. It leaves out trials whose simulated server did not
// start.
func errorsOf(of []row, metric int, predicted [][]trial.Probe, refused []error) (errs []float64) {
	for _, r := range of {
		if r.metric == metric && refused[r.candidate] == nil {
			is := metrics[metric].of(predicted[r.candidate][r.probe].Measurement)
			errs = append(errs, math.Abs(is/r.observed-1))
		}
	}
	return errs
}

// compareCaches compares the predicted hit rate of the prefix cache and the predicted prompt tokens with the
// measurements.
func (c *stepFit) compareCaches(predicted [][]trial.Probe) {
	var off []float64
	is, was := 0, 0
	for i, one := range c.chosen {
		for j, p := range one.probes {
			if !p.used {
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
		c.note("the simulator's prompts have %.0f %% of the tokens that the server counted, because it does not have the model's tokenizer; the cost of a prompt token is wrong by as much", 100*c.result.Prompts)
	}
}
