package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// Gallop is the factor of the capacity search's first step. A search then takes about four probes from a hint that is right within
// a third (simulated engines, hint error 0.35 in log rate).
const Gallop = 1.35

// TypicalStart and TypicalProbes estimate a trial: how long a 70B model loads from a disk cache, and the mean number of probes
// in searches on simulated engines.
const (
	TypicalStart  = 150 * time.Second
	TypicalProbes = 4
)

// Runner returns a Runner that measures the plan's points. The caller sets its Start.
func (p *Plan) Runner() *trial.Runner {
	f := p.File
	return &trial.Runner{
		WorstCase: f.Probe.WorstCase, MinAcceptance: f.Speculation.MinAcceptance, MinDrafted: f.Speculation.MinDrafted,
		Source: p.Source, SLO: f.SLO, Seed: p.Seed,
		Lengths:   trial.Lengths{LeadIn: f.Probe.LeadIn, Window: f.Probe.Window, MinRequests: f.Probe.MinRequests},
		Cache:     p.Protocol(),
		PrimeRate: f.Cache.PrimeRate,
		Marks:     p.Marks(),
		Simulated: f.Server.Simulate != "",
		Arrivals:  workload.Arrivals{Burstiness: f.Load.Burstiness},
		Natural:   f.Workload.Output == workload.Natural,
		Search: capacity.Search{
			Hint: f.Probe.StartRate, Min: f.Probe.MinRate, Max: f.Probe.MaxRate,
			Factor: Gallop, Tolerance: f.Probe.Tolerance, MaxProbes: f.Probe.MaxProbes, Precision: f.Probe.Precision,
		},
	}
}

// Probe returns the load of a probe at the start rate. Without a start rate it takes the lowest rate.
func (p *Plan) Probe() workload.Plan {
	f := p.File
	return workload.Plan{
		Source: p.Source, Seed: f.Sampler.Seed, Rate: cmp.Or(f.Probe.StartRate, f.Probe.MinRate), LeadIn: f.Probe.LeadIn, Window: f.Probe.Window,
		MinRequests: f.Probe.MinRequests, Arrivals: workload.Arrivals{Burstiness: f.Load.Burstiness},
	}
}

// Requests returns how many requests a probe at the start rate counts.
func (p *Plan) Requests() int {
	n, _ := p.Probe().Counted()
	return n
}

// Window returns how long a probe at the start rate counts requests.
func (p *Plan) Window() time.Duration {
	f := p.File
	return max(f.Probe.Window, time.Duration(float64(f.Probe.MinRequests)/max(f.Probe.StartRate, f.Probe.MinRate)*float64(time.Second)))
}

// NeedsITL reports whether the times between tokens are recorded.
func (p *Plan) NeedsITL() bool { return p.ITL || p.File.SLO.NeedsITL() }

// Marks returns the notes that hold for every figure of the study.
func (p *Plan) Marks() []string {
	var marks []string
	if p.File.AllowMeaninglessSpeculation {
		marks = append(marks, "speculation was measured on a workload whose acceptance rate means nothing (allow_meaningless_speculation)")
	}
	if p.File.AllowQualityChange {
		marks = append(marks, "flags that change the answers were searched (allow_quality_change)")
	}
	if p.File.Workload.Output == workload.Natural {
		marks = append(marks, "the model chose the length of its answers (output: natural): with other flags, or on another day, the work differs")
	}
	if dynamo := p.File.Server.Dynamo; len(dynamo) > 0 {
		marks = append(marks, "Dynamo's own flags were left out: "+strings.Join(dynamo, " "))
	}
	if p.File.Load.Driver == studyfile.VLLMBench {
		marks = append(marks, "load by vllm bench serve: TTFT counts from its POST, not from the due time; the lead-in was a separate run, and nothing was sent after the window")
	}
	if names := p.ignoredFlags(); p.File.Server.Simulate != "" && len(names) > 0 {
		marks = append(marks, "the simulated server ignores "+strings.Join(names, ", "))
	}
	return marks
}

// ignoredFlags are the flags of the study's servers that affect a real server and not the simulated one.
func (p *Plan) ignoredFlags() []string {
	flags, err := space.Flags(slices.Concat(p.File.Server.Args, p.File.Server.Current))
	if err != nil {
		return nil // the file's check has reported it
	}
	var names []string
	for _, flag := range flags {
		name := fmt.Sprintf("--%s", flag.Base())
		if sim.Ignores(flag.Base()) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
