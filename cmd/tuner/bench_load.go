package main

import (
	"math"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/loadtest"
)

// maxTokens limits the lengths of prompts and answers. No server accepts a request of this length.
const maxTokens = 10_000_000

// The kinds of --arrivals.
const (
	poisson  = "poisson"
	constant = "constant"
	traced   = "trace"
	replayed = "replay"
)

// newBenchLoad opens the workload and reads the flags that say when its requests are sent.
func newBenchLoad(c *cli.Context) (loadtest.Load, error) {
	l := loadtest.Load{
		Live: c.Bool("live"), Seed: c.Uint64("seed"), LeadIn: c.Duration("lead-in"), Requests: c.Int("requests"),
		Rescale: c.Bool("rescale"), NoRunOut: c.Bool("no-run-out"), EmptyCaches: c.Bool("reset-cache"),
	}
	const year = 366 * 24 * 3600
	switch seconds := c.Float64("seconds"); {
	case l.Requests < 0 || c.IsSet("requests") && l.Requests == 0:
		return l, usage("--requests %d: must be at least 1", l.Requests)
	case l.Requests > loadtest.MaxRequests:
		return l, usage("--requests %d: must be at most %d", l.Requests, loadtest.MaxRequests)
	case !(seconds >= 0 && seconds < year):
		return l, usage("--seconds %g: must be 0 or more, and less than a year", seconds)
	case l.LeadIn < 0:
		return l, usage("--lead-in %s: must not be negative", l.LeadIn)
	case c.Int("input-tokens") > maxTokens || c.Int("output-tokens") > maxTokens:
		return l, usage("--input-tokens and --output-tokens: must be at most %d", maxTokens)
	case l.Rescale && (c.IsSet("seconds") || c.IsSet("lead-in") && l.LeadIn > 0):
		return l, usage("--rescale sends exactly --requests N, as vllm bench serve does; leave out --seconds and --lead-in")
	default:
		l.Window = time.Duration(seconds * float64(time.Second))
	}
	var err error
	if l.Arrivals, err = benchArrivals(c); err != nil {
		return l, err
	}
	l.Source, err = benchSource(c)
	return l, err
}

// benchArrivals returns the distribution of the gaps between arrivals.
func benchArrivals(c *cli.Context) (workload.Arrivals, error) {
	var a workload.Arrivals
	kind := c.String("arrivals")
	if c.IsSet("burstiness") && kind != poisson {
		return a, usage("--burstiness works with --arrivals poisson only; leave out --burstiness or --arrivals %s", kind)
	}
	switch kind {
	case poisson:
		if a.Burstiness = c.Float64("burstiness"); !(a.Burstiness > 0) {
			return a, usage("--burstiness %g: must be above 0; 1 is Poisson, larger is smoother", a.Burstiness)
		}
	case constant:
		a.Burstiness = math.Inf(1)
	case traced, replayed:
		trace, err := benchTrace(c)
		if err != nil {
			return a, err
		}
		a.Trace = trace
	default:
		return a, oneOf("arrivals", kind, poisson, constant, traced, replayed)
	}
	if err := a.Check(); err != nil {
		return a, usage("--arrivals %s: %w", kind, err)
	}
	return a, nil
}
