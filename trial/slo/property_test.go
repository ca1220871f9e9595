package slo

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/realtime"
)

// randomProbe returns the samples of a random probe of a few hundred requests. Some are slow, some failed, some have
// one token, and some are still pending at the time now. Half of the probes end early.
func randomProbe(random *rand.Rand) (samples []bench.Sample, planned int, now time.Duration) {
	n, slow, early := 100+random.IntN(300), random.Float64()*random.Float64()/10, random.IntN(2) == 0
	now = time.Duration(1+random.IntN(60)) * time.Second
	for i := range n {
		s := bench.Sample{Index: i, Due: time.Duration(i) * now / time.Duration(n), WantTokens: 1 + random.IntN(200)}
		ttft, tpot := time.Duration(random.ExpFloat64()*float64(150*ms)), time.Duration((0.5+random.Float64())*float64(30*ms))
		if random.Float64() < slow {
			ttft += 2 * time.Second
		}
		if random.Float64() < slow {
			tpot += 60 * ms
		}
		s.Sent, s.First = s.Due, s.Due+ttft
		s.Last = s.First + time.Duration(s.WantTokens-1)*tpot
		s.End, s.OutputTokens, s.Chunks = s.Last, s.WantTokens, s.WantTokens
		switch {
		case random.Float64() < slow/50:
			s.Failure, s.First, s.Last, s.OutputTokens = bench.Reset, 0, 0, 0
		case s.Last > now && early: // still pending; a probe that does not end early waits for the answer
			if s.End, s.OutputTokens, s.Chunks = 0, 0, 0; s.First > now {
				s.First, s.Last = 0, 0
			} else {
				s.Last, s.Chunks = s.First, 1
			}
		}
		samples = append(samples, s)
	}
	if early {
		n += random.IntN(n)
	}
	return samples, n, now
}

// anyLimits returns an SLO of one to three random limits.
func anyLimits(random *rand.Rand) SLO {
	all := []Limit{
		{TTFT, []float64{50, 90, 95, 99}[random.IntN(4)], time.Duration(100+random.IntN(3000)) * ms},
		{TPOT, []float64{50, 90, 95, 99}[random.IntN(4)], time.Duration(20+random.IntN(80)) * ms},
		{E2E, []float64{50, 90, 95, 99}[random.IntN(4)], time.Duration(1000+random.IntN(9000)) * ms},
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return SLO{Limits: all[:1+random.IntN(3)], MaxErrorRate: []float64{0, 0.05}[random.IntN(2)]}
}

// TestPropertiesOfManySeeds runs the property tests of this file with more seeds.
func TestPropertiesOfManySeeds(t *testing.T) {
	realtime.Only(t, "hundreds of probes")
	eachIsWhatTheCheckCounts(t, 200)
	looserLimitNeverFails(t, 600)
}

func TestEachIsWhatTheCheckCounts(t *testing.T) { eachIsWhatTheCheckCounts(t, 50) }

func eachIsWhatTheCheckCounts(t *testing.T, seeds uint64) {
	t.Helper()
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 1))
		samples, planned, now := randomProbe(random)
		limits := anyLimits(random)
		for _, c := range limits.Judge(samples, planned, now).Checks {
			over, kept, unknown := strings.Count(c.Each, "x"), strings.Count(c.Each, "."), strings.Count(c.Each, "?")
			all := over == c.Broken && over+kept == c.N
			if endedEarly(samples, planned) { // the field Each may differ from the counts: it leaves the last requests undecided, and includes the known TTFT of a pending request
				all = over <= c.Broken && over >= c.Failed
			}
			if len(c.Each) != len(samples) || !all || over+kept+unknown != len(samples) {
				t.Fatalf("seed %d: %s has %d over and %d kept of %d requests, counted are %d of %d", seed, c.Limit, over, kept, len(samples), c.Broken, c.N)
			}
		}
		// The field Each follows the order of the requests. Whether a limit is kept does not depend on that order.
		order := random.Perm(len(samples))
		mixed := make([]bench.Sample, len(samples))
		for i, from := range order {
			mixed[i] = samples[from]
		}
		for k, c := range limits.Judge(samples, planned, now).Checks {
			d := limits.Judge(mixed, planned, now).Checks[k]
			for i, from := range order {
				if d.Each[i] != c.Each[from] {
					t.Fatalf("seed %d: %s of request %d is %c in another order, was %c", seed, c.Limit, from, d.Each[i], c.Each[from])
				}
			}
			if d.Broken != c.Broken || d.N != c.N || d.ValueMS != c.ValueMS || d.Headroom != c.Headroom {
				t.Fatalf("seed %d: in another order %s is %+v, was %+v", seed, c.Limit, d, c)
			}
		}
	}
}

// A looser limit never turns a pass into a fail, and never raises the number of requests that break it.
func TestALooserLimitNeverFails(t *testing.T) { looserLimitNeverFails(t, 150) }

func looserLimitNeverFails(t *testing.T, seeds uint64) {
	t.Helper()
	passed := uint64(0)
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 2))
		samples, planned, now := randomProbe(random)
		strict := anyLimits(random)
		before := strict.Judge(samples, planned, now)
		loose := SLO{Limits: append([]Limit(nil), strict.Limits...), MaxErrorRate: strict.MaxErrorRate}
		i := random.IntN(len(loose.Limits))
		loose.Limits[i].Max += time.Duration(random.IntN(1000)) * ms
		after := loose.Judge(samples, planned, now)
		if before.Pass {
			passed++
		}
		if before.Pass && !after.Pass || after.Checks[i].Broken > before.Checks[i].Broken {
			t.Fatalf("seed %d: %s gives %+v, %s gives %+v", seed, strict, before, loose, after)
		}
	}
	if passed < seeds/15 || passed > seeds-seeds/15 {
		t.Errorf("%d of %d pass; the test shows nothing unless some pass and some fail", passed, seeds)
	}
}
