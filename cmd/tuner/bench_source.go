package main

import (
	"slices"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
)

// benchSpec returns the workload that the flags describe.
func benchSpec(c *cli.Context) workload.Spec {
	spec := workload.Spec{
		Kind: c.String("workload"), Path: c.String("path"), Endpoint: c.String("endpoint"), Layout: c.String("layout"),
		InputTokens: c.Int("input-tokens"), OutputTokens: c.Int("output-tokens"), RangeRatio: c.Float64("range-ratio"),
		PrefixTokens: c.Int("prefix-tokens"), Prefixes: c.Int("prefixes"), SuffixTokens: c.Int("suffix-tokens"),
		HitPercent: c.Float64("hit-percent"), Groups: c.Int("groups"), VocabSize: c.Int("vocab-size"),
		Repeat: c.String("repeat"), SkipBadRows: c.Bool("skip-bad-rows"),
	}
	if c.Bool("natural") {
		spec.Output = workload.Natural
	}
	return spec
}

// benchSource opens the workload.
func benchSource(c *cli.Context) (workload.Source, error) {
	if err := oneOf("workload", c.String("workload"), workload.Kinds...); err != nil {
		return nil, err
	}
	if kind := c.String("workload"); slices.Contains(workload.Settings["path"], kind) && c.String("path") == "" {
		return nil, usage("--workload %s reads a file; name it with --path FILE", kind)
	}
	open := workload.Open
	if c.Bool("live") {
		open = func(spec workload.Spec, seed uint64) (workload.Source, error) {
			return workload.OpenLive(spec, c.Duration("think-time"), seed)
		}
	}
	source, err := open(benchSpec(c), c.Uint64("seed"))
	if err != nil {
		return nil, usageError{err}
	}
	return source, nil
}

// benchTracePath returns the file with the times of requests, which is --trace, or --path if --trace is not set.
func benchTracePath(c *cli.Context) string {
	if path := c.String("trace"); path != "" {
		return path
	}
	return c.String("path")
}

// benchTrace opens the recorded traffic from which the times of requests come.
func benchTrace(c *cli.Context) (*workload.Trace, error) {
	path := benchTracePath(c)
	if path == "" {
		return nil, usage("--arrivals %s needs a file with times; write --trace FILE, or --workload trace (or capture) with --path FILE", c.String("arrivals"))
	}
	spec := workload.Spec{Kind: "trace", Path: path, Layout: c.String("layout"), SkipBadRows: c.Bool("skip-bad-rows")}
	if path == c.String("path") {
		spec = benchSpec(c)
	}
	trace, err := workload.OpenTrace(spec, c.Uint64("seed"))
	if err != nil {
		return nil, usage("--arrivals %s: %w", c.String("arrivals"), err)
	}
	return trace, nil
}
