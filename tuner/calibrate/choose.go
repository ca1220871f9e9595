package calibrate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

const (
	// leastProbes is how many a fit needs at least: a dozen constants are to be told by five figures each.
	leastProbes = 10
	// every is of how many probes one is not fitted, but held against the fit.
	every = 5
	// saturated is the part of the offered rate below which a server does not follow: its latencies are then those of a queue
	// that grows with the window, and no constant's.
	saturated = 0.85
)

// A candidate is a trial with the probes that are predicted.
type candidate struct {
	trial   studies.Trial
	args    []string      // those that mean something to the simulator
	options sim.Options   // what they come to
	probes  []trial.Probe // to be replayed, in their order
	used    []bool        // by probe: it is compared, and not only what the cache has seen
	heldOut []bool        // by probe: it is compared and not fitted
}

// A Count is how many of something were left out.
type Count struct {
	Why string
	N   int
}

// Counts are reasons in the order in which they came up.
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

// simulatedFlags are the flags that change what the simulator predicts. The model's other flags are the user's, and in the
// measurements.
var simulatedFlags = []string{
	"gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-model-len", "enable-prefix-caching",
	"no-enable-prefix-caching", "enforce-eager", "no-enforce-eager", "speculative-config",
}

// simulatedArgs keeps the args that change what the simulator predicts, and names the flags that do not.
func simulatedArgs(args []string) (known, others []string, err error) {
	flags, err := space.Flags(args)
	if err != nil {
		return nil, nil, err
	}
	for _, f := range flags {
		if !slices.Contains(simulatedFlags, f.Name) {
			others = append(others, "--"+f.Name)
			continue
		}
		known = append(append(known, "--"+f.Name), f.Values...)
	}
	return known, others, nil
}

// whyNot says why a probe cannot be predicted, or nothing.
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
	case followed(p) < saturated:
		return "over-saturated"
	}
	return ""
}

// followed is the part of the offered requests that ended within the window.
func followed(p trial.Probe) float64 {
	m := p.Measurement
	if m.WindowRequestThroughput > 0 && m.Window > 0 {
		return m.WindowRequestThroughput * m.Window.Seconds() / float64(m.Requests)
	}
	return m.RequestThroughput / p.Rate
}

// choose returns the trials with probes to predict, once with is the profile whose memory is that of the measured server.
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
		last := -1
		for i, probe := range one.probes {
			why := whyNot(probe)
			if why != "" {
				c.result.LeftOut.add(why)
				continue
			}
			one.used[i], last = true, i
			n++
			one.heldOut[i] = n%every == 0
		}
		if last < 0 {
			continue
		}
		one.trim(c.Runner.Cache == trial.Reset, last)
		chosen = append(chosen, one)
	}
	return chosen
}

// newCandidate reads a trial's args. Its error says why the profile's server does not start.
func newCandidate(p *sim.Profile, t studies.Trial) (*candidate, error) {
	args, _, err := simulatedArgs(t.Args)
	if err != nil {
		return nil, err
	}
	options, err := p.ParseArgs(args)
	if err != nil {
		return nil, err
	}
	if _, err := p.KVTokens(options); err != nil {
		text, _, _ := strings.Cut(err.Error(), ".")
		return nil, fmt.Errorf("the simulator would not start: %s", text)
	}
	n := len(t.Probes)
	return &candidate{trial: t, args: args, options: options, probes: t.Probes, used: make([]bool, n), heldOut: make([]bool, n)}, nil
}

// trim leaves out what is not compared and leaves no trace either: all after the last that is, and where the cache is emptied
// before each probe all others too.
func (c *candidate) trim(reset bool, last int) {
	var probes []trial.Probe
	var used, heldOut []bool
	for i := range last + 1 {
		if c.used[i] || !reset {
			probes, used, heldOut = append(probes, c.probes[i]), append(used, c.used[i]), append(heldOut, c.heldOut[i])
		}
	}
	c.probes, c.used, c.heldOut = probes, used, heldOut
}

// count returns how many probes are fitted, and how many are held out.
func count(chosen []*candidate) (fitted, heldOut int) {
	for _, c := range chosen {
		for i := range c.probes {
			switch {
			case c.heldOut[i]:
				heldOut++
			case c.used[i]:
				fitted++
			}
		}
	}
	return fitted, heldOut
}

// predict replays the candidates' probes on a profile, several trials at a time. A trial that the profile does not start has
// none, and its error.
func (c *calibration) predict(ctx context.Context, p *sim.Profile, chosen []*candidate) (predicted [][]trial.Probe, errs []error, err error) {
	predicted, errs = make([][]trial.Probe, len(chosen)), make([]error, len(chosen))
	c.rig.Profile = p
	runner := c.Runner
	runner.Start = c.rig.Start
	c.each(len(chosen), func(i int) {
		one := chosen[i]
		predicted[i], errs[i] = runner.Replay(ctx, trial.Task{Number: one.trial.Number, Args: one.args, Done: one.probes})
	})
	c.replays++
	c.tell()
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	return predicted, errs, nil
}
