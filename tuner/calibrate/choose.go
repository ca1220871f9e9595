package calibrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

const (
	// minProbes is the smallest number of probes for a fit. The fit uses five figures of each probe to determine about
	// a dozen constants.
	minProbes = 10
	// heldOutEvery is 5: the fit ignores every fifth probe. These held-out probes show how well the result predicts
	// what the fit has not seen.
	heldOutEvery = 5
	// minServed is the smallest share of a probe's requests that must end within the window. A probe with a smaller
	// share is left out. Its latencies come from a queue that grew during the window, and say nothing about the
	// constants.
	minServed = 0.85
)

// A candidate is a trial whose probes are predicted.
type candidate struct {
	trial   studies.Trial
	args    []string    // args of the flags that the simulator models
	options sim.Options // parsed from args
	probes  []probe     // probes to replay, in order
}

// A probe is a measured probe to replay.
type probe struct {
	trial.Probe
	used    bool // the probe is compared with the prediction; other probes are replayed only for their effect on the cache
	heldOut bool // the fit ignores the probe; the report compares the predictions with it
}

// A Count says how many probes or trials were left out for one reason.
type Count struct {
	Why string
	N   int
}

// Counts has one Count for each reason. The reason that occurred first comes first.
type Counts []Count

func (c *Counts) add(why string) {
	for i := range *c {
		if (*c)[i].Why == why {
			(*c)[i].N++
			return
		}
	}
	*c = append(*c, Count{why, 1})
}

// SimulatedArgs returns the args that change the simulator's predictions, and the names of the other flags.
func SimulatedArgs(args []string) (known, others []string, err error) {
	flags, err := space.Flags(args)
	if err != nil {
		return nil, nil, err
	}
	for _, f := range flags {
		if !sim.Models(strings.TrimPrefix(f.Name, "no-")) {
			others = append(others, "--"+f.Name)
			continue
		}
		known = append(append(known, "--"+f.Name), f.Values...)
	}
	return known, others, nil
}

// optionsOf returns the simulator's options for the args of a trial. It ignores flags that the simulator does not
// model.
func optionsOf(p *sim.Profile, t studies.Trial) (sim.Options, error) {
	args, _, err := SimulatedArgs(t.Args)
	if err != nil {
		return sim.Options{}, err
	}
	return p.ParseArgs(args)
}

// whyNot returns why a probe cannot be compared with a prediction; "" if it can.
func whyNot(p trial.Probe) string {
	m := p.Measurement
	switch {
	case m.Void != "":
		return "void"
	case p.Verdict.ClientLimited != "":
		return "client-limited"
	case p.Stopped:
		return "stopped early"
	case m.Failed > 0 || m.Completed < m.Requests || m.Completed == 0:
		return "with failed requests"
	case servedShare(p) < minServed:
		return "over-saturated"
	}
	return ""
}

// servedShare returns the share of the offered requests that ended within the window.
func servedShare(p trial.Probe) float64 {
	m := p.Measurement
	if m.WindowRequestThroughput > 0 && m.Window > 0 {
		return m.WindowRequestThroughput * m.Window.Seconds() / float64(m.Requests)
	}
	return m.RequestThroughput / p.Rate
}

// choose returns the trials that have probes to predict. p must already have the memory constants of the measured
// server.
func (c *calibration) choose(p *sim.Profile) (chosen []*candidate) {
	n := 0
	for _, t := range c.Study.Trials {
		if len(t.Probes) == 0 {
			continue
		}
		one, err := newCandidate(p, t)
		if err != nil {
			c.result.LeftOutTrials.add(err.Error())
			continue
		}
		end := 0 // number of probes up to the last used one; later probes have no effect
		for i, measured := range t.Probes {
			p := probe{Probe: measured}
			if why := whyNot(measured); why != "" {
				c.result.LeftOut.add(why)
			} else {
				n++
				p.used, p.heldOut, end = true, n%heldOutEvery == 0, i+1
			}
			one.probes = append(one.probes, p)
		}
		if end == 0 {
			continue
		}
		one.probes = slices.DeleteFunc(one.probes[:end], func(p probe) bool {
			return !p.used && c.Runner.Cache == trial.Reset // the cache is emptied before each probe
		})
		chosen = append(chosen, one)
	}
	return chosen
}

// newCandidate parses the args of a trial. The error says why the simulated server would not start with these args.
func newCandidate(p *sim.Profile, t studies.Trial) (*candidate, error) {
	args, _, err := SimulatedArgs(t.Args)
	if err != nil {
		return nil, err
	}
	options, err := p.ParseArgs(args)
	if err != nil {
		return nil, err
	}
	if _, err := p.KVTokens(options); err != nil {
		if start, ok := errors.AsType[*sim.StartError](err); ok {
			err = errors.New(start.Summary)
		}
		return nil, fmt.Errorf("the simulator would not start: %w", err)
	}
	return &candidate{trial: t, args: args, options: options}, nil
}

// count returns the numbers of fitted and of held-out probes.
func count(chosen []*candidate) (fitted, heldOut int) {
	for _, c := range chosen {
		for _, p := range c.probes {
			switch {
			case p.heldOut:
				heldOut++
			case p.used:
				fitted++
			}
		}
	}
	return fitted, heldOut
}
