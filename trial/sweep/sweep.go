// Package sweep measures named configs at every load of a list and compares them. Each config gets its own server. The
// comparison is written as text, CSV files and JSON. The package never searches for better flags.
package sweep

import (
	"slices"
	"time"

	"vllmtuner/trial"
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

	Configs

	begun int // how many configs were begun; the last of them may be incomplete
}

// loads returns the loads of each server.
func (s *Sweep) loads() loads { return s.Plan.Levels }

// simulated reports whether the file or a server's log says that the server was simulated.
func (s *Sweep) simulated() bool {
	return s.Simulated != "" || slices.ContainsFunc(s.Configs, func(c *Config) bool { return c.Result.Facts.Simulated })
}

// Begun reports whether the measurement of any config has begun.
func (s *Sweep) Begun() bool { return s.begun > 0 }
