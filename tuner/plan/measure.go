package plan

import (
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

// Gallop is the factor between the first two rates of a capacity search. A search begins at a hint, which is a guessed
// capacity. With 1.35, a search takes about four probes if the hint is right within a third. This was measured with
// simulated engines, at a hint error of 0.35 in log rate.
const Gallop = 1.35

// typicalStart and typicalProbes are used to estimate the time of a trial. typicalStart is how long a 70B model takes
// to load from a disk cache. typicalProbes is the mean number of probes of searches on simulated engines.
const (
	typicalStart  = 150 * time.Second
	typicalProbes = 4
	typicalRace   = 2 // mean number of probes in a race, and in a confirmation
)

// Runner returns a Runner with the settings of the plan. The caller must set the field Start.
func (p *Plan) Runner() *trial.Runner {
	f := p.File
	return &trial.Runner{
		WorstCase: f.Probe.WorstCase, MinAcceptance: f.Speculation.MinAcceptance, MinDrafted: f.Speculation.MinDrafted,
		Source: p.Load.Source, SLO: f.SLO, Seed: p.Load.Seed,
		Lengths:   trial.Lengths{LeadIn: f.Probe.LeadIn, Window: f.Probe.Window, MinRequests: f.Probe.MinRequests},
		Confirm:   p.Load.confirm(),
		Cache:     p.Load.Protocol(),
		PrimeRate: f.Cache.PrimeRate,
		Marks:     p.Marks(),
		Simulated: f.Server.Simulate != "",
		Arrivals:  workload.Arrivals{Burstiness: f.Load.Burstiness},
		Natural:   f.Workload.Output == workload.Natural,
		Search: capacity.Search{
			Hint: f.Probe.StartRate, Min: f.Probe.MinRate, Max: f.Probe.MaxRate,
			Race: capacity.Race{MinGain: f.Budget.MinGain}, Factor: Gallop, Tolerance: f.Probe.Tolerance, MaxProbes: f.Probe.MaxProbes, Precision: f.Probe.Precision,
		},
	}
}

// Marks returns the notes that apply to all figures of the study.
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
	if names := ignoredFlags(p.File.Server); p.File.Server.Simulate != "" && len(names) > 0 {
		marks = append(marks, "the simulated server ignores "+strings.Join(names, ", "))
	}
	return marks
}

// ignoredFlags returns the flags in the study file that have an effect on a real server, but not on the simulated one.
func ignoredFlags(s studyfile.Server) []string {
	flags, err := space.Flags(slices.Concat(s.Args, s.Current))
	if err != nil {
		return nil // the check of the file has already reported it
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
