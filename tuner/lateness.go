package tuner

import (
	"errors"
	"fmt"

	"vllmtuner/trial"
)

// ErrClientLimited is returned when the load generator decided most probes of a Run: then no flags can be judged.
var ErrClientLimited = errors.New("the load generator is the limit, not the server")

const (
	// minProbes must be measured before a Run gives up because of its load generator. They are two attempts at a trial.
	minProbes = 6
	// The load generator may decide maxLimited trials of the default, or of the current args. The study does not measure
	// these args again then.
	maxLimited = 2
)

// lateness counts the probes of one Run that the load generator decided. An earlier Run may have been on another
// machine.
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

// tooLate returns an error when the load generator decided most probes.
func (l *lateness) tooLate() error {
	if l.probes < minProbes || 2*l.limited <= l.probes {
		return nil
	}
	return fmt.Errorf("%w: it decided %d of %d probes; at %.4g req/s %s", ErrClientLimited, l.limited, l.probes, l.worst.Rate, l.worst.Verdict.ClientLimited)
}
