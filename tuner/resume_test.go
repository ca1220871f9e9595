package tuner

import (
	"context"
	"errors"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/samber/lo"

	"vllmtuner/realtime"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// resumable are kinds of studies that must give the same answer after a resumption. With the Reset protocol all digits
// agree.
var resumable = map[string]struct {
	open  func(*testing.T, string) *studies.Store
	study func(*testing.T, Store) *Study
}{
	"every point in full": {open, func(t *testing.T, store Store) *Study { return study(t, store, trial.Reset, 3) }},
	"races":               {open, func(t *testing.T, store Store) *Study { return racing(t, store, 4) }},
	"predictions": {open, func(t *testing.T, store Store) *Study {
		s, calls := predicting(t, store, 4)
		predict := s.Predict
		s.Predict = func(ctx context.Context, study studies.Study) ([]studies.Trial, string, error) {
			if *calls > 0 || len(study.Prior) > 0 {
				t.Errorf("the space is predicted again: %d calls, %d predictions", *calls, len(study.Prior))
			}
			return predict(ctx, study)
		}
		return s
	}},
	"capacity per GPU": {
		func(t *testing.T, dir string) *studies.Store { return openFor(t, dir, studies.CapacityPerGPU) },
		func(t *testing.T, store Store) *Study { return searchingGPUs(t, store, "gp", 5) },
	},
}

// A study that was killed before its middle write must resume to the same points and the same answer. No probe is
// measured twice.
func TestResumeEqualsNoInterruption(t *testing.T) {
	resumesAfterKills(t, func(at, writes int, after bool) bool { return at == writes/2 && !after })
}

// TestResumeEqualsNoInterruptionAnywhere kills each study before every sixth write, and after the last one. With
// SOAK_REAL_TIME it kills each study before every write.
func TestResumeEqualsNoInterruptionAnywhere(t *testing.T) {
	realtime.Long(t, "hundreds of studies")
	every := realtime.Rounds(6, 1)
	resumesAfterKills(t, func(at, _ int, after bool) bool { return at%every == every/2 || after })
}

// resumesAfterKills kills studies before each write that the function selects. If the function selects the last write
// with after, it also kills them after that write. A kill after any other write has the same effect as a kill before the
// next write.
func resumesAfterKills(t *testing.T, selects func(at, writes int, after bool) bool) {
	for name, kind := range resumable {
		t.Run(name, func(t *testing.T) {
			whole := kind.open(t, t.TempDir())
			counting, writes := killedAt(whole, 0, false)
			mustRun(t, kind.study(t, counting))
			want := answers(t, whole)
			resumes := func(at int, after bool) {
				dir := filepath.Join(t.TempDir(), "study")
				first := kind.open(t, dir)
				killed, _ := killedAt(first, at, after)
				if _, err := kind.study(t, killed).Run(t.Context()); !errors.Is(err, errKilled) {
					t.Fatalf("killed at write %d of %d: Run = %v", at, *writes, err)
				}
				first.Close()
				second := kind.open(t, dir)
				had := countProbes(answers(t, second))
				probed := 0
				resumed := kind.study(t, second)
				resumed.Observe = func(e Event) {
					if e.Kind == Probed {
						probed++
					}
				}
				mustRun(t, resumed)
				got := answers(t, second)
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("killed at write %d of %d (after it: %v): the resumed study differs:\n got %+v\nwant %+v", at, *writes, after, got, want)
				}
				if had+probed != countProbes(got) {
					t.Errorf("killed at write %d: %d probes were stored, %d measured again, of %d", at, had, probed, countProbes(got))
				}
				second.Close()
			}
			for at := 1; at <= *writes; at++ {
				if selects(at, *writes, false) {
					resumes(at, false)
				}
			}
			if selects(*writes, *writes, true) {
				resumes(*writes, true)
			}
		})
	}
}

func countProbes(trials []studies.Trial) int {
	return lo.SumBy(trials, func(t studies.Trial) int { return len(t.Probes) })
}
