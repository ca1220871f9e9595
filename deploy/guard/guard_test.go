package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func best(args []string) func(context.Context) (Winner, error) {
	return func(context.Context) (Winner, error) { return Winner{Args: args}, nil }
}

// A loan is one way in which a study may go.
type loan struct {
	name    string
	winner  func(context.Context) (Winner, error)
	fails   bool
	args    []string // of production at the end
	downs   int      // how often production is scaled down
	outcome string   // word of the Outcome; "" if there is none
	err     error    // of the guard; nil if it did what it was asked to do
}

var loans = []loan{
	{name: "production keeps its args", args: ownArgs, downs: 1},
	{name: "the best args are applied", winner: best(bestArgs), args: bestArgs, downs: 1, outcome: Applied},
	{name: "the best args do not run", winner: best(badArgs), args: ownArgs, downs: 2, outcome: RolledBack},
	{name: "production has the best args", winner: best(ownArgs), args: ownArgs, downs: 1, outcome: Kept},
	{name: "the study fails", fails: true, winner: best(bestArgs), args: ownArgs, downs: 1, err: ErrStudyFailed},
	{name: "the best args are refused", winner: func(context.Context) (Winner, error) { return Winner{Refused: "the snapshot is of another study"}, nil }, args: ownArgs, downs: 1, outcome: Kept},
	{name: "the best args cannot be read", winner: func(context.Context) (Winner, error) { return Winner{}, errLost }, args: ownArgs, downs: 1, outcome: Kept},
}

// settled returns what is wrong with production after a loan; "" if it has its replicas, its args and no record.
func (s *shop) settled(l loan) string {
	s.wait(crashes)
	switch d := s.deployment; {
	case s.record != nil:
		return "the record is left"
	case d.Replicas != 1:
		return fmt.Sprintf("production has %d replicas", d.Replicas)
	case !slices.Equal(d.Args, l.args):
		return fmt.Sprintf("production has the args %q", d.Args)
	case !s.rollout().Done:
		return "production does not run"
	case s.downs != l.downs:
		return fmt.Sprintf("production was taken down %d times, want %d", s.downs, l.downs)
	case !s.job.Outcome.Is(l.outcome) && l.outcome != "", l.outcome == "" && s.job.Outcome != "":
		return fmt.Sprintf("the outcome is %q, want %q", s.job.Outcome, l.outcome)
	}
	return ""
}

// endsAs reports whether an error of the guard is the one that a loan ends with.
func (l loan) endsAs(err error) bool {
	if l.outcome != "" && l.outcome != Applied {
		got, ok := errors.AsType[*OutcomeError](err)
		return ok && got.Outcome.Is(l.outcome)
	}
	return errors.Is(err, l.err) && (err == nil) == (l.err == nil)
}

func TestALoanIsGivenBack(t *testing.T) {
	for _, l := range loans {
		synctest.Test(t, func(t *testing.T) {
			s := newShop(t)
			s.fails = l.fails
			var told []string
			err := s.keep(t.Context(), Guard{Winner: l.winner, Say: func(text string) { told = append(told, text) }})
			if wrong := s.settled(l); wrong != "" || !l.endsAs(err) {
				t.Errorf("%s: %s; the guard ends with %v", l.name, wrong, err)
			}
			if again := s.keep(t.Context(), Guard{Winner: l.winner}); !l.endsAs(again) || s.downs != l.downs {
				t.Errorf("%s: a second guard ends with %v, and production was taken down %d times", l.name, again, s.downs)
			}
			t.Logf("%s, %d calls:\n%s", l.name, s.calls, strings.Join(told, "\n"))
		})
	}
}

// A guard may be killed before and after each call, and each call may fail or lose its answer. Production always gets back
// what it had, and is never taken down once more.
func TestAGuardGoesOnAfterAnyFault(t *testing.T) {
	for _, l := range loans {
		calls := 1
		for at := 1; at <= calls; at++ {
			for _, f := range []fault{refused, lost, conflict, killed, killedToo} {
				synctest.Test(t, func(t *testing.T) {
					s := newShop(t)
					s.fails = l.fails
					where := ""
					s.fault = func(call int, name string) fault {
						if call == at {
							where = name
							return f
						}
						return none
					}
					err := s.keep(t.Context(), Guard{Winner: l.winner})
					if wrong := s.settled(l); wrong != "" || !l.endsAs(err) {
						t.Errorf("%s, fault %d at call %d (%s): %s; the guard ends with %v", l.name, f, at, where, wrong, err)
					}
					calls = max(calls, s.calls)
				})
			}
		}
	}
}

// A guard that is told to end gives the GPU back within two seconds, whenever that is.
func TestTheGuardGivesBackWhenTold(t *testing.T) {
	for after := time.Duration(0); after < 150*time.Second; after += 3 * time.Second {
		synctest.Test(t, func(t *testing.T) {
			s, stop := newShop(t), make(chan struct{})
			begin, back := time.Now(), time.Time{}
			time.AfterFunc(after, func() { close(stop) })
			err := s.keep(t.Context(), Guard{Winner: best(bestArgs), Stop: stop})
			if back = time.Now(); back.Sub(begin) > after+2*time.Second && s.job.Outcome.Is(Returned) {
				t.Errorf("told after %s, the guard ends after %s", after, back.Sub(begin))
			}
			if s.deployment.Replicas != 1 || s.record != nil && s.record.Phase != Verifying {
				t.Errorf("told after %s: production has %d replicas, the record is %+v (%v)", after, s.deployment.Replicas, s.record, err)
			}
			_ = s.keep(t.Context(), Guard{Winner: best(bestArgs)}) // the Job controller starts a guard that ended with an error again
			s.wait(crashes)
			if s.downs > 1 && s.job.State != Complete || s.deployment.Replicas != 1 || s.record != nil || !s.rollout().Done {
				t.Errorf("told after %s, then started again: production was taken down %d times, has %d replicas; record %+v", after, s.downs, s.deployment.Replicas, s.record)
			}
		})
	}
}
