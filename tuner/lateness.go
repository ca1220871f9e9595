package tuner

import (
	"errors"
	"fmt"

	"vllmtuner/render"
	"vllmtuner/trial"
)

// ErrClientLimited is returned if the load generator, not the server, limited most probes of a Run. Then no flags can
// be judged.
var ErrClientLimited = errors.New("the load generator is the limit, not the server")

const (
	// minProbes is how many probes a Run needs before it may give up because of its load generator. Two attempts at one
	// trial have about as many probes.
	minProbes = 6
	// maxLimited is a limit: if the load generator limited maxLimited trials of the default, or of the current args,
	// the study does not measure these args again.
	maxLimited = 2
)

// lateness counts the probes of one Run, and those that the load generator limited. It ignores earlier Runs, which may
// have been on another machine.
type lateness struct {
	probes, limited int
	worst           trial.Probe // the limited probe with the highest send lag
}

func (l *lateness) count(p trial.Probe) {
	l.probes++
	if p.Verdict.ClientLimited == "" {
		return
	}
	if l.limited++; l.limited == 1 || p.Measurement.SendLag.P99 > l.worst.Measurement.SendLag.P99 {
		l.worst = p
	}
}

// tooLate returns an error if the load generator limited most of at least minProbes probes.
func (l *lateness) tooLate() error {
	if l.probes < minProbes || 2*l.limited <= l.probes {
		return nil
	}
	return fmt.Errorf("%w: the generator's delay decided the verdicts of %s; at %s req/s %s", ErrClientLimited, render.Of(l.limited, l.probes, "probe"), render.Rate(l.worst.Rate), l.worst.Verdict.ClientLimited)
}
