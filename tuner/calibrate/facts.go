package calibrate

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
)

// phases maps the phase names of serverctl to the profile's constants. A constant contains the time of all its phases.
var phases = map[string]string{
	"importing and configuring":       "start_up.weights",
	"loading the weights":             "start_up.weights",
	"profiling memory":                "start_up.profile",
	"compiling":                       "start_up.compile",
	"capturing graphs and warming up": "start_up.graphs",
	"starting the HTTP server":        "start_up.graphs",
}

// startUps are the constants of the start-up time, in the order of a start.
var startUps = []string{"start_up.weights", "start_up.profile", "start_up.compile", "start_up.graphs"}

// times sets the start and stop times of the profile to the medians of the trials.
func (c *calibration) times(p *sim.Profile) {
	parts, totals, stops := map[string][]float64{}, []float64{}, []float64{}
	for _, t := range c.Study.Trials {
		if took := t.Result.Ended.Took; took > 0 {
			stops = append(stops, took.Seconds())
		}
		facts := t.Result.Facts
		if facts.StartUp <= 0 {
			continue
		}
		totals = append(totals, facts.StartUp.Seconds())
		if len(facts.Parts) == 0 {
			continue
		}
		for path, seconds := range sumParts(facts.Parts) {
			parts[path] = append(parts[path], seconds)
		}
	}
	switch {
	case len(parts) > 0:
		for _, path := range startUps {
			c.set(p, path, median(parts[path]), "measured", "median of %s, from the logs", render.Count(len(parts[path]), "start"))
		}
	case len(totals) > 0:
		scale := median(totals) / c.From.StartUp.Total().Seconds()
		for _, path := range startUps {
			c.set(p, path, scale**c.From.Value(path), "measured", "the median of %s is %.3g s; the parts were not logged and have the proportions of %s",
				render.Count(len(totals), "start"), median(totals), c.From.Name)
		}
	default:
		c.note("no start was timed: start_up keeps the values of %s", c.From.Name)
	}
	if len(stops) > 0 {
		c.set(p, "stop.time", median(stops), "measured", "median of %s", render.Count(len(stops), "stop"))
	}
}

// sumParts sums the times of the phases for each constant, in seconds. Every constant has an entry. The time of an
// unknown phase is added to start_up.graphs.
func sumParts(parts []serverctl.Part) map[string]float64 {
	sums := map[string]float64{}
	for _, path := range startUps {
		sums[path] = 0
	}
	for _, part := range parts {
		path := phases[part.Name]
		if path == "" {
			path = "start_up.graphs"
		}
		sums[path] += part.Took.Seconds()
	}
	return sums
}

// acceptance sets the probability that a draft token is accepted, for each position in a draft. It uses the counters of
// all probes.
func (c *calibration) acceptance(p *sim.Profile) {
	var accepted []float64
	drafts, probes := 0.0, 0
	for _, t := range c.Study.Trials {
		for _, probe := range t.Probes {
			s := probe.Speculation
			if s == nil || len(s.At) == 0 {
				continue
			}
			probes++
			drafts += s.Drafts
			for i, n := range s.At {
				if i == len(accepted) {
					accepted = append(accepted, 0)
				}
				accepted[i] += n
			}
		}
	}
	if probes == 0 {
		return
	}
	var chances []float64
	before := drafts
	for _, n := range accepted {
		if before <= 0 {
			break
		}
		chances = append(chances, min(1, n/before))
		before = n
	}
	const path = "speculation.acceptance"
	p.Set(path, chances, "measured", fmt.Sprintf("study %s%s: %.0f drafts of %s", c.Study.Name, c.madeUp(), drafts, render.Count(probes, "probe")))
	c.note("%s is %.2g, from the counters of %s", path, chances, render.Count(probes, "probe"))
}

// defaults sets the profile's default of each flag that was not given, if the server's log shows its value.
func (c *calibration) defaults(p *sim.Profile) {
	d := &p.Defaults
	logged := map[string]bool{}
	for _, t := range c.Study.Trials {
		facts := t.Result.Facts
		for flag, to := range map[string]*int{"max-num-seqs": &d.MaxNumSeqs, "max-num-batched-tokens": &d.MaxNumBatchedTokens} {
			if n, err := strconv.Atoi(facts.Args[flag]); err == nil && n > 0 && !gives(t, flag) {
				*to, logged[flag] = n, true
			}
		}
		if v, err := strconv.ParseFloat(facts.Args["gpu-memory-utilization"], 64); err == nil && v > 0 && v <= 1 && !gives(t, "gpu-memory-utilization") {
			d.GPUMemoryUtilization, logged["gpu-memory-utilization"] = v, true
		}
		if facts.MaxModelLen > 0 && !gives(t, "max-model-len") {
			d.MaxModelLen, logged["max-model-len"] = facts.MaxModelLen, true
		}
	}
	for _, flag := range []struct {
		name  string
		value any
	}{
		{"gpu-memory-utilization", d.GPUMemoryUtilization}, {"max-num-seqs", d.MaxNumSeqs},
		{"max-num-batched-tokens", d.MaxNumBatchedTokens}, {"max-model-len", d.MaxModelLen},
	} {
		n := 0
		for _, t := range c.Study.Trials {
			if !gives(t, flag.name) {
				n++
			}
		}
		if n > 0 && !logged[flag.name] && !c.result.Simulated {
			c.note("--%s was not given in %s, and the server's log does not show its value: assumed to be %v, the default of %s; edit defaults in the file of --from if that is wrong",
				flag.name, render.Count(n, "trial"), flag.value, c.From.Name)
		}
	}
}

// gives reports whether a trial's args have a flag.
func gives(t studies.Trial, name string) bool {
	args, _, err := SimulatedArgs(t.Args)
	return err == nil && slices.Contains(args, "--"+name)
}

// noteConstantFlags writes a note for each flag that had the same value in all trials. The note says what the study
// cannot determine for this reason. Another note lists the flags that the simulator does not model.
func (c *calibration) noteConstantFlags(chosen []*candidate) {
	for _, flag := range []struct {
		name, what string
		of         func(sim.Options) any
	}{
		{"gpu-memory-utilization", "the GPU's memory and the fixed part of its use", func(o sim.Options) any { return o.GPUMemoryUtilization }},
		{"max-num-seqs", "the memory of a sequence", func(o sim.Options) any { return o.MaxNumSeqs }},
		{"max-num-batched-tokens", "the memory of a batched token, and the cost of a large prefill",
			func(o sim.Options) any { return o.MaxNumBatchedTokens }},
	} {
		value := flag.of(chosen[0].options)
		if !slices.ContainsFunc(chosen, func(one *candidate) bool { return flag.of(one.options) != value }) {
			c.note("--%s was %v in every used trial: only a study that varies it can determine %s", flag.name, value, flag.what)
		}
	}
	var names, variables []string
	for _, one := range chosen {
		variables = append(variables, slices.Collect(maps.Keys(one.trial.Point.Env()))...)
		_, unknown, _ := SimulatedArgs(one.trial.Args) // choose leaves out trials with wrong args
		for _, name := range unknown {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	if len(names) > 0 {
		c.note("the simulator does not model these flags, so the constants include their effect: %s", joined(names))
	}
	if len(variables) > 0 {
		slices.Sort(variables)
		c.note("the simulator does not model these environment variables, so the constants include their effect: %s", joined(slices.Compact(variables)))
	}
}
