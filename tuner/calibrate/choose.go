package calibrate

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

const (
	// minProbes is the number of probes that a fit needs. Five figures of each probe determine a dozen constants.
	minProbes = 10
	// heldOutEvery says which probes are held out: the fit ignores every fifth probe, which is only compared with the
	// result.
	heldOutEvery = 5
	// saturated is the served share of the offered rate below which a probe is left out. Its latencies come from a
	// queue that grows with the window, and say nothing about the constants.
	saturated = 0.85
)

// A candidate is a trial and its probes to predict.
type candidate struct {
	trial   studies.Trial
	args    []string    // of the flags that the simulator models
	options sim.Options // parsed from args
	probes  []probe     // probes to replay, in order
}

// A probe is a measured probe to replay.
type probe struct {
	trial.Probe
	used    bool // it is compared with the prediction; other probes are replayed only for their effect on the cache
	heldOut bool // it is compared with the prediction, and the fit ignores it
}

// A Count says how many probes or trials were left out for one reason.
type Count struct {
	Why string
	N   int
}

// Counts has a Count for each reason, in the order in which the reasons occurred.
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

// simulatedArgs returns the args that change the simulator's predictions, and the names of the other flags.
func simulatedArgs(args []string) (known, others []string, err error) {
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

// optionsOf returns the options of a trial's args that the simulator models.
func optionsOf(p *sim.Profile, t studies.Trial) (sim.Options, error) {
	args, _, err := simulatedArgs(t.Args)
	if err != nil {
		return sim.Options{}, err
	}
	return p.ParseArgs(args)
}

// whyNot returns why a probe cannot be predicted; "" when it can.
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
	case servedShare(p) < saturated:
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

// choose returns the trials with probes to predict. p has the memory constants of the measured server already.
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
		end := 0 // of the probes that have an effect on a comparison
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

// newCandidate reads a trial's args. Its error says why the simulated server would not start with them.
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

// predict replays the candidates' probes on a profile, several trials at a time. A trial whose server does not start
// has an error and no probes.
func (c *calibration) predict(ctx context.Context, p *sim.Profile, chosen []*candidate) (predicted [][]trial.Probe, errs []error, err error) {
	predicted, errs = make([][]trial.Probe, len(chosen)), make([]error, len(chosen))
	c.rig.Profile = p
	runner := c.Runner
	runner.Start = c.rig.Start
	var workers errgroup.Group
	workers.SetLimit(runtime.GOMAXPROCS(0))
	for i, one := range chosen {
		workers.Go(func() error {
			task := trial.Task{Number: one.trial.Number, Args: one.args}
			for _, p := range one.probes {
				task.Done = append(task.Done, p.Probe)
			}
			predicted[i], errs[i] = runner.Replay(ctx, task)
			return nil // one trial's error does not stop the others
		})
	}
	_ = workers.Wait() // always nil
	c.replays++
	if c.Progress != nil {
		c.Progress(c.replays, max(c.planned, c.replays+c.replays/10))
	}
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	return predicted, errs, nil
}
