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

// capacityFlags are the flags that need --find-capacity.
var capacityFlags = []string{"tolerance", "precision", "budget", "max-rate", "margin", "no-prime"}

// defaultBudget limits the time of a search. Without this limit, a mistyped latency limit would lead the search to
// rates of one request a minute. At such a rate, a run of 300 requests takes hours.
const defaultBudget = 2 * time.Hour

// defaultWindow is the minimum length of a search's runs if neither --seconds nor --requests is given. At 20 req/s, 300
// requests take only 15 s. No queue has time to grow in 15 s: on simulated engines the measured capacity was then 22 %
// too high.
const defaultWindow = 2 * time.Minute

// planSearch sets the search that --find-capacity and its flags ask for.
func planSearch(c *cli.Context, b *loadtest.Bench, rates []float64) error {
	if err := checkSearchFlags(c, b, rates); err != nil {
		return err
	}
	precision, err := parsePrecision(c.String("precision"))
	if err != nil {
		return err
	}
	if !c.IsSet("seconds") && !c.IsSet("requests") && !b.Load.Rescale {
		b.Load.Window = defaultWindow
	}
	if !c.IsSet("lead-in") && !b.Load.Rescale {
		protocol := trial.Carried // no run empties the server's prefix cache
		if b.ResetCache {
			protocol = trial.Reset
		}
		b.Load.LeadIn = trial.DefaultLeadIn(*b.SLO, b.Load.Source, protocol)
	}
	maxProbes := 12
	if precision > 0 { // maxProbes is so large that the budget ends the search first
		maxProbes = 200
	}
	highest := c.Float64("max-rate")
	hint := min(1.0, highest)
	if len(rates) == 1 {
		hint = rates[0]
	}
	// If the server fails at a hundredth of the first rate, more probes do not help; the user must choose another first
	// rate.
	lowest, primes := max(hint/100, minRate), !b.ResetCache && !c.Bool("no-prime")
	b.Search = &loadtest.Search{Margin: c.Float64("margin"), Prime: primes, Search: capacity.Search{
		Hint: hint, Min: lowest, Max: highest, Factor: plan.Gallop, Tolerance: c.Float64("tolerance"),
		MaxProbes: maxProbes, Precision: precision, Budget: c.Duration("budget"),
	}}
	b.Runs = []loadtest.Run{b.Load.Open(hint, 0)} // the checks before the search need the number of requests of its first run
	return checkFirstRun(b)
}

// checkSearchFlags refuses flags that do not fit a search.
func checkSearchFlags(c *cli.Context, b *loadtest.Bench, rates []float64) error {
	tolerance, highest, margin := c.Float64("tolerance"), c.Float64("max-rate"), c.Float64("margin")
	switch {
	case b.SLO == nil:
		return usage("--find-capacity needs the limits to keep: --slo 'p99 ttft <= 1000ms'")
	case c.IsSet("concurrency") || c.IsSet("ramp-up") || c.String("arrivals") == replayed:
		return usage("--find-capacity searches a rate; leave out --concurrency, --ramp-up and --arrivals replay")
	case len(rates) > 1:
		return usage("--find-capacity takes at most one --rate, the rate to begin at")
	case !(tolerance > 0 && tolerance <= 10):
		return usage("--tolerance %g: must be above 0 and at most 10", tolerance)
	case c.Duration("budget") <= 0:
		return usage("--budget %s: must be above 0; write a time such as 30m", c.Duration("budget"))
	case !(margin > 0 && margin <= 1):
		return usage("--margin %g: must be above 0 and at most 1; the advised rate is this fraction of the lower end of the capacity's interval", margin)
	case !(highest >= minRate && highest <= maxRate):
		return usage("--max-rate %g: must be at least %g and at most %d", highest, minRate, maxRate)
	case c.Bool("no-prime") && b.ResetCache:
		return usage("--reset-cache empties the cache before each run; leave out --no-prime")
	case len(rates) == 1 && rates[0] > highest:
		return usage("--rate %g is above --max-rate %g; begin lower", rates[0], highest)
	}
	return nil
}

// checkFirstRun refuses a search whose runs have too few requests for a verdict, or whose first run takes too long.
func checkFirstRun(b *loadtest.Bench) error {
	needed, limit := b.SLO.MinRequests()
	if n := b.Load.Open(b.Search.Min, 0).Requests(); n < needed {
		return usage("--slo: a verdict on %s takes %d requests, but a run has only %d at low rates; take --requests %d or a lower percentile", limit, needed, n, needed)
	}
	if takes := b.Load.Planned(b.Search.Hint); takes > b.Search.Budget {
		remedy := "fewer --requests"
		if b.Load.MinRequests() <= needed {
			remedy = fmt.Sprintf("a lower percentile (a verdict on %s takes %d requests)", limit, needed)
		}
		return usage("--budget %s: a single run of %s at %g req/s takes %s; raise --budget, begin at a higher --rate, or take %s",
			render.Span(b.Search.Budget), render.Count(b.Runs[0].Requests(), "request"), b.Search.Hint, render.Span(takes), remedy)
	}
	return nil
}

// parsePrecision reads half the width of the capacity's interval, relative to the capacity, such as 5% or 0.05. It
// returns 0 for an empty text.
func parsePrecision(text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	v, err := studyfile.Fraction("--precision", text)
	if err != nil || !(v > studyfile.MinPrecision && v < studyfile.MaxPrecision) {
		return 0, usage("--precision %s: write more than %g %% and less than %g %%, such as 5%% or 0.05",
			text, 100*studyfile.MinPrecision, 100*studyfile.MaxPrecision)
	}
	return v, nil
}
