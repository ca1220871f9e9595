package studies

import (
	"context"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// The next commit adds newly spent time to what the study has spent. Readers get the sum from a base, a delta and the
// live database. Time that is not followed by a commit is lost.
func TestSpend(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	s.Spend(trial.Spent{trial.Choosing: time.Second})
	s.Spend(trial.Spent{trial.Starting: time.Minute, trial.Choosing: 500 * time.Millisecond})
	try(t, s.Begin(aTrial(0)))
	s.Spend(trial.Spent{trial.Windows: 2 * time.Minute})
	wantError(t, s.Finish(7, aResult(2)), "never begun") // a refused write stores nothing
	try(t, s.Record(0, aProbe(0, 2)), s.Record(0, aProbe(0, 2)), s.Close())
	want := trial.Spent{trial.Choosing: 1500 * time.Millisecond, trial.Starting: time.Minute, trial.Windows: 2 * time.Minute}
	study, err := ReadSnapshot(dir)
	try(t, err)
	if !reflect.DeepEqual(study.Spent, want) {
		t.Errorf("the study has spent %v, want %v", study.Spent, want)
	}
	s = open(t, dir)
	s.Spend(trial.Spent{trial.Windows: time.Minute, trial.Lost: time.Second})
	try(t, s.Finish(0, aResult(2)), s.Finish(0, aResult(2)))
	s.Spend(trial.Spent{trial.Windows: time.Hour})
	try(t, s.Close())
	want[trial.Windows], want[trial.Lost] = 3*time.Minute, time.Second
	for what, read := range map[string]func() (Study, error){
		"snapshot": func() (Study, error) { return ReadSnapshot(dir) },
		"summary":  func() (Study, error) { return ReadSummary(dir, func(Study) []int { return nil }) },
		"file": func() (Study, error) {
			out := filepath.Join(t.TempDir(), "out.db")
			if _, err := Export(context.Background(), dir, out); err != nil {
				return Study{}, err
			}
			return ReadFile(out)
		},
	} {
		study, err := read()
		try(t, err)
		if !reflect.DeepEqual(study.Spent, want) {
			t.Errorf("the %s has spent %v, want %v", what, study.Spent, want)
		}
	}
}

// A study of an older tuner has no booked time. Its time is booked from the next run on. It is not known whether the
// older tuner was killed.
func TestAnOldStudyHasSpentNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, fence.Database)
	try(t, oldDatabase(t, hasSpent-1, path).Close())
	study, err := ReadFile(path)
	try(t, err)
	s, _, err := Open(context.Background(), dir, New{Name: study.Name, Seed: study.Seed, File: study.File, World: study.World}, Options{})
	try(t, err)
	if study.Spent != nil || s.Killed() != 0 {
		t.Errorf("an old study has spent %v, and its owner was killed after %s", study.Spent, s.Killed())
	}
	s.Spend(trial.Spent{trial.Starting: time.Minute})
	try(t, s.Begin(aTrial(4)), s.Close())
	study, err = ReadSnapshot(dir)
	try(t, err)
	if want := (trial.Spent{trial.Starting: time.Minute}); !reflect.DeepEqual(study.Spent, want) {
		t.Errorf("the study has spent %v, want %v", study.Spent, want)
	}
}

func TestAfterLastCommit(t *testing.T) {
	at := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	booked := trial.Spent{trial.Starting: time.Minute}
	for _, row := range []struct {
		name  string
		state State
		spent trial.Spent
		kind  fence.Kind
		last  time.Duration // from the last commit to the last slot
		want  time.Duration
	}{
		{"killed after a heartbeat", Running, booked, fence.Heartbeat, 40 * time.Second, 40 * time.Second},
		{"killed right after a commit", Running, booked, fence.Commit, time.Millisecond, time.Millisecond},
		{"the owner's clock went back", Running, booked, fence.Heartbeat, -time.Second, 0},
		{"ended in order", Stopped, booked, fence.Released, time.Minute, 0},
		{"released after a failure", Running, booked, fence.Released, time.Minute, 0},
		{"another owner began to take over", Running, booked, fence.Claim, time.Hour, 0},
		{"an older tuner booked nothing", Running, nil, fence.Heartbeat, time.Minute, 0},
	} {
		was := Study{State: row.state, Spent: row.spent, Updated: at}
		if got := afterLastCommit(was, fence.Slot{Kind: row.kind, Time: at.Add(row.last)}); got != row.want {
			t.Errorf("%s: %s, want %s", row.name, got, row.want)
		}
	}
}
