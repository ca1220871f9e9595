// Package sweep measures named configs, each on a server of its own, at every load of one grid, and compares them. It writes the
// comparison as text, CSV files and JSON. It never searches.
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
	Name      string // of the study
	Model     string
	Simulated string   // profile of the simulated server; "" for a real one
	Command   []string // of a real server
	Args      []string // of every server
	Workload  string
	Seed      uint64
	SLO       slo.SLO
	Cache     trial.Protocol
	Plan      trial.Sweep   // what each server goes through
	StartUp   time.Duration // of a server, estimated beforehand
	Marks     []string      // notes that hold for all configs
	Configs   []*Config     // in the order of the file; the first is the baseline

	begun int // how many configs were begun; the last of them may not be done
}

// A Config is one config, with its result once it was measured.
type Config struct {
	Name        string
	Description string
	Flags       map[string]string // only the flags of this config
	Args        []string          // all args of the server, after the model
	Number      int               // index in the file, from 0; it names the log

	Result trial.Result
	Probes []trial.Probe
}

// closed reports whether the levels are concurrencies of a closed loop.
func (s *Sweep) closed() bool { return len(s.Plan.Levels) > 0 && s.Plan.Levels[0].Streams > 0 }

// varied names what the levels vary.
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

// Begun reports whether there is anything to report.
func (s *Sweep) Begun() bool { return s.begun > 0 }

// measuredAny reports whether any load was measured.
func (s *Sweep) measuredAny() bool {
	return slices.ContainsFunc(s.Configs, func(c *Config) bool { return len(c.Probes) > 0 })
}

// label is the name of a config, with a mark at the baseline.
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

// trouble says why a config's server failed; "" when it did not.
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

// found says in a few words what was found for a config.
func (c *Config) found(closed bool) string {
	if trouble := c.trouble(); trouble != "" {
		return trouble
	}
	return loadtest.HighestText(trial.Steps(c.Probes), closed)
}
