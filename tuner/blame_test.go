package tuner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// coarse limits each search of a study to two probes, for tests in which the capacities do not matter.
func coarse(s *Study) *Study {
	s.Runner.Search.MaxProbes = 2
	return s
}

// dying makes the first n starts of a study's servers fail. Later starts return the simulated server. The result points
// to the number of starts so far.
func dying(s *Study, n int, death func(start int) *serverctl.ExitError) *int {
	good, starts := s.Runner.Start, 0
	s.Runner.Start = func(ctx context.Context, l trial.Launch) (trial.Server, trial.Load, error) {
		if starts++; starts <= n {
			return nil, nil, death(starts)
		}
		return good(ctx, l)
	}
	return &starts
}

func always(e serverctl.ExitError) func(int) *serverctl.ExitError {
	return func(int) *serverctl.ExitError { return &e }
}

const forEver = 1 << 30 // servers

// A broken machine ends the study with an error. Trials that failed because of the machine do not count towards the
// budget. After the repair the study measures all trials of the budget, the default first.
func TestABrokenMachineCostsNoTrial(t *testing.T) {
	script := serverctl.ExitError{Class: serverctl.StartCrash, Evidence: "serve.sh: process 4711 found no GPU"}
	for _, row := range []struct {
		name   string
		death  func(int) *serverctl.ExitError
		starts int // server starts until the study ends
		stored int // finished trials when the study ends
	}{
		{"a driver that does not start gets a second try", always(serverctl.ExitError{Class: serverctl.Infrastructure, Cause: serverctl.Driver, Evidence: "CUDA driver initialization failed"}), 2, 0},
		{"args that every trial has are refused once", always(serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: "unrecognized arguments: --x", Argparse: true}), 1, 0},
		{"the first servers die with the same words except for numbers", func(n int) *serverctl.ExitError {
			e := script
			e.Evidence = fmt.Sprintf("serve.sh: process %d found no GPU", n)
			return &e
		}, 3, 3},
		{"flags are refused with the same words whatever they are", always(serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: "max_model_len (9) is too long"}), 3, 3},
	} {
		t.Run(row.name, func(t *testing.T) {
			store := open(t, t.TempDir())
			s := coarse(study(t, store, trial.Primed, 4))
			starts := dying(s, forEver, row.death)
			if _, err := s.Run(t.Context()); !errors.Is(err, ErrNothingStarts) || !strings.Contains(err.Error(), row.death(*starts).Evidence) {
				t.Fatalf("Run = %v, want ErrNothingStarts with the words", err)
			}
			finished := 0
			for _, one := range answers(t, store) {
				if one.State == studies.Done {
					finished++
				}
			}
			if *starts != row.starts || finished != row.stored {
				t.Errorf("%d starts and %d finished trials, want %d and %d", *starts, finished, row.starts, row.stored)
			}
			again := coarse(study(t, store, trial.Primed, 4))
			if row.stored > 0 { // run again while the machine is still broken
				starts = dying(again, forEver, row.death)
				if _, err := again.Run(t.Context()); !errors.Is(err, ErrNothingStarts) || *starts != row.starts {
					t.Errorf("run again before the repair: %v after %d starts, want the error after %d", err, *starts, row.starts)
				}
				row.stored *= 2
				again = coarse(study(t, store, trial.Primed, 4))
			}
			if end, err := again.Run(t.Context()); err != nil || !strings.Contains(end.Why, "budget.trials is used up") {
				t.Fatalf("after the repair: %+v, %v", end, err)
			}
			got := answers(t, store)
			if len(got) != row.stored+4 {
				t.Fatalf("%d trials are stored, want %d and the four of the budget", len(got), row.stored)
			}
			for i, want := range []studies.Origin{studies.Default, studies.Current, studies.Sampled, studies.Sampled} {
				if one := got[row.stored+i]; one.Origin != want || i < 2 && one.Result.Outcome != trial.Measured || one.Result.Outcome == trial.Unknown {
					t.Errorf("trial %d is %s by %s, want it measured by %s", one.Number, one.Result.Outcome, one.Origin, want)
				}
			}
		})
	}
}

// If no flag can cure a failure, the advice for the user stays apart from the error.
func TestAdviceStaysApartFromTheError(t *testing.T) {
	s := coarse(study(t, open(t, t.TempDir()), trial.Primed, 3))
	dying(s, forEver, always(serverctl.ExitError{Class: serverctl.ModelNotFound, Cause: serverctl.GatedModel, Evidence: "access is restricted"}))
	_, err := s.Run(t.Context())
	advised, ok := err.(*trial.RemedyError)
	if !ok {
		t.Fatalf("Run = %v, want a RemedyError", err)
	}
	want := serverctl.Remedy(serverctl.ModelNotFound, serverctl.GatedModel)
	if says := advised.Err.Error(); advised.Remedy != want || !strings.HasPrefix(says, "trial 0: ") || strings.Contains(says, want) {
		t.Errorf("the error is %q and the advice %q, want the advice %q and an error without it", says, advised.Remedy, want)
	}
}

// With a budget of fewer than three trials, a broken machine also ends the study with an error. The whole budget is
// available again after the repair.
func TestABrokenMachineAndASmallBudget(t *testing.T) {
	crash := serverctl.ExitError{Class: serverctl.StartCrash, Evidence: "serve.sh: no GPU"}
	for budget, says := range map[int]string{1: "the only server died during its start", 2: "each of the first 2 servers died with the same message"} {
		store := open(t, t.TempDir())
		s := coarse(study(t, store, trial.Primed, budget))
		starts := dying(s, forEver, always(crash))
		_, err := s.Run(t.Context())
		if !errors.Is(err, ErrNothingStarts) || !strings.Contains(err.Error(), says) || *starts != budget {
			t.Errorf("budget %d: Run = %v after %d starts, want ErrNothingStarts after %d: %s", budget, err, *starts, budget, says)
		}
		if advised, ok := err.(*trial.RemedyError); !ok || advised.Remedy != serverctl.Remedy("", serverctl.SameWords) {
			t.Errorf("budget %d: Run = %v, want a RemedyError", budget, err)
		}
		if _, err := coarse(study(t, store, trial.Primed, budget)).Run(t.Context()); err != nil {
			t.Errorf("budget %d, after the repair: %v", budget, err)
		}
		got := answers(t, store)
		if len(got) != 2*budget || got[budget].Origin != studies.Default || got[budget].Result.Outcome != trial.Measured {
			t.Errorf("budget %d, after the repair: %d trials, want %d with the default measured", budget, len(got), 2*budget)
		}
	}
}

// If all points of a space are infeasible because of their flags, that is a result. It does not mean that the machine
// is broken.
func TestAnInfeasibleSpaceIsAResult(t *testing.T) {
	for _, row := range []struct {
		name  string
		death func(int) *serverctl.ExitError
	}{
		{"no memory for any", always(serverctl.ExitError{Class: serverctl.OOMStart, Evidence: "CUDA out of memory"})},
		{"flags that exclude each other, with different words", func(n int) *serverctl.ExitError {
			return &serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: fmt.Sprintf("max_num_batched_tokens (%d) is too small", n)}
		}},
		{"crashes with different words", func(n int) *serverctl.ExitError {
			return &serverctl.ExitError{Class: serverctl.StartCrash, Evidence: "AssertionError: " + strings.Repeat("x", n)}
		}},
		{"crashes under load", always(serverctl.ExitError{Class: serverctl.CrashLoad, Evidence: "illegal memory access"})},
	} {
		store := open(t, t.TempDir())
		s := coarse(study(t, store, trial.Primed, 4))
		dying(s, forEver, row.death)
		if end, err := s.Run(t.Context()); err != nil || !strings.Contains(end.Why, "budget.trials is used up") {
			t.Errorf("%s: Run = %+v, %v, want four infeasible trials", row.name, end, err)
		}
		for _, one := range answers(t, store) {
			if one.Result.Outcome != trial.Infeasible {
				t.Errorf("%s: trial %d is %s", row.name, one.Number, one.Result.Outcome)
			}
		}
	}
}

// Older versions of the tuner finished a study even if all its trials died because the machine was broken. Such a study
// must continue after the repair.
func TestAStudyOfABrokenMachineGoesOn(t *testing.T) {
	store := open(t, t.TempDir())
	for i := range 4 {
		origin := studies.Sampled
		if i == 0 {
			origin = studies.Default
		}
		err := store.Begin(studies.Trial{Number: i, Origin: origin, Point: space.Point{"max-num-seqs": fmt.Sprint(2 + i)}, Began: time.Now()})
		if err == nil {
			err = store.Finish(i, trial.Result{Outcome: trial.Infeasible, Class: serverctl.FlagsRejected, Evidence: "python3: can't open file '/x.py'"})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	mustRun(t, coarse(study(t, store, trial.Primed, 4)))
	got := answers(t, store)
	if len(got) != 8 || got[4].Origin != studies.Default || got[4].Result.Outcome != trial.Measured || got[3].Result.Outcome != trial.Unknown {
		t.Errorf("%d trials, the fifth %s by %s, want the default measured again", len(got), got[4].Result.Outcome, got[4].Origin)
	}
}

// If somebody ends a server, the trial gets a second try, and its point is not blamed. If the host runs out of memory
// twice, the point is blamed only if its flags ask for host memory.
func TestAnEndFromOutsideIsNobodysFault(t *testing.T) {
	for _, row := range []struct {
		name    string
		cause   serverctl.Cause
		deaths  int
		current space.Point
		want    trial.Outcome
	}{
		{"terminated once", serverctl.Terminated, 1, nil, trial.Measured},
		{"killed twice", serverctl.Killed, 2, nil, trial.Unknown},
		{"no memory of the host, once", serverctl.HostOOM, 1, space.Point{"cpu-offload-gb": "64"}, trial.Measured},
		{"no memory of the host, twice", serverctl.HostOOM, 2, space.Point{"max-num-seqs": "8"}, trial.Unknown},
		{"no memory of the host for flags that ask for it", serverctl.HostOOM, 2, space.Point{"cpu-offload-gb": "64"}, trial.Infeasible},
	} {
		store := open(t, t.TempDir())
		s := coarse(study(t, store, trial.Primed, 1))
		dying(s, row.deaths, always(serverctl.ExitError{Class: serverctl.Infrastructure, Cause: row.cause, Evidence: "gone"}))
		next := studies.Trial{Origin: studies.Default, Point: row.current}
		err := store.Begin(next)
		if err != nil {
			t.Fatal(err)
		}
		if r, err := s.runTrial(t.Context(), &next, studies.Study{}); err != nil || r.Outcome != row.want {
			t.Errorf("%s: %s, %v, want %s", row.name, r.Outcome, err, row.want)
		}
	}
}
