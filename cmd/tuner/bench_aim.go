package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/tuner/space"
)

// newBenching reads the flags.
func newBenching(c *cli.Context) (*benching, error) {
	b := &benching{stderr: c.App.ErrWriter, resetCache: c.Bool("reset-cache"), seed: c.Uint64("seed")}
	var err error
	if b.client, err = benchClient(c, b.stderr); err != nil {
		return nil, err
	}
	if c.Bool("quiet") {
		b.stderr = io.Discard
	}
	if b.slo, err = parseSLO(c.StringSlice("slo")); err != nil {
		return nil, err
	}
	if b.limits, err = parseGoodput(c.StringSlice("goodput")); err != nil {
		return nil, err
	}
	b.client.Limits = b.limits
	if err := b.checkFlags(c); err != nil {
		return nil, err
	}
	if b.load, err = newBenchLoad(c); err != nil {
		return nil, err
	}
	if b.slo != nil {
		b.load.judged, _ = b.slo.MinRequests()
	}
	if err := b.aim(c); err != nil {
		return nil, err
	}
	return b, b.repeats()
}

// checkFlags finds flags without effect, which would be a surprise and not an error.
func (b *benching) checkFlags(c *cli.Context) error {
	ramp := c.IsSet("ramp-up")
	for _, row := range []struct {
		wrong bool
		says  string
	}{
		{c.Int("max-concurrency") < 0, "--max-concurrency: must not be negative"},
		{c.IsSet("max-concurrency") && c.IsSet("concurrency"), "--max-concurrency is for a rate; --concurrency has its own"},
		{c.IsSet("max-concurrency") && c.Bool("find-capacity"), "--find-capacity needs open loop: requests that wait in the client would hide the queue; leave out --max-concurrency"},
		{!ramp && (c.IsSet("ramp-from") || c.IsSet("ramp-to")), "--ramp-from and --ramp-to need --ramp-up linear or exponential"},
		{c.IsSet("think-time") && !c.Bool("live"), "--think-time is for --live"},
		{c.Duration("think-time") < 0, "--think-time: must not be negative"},
		{c.IsSet("speed") && c.String("arrivals") != replayed, "--speed is for --arrivals replay"},
		{c.Bool("live") && c.Bool("find-capacity"), "--live cannot be scored: users who wait for slow answers lower the load by themselves; leave out --find-capacity"},
		{c.Bool("live") && c.IsSet("slo"), "--live cannot be scored: users who wait for slow answers lower the load by themselves; leave out --slo (--goodput counts without a verdict)"},
		{c.IsSet("input-tokens") && c.Int("input-tokens") < 1, "--input-tokens: must be at least 1"},
		{c.IsSet("output-tokens") && c.Int("output-tokens") < 1, "--output-tokens: must be at least 1"},
		{c.Bool("rescale") && c.IsSet("concurrency"), "--rescale is for a rate"},
	} {
		if row.wrong {
			return usage("%s", row.says)
		}
	}
	for _, name := range capacityFlags {
		if c.IsSet(name) && !c.Bool("find-capacity") {
			return usage("--%s is for --find-capacity", name)
		}
	}
	return nil
}

// aim says which runs the flags ask for.
func (b *benching) aim(c *cli.Context) error {
	rates, err := parseRates(c.StringSlice("rate"))
	if err != nil {
		return err
	}
	streams, err := parseConcurrencies(c.StringSlice("concurrency"))
	if err != nil {
		return err
	}
	if c.Bool("find-capacity") {
		return b.aimAtCapacity(c, rates)
	}
	var given []string
	for _, name := range []string{"rate", "concurrency", "ramp-up"} {
		if c.IsSet(name) {
			given = append(given, "--"+name)
		}
	}
	replay := c.String("arrivals") == replayed
	if replay {
		given = append(given, "--arrivals replay")
	}
	switch {
	case len(given) == 0:
		return usage("bench needs --rate or --concurrency; see `tuner bench --help`")
	case len(given) > 1:
		return usage("%s: take one of them; for a rate with at most N in flight write --max-concurrency N", strings.Join(given, " and "))
	case len(rates)+len(streams) > mostRuns:
		return usage("%d runs are more than %d", len(rates)+len(streams), mostRuns)
	case c.IsSet("ramp-up"):
		return b.aimAtRamp(c)
	case replay:
		if !(c.Float64("speed") > 0) {
			return usage("--speed %g: must be above 0", c.Float64("speed"))
		}
		b.shots = []shot{b.load.replay(c.Float64("speed"), benchTracePath(c) == c.String("path"))}
	}
	for i, rate := range rates {
		if err := b.load.checkLength(rate); err != nil {
			return err
		}
		b.shots = append(b.shots, b.load.nth(i).open(rate))
	}
	for i, n := range streams {
		b.shots = append(b.shots, b.load.nth(i).closed(n))
	}
	return nil
}

func (b *benching) aimAtRamp(c *cli.Context) error {
	kind, from, to := c.String("ramp-up"), c.Float64("ramp-from"), c.Float64("ramp-to")
	kinds := []string{"linear", "exponential"}
	switch {
	case kind != kinds[0] && kind != kinds[1]:
		return usage("--ramp-up %s: there is no such kind; %s", kind, space.DidYouMean(kind, kinds))
	case !(from >= leastRate && from <= mostRate && to >= leastRate && to <= mostRate):
		return usage("--ramp-up needs --ramp-from and --ramp-to, at least %g and at most %d", leastRate, mostRate)
	case b.load.arrivals.Trace != nil || b.load.rescale:
		return usage("--ramp-up has arrivals of its own; leave out --arrivals trace and --rescale")
	}
	b.shots = []shot{b.load.ramp(from, to, kind == kinds[1])}
	return nil
}

// repeats says where requests will be asked again, which turns misses of the prefix cache into hits, or refuses it.
func (b *benching) repeats() error {
	source := b.load.source
	if n, first := workload.Skipped(source); n > 0 {
		fmt.Fprintf(b.stderr, "%d bad rows are left out, the first: %v\n", n, first)
	}
	for _, s := range b.shots {
		if err := workload.Enough(source, s.planned); err != nil {
			return usageError{err}
		}
		if n := workload.Repeats(source, s.planned); n > 0 {
			fmt.Fprintf(b.stderr, "%s: %d of %d requests repeat earlier ones of %s and may hit the prefix cache; see --repeat\n", s, n, s.planned, source.Name())
			return nil
		}
	}
	switch again := source != nil && source.Len() > 0 && !b.resetCache; {
	case again && b.search != nil && b.search.prime:
		fmt.Fprintf(b.stderr, "every run asks the same %d requests of %s, which are sent once before: they may hit the prefix cache; see --reset-cache\n", source.Len(), source.Name())
	case again && (len(b.shots) > 1 || b.search != nil):
		fmt.Fprintf(b.stderr, "every run asks the same %d requests of %s: the later ones may hit the prefix cache; see --reset-cache\n", source.Len(), source.Name())
	}
	return nil
}

// checkEnough refuses a search whose runs have too few requests to tell. What counts is a run at the lowest rate.
func (b *benching) checkEnough() error {
	least, limit := b.slo.MinRequests()
	if n := b.load.open(b.search.Min).planned; n < least {
		return usage("--slo %s: a verdict takes %d requests, a run has only %d at low rates;\ntake --requests %d or a lower percentile", limit, least, n, least)
	}
	return nil
}

// checkShort refuses runs that have too few requests for the verdict that is asked for.
func (b *benching) checkShort() error {
	if b.slo == nil {
		return nil
	}
	least, limit := b.slo.MinRequests()
	for _, s := range b.shots {
		if s.planned < least {
			return usage("--slo %s: %s has %d requests, too few for a verdict; take --requests %d, or leave --slo out for figures alone", limit, s, s.planned, least)
		}
	}
	return nil
}
