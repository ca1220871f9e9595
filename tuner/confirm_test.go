package tuner

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// Finalists race against the best confirmed point. The default is measured in full.
func TestFinalistsAreConfirmedAsFarAsNeeded(t *testing.T) {
	best := space.Point{"max-num-seqs": "64"}
	at := func(origin studies.Origin, point space.Point, rate float64) studies.Trial {
		c := capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact}
		return studies.Trial{Origin: origin, Point: point, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c}}
	}
	for _, row := range []struct {
		name      string
		point     space.Point
		rate      float64 // capacity of the point in the search
		confirmed bool    // whether the best point is confirmed
		races     bool
		rough     bool // whether the probes are as short as in a search
	}{
		{"the first finalist", best, 2, false, false, false},
		{"another finalist", space.Point{"max-num-seqs": "128"}, 1.5, true, true, false},
		{"the default", nil, 1.9, true, false, false},
		{"a default that carries half", nil, 1, true, false, true},
	} {
		now := studies.Study{Trials: []studies.Trial{at(studies.Default, nil, row.rate), at(studies.Sampled, best, 2), at(studies.Sampled, row.point, row.rate)}}
		if row.confirmed {
			now.Trials = append(now.Trials, at(studies.Confirmed, best, 1.95))
		}
		s, task := &Study{Budget: Budget{MinGain: 0.01}}, trial.Task{}
		s.confirm(&task, &studies.Trial{Number: len(now.Trials), Origin: studies.Confirmed, Point: row.point}, now)
		if task.Confirm == row.rough || task.Draw != firstConfirmingDraw || (task.Best != nil) != row.races {
			t.Errorf("%s: %+v, want races %v, rough %v", row.name, task, row.races, row.rough)
		}
		if task.Hint() != row.rate {
			t.Errorf("%s: begins at %g req/s, want %g", row.name, task.Hint(), row.rate)
		}
		if row.races && task.Best().Capacity.Rate != 1.95 {
			t.Errorf("%s: races against %g req/s, want 1.95", row.name, task.Best().Capacity.Rate)
		}
	}
}

// The best confirmed point and the default are confirmed in turn until the rule decides. Each round has requests of its own.
func TestConfirmationsGoOnUntilTheRuleDecides(t *testing.T) {
	best, other := space.Point{"max-num-seqs": "64"}, space.Point{"max-num-seqs": "32"}
	s := &Study{Budget: Budget{MinGain: 0.01}, MaxRounds: 4}
	type confirmation struct {
		point space.Point
		rate  float64 // 0 if no rate kept the SLO
	}
	for _, row := range []struct {
		name   string
		stdErr float64
		done   []confirmation
		next   space.Point
		more   bool
	}{
		{"nothing is confirmed", 0.02, nil, nil, false},
		{"the default is not confirmed", 0.02, []confirmation{{best, 2.1}}, nil, false},
		{"clearly better", 0.02, []confirmation{{best, 2.2}, {nil, 2}}, nil, false},
		{"perhaps better", 0.02, []confirmation{{best, 2.06}, {nil, 2}}, best, true},
		{"the round is half done", 0.02, []confirmation{{best, 2.06}, {nil, 2}, {best, 2.06}}, nil, true},
		{"the second round decides", 0.02, []confirmation{{best, 2.1}, {nil, 2}, {best, 2.1}, {nil, 2}}, nil, false},
		{"perhaps no better", 0.02, []confirmation{{best, 2.002}, {nil, 2}}, best, true},
		{"likely not better", 0.02, []confirmation{{best, 1.96}, {nil, 2}}, nil, false},
		{"worse", 0.02, []confirmation{{best, 1.9}, {nil, 2}}, nil, false},
		{"better by less than the least gain", 0.001, []confirmation{{best, 2.003}, {nil, 2}}, nil, false},
		{"of two points, the better one", 0.02, []confirmation{{best, 2}, {other, 2.07}, {nil, 2}}, other, true},
		{"the best of two rounds falls behind, and the new best catches up", 0.02, []confirmation{{best, 2.12}, {other, 2.092}, {nil, 2.09}, {best, 2}, {nil, 2.09}}, other, true},
		{"four rounds", 0.04, []confirmation{{best, 2.1}, {nil, 2}, {best, 2.1}, {nil, 2}, {best, 2.1}, {nil, 2}, {best, 2.1}, {nil, 2}}, nil, false},
		{"the default kept no rate", 0.02, []confirmation{{best, 2.1}, {nil, 0}}, nil, false},
		{"no errors are known", 0, []confirmation{{best, 2.1}, {nil, 2}}, nil, false},
	} {
		now := studies.Study{}
		for i, c := range row.done {
			is := capacity.Capacity{Rate: c.rate, Low: c.rate, High: c.rate, Bound: capacity.Exact, StdErr: row.stdErr}
			if c.rate == 0 {
				is = capacity.Capacity{Rate: 1, High: 1, Bound: capacity.AtMost}
			}
			now.Trials = append(now.Trials, studies.Trial{
				Number: i, Origin: studies.Confirmed, Point: c.point, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: is},
			})
		}
		next, more := s.undecided(now)
		if more != row.more || next.String() != row.next.String() {
			t.Errorf("%s: the next confirmation is of %v (%v), want %v (%v)", row.name, next, more, row.next, row.more)
			continue
		}
		if more {
			var task trial.Task
			round := confirmations(now, next)
			s.confirm(&task, &studies.Trial{Number: len(row.done), Origin: studies.Confirmed, Point: next}, now)
			if task.Draw != firstConfirmingDraw+round*drawsOfRound || task.Best != nil {
				t.Errorf("%s: round %d begins with draw %d, races: %v", row.name, round, task.Draw, task.Best != nil)
			}
		}
	}
}

// The rule calls equal servers different in less than 5 of 100 studies, and finds a gain of 5 % in at least 80 of 100.
func TestTheRuleOfTheRounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const n = 2000
	s := &Study{Budget: Budget{MinGain: 0.01}, MaxRounds: 6}
	for _, row := range []struct{ gain, least, most float64 }{{0, 0.02, 0.05}, {0.05, 0.9, 0.96}} {
		found, rounds := 0, 0
		for range n {
			now := studies.Study{}
			measure := func(p space.Point, rate float64) {
				const stdErr = 0.02
				is := capacity.Capacity{Rate: rate * math.Exp(stdErr*rng.NormFloat64()), Bound: capacity.Exact, StdErr: stdErr}
				now.Trials = append(now.Trials, studies.Trial{
					Number: len(now.Trials), Origin: studies.Confirmed, Point: p, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: is},
				})
			}
			best := space.Point{"max-num-seqs": "64"}
			measure(best, 2*(1+row.gain))
			measure(nil, 2)
			for next, more := s.undecided(now); more; next, more = s.undecided(now) {
				measure(next, 2*(1+row.gain*float64(len(next))))
			}
			pooled := studies.Pooled(now.Trials)
			if c, ok := capacity.Compare(pooled[0].Result.Capacity, pooled[1].Result.Capacity); ok && c.Distinguishable() {
				found++
			}
			rounds += len(now.Trials) / 2
		}
		part := float64(found) / n
		t.Logf("gain %.0f %%: found in %.1f %% of the studies, %.2f rounds", 100*row.gain, 100*part, float64(rounds)/n)
		if part < row.least || part > row.most {
			t.Errorf("a gain of %.0f %% is found in %.1f %% of the studies, want %.0f to %.0f", 100*row.gain, 100*part, 100*row.least, 100*row.most)
		}
	}
}

// All confirmations are read in full: without its pieces, a capacity does not show what two servers have in common.
func TestConfirmationsAreReadInFull(t *testing.T) {
	at := func(number int, origin studies.Origin, rate float64) studies.Trial {
		c := capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact}
		return studies.Trial{Number: number, Origin: origin, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c}}
	}
	study := studies.Study{Trials: []studies.Trial{
		at(0, studies.Default, 2), at(1, studies.Sampled, 3), at(2, studies.Sampled, 2.5), at(3, studies.Confirmed, 2.9), at(4, studies.Confirmed, 2.1),
	}}
	if got := Compared(study); !slices.Equal(got, []int{1, 3, 4}) {
		t.Errorf("Compared = %v, want the incumbent and both confirmations: 1, 3 and 4", got)
	}
}

// A finalist that lost its race counts among the points from which the best was chosen, for the rule as for the report. So
// a study does not end its rounds as clear with a gain that the report calls not distinguishable.
func TestALostRaceCountsInTheRule(t *testing.T) {
	confirmed := func(number int, p space.Point, c capacity.Capacity) studies.Trial {
		return studies.Trial{Number: number, Origin: studies.Confirmed, Point: p, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c}}
	}
	at := func(rate float64) capacity.Capacity {
		return capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact, StdErr: 0.02}
	}
	best := space.Point{"max-num-seqs": "64"}
	now := studies.Study{Trials: []studies.Trial{confirmed(0, best, at(2.13)), confirmed(1, nil, at(2))}}
	s := &Study{Budget: Budget{MinGain: 0.01}, MaxRounds: capacity.MaxRounds}
	if _, more := s.undecided(now); more {
		t.Fatal("the gain over the default is clear, and another round follows")
	}
	lost := confirmed(2, space.Point{"max-num-seqs": "32"}, capacity.Capacity{Rate: 1.9, Bound: capacity.Estimated, StdErr: 0.04})
	lost.Result.Outcome, lost.Result.Class = trial.Dropped, serverctl.DroppedByRace
	now.Trials = append(now.Trials, lost)
	if next, more := s.undecided(now); !more || next.String() != best.String() {
		t.Errorf("after a lost race the next confirmation is of %v (%v), want the best: chosen from two, it is not clearly better", next, more)
	}
}

// A point that failed one of its confirmations cannot win, so it is not confirmed further.
func TestAPointThatDidNotHoldIsNotConfirmedAgain(t *testing.T) {
	one := func(number int, p space.Point, rate float64) studies.Trial {
		c := capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact, StdErr: 0.02}
		if rate == 0 {
			c = capacity.Capacity{Rate: 1, High: 1, Bound: capacity.AtMost}
		}
		return studies.Trial{Number: number, Origin: studies.Confirmed, Point: p, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c}}
	}
	best, other := space.Point{"max-num-seqs": "64"}, space.Point{"max-num-seqs": "32"}
	now := studies.Study{Trials: []studies.Trial{one(0, best, 2.08), one(1, other, 2.04), one(2, nil, 2), one(3, best, 0)}}
	s := &Study{Budget: Budget{MinGain: 0.01}, MaxRounds: capacity.MaxRounds}
	if next, more := s.undecided(now); !more || next.String() != other.String() {
		t.Errorf("the next confirmation is of %v (%v), want %v", next, more, other)
	}
}
