// Package sweep measures named configs at every load of a list and compares them. Each config gets its own server. The
// comparison is written as text, CSV files and JSON. The package never searches for better flags.
package sweep

import (
	"maps"
	"slices"
	"strings"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// A Sweep has the configs to measure and their results.
type Sweep struct {
	Name      string // name of the study; the names of the CSV files begin with it
	Model     string
	Simulated string   // profile of the simulated server; "" for a real one
	Command   []string // command that starts a real server
	Args      []string // args of every server
	Workload  string
	Seed      uint64
	SLO       slo.SLO
	Cache     trial.Protocol
	Plan      trial.Sweep   // warm-up and loads of each server
	StartUp   time.Duration // estimated time that a server takes to start
	Marks     []string      // notes that hold for all configs
	Configs   []*Config     // configs in the order of the file; the first is the baseline

	begun int // how many configs were begun; the last of them may be incomplete
}

// A Config is one config and, after its measurement, its result.
type Config struct {
	Name        string
	Description string
	Flags       map[string]string // the flags that this config sets itself
	Args        []string          // all args of the server, after the model
	Number      int               // index in the file, from 0; it names the log

	Result trial.Result
	Probes []trial.Probe
}

// closed reports whether the levels are concurrencies of a closed loop.
func (s *Sweep) closed() bool { return len(s.Plan.Levels) > 0 && s.Plan.Levels[0].Streams > 0 }

// varied returns what differs between the levels: concurrency or rate.
func (s *Sweep) varied() string {
	if s.closed() {
		return "concurrency"
	}
	return "rate"
}

func (s *Sweep) flagNames() []string {
	flags := map[string]string{}
	for _, c := range s.Configs {
		maps.Copy(flags, c.Flags)
	}
	return slices.Sorted(maps.Keys(flags))
}

// simulated reports whether the file or a server's log says that the server was simulated.
func (s *Sweep) simulated() bool {
	return s.Simulated != "" || slices.ContainsFunc(s.Configs, func(c *Config) bool { return c.Result.Facts.Simulated })
}

// Begun reports whether the measurement of any config has begun.
func (s *Sweep) Begun() bool { return s.begun > 0 }

// measuredAny reports whether any load was measured.
func (s *Sweep) measuredAny() bool {
	return slices.ContainsFunc(s.Configs, func(c *Config) bool { return len(c.Probes) > 0 })
}

// label returns the name of a config; the name of the baseline is marked.
func (s *Sweep) label(i int) string {
	if i == 0 {
		return s.Configs[i].Name + " (baseline)"
	}
	return s.Configs[i].Name
}

func (c *Config) at(l trial.Level) (trial.Probe, bool) {
	i := slices.IndexFunc(c.Probes, func(p trial.Probe) bool { return p.Level() == l })
	if i < 0 {
		return trial.Probe{}, false
	}
	return c.Probes[i], true
}

// trouble says why the server of a config failed; "" if it did not fail.
func (c *Config) trouble() string {
	r := c.Result
	if r.Outcome == trial.Measured || r.Class == "" && r.Outcome == "" {
		return ""
	}
	class := serverctl.Words(r.Class, r.Cause)
	what := "failed under load"
	if r.Facts.StartUp == 0 {
		what = "cannot start"
	}
	return strings.TrimSuffix(what+": "+strings.TrimPrefix(class+": "+r.Evidence, ": "), ": ")
}

// found says in a few words what the highest load of a config is, or why its server failed.
func (c *Config) found(closed bool) string {
	if trouble := c.trouble(); trouble != "" {
		return trouble
	}
	return loadtest.HighestText(trial.Steps(c.Probes), closed)
}
