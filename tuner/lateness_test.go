package tuner

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// lateLoad sends the load of a simulated server 30 ms late whenever isLate returns true. The answers are also 30 ms
// later.
type lateLoad struct {
	trial.Load
	isLate func() bool
}

func (l lateLoad) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	run, err := l.Load.Run(ctx, schedule, stop)
	if l.isLate() {
		const lag = 30 * time.Millisecond // the limit is 100 ms
		for i := range run.Samples {
			s := &run.Samples[i]
			s.Sent += lag
			if s.First > 0 {
				s.First += lag
			}
			if s.End > 0 {
				s.End += lag
			}
		}
	}
	return run, err
}

// lateIn makes the load generator late whenever the function late returns true. The argument start of this function
// counts the starts of a trial's server from 0.
func lateIn(s *Study, late func(trialNumber, start int) bool) *Study {
	start, starts := s.Runner.Start, map[int]int{}
	s.Runner.Start = func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
		server, load, err := start(ctx, launch)
		n := starts[launch.Number]
		starts[launch.Number]++
		return server, lateLoad{load, func() bool { return late(launch.Number, n) }}, err
	}
	return s
}

// A trial that a late load generator limited is measured again. If the second measurement is good, the trial counts
// like any other.
func TestAClientLimitedTrialIsMeasuredOnceMore(t *testing.T) {
	const which = 1
	store := open(t, t.TempDir())
	s := lateIn(study(t, store, trial.Reset, which+1), func(n, start int) bool { return n == which && start == 0 })
	mustRun(t, s)
	for _, got := range answers(t, store) {
		if r := got.Result; r.Class != "" || r.Capacity.Limited != "" || r.Capacity.Bound != capacity.Exact {
			t.Errorf("trial %d is %s, %s %g, limited %q; want an exact capacity", got.Number, r.Class, r.Capacity.Bound, r.Capacity.Rate, r.Capacity.Limited)
		}
		again := lastAttempt(got.Probes) == 1
		if notes := strings.Join(got.Result.Notes, " "); again != (got.Number == which) || again != strings.Contains(notes, "late at p99") {
			t.Errorf("trial %d was measured again: %t, notes %q; want it of trial %d alone", got.Number, again, notes, which)
		}
	}
}

// If most probes of a study are client-limited, it ends with an error and without an answer. On a better machine it
// continues, and measures its default again.
func TestAStudyOfALateLoadGeneratorStops(t *testing.T) {
	store := open(t, t.TempDir())
	late := true
	s := lateIn(study(t, store, trial.Reset, 3), func(int, int) bool { return late })
	_, err := s.Run(t.Context())
	if !errors.Is(err, ErrClientLimited) || !strings.Contains(err.Error(), "30 ms late at p99") {
		t.Fatalf("Run = %v, want that the load generator is the limit", err)
	}
	got := answers(t, store)
	if r := got[0].Result; len(got) != 1 || r.Class != serverctl.ClientLimited || r.Capacity.Bound != capacity.AtLeast {
		t.Fatalf("%d trials, the first %+v; want one, at least what passed", len(got), r)
	}
	late = false
	mustRun(t, study(t, store, trial.Reset, 3))
	got = answers(t, store)
	if got[1].Origin != studies.Default || got[1].Result.Capacity.Bound != capacity.Exact || got[1].Result.Class != "" || got[2].Origin == studies.Default {
		t.Errorf("trial 1 is %s, %+v, and trial 2 %s; want the default once more", got[1].Origin, got[1].Result, got[2].Origin)
	}
}

// A default that the load generator limited is measured once more, but not again and again.
func TestALateDefaultIsNotAskedForForEver(t *testing.T) {
	late := studies.Trial{Origin: studies.Default, Result: trial.Result{Outcome: trial.Measured, Class: serverctl.ClientLimited}}
	unknown := studies.Trial{Origin: studies.Default, Result: trial.Result{Outcome: trial.Unknown, Class: serverctl.ClientLimited}}
	died := studies.Trial{Origin: studies.Default, Result: trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure}}
	well := studies.Trial{Origin: studies.Default, Result: trial.Result{Outcome: trial.Measured}}
	other := studies.Trial{Origin: studies.Sampled, Result: trial.Result{Outcome: trial.Measured}}
	for _, row := range []struct {
		name   string
		trials []studies.Trial
		want   bool
	}{
		{"none", []studies.Trial{other}, false},
		{"late once", []studies.Trial{late}, false},
		{"late twice", []studies.Trial{late, unknown}, true},
		{"late and then well", []studies.Trial{late, well}, true},
		{"died and late", []studies.Trial{died, died, unknown}, false},
	} {
		if got := referenceKnown(studies.Study{Trials: row.trials}, studies.Default); got != row.want {
			t.Errorf("%s: known %t, want %t", row.name, got, row.want)
		}
	}
}

// A Run gives up only if it has enough probes and the load generator limited most of these probes.
func TestMostProbesMustBeLate(t *testing.T) {
	for _, row := range []struct {
		well, late int
		want       bool
	}{{0, 5, false}, {0, 6, true}, {3, 3, false}, {3, 4, true}, {30, 29, false}} {
		var l lateness
		for range row.well {
			l.count(trial.Probe{Rate: 20})
		}
		for range row.late {
			l.count(trial.Probe{Rate: 30, Verdict: slo.Verdict{ClientLimited: "the load generator was 17.5 ms late at p99"}})
		}
		if err := l.tooLate(); errors.Is(err, ErrClientLimited) != row.want {
			t.Errorf("%d of %d probes late: %v, want an error %t", row.late, row.late+row.well, err, row.want)
		}
	}
}
