package capacity

import (
	"context"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"vllmtuner/realtime"
)

// A synthetic server breaks a request's limit with a probability that grows with the work around the request. The
// probability is one half when that work is as much as evenly spread requests bring at halfRate. The server's true
// capacity in the long run can be computed.
type synthetic struct {
	halfRate float64 // requests per second
	k        kernel
	rng      *rand.Rand
}

func (s *synthetic) stretch(rate, seconds float64) Stretch {
	const leadIn = 60
	var out Stretch
	for at := 0.0; ; {
		at += s.rng.ExpFloat64() / rate
		if at > leadIn+seconds+60 {
			return out
		}
		switch {
		case at < leadIn:
			out.First++
		case at < leadIn+seconds:
			out.Counted++
		}
		out.Due = append(out.Due, at)
		out.Prompt = append(out.Prompt, 0.5+s.rng.Float64())
		out.Answer = append(out.Answer, 2*s.rng.Float64())
	}
}

// population returns 8,000 requests, which stand for the workload in the long run.
func (s *synthetic) population() *Population {
	p := &Population{}
	at := 0.0
	for range 8_000 {
		at += s.rng.ExpFloat64()
		p.Due, p.Prompt, p.Answer = append(p.Due, at), append(p.Prompt, 0.5+s.rng.Float64()), append(p.Answer, 2*s.rng.Float64())
	}
	for i := range p.Due {
		p.Due[i] *= float64(len(p.Due)) / at
	}
	return p
}

// probe returns a Probe of the server. Its windows last the given number of seconds. The limits are multiples of
// halfRate.
func (s *synthetic) probe(seconds float64, limits ...float64) Probe {
	return func(_ context.Context, rate float64) (Outcome, error) {
		e := &Evidence{Rate: rate, Stretch: s.stretch(rate, seconds)}
		surplus := e.surplus(s.k, rate)
		o := Outcome{Pass: true, Headroom: 3, InFlight: 10 * rate, Evidence: e}
		for _, part := range limits {
			var each strings.Builder
			broken := 0
			for _, load := range surplus {
				if s.rng.Float64() < breakProbability(rate*math.Exp(load)/part/s.halfRate) {
					each.WriteByte(over)
					broken++
				} else {
					each.WriteByte(kept)
				}
			}
			e.Limits = append(e.Limits, LimitEvidence{Name: "p99 TTFT", Queue: true, Allowed: 0.01, Each: each.String()})
			headroom := math.Log(0.01*float64(e.Counted)+1) - math.Log(float64(broken)+1)
			if broken > e.Counted/100 {
				o.Pass = false
			}
			if headroom < o.Headroom {
				o.Headroom, o.Binding = headroom, "p99 TTFT"
			}
		}
		return o, nil
	}
}

// breakProbability returns the probability that a request breaks the limit. It takes the load around the request,
// divided by the server's halfRate.
func breakProbability(load float64) float64 { return normal(math.Log(load) / 0.08) }

// truth returns the rate at which one request in a hundred breaks the limit in the long run.
func (s *synthetic) truth(p *Population) float64 {
	low, high := s.halfRate/10, s.halfRate
	for high/low > 1.0001 {
		rate, broken := math.Sqrt(low*high), 0.0
		for _, bin := range p.fluctuationAt(s.k, rate) {
			broken += bin.share * breakProbability(rate*math.Exp(bin.surplus)/s.halfRate)
		}
		if broken > 0.01 {
			high = rate
		} else {
			low = rate
		}
	}
	return low
}

func TestTheEstimateIsTheLongRunsCapacity(t *testing.T) {
	for _, k := range []kernel{{2.5, false, 0.5}, {10, true, 1}, {20, false, 0}} {
		rng := rand.New(rand.NewPCG(1, uint64(k.tau)))
		s := &synthetic{halfRate: 6, k: k, rng: rng}
		p := s.population()
		truth := s.truth(p)
		const repetitions = 16
		var errs []float64
		covered := 0
		for range repetitions {
			search := search(truth * math.Exp(0.35*rng.NormFloat64()))
			search.Population = p
			c, err := search.Find(t.Context(), s.probe(120, 1))
			if err != nil {
				t.Fatal(err)
			}
			if c.Rate < c.Low || c.Rate > c.High || c.Lowest > c.Rate || c.Highest < c.Rate {
				t.Fatalf("%+v: the rate is outside its bracket or its interval: %+v", k, c)
			}
			errs = append(errs, math.Log(c.Rate/truth))
			if c.Lowest <= truth && truth <= c.Highest {
				covered++
			}
		}
		bias, squares := 0.0, 0.0
		for _, e := range errs {
			bias += e / repetitions
			squares += e * e / repetitions
		}
		if math.Abs(bias) > 0.05 || math.Sqrt(squares) > 0.08 || covered < 13 {
			t.Errorf("%+v: bias %.1f %%, RMSE %.1f %%, %d of %d intervals hold the truth; want at most 5 %% and 8 %%, and at least 13", k, 100*bias, 100*math.Sqrt(squares), covered, repetitions)
		}
	}
}

// Each property must hold for any seed. TestSearches uses few seeds. TestSearchesOfManySeeds uses many, which take too
// long under the race detector.
var properties = []struct {
	name      string
	few, many uint64 // with SOAK_REAL_TIME, five times as many
	holds     func(t *testing.T, seeds uint64)
}{
	{"monotone in the limit", 3, 4, estimateIsMonotoneInTheLimit},
	{"goes on as it went", 1, 2, searchGoesOnAsItWent},
	{"precision foretold", 2, 4, precisionIsForetold},
	{"far probes", 5, 10, farProbesDoNotMoveTheAnswer},
	{"any hint", 3, 6, hintDoesNotMatter},
	{"single burst", 6, 12, singleBurstIsNotBelieved},
}

func TestSearches(t *testing.T) {
	for _, p := range properties {
		t.Run(p.name, func(t *testing.T) { p.holds(t, p.few) })
	}
}

func TestSearchesOfManySeeds(t *testing.T) {
	realtime.Long(t, "hundreds of searches")
	for _, p := range properties {
		t.Run(p.name, func(t *testing.T) { p.holds(t, p.many*uint64(realtime.Rounds(1, 5))) })
	}
}

// A looser limit never lowers the capacity by more than the capacity's standard error.
func estimateIsMonotoneInTheLimit(t *testing.T, seeds uint64) {
	for seed := range seeds {
		s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 2))}
		p := s.population()
		var before Capacity
		for _, part := range []float64{0.8, 0.9, 1, 1.1, 1.25} {
			s.rng = rand.New(rand.NewPCG(seed, 3)) // the same requests under every limit
			search := search(4)
			search.Population = p
			c, err := search.Find(t.Context(), s.probe(120, part))
			if err != nil {
				t.Fatal(err)
			}
			if c.Rate < before.Rate*math.Exp(-c.StdErr) {
				t.Errorf("seed %d: with %g times the limit the capacity falls from %.3g to %.3g", seed, part, before.Rate, c.Rate)
			}
			before = c
		}
	}
}

// A search that is resumed after any of its steps makes the same further steps, and gives the same answer.
func searchGoesOnAsItWent(t *testing.T, seeds uint64) {
	for seed := range seeds {
		var steps []Step
		s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 4))}
		look := search(2 + 6*s.rng.Float64())
		look.Population, look.Precision, look.MaxProbes = s.population(), 0.1, 20
		probe := s.probe(120, 1)
		whole, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
			o, err := probe(ctx, rate)
			steps = append(steps, Step{rate, o})
			return o, err
		})
		if err != nil {
			t.Fatal(err)
		}
		if whole.Probes > look.MaxProbes || whole.Probes != len(steps) {
			t.Errorf("seed %d: %d probes, want at most %d", seed, whole.Probes, look.MaxProbes)
		}
		for _, known := range []int{0, 1, len(steps) / 2, len(steps) - 1, len(steps)} {
			look.Known = slices.Clone(steps[:known])
			next := known
			again, err := look.Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
				if rate != steps[next].Rate {
					t.Fatalf("seed %d: with %d steps known the next rate is %g, and was %g", seed, known, rate, steps[next].Rate)
				}
				next++
				return steps[next-1].Outcome, nil
			})
			if err != nil || !reflect.DeepEqual(again, whole) {
				t.Fatalf("seed %d: with %d steps known the answer is %+v, %v; was %+v", seed, known, again, err, whole)
			}
		}
	}
}

// A search with a precision forecasts its cost, keeps to the forecast, and reaches the precision.
func precisionIsForetold(t *testing.T, seeds uint64) {
	for seed := range seeds {
		s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 5))}
		look := search(4)
		var told []Forecast
		look.Population, look.Precision, look.MaxProbes = s.population(), 0.05, 60
		probes, before := 0, 0 // number of probes so far, and at the time of the forecast
		look.Plan = func(f Forecast) { told, before = append(told, f), probes }
		probe := s.probe(120, 1)
		c, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
			probes++
			return probe(ctx, rate)
		})
		if err != nil || len(told) != 1 {
			t.Fatalf("seed %d: %v, %d forecasts", seed, err, len(told))
		}
		if took := c.Probes - before; took < told[0].least() || took > told[0].most() || halfWidth(c.StdErr) > 0.065 {
			t.Errorf("seed %d: known to ±%.1f %% after %d further probes; the forecast was %+v", seed, 100*halfWidth(c.StdErr), took, told[0])
		}
	}
}

// A small difference in latency makes a small difference in capacity. At 2.0 req/s one real run had a p99 TTFT of 953
// ms and the next run 1010 ms; the limit was 1000 ms. A sweep over a grid of rates called the capacity 2.0 and then
// 1.5. A search finds capacities that differ by a few per cent.
func TestASmallDifferenceIsSmall(t *testing.T) {
	at2 := []float64{953, 1010}
	var found []float64
	for _, ms := range at2 {
		c, err := search(2).Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			h := math.Log(1000/ms) + 4*math.Log(2/rate)
			return Outcome{Pass: h >= 0, Headroom: h, Binding: "p99 TTFT"}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, c.Rate)
	}
	if apart := math.Abs(math.Log(found[0] / found[1])); apart > 0.04 {
		t.Errorf("p99s of %v ms at 2 req/s give %v req/s, %.0f %% apart, want a few", at2, found, 100*apart)
	}
}

// The requests of all other probes outvote a single verdict that is wrong by chance. The answer then has a doubt.
func TestALuckyVerdictIsOutvoted(t *testing.T) {
	s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(7, 6))}
	p := s.population()
	look := search(5)
	look.Population = p
	lied := false
	probe := s.probe(240, 1)
	c, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		o, err := probe(ctx, rate)
		if !lied && o.Pass { // report the first good window as failed
			lied, o.Pass, o.Headroom = true, false, -0.01
		}
		return o, err
	})
	if err != nil || c.Bound != Exact || c.Doubt == "" || math.Abs(math.Log(c.Rate/s.truth(p))) > 0.15 {
		t.Errorf("Find = %+v, %v; the truth is %.3g; want it found, with a doubt", c, err, s.truth(p))
	}
}

// Probes far from the capacity do not change the answer. Far below it every request is quick, and far above it almost
// every request is slow.
func farProbesDoNotMoveTheAnswer(t *testing.T, seeds uint64) {
	for seed := range seeds {
		s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 12))}
		p, probe := s.population(), s.probe(120, 1, 3) // the second limit breaks only far above the capacity
		var near []Step
		for _, rate := range []float64{3.5, 4.5, 4, 4.2, 5} {
			o, err := probe(t.Context(), rate)
			if err != nil {
				t.Fatal(err)
			}
			near = append(near, Step{rate, o})
		}
		all := slices.Clone(near)
		for _, rate := range []float64{0.1, 0.2, 0.4, 0.8, 1.2, 20, 40} {
			o, err := probe(t.Context(), rate)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, Step{rate, o})
		}
		want, ok := locate(near, p, nil)
		got, okToo := locate(all, p, nil)
		if !ok || !okToo || math.Abs(got.logRate-want.logRate) > 0.05 || got.limit != want.limit {
			t.Errorf("seed %d: %.3g req/s by %s from near probes, %.3g by %s with far ones (%v, %v)",
				seed, math.Exp(want.logRate), want.limit, math.Exp(got.logRate), got.limit, ok, okToo)
		}
	}
}

// A search finds the same capacity from any first rate.
func hintDoesNotMatter(t *testing.T, seeds uint64) {
	var errs, worst float64
	n, held := 0, 0
	for seed := range seeds {
		for _, off := range []float64{0.02, 0.1, 0.3, 3, 10} {
			s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 13))}
			p := s.population()
			truth := s.truth(p)
			look := search(off * truth)
			look.Min, look.Max, look.Population = truth/200, truth*50, p
			c, err := look.Find(t.Context(), s.probe(120, 1, 3))
			if err != nil || c.Bound != Exact {
				t.Fatalf("seed %d from %g of the truth: %+v, %v", seed, off, c, err)
			}
			e := math.Log(c.Rate / truth)
			errs += e * e
			worst = max(worst, math.Abs(e))
			if n++; c.Lowest <= truth && truth <= c.Highest {
				held++
			}
		}
	}
	rmse := math.Sqrt(errs / float64(n))
	t.Logf("RMSE %.1f %%, at worst %.1f %%; the interval holds the truth in %d of %d", 100*rmse, 100*worst, held, n)
	if rmse > 0.1 || worst > 0.35 || held < n*9/10 {
		t.Errorf("RMSE %.1f %%, largest error %.1f %%, and the truth is in %d of %d intervals", 100*rmse, 100*worst, held, n)
	}
}

func TestStudent(t *testing.T) {
	for freedom, want := range map[float64]float64{3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 1e9: 1.960} { // the expected values are from a table
		if got := student(freedom); math.Abs(got-want) > 0.01*want {
			t.Errorf("student(%g) = %.3f, want %.3f", freedom, got, want)
		}
	}
}

func TestBursts(t *testing.T) {
	const clusterSize = 9 // the value of the method clusterSize at low rates
	quiet := strings.Repeat(".", burstGap*clusterSize+1)
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
		{strings.Repeat("x", burstLength*clusterSize), 1},
		{strings.Repeat("x", 10*burstLength*clusterSize), 10},
	} {
		e := &Evidence{Rate: 1, Limits: []LimitEvidence{{Each: row.each}}}
		if got := e.bursts(0); got != row.want {
			t.Errorf("bursts of %q = %d, want %d", row.each, got, row.want)
		}
	}
}

// If a single burst fails a probe below the capacity, the search measures that rate again and then goes on to higher
// rates.
func singleBurstIsNotBelieved(t *testing.T, seeds uint64) {
	again, beyond := uint64(0), uint64(0)
	for seed := range seeds {
		s := &synthetic{halfRate: 8, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 7))}
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
		look := search(0.55 * truth) // the second probe is then at 0.74 of the true capacity
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

// The standard error has a part from the fit, a part from how the slow requests are spread over the pieces, a part from
// probe to probe, and one that stays.
func TestThePartsOfAStandardError(t *testing.T) {
	e := estimate{gradient: [3]float64{1, 0, 0}}
	e.fit.information = [3][3]float64{{2500, 0, 0}, {0, 1, 0}, {0, 0, 1}} // the fit alone has a standard error of 2 %
	const bursts = 1e6                                                    // Student's t is then the normal distribution
	for _, row := range []struct {
		name  string
		moved float64 // influence of each of four pieces
		near  float64
		want  float64 // variance
	}{
		{"no piece moves the estimate", 0, 4, 0.0004/2 + probeError*probeError/4 + modelError*modelError},
		{"the pieces say the same as the fit", 0.005, 4, 0.0004 + probeError*probeError/4 + modelError*modelError},
		{"the pieces say twice the error", 0.01, 4, 0.0004*5/2 + probeError*probeError/4 + modelError*modelError},
		{"the pieces are counted up to a limit", 1, 4, 0.0004*(1+maxClustered)/2 + probeError*probeError/4 + modelError*modelError},
		{"no probe is near", 0, 1e-9, 0.0004/2 + probeError*probeError/minNear + modelError*modelError},
	} {
		e.pieces = []Piece{{Moved: row.moved}, {Moved: -row.moved}, {Moved: row.moved}, {Moved: -row.moved}}
		if got := e.stdErrWith(e.fit.information, bursts, row.near); math.Abs(got*got/row.want-1) > 1e-3 {
			t.Errorf("%s: the variance is %.6f, want %.6f", row.name, got*got, row.want)
		}
	}
	twice := e.fit.information
	twice[0][0] *= 2
	if now, later := e.stdErrWith(e.fit.information, bursts, 4), e.stdErrWith(twice, bursts, 8); later >= now {
		t.Errorf("twice the probes change the standard error from %.4f to %.4f", now, later)
	}
}
