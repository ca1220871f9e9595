package main

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl/host"
	"vllmtuner/trial/loadtest"
)

// newBench returns the load test that the flags describe.
func newBench(c *cli.Context) (*loadtest.Bench, error) {
	b := &loadtest.Bench{Notes: c.App.ErrWriter, ResetCache: c.Bool("reset-cache")}
	var err error
	if b.Client, err = benchClient(c, b.Notes); err != nil {
		return nil, err
	}
	if c.Bool("quiet") {
		b.Notes = io.Discard
	}
	if b.SLO, err = parseSLO(c.StringSlice("slo")); err != nil {
		return nil, err
	}
	if b.Limits, err = parseGoodput(c.StringSlice("goodput")); err != nil {
		return nil, err
	}
	b.Client.Limits = b.Limits
	if err := checkBenchFlags(c); err != nil {
		return nil, err
	}
	if b.Load, err = newBenchLoad(c); err != nil {
		return nil, err
	}
	if b.SLO != nil {
		b.Load.MinJudged, _ = b.SLO.MinRequests()
	}
	if err := planRuns(c, b); err != nil {
		return nil, err
	}
	return b, sayRepeats(b)
}

// checkBenchFlags refuses values out of range, and flags that have no effect together with the other flags.
func checkBenchFlags(c *cli.Context) error {
	ramp := c.IsSet("ramp-up")
	for _, row := range []struct {
		wrong bool
		says  string
	}{
		{c.Int("max-concurrency") < 0, "--max-concurrency: must not be negative"},
		{c.IsSet("max-concurrency") && c.IsSet("concurrency"), "--max-concurrency is for --rate; with --concurrency, leave it out"},
		{c.IsSet("max-concurrency") && c.Bool("find-capacity"), "--find-capacity needs open loop: requests that wait in the client would hide the queue; leave out --max-concurrency"},
		{!ramp && (c.IsSet("ramp-from") || c.IsSet("ramp-to")), "--ramp-from and --ramp-to need --ramp-up linear or exponential"},
		{c.IsSet("think-time") && !c.Bool("live"), "--think-time is for --live"},
		{c.Duration("think-time") < 0, "--think-time: must not be negative"},
		{c.IsSet("speed") && c.String("arrivals") != replayed, "--speed is for --arrivals replay"},
		{c.Bool("live") && c.Bool("find-capacity"), "--live cannot be scored: users who wait for slow answers lower the load by themselves; leave out --find-capacity"},
		{c.Bool("live") && c.IsSet("slo"), "--live cannot be scored: users who wait for slow answers lower the load by themselves; leave out --slo (--goodput counts without a verdict)"},
		{c.IsSet("input-tokens") && c.Int("input-tokens") < 1, "--input-tokens: must be at least 1"},
		{c.IsSet("output-tokens") && c.Int("output-tokens") < 1, "--output-tokens: must be at least 1"},
		{c.Bool("rescale") && c.IsSet("concurrency"), "--rescale needs --rate"},
	} {
		if row.wrong {
			return usage("%s", row.says)
		}
	}
	for _, name := range capacityFlags {
		if c.IsSet(name) && !c.Bool("find-capacity") {
			return usage("--%s works with --find-capacity only", name)
		}
	}
	return nil
}

// planRuns sets the runs that the flags ask for.
func planRuns(c *cli.Context, b *loadtest.Bench) error {
	rates, err := parseRates(c.StringSlice("rate"))
	if err != nil {
		return err
	}
	streams, err := parseConcurrencies(c.StringSlice("concurrency"))
	if err != nil {
		return err
	}
	if c.Bool("find-capacity") {
		return planSearch(c, b, rates)
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
		return usage("%s: give only one of them; for a rate with at most N in flight write --max-concurrency N", strings.Join(given, " and "))
	case len(rates)+len(streams) > maxRuns:
		return usage("the flags ask for %d runs, and at most %d are allowed; leave some loads out", len(rates)+len(streams), maxRuns)
	case c.IsSet("ramp-up"):
		return planRamp(c, b)
	case replay:
		if !(c.Float64("speed") > 0) {
			return usage("--speed %g: must be above 0", c.Float64("speed"))
		}
		b.Runs = []loadtest.Run{b.Load.Replay(c.Float64("speed"), benchTracePath(c) == c.String("path"))}
	}
	for i, rate := range rates {
		if err := b.Load.CheckLength(rate); err != nil {
			return usageError{err}
		}
		b.Runs = append(b.Runs, b.Load.Nth(i).Open(rate, 0))
	}
	for i, n := range streams {
		b.Runs = append(b.Runs, b.Load.Nth(i).Closed(n))
	}
	return nil
}

func planRamp(c *cli.Context, b *loadtest.Bench) error {
	kind, from, to := c.String("ramp-up"), c.Float64("ramp-from"), c.Float64("ramp-to")
	if err := oneOf("ramp-up", kind, "linear", "exponential"); err != nil {
		return err
	}
	switch {
	case !(from >= minRate && from <= maxRate && to >= minRate && to <= maxRate):
		return usage("--ramp-up needs --ramp-from and --ramp-to, at least %g and at most %d", minRate, maxRate)
	case b.Load.Arrivals.Trace != nil || b.Load.Rescale:
		return usage("--ramp-up has arrivals of its own; leave out --arrivals trace and --rescale")
	}
	b.Runs = []loadtest.Run{b.Load.Ramp(from, to, kind == "exponential")}
	return nil
}

// sayRepeats prints a note if requests are sent more than once, because the repeats may hit the prefix cache. It
// returns an error if --repeat forbids repeats. It also notes how many bad rows were left out.
func sayRepeats(b *loadtest.Bench) error {
	source := b.Load.Source
	if n, first := workload.Skipped(source); n > 0 {
		fmt.Fprintf(b.Notes, "%s left out; the first one: %v\n", render.Are(n, "bad row"), first)
	}
	for _, r := range b.Runs {
		if err := workload.Enough(source, r.Requests()); err != nil {
			return usageError{err}
		}
		if n := workload.Repeats(source, r.Requests()); n > 0 {
			fmt.Fprintf(b.Notes, "%s: %s repeat earlier requests of %s: they may hit the prefix cache; see --repeat\n", r, render.Of(n, r.Requests(), "request"), source.Name())
			return nil
		}
	}
	switch again := source != nil && source.Len() > 0 && !b.ResetCache; {
	case again && b.Search != nil && b.Search.Prime:
		fmt.Fprintf(b.Notes, "every run sends the same %s of %s, and a first pass sends them before the search: they may hit the prefix cache; see --reset-cache\n", render.Count(source.Len(), "request"), source.Name())
	case again && (len(b.Runs) > 1 || b.Search != nil):
		fmt.Fprintf(b.Notes, "every run sends the same %s of %s: later runs may hit the prefix cache; see --reset-cache\n", render.Count(source.Len(), "request"), source.Name())
	}
	return nil
}

// checkRequests refuses runs that have too few requests for a verdict.
func checkRequests(b *loadtest.Bench) error {
	if b.SLO == nil {
		return nil
	}
	needed, limit := b.SLO.MinRequests()
	for _, r := range b.Runs {
		if r.Requests() < needed {
			return usage("--slo %s: %s has %s, too few for a verdict; take --requests %d, or leave --slo out for figures alone", limit, r, render.Count(r.Requests(), "request"), needed)
		}
	}
	return nil
}

// checkOpenFiles refuses closed-loop runs that need more open files than the limit allows. It warns about open-loop
// runs if the requests of one second need more files than the limit allows.
func checkOpenFiles(b *loadtest.Bench, limit *host.Limit) error {
	need := host.Need{Certain: true}
	for _, r := range b.Runs {
		streams, exact := r.InFlight()
		if !exact {
			need.Certain = false
			if limit := b.Client.MaxInFlight; limit > 0 {
				streams = min(streams, limit)
			}
		}
		need.Streams = max(need.Streams, streams)
	}
	for _, f := range host.CheckFiles(limit, need) {
		if f.Severity == host.Error {
			return usage("%s", f.TextWithRemedy())
		}
		render.Warn(b.Notes, "%s", f.TextWithRemedy())
	}
	return nil
}

// newBenchReport returns the report that the flags describe.
func newBenchReport(c *cli.Context, b *loadtest.Bench) (*loadtest.Report, error) {
	format := c.String("output")
	if err := oneOf("output", format, loadtest.Formats...); err != nil {
		return nil, err
	}
	printDocuments(c, format)
	report := &loadtest.Report{Bench: b, Out: c.App.Writer, Format: format, File: c.String("result-file"), Append: c.Bool("append")}
	if report.Append && report.File == "" {
		return nil, usage("--append needs --result-file")
	}
	meta := loadtest.Meta{Burstiness: c.Float64("burstiness"), Metadata: map[string]string{}, Detailed: c.Bool("detailed")}
	if c.String("arrivals") == constant {
		meta.Burstiness = math.Inf(1)
	}
	for _, word := range c.StringSlice("metadata") {
		key, value, ok := strings.Cut(word, "=")
		if !ok || key == "" {
			return nil, usage("--metadata %s: write KEY=VALUE", word)
		}
		meta.Metadata[key] = value
	}
	if err := meta.Check(b); err != nil {
		return nil, usage("--metadata: %w", err)
	}
	report.Meta = meta
	return report, nil
}
