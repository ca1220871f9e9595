package capacity

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestStudent(t *testing.T) {
	for freedom, want := range map[float64]float64{3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 1e9: 1.960} { // from a table
		if got := student(freedom); math.Abs(got-want) > 0.01*want {
			t.Errorf("student(%g) = %.3f, want %.3f", freedom, got, want)
		}
	}
}

func TestBursts(t *testing.T) {
	const clusterSize = 9 // at low rates
	quiet := strings.Repeat(".", apart*clusterSize+1)
	for _, row := range []struct {
		each string
		want int
	}{
		{quiet, 0},
		{"x", 1},
		{"..xx.x...x..", 1},
		{"x" + quiet + "x", 2},
		{"x" + strings.Replace(quiet, ".", "?", 2) + "x", 1}, // two requests of unknown outcome
		{quiet + "xxx" + quiet + "x.x" + quiet, 2},
		{strings.Repeat("x", long*clusterSize), 1},
		{strings.Repeat("x", 10*long*clusterSize), 10},
	} {
		e := &Evidence{Rate: 1, Limits: []LimitEvidence{{Each: row.each}}}
		if got := e.bursts(0); got != row.want {
			t.Errorf("bursts of %q = %d, want %d", row.each, got, row.want)
		}
	}
}

// If a single burst fails a probe below the capacity, the search measures that rate again and then goes on to higher rates.
func singleBurstIsNotBelieved(t *testing.T, seeds uint64) {
	again, beyond := uint64(0), uint64(0)
	for seed := range seeds {
		s := &synthetic{max: 8, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 7))}
		p := s.population()
		truth := s.truth(p)
		var probed []float64
		probe := func(ctx context.Context, rate float64) (Outcome, error) {
			o, err := s.probe(120, 1)(ctx, rate)
			probed = append(probed, rate)
			if len(probed) == 2 {
				each := []byte(o.Evidence.Limits[0].Each)
				copy(each[100:], strings.Repeat(string(over), 25))
				o.Evidence.Limits[0].Each, o.Pass, o.Headroom = string(each), false, -1
			}
			return o, err
		}
		look := search(0.55 * truth) // the second probe is then at 0.74 of the truth
		look.Population = p
		if _, err := look.Find(t.Context(), probe); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(probed[2:], probed[1]) {
			again++
		}
		if slices.Max(probed) > 0.9*truth {
			beyond++
		}
	}
	if again < seeds*9/10 || beyond < seeds*3/4 {
		t.Errorf("%[2]d of %[1]d searches try the rate of the burst again, want 90 %%; %[3]d come near the truth, want 75 %%", seeds, again, beyond)
	}
}
