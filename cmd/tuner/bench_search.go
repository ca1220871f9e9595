package main

import (
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// capacityFlags have a meaning with --find-capacity alone.
var capacityFlags = []string{"tolerance", "precision", "budget", "max-rate", "margin", "no-prime"}

// defaultBudget is how long a search may take by default. A run of 300 requests takes hours at one request a minute, and a
// mistyped limit would lead there.
const defaultBudget = 2 * time.Hour

// defaultWindow is how long the runs of a search last at least if neither --seconds nor --requests is given. 300 requests
// take 15 s at 20 req/s. No queue has time to grow in 15 s: on simulated engines the capacity then came out 22 % too high.
const defaultWindow = 2 * time.Minute

// planSearch reads the flags of --find-capacity.
func planSearch(c *cli.Context, b *loadtest.Bench, rates []float64) error {
	precision, err := parsePrecision(c.String("precision"))
	tolerance, highest, margin, budget := c.Float64("tolerance"), c.Float64("max-rate"), c.Float64("margin"), c.Duration("budget")
	switch {
	case b.SLO == nil:
		return usage("--find-capacity needs the limits to keep: --slo 'p99 ttft <= 1000ms'")
	case c.IsSet("concurrency") || c.IsSet("ramp-up") || c.String("arrivals") == replayed:
		return usage("--find-capacity looks for a rate; leave out --concurrency, --ramp-up and --arrivals replay")
	case len(rates) > 1:
		return usage("--find-capacity needs one --rate at most, where to begin")
	case !(tolerance > 0 && tolerance <= 10):
		return usage("--tolerance %g: must be above 0 and at most 10", tolerance)
	case err != nil:
		return err
	case budget <= 0:
		return usage("--budget %s: must be above 0; write a time such as 30m", budget)
	case !(margin > 0 && margin <= 1):
		return usage("--margin %g: must be above 0 and at most 1: the advised rate as a part of the capacity's lower end", margin)
	case !(highest >= minRate && highest <= maxRate):
		return usage("--max-rate %g: must be at least %g and at most %d", highest, minRate, maxRate)
	case c.Bool("no-prime") && b.ResetCache:
		return usage("--reset-cache empties the cache before each run; leave out --no-prime")
	case len(rates) == 1 && rates[0] > highest:
		return usage("--rate %g is above --max-rate %g; begin lower", rates[0], highest)
	}
	hint := min(1.0, highest)
	if len(rates) == 1 {
		hint = rates[0]
	}
	if !c.IsSet("seconds") && !c.IsSet("requests") && !b.Load.Rescale {
		b.Load.Window = defaultWindow
	}
	if !c.IsSet("lead-in") && !b.Load.Rescale {
		protocol := trial.Carried // whatever its server caches
		if c.Bool("reset-cache") {
			protocol = trial.Reset
		}
		b.Load.LeadIn = trial.DefaultLeadIn(*b.SLO, b.Load.Source, protocol)
	}
	// A server that fails at a hundredth of the first rate needs another first rate, not more probes. A search for a precision
	// ends by its budget.
	maxProbes, fraction := 12, 100.0
	if precision > 0 {
		maxProbes = 200
	}
	b.Search = &loadtest.Search{Margin: margin, Prime: !b.ResetCache && !c.Bool("no-prime"), Search: capacity.Search{
		Hint: hint, Min: max(hint/fraction, minRate), Max: highest, Factor: plan.Gallop, Tolerance: tolerance, MaxProbes: maxProbes, Precision: precision, Budget: budget,
	}}
	needed, limit := b.SLO.MinRequests()
	if n := b.Load.Open(b.Search.Min, 0).Requests(); n < needed {
		return usage("--slo %s: a verdict takes %d requests, a run has only %d at low rates;\ntake --requests %d or a lower percentile", limit, needed, n, needed)
	}
	first := b.Load.Open(hint, 0)
	b.Runs = []loadtest.Run{first} // whose requests are checked before the first run
	if takes := b.Load.Planned(hint); takes > budget {
		remedy := "fewer --requests"
		if b.Load.MinRequests() <= needed {
			remedy = fmt.Sprintf("a lower percentile (a verdict on %s takes %d requests)", limit, needed)
		}
		return usage("--budget %s: a single run of %s at %g req/s takes %s; raise it, begin at a higher --rate, or take %s",
			budget, render.Count(first.Requests(), "request"), hint, render.Span(takes), remedy)
	}
	return nil
}

// parsePrecision reads half the width of an interval as a part of the rate, such as 5% or 0.05; "" is 0.
func parsePrecision(text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	v, err := parseShare(text)
	if err != nil || !(v > studyfile.MinPrecision && v < studyfile.MaxPrecision) {
		return 0, usage("--precision %s: write more than %g %% and less than %g %%, such as 5%% or 0.05",
			text, 100*studyfile.MinPrecision, 100*studyfile.MaxPrecision)
	}
	return v, nil
}
