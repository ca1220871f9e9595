package sampler

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// raced returns a trial that raced, and the standard error of its gain.
func raced(number int, p space.Point, rate, ratioErr float64) studies.Trial {
	t := measuredTrial(number, p, rate)
	t.Result.Capacity.StdErr, t.Result.Capacity.RatioErr = 2*ratioErr, ratioErr
	return t
}

// Many points that all seem 8 % worse than the best say that the best was lucky. One point that is 8 % worse than its
// equals says that it is worse.
func TestALuckyBestIsNotBelieved(t *testing.T) {
	s := oneNumber(t)
	history := []studies.Trial{raced(0, space.Point{}, 1.9, 0.03), raced(1, utilization("0.97"), 2, 0.08)}
	for i, at := range []string{"0.5", "0.58", "0.66", "0.74", "0.82", "0.9"} {
		history = append(history, raced(2+i, utilization(at), 2*math.Exp(-0.08), math.Hypot(0.08, 0.08)))
	}
	lead := func() float64 {
		expected := expectations(s, 1, history)
		others := 0.0
		for i := 2; i < 8; i++ {
			others += expected[i] / 6
		}
		return expected[1] - others
	}
	shared := lead()
	for i := range history { // the same errors, but each trial's own
		c := &history[i].Result.Capacity
		c.StdErr, c.RatioErr = c.RatioErr, 0
	}
	if own := lead(); own < 0.02 || shared > own/2 {
		t.Errorf("the best is believed to be %.3f above the others, and %.3f if each error is the trial's own", shared, own)
	}
}

// The errors form a tree: a trial has the error of the best trial that it raced against, and the luck of that trial.
func TestWhatErrorsHaveInCommon(t *testing.T) {
	at := func(i int) space.Point { return utilization(fmt.Sprintf("0.%d", 70+i)) }
	history := []studies.Trial{
		raced(0, at(0), 2, 0), raced(1, at(1), 2.2, 0.04), raced(2, at(2), 2.1, 0.05), raced(3, at(3), 2.1, math.Hypot(0.04, 0.06)),
		raced(4, at(4), 2.1, math.Hypot(0.04, 0.06)),
	}
	history[0].Result.Capacity.StdErr = 0.1
	sums := errorsOf(history)
	common := func(i, j int) float64 {
		own, luck := sums[i].common(sums[j])
		return own + luck
	}
	moved := slices.Clone(history)
	moved[1].Source, moved[2].Version = "before the world changed", "0.15"
	for i, sum := range errorsOf(moved) {
		if want := map[int]int{1: 1, 2: 1, 3: 3}[i]; want > 0 && len(sum) != want {
			t.Errorf("with another world and version, the error of trial %d has %d parts, want %d", i, len(sum), want)
		}
	}
	default0, first, luck0, luck1 := squared(0.1), squared(0.04), luckShare*squared(0.04), luckShare*squared(0.06)
	for _, row := range []struct {
		name string
		i, j int
		want float64
	}{
		{"a challenger and the best it raced against", 0, 1, default0},
		{"a challenger of the first best and one of the second", 3, 1, default0 + first + luck0},
		{"two challengers of the same best", 3, 4, default0 + first + luck0 + luck1},
		{"a challenger", 3, 3, default0 + first + luck0 + luck1 + squared(0.06)},
	} {
		if got := common(row.i, row.j); math.Abs(got-row.want) > 1e-9 {
			t.Errorf("%s: the errors have the covariance %.6f, want %.6f", row.name, got, row.want)
		}
	}
}
