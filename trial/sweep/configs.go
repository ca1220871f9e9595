package sweep

import (
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
)

// A Config is a named set of server flags and, after the config was measured, the result.
type Config struct {
	Name        string
	Description string
	Flags       map[string]string // the flags that this config sets itself
	Args        []string          // all args of the server, after the model's name
	Number      int               // index in the file, from 0; it names the log

	Result trial.Result
	Probes []trial.Probe
}

// Configs are the configs of a sweep in the order of the file. The first is the baseline.
type Configs []*Config

func (all Configs) flagNames() []string {
	flags := map[string]string{}
	for _, c := range all {
		maps.Copy(flags, c.Flags)
	}
	return slices.Sorted(maps.Keys(flags))
}

// measuredAny reports whether any load was measured.
func (all Configs) measuredAny() bool {
	return slices.ContainsFunc(all, func(c *Config) bool { return len(c.Probes) > 0 })
}

// label returns the name of a config; the name of the baseline is marked.
func (all Configs) label(i int) string {
	if i == 0 {
		return all[i].Name + " (baseline)"
	}
	return all[i].Name
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
	what := "failed under load"
	if r.Facts.StartUp == 0 {
		what = "cannot start"
	}
	return strings.Join(lo.Compact([]string{what, serverctl.Words(r.Class, r.Cause), r.Evidence}), ": ")
}

// found says in a few words what the highest load of a config is, or why its server failed.
func (c *Config) found(closed bool) string {
	if trouble := c.trouble(); trouble != "" {
		return trouble
	}
	return loadtest.HighestText(trial.Steps(c.Probes), closed)
}
