package studies

import (
	"time"

	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// Spend adds time to what the study has spent. The next commit stores it. If the process is killed before, the time is
// lost.
func (s *Store) Spend(more trial.Spent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spent = s.spent.Plus(more)
}

// Killed returns how long the study's last owner lived after its last commit, if that owner was killed. The study's
// spent time does not include this time. The error is at most one heartbeat, 15 s. If nothing is known, Killed returns 0.
func (s *Store) Killed() time.Duration { return s.silent }

// afterLastCommit returns the time from the last commit of a study to the last slot of its owner. Both times are by the
// owner's clock. If the owner has ended in order, or booked no time, it returns 0.
func afterLastCommit(was Study, last fence.Slot) time.Duration {
	lived := last.Kind == fence.Commit || last.Kind == fence.Heartbeat
	if was.State != Running || len(was.Spent) == 0 || !lived {
		return 0
	}
	return max(0, last.Time.Sub(was.Updated))
}

// addSpent adds time to the table spent.
func (t *transaction) addSpent(more trial.Spent) {
	for _, part := range trial.Parts {
		d := more[part]
		if d == 0 {
			continue
		}
		if was := t.rows(spentTable, "WHERE what=?", string(part)); len(was) > 0 {
			t.change(was[0], "seconds", was[0].real("seconds")+d.Seconds())
		} else {
			t.insert(spentTable, []any{string(part), d.Seconds()})
		}
	}
}

func (r *loader) loadSpent() error {
	if r.schema < hasSpent {
		return nil
	}
	return r.readTable(spentTable, func(one row) error {
		r.study.Spent = r.study.Spent.Plus(trial.Spent{trial.Part(one.text("what")): Seconds(one.real("seconds"))})
		return nil
	})
}
