package report

import (
	"math"
	"strings"
	"testing"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// confirmedStudy has a search whose best is trial 1, and confirmations with the given capacities in the order 1, 2,
// default.
func confirmedStudy(rates ...float64) studies.Study {
	point := func(seqs string) space.Point { return space.Point{"max-num-seqs": seqs} }
	one := func(origin studies.Origin, p space.Point, rate, stdErr float64) studies.Trial {
		c := capacity.Capacity{Rate: rate, Low: 0.95 * rate, High: 1.05 * rate, Bound: capacity.Exact, Binding: "p99 TPOT", StdErr: stdErr, Lowest: 0.9 * rate, Highest: 1.1 * rate}
		if rate == 0 {
			c = capacity.Capacity{Rate: 1, High: 1, Bound: capacity.AtMost, Binding: "p99 TPOT"}
		}
		return studies.Trial{Origin: origin, Point: p, State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c, GPUTime: time.Minute}}
	}
	study := studies.Study{Name: "s", State: studies.Done, Trials: []studies.Trial{
		one(studies.Default, space.Point{}, 2, 0.05), one(studies.Sampled, point("1"), 2.6, 0.05), one(studies.Sampled, point("2"), 2.5, 0.05),
	}}
	for i, rate := range rates {
		study.Trials = append(study.Trials, one(studies.Confirmed, []space.Point{point("1"), point("2"), {}}[i], rate, 0.02))
	}
	for i := range study.Trials {
		study.Trials[i].Number = i
	}
	return study
}

// The confirmations decide: the best of them wins, its capacity is shown, and the gain is over the confirmed default. A
// point whose confirmation failed does not win.
func TestTheConfirmationDecides(t *testing.T) {
	for _, row := range []struct {
		name      string
		confirmed []float64
		trial     int // the trial whose capacity is shown
		found     int
		gain      float64
	}{
		{"nothing is confirmed yet", nil, 1, 1, 0.3},
		{"the best of the search holds", []float64{2.4, 2.3, 2}, 3, 1, 0.2},
		{"the second is better with fresh requests", []float64{2.2, 2.4, 2}, 4, 2, 0.2},
		{"the best of the search does not hold", []float64{0, 2.4, 2}, 4, 2, 0.2},
		{"none holds", []float64{0, 0, 2}, 5, 0, 0},
		{"the default is not confirmed yet", []float64{2.4}, 3, 1, 0.3},
	} {
		best, ok := Best(confirmedStudy(row.confirmed...))
		if !ok || best.Trial.Number != row.trial || best.Found.Number != row.found {
			t.Errorf("%s: the winner is trial %d, found by %d (%v); want %d and %d", row.name, best.Trial.Number, best.Found.Number, ok, row.trial, row.found)
			continue
		}
		if got := best.Gain.Ratio; got < row.gain-0.001 || got > row.gain+0.001 {
			t.Errorf("%s: the gain is %.3f, want %.3f", row.name, got, row.gain)
		}
	}
}

// The page names the trial that found the point, and says which trials a column compares.
func TestAConfirmedWinnerIsExplained(t *testing.T) {
	study := confirmedStudy(2.4, 2.3, 2)
	var best, status strings.Builder
	if err := BestText(&best, study, Options{}); err != nil {
		t.Fatal(err)
	}
	if err := StatusText(&status, study, Options{}); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		best.String():   "3, which confirms trial 1 (sampler) with fresh requests",
		status.String(): "(vs best: confirmations against trial 3, all others against trial 1)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}

// The confirmations of a point count by their mean. The page shows the first of them.
func TestRepeatedConfirmationsArePooled(t *testing.T) {
	study := confirmedStudy(2.4, 2.2, 2)
	for i, again := range []studies.Trial{study.Trials[3], study.Trials[5]} {
		again.Number = 6 + i
		again.Result.Capacity.Rate *= 1.02
		study.Trials = append(study.Trials, again)
	}
	best, ok := Best(study)
	measured := best.Trial.Result.Capacity.Rate
	if !ok || best.Trial.Number != 3 || best.Found.Number != 1 || math.Abs(measured/(2.4*math.Sqrt(1.02))-1) > 1e-9 {
		t.Fatalf("the winner is %d, found by %d, with %.4g req/s; want 3, 1 and %.4g", best.Trial.Number, best.Found.Number, measured, 2.4*math.Sqrt(1.02))
	}
	once, _ := Best(confirmedStudy(2.4, 2.2, 2))
	if g := best.Gain; math.Abs(g.Ratio-0.2) > 1e-9 || g.Among != once.Gain.Among || g.Comparison.Lowest <= once.Gain.Comparison.Lowest {
		t.Errorf("the gain is %+v (%+v), want 20 %% among as many points as after one round (%+v), and a narrower interval", g, g.Comparison, once.Gain.Comparison)
	}
	study.Trials[6].Result.Capacity = capacity.Capacity{Rate: 1, High: 1, Bound: capacity.AtMost}
	if best, _ := Best(study); best.Found.Number == 1 {
		t.Error("a point wins though one of its confirmations did not keep the SLO")
	}
	if s := Summarize(study, Options{Planned: 5}); s.Planned != 8 {
		t.Errorf("%d trials are planned, want all 8 that were begun", s.Planned)
	}
}

// The best of several confirmations is partly lucky. Its capacity is lowered by that, and the page says so. A best that
// is far ahead stays as measured.
func TestTheLuckOfTheBestConfirmationIsTakenOff(t *testing.T) {
	for _, row := range []struct {
		name      string
		confirmed []float64
		lucky     bool
	}{
		{"another point is as good", []float64{2.4, 2.39, 2}, true},
		{"the best is far ahead", []float64{2.4, 1.9, 1.8}, false},
		{"a repeated confirmation is one rival, not two", []float64{2.4, 2.39, 2}, true},
	} {
		study := confirmedStudy(row.confirmed...)
		if strings.Contains(row.name, "repeated") {
			again := study.Trials[4]
			again.Number = len(study.Trials)
			study.Trials = append(study.Trials, again)
		}
		best, _ := Best(study)
		c, off := best.Capacity, math.Log(best.Trial.Result.Capacity.Rate/best.Capacity.Rate)
		if lucky := off > 0.005; lucky != row.lucky || off > 0.015 || math.Abs(off-best.Luck) > 1e-9 || !(c.Lowest < c.Rate && c.Rate < c.Highest) {
			t.Errorf("%s: %.4f is taken off (%.4f), leaving %+v", row.name, off, best.Luck, c)
		}
		var text strings.Builder
		if err := BestText(&text, study, Options{}); err != nil {
			t.Fatal(err)
		}
		if says := strings.Contains(text.String(), "less than measured, because the best of several is partly lucky"); says != row.lucky {
			t.Errorf("%s: the page mentions luck: %v, want %v:\n%s", row.name, says, row.lucky, text.String())
		}
	}
}
