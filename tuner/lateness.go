package tuner

import (
	"errors"
	"fmt"

	"vllmtuner/trial"
)

// ErrClientLimited is returned when most probes of a run were decided by the load generator: no choice of flags can be judged so.
var ErrClientLimited = errors.New("the load generator is the limit, not the server")

const (
	// leastProbes are what a run must have measured before it is given up for its load generator: two attempts at a trial.
	leastProbes = 6
	// mostLimited is how many trials of a reference may be decided by the load generator before the study goes on without it.
	mostLimited = 2
)

// lateness counts the probes of one run that the load generator decided. Those of earlier runs may be of another machine.
type lateness struct {
	probes, limited int
	worst           trial.Probe // of the limited ones, by its send lag
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

// tooMuch is an error when most probes were decided by the load generator.
func (l *lateness) tooMuch() error {
	if l.probes < leastProbes || 2*l.limited <= l.probes {
		return nil
	}
	return fmt.Errorf("%w: it decided %d of %d probes; at %.4g req/s %s", ErrClientLimited, l.limited, l.probes, l.worst.Rate, l.worst.Verdict.ClientLimited)
}
