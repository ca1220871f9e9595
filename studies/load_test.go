package studies

import (
	"testing"

	"vllmtuner/trial"
)

// Summary with Nearest reads the probes of one trial only: the measured trial whose failed probe is nearest to the SLO.
func TestNearest(t *testing.T) {
	s := open(t, t.TempDir())
	read := func() Study {
		t.Helper()
		study, err := s.Summary(func(Study) []int { return []int{Nearest} })
		try(t, err)
		return study
	}
	store := func(number int, rate, headroom float64, outcome trial.Outcome) {
		t.Helper()
		p := aProbe(0, rate)
		p.Verdict.Pass, p.Verdict.Headroom = headroom >= 0, headroom
		r := aResult(rate)
		r.Outcome = outcome
		try(t, s.Begin(aTrial(number)), s.Record(number, p), s.Finish(number, r))
	}
	store(0, 1, 0.5, trial.Measured)
	if study := read(); len(study.Trials[0].Probes) != 0 {
		t.Errorf("no probe failed, but the probes %+v are read", study.Trials[0].Probes)
	}
	store(1, 1, -0.3, trial.Measured)
	store(2, 2, -0.1, trial.Measured)
	store(3, 1, -0.1, trial.Measured)
	store(4, 1, -0.01, trial.Unknown)
	for _, got := range read().Trials {
		if want := got.Number == 3; (len(got.Probes) == 1) != want {
			t.Errorf("trial %d has %d probes; want a probe of trial 3 alone, which has the lower rate of two with the same headroom", got.Number, len(got.Probes))
		}
	}
}
