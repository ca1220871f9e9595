package simload

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
)

// A subject is one started server of a world, with the cache state that the world's protocol requires.
type subject struct {
	world
	draw   int
	server trial.Server
	load   trial.Load
	source workload.Source
}

// start starts and primes a server. The draw decides the requests, their arrivals and the engine's noise.
func (w world) start(draw int) (*subject, error) {
	rig := &Rig{Profile: w.profile}
	server, load, err := rig.Start(context.Background(), trial.Launch{Number: draw + 1, Args: w.args})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w.name, err)
	}
	s := &subject{world: w, draw: draw, server: server, load: load, source: drawn{w.source, draw}}
	return s, s.prime()
}

// prime fills the prefix cache: with one pass of a finite workload, or with twice as many tokens as the cache holds.
func (s *subject) prime() error {
	const maxPasses = 100
	n := 100
	switch s.cache {
	case trial.Reset:
		return nil
	case trial.Primed:
		n = s.source.Len()
	}
	for i := range maxPasses {
		pass := workload.Pass{Source: s.source, Seed: s.seed(), Stream: workload.PrimeStream, Rate: primeRate(s.guess), First: i * n, N: n}
		if _, err := s.load.Run(context.Background(), pass.Schedule(), nil); err != nil {
			return fmt.Errorf("%s: prime: %w", s.name, err)
		}
		c, err := s.server.Counters(context.Background())
		if err != nil {
			return err
		}
		written := c.PromptTokens - c.PrefixHits + c.GenerationTokens
		if s.cache == trial.Primed || written > 2*float64(s.server.Facts().KVCacheTokens) {
			return nil
		}
	}
	return nil
}

// primeRate returns a rate at which no queue forms.
func primeRate(guess float64) float64 { return 0.7 * guess }

func (s *subject) seed() uint64 { return uint64(s.draw) }

// open sends a load in an open loop. It first empties the cache if the protocol says so.
func (s *subject) open(schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if err := s.fresh(); err != nil {
		return bench.Run{}, err
	}
	return s.load.Run(context.Background(), schedule, stop)
}

// closed sends n counted requests in a closed loop, after leadIn uncounted ones.
func (s *subject) closed(streams, n, leadIn int) (bench.Run, error) {
	if err := s.fresh(); err != nil {
		return bench.Run{}, err
	}
	loop, ok := s.load.(trial.ClosedLoad)
	if !ok {
		return bench.Run{}, errors.New("no closed loop")
	}
	schedule := workload.Loop{Source: s.source, LeadIn: leadIn, N: n}.Schedule()
	return loop.RunClosed(context.Background(), workload.WithoutRunOut(schedule), streams, nil)
}

func (s *subject) fresh() error {
	if s.cache != trial.Reset {
		return nil
	}
	return s.server.ResetCache(context.Background())
}

// A stretch is one long stationary load: a number of requests after a lead-in.
type stretch struct {
	requests int
	leadIn   time.Duration
}

// runStretch offers a rate to a fresh server for a whole stretch.
func (w world) runStretch(rate float64, draw int, s stretch) (bench.Run, error) {
	sub, err := w.start(draw)
	if err != nil {
		return bench.Run{}, err
	}
	plan := workload.Plan{Source: sub.source, Seed: sub.seed(), Rate: rate, LeadIn: s.leadIn, MinRequests: s.requests}
	run, err := sub.open(plan.Schedule(), nil)
	if err != nil {
		return run, fmt.Errorf("%s at %g req/s: %w", w.name, rate, err)
	}
	return run, nil
}

// broken counts the requests that break each limit.
func (w world) broken(samples []bench.Sample) []int {
	var n []int
	for _, c := range w.slo.Judge(samples, len(samples), math.MaxInt64).Checks {
		n = append(n, c.Broken)
	}
	return n
}

// inParallel calls a function once with every number from 0 to n-1, on all cores. The results must not depend on the
// order of the calls.
func inParallel(n int, call func(i int) error) error {
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range n {
		group.Go(func() error { return call(i) })
	}
	return group.Wait()
}

// goal is the share of requests that may break a limit, because every limit here is on a p99.
const goal = 0.01

// A truth is the capacity of a world, measured by long loads.
type truth struct {
	capacity float64 // rate at which the share of requests that break a limit equals goal, requests per second
	se       float64 // standard error of ln(capacity), from the differences between draws
	limit    int     // index of the limit that breaks first
	rates    []float64
	shares   [][]float64 // share of the requests of all draws that break a limit, indexed by limit and rate
	requests int         // number of requests at each rate
	slope    float64     // by how many per cent the share of broken requests grows when the rate grows by 1 %
}

// An effort says how many requests are used to measure a true capacity.
type effort struct {
	stretch
	batch int     // number of draws that are added at a time, until the standard error is low enough
	most  int     // maximum number of draws
	se    float64 // wanted standard error of ln(capacity)
}

// wholeEffort sends 40,000 requests at each rate, and up to 320,000 if the draws differ much. A world takes 10 to 120 s
// on one core.
var wholeEffort = effort{stretch{5000, 300 * time.Second}, 8, 64, 0.004}

// relativeRates lists the rates at which the true capacity is measured, as multiples of a first estimate.
var relativeRates = []float64{0.92, 0.96, 0.99, 1.02, 1.05, 1.09}

// truth measures the capacity of a world. The parameter first is the number of the first draw to use.
func (w world) truth(first int, e effort) (truth, error) {
	centre, err := w.nearCapacity(w.guess, w.guess/30, w.guess*30)
	if err != nil {
		return truth{}, err
	}
	w.guess = centre
	for range 5 {
		t, err := w.truthAround(centre, first, e)
		if err != nil {
			return truth{}, err
		}
		if t.inside() {
			return t, nil
		}
		centre = min(max(t.capacity, centre*relativeRates[0]), centre*relativeRates[len(relativeRates)-1])
	}
	return truth{}, fmt.Errorf("%s: the share of broken requests is not %g anywhere near %.3g req/s", w.name, goal, centre)
}

// inside reports whether the capacity lies far enough from the lowest and the highest rate to be interpolated.
func (t truth) inside() bool { return t.rates[1] < t.capacity && t.capacity < t.rates[len(t.rates)-2] }

// truthAround measures the shares of requests that break a limit, at rates around the rate centre. It adds draws until
// the standard error is low enough or the capacity lies outside the rates.
func (w world) truthAround(centre float64, first int, e effort) (truth, error) {
	t := truth{}
	for _, part := range relativeRates {
		t.rates = append(t.rates, centre*part)
	}
	var counts [][][]int // numbers of broken requests, indexed by draw, rate and limit
	for len(counts) < e.most {
		had := len(counts)
		counts = append(counts, make([][][]int, e.batch)...)
		for i := had; i < len(counts); i++ {
			counts[i] = make([][]int, len(t.rates))
		}
		err := inParallel(e.batch*len(t.rates), func(i int) error {
			draw, rate := had+i/len(t.rates), i%len(t.rates)
			run, err := w.runStretch(t.rates[rate], first+draw, e.stretch)
			counts[draw][rate] = w.broken(run.Samples)
			return err
		})
		if err != nil {
			return truth{}, err
		}
		t.read(counts, e.requests, len(w.slo.Limits))
		if t.se < e.se || !t.inside() {
			break
		}
	}
	return t, nil
}

// read computes the capacity from the counts, and its standard error by leaving out one draw at a time.
func (t *truth) read(counts [][][]int, perDraw, limits int) {
	t.requests = len(counts) * perDraw
	t.shares = pooled(counts, perDraw, limits, -1)
	t.capacity, t.limit = cross(t.rates, t.shares)
	_, t.se = jackknifed(len(counts), func(leftOut int) float64 {
		c, _ := cross(t.rates, pooled(counts, perDraw, limits, leftOut))
		return math.Log(c)
	})
	shares := monotone(t.shares[t.limit])
	last := len(shares) - 1
	t.slope = math.Log(shares[last]/shares[0]) / math.Log(t.rates[last]/t.rates[0])
}

// pooled returns the shares of broken requests, indexed by limit and rate. The parameter leftOut is the number of a
// draw that does not count; -1 means that all draws count. pooled adds half a broken request to the count of each
// share, so that no share is zero.
func pooled(counts [][][]int, perDraw, limits, leftOut int) [][]float64 {
	shares := make([][]float64, limits)
	for limit := range shares {
		for rate := range counts[0] {
			sum, n := 0.5, 1.0
			for draw := range counts {
				if draw != leftOut {
					sum += float64(counts[draw][rate][limit])
					n += float64(perDraw)
				}
			}
			shares[limit] = append(shares[limit], sum/n)
		}
	}
	return shares
}

// cross returns the lowest rate at which the share of requests that break a limit reaches the goal, and the index of
// that limit.
func cross(rates []float64, shares [][]float64) (rate float64, limit int) {
	rate = math.Inf(1)
	for i := range shares {
		if r := crossOne(rates, shares[i], goal); r < rate {
			rate, limit = r, i
		}
	}
	return rate, limit
}

// crossOne returns the rate at which the shares reach the wanted share. Between the rates it interpolates log-linearly.
// Below the first and above the last rate it extends the first or the last interval. It returns +Inf when the shares do
// not grow at all.
func crossOne(rates, shares []float64, wanted float64) float64 {
	m := monotone(shares)
	last := len(m) - 1
	if !(m[last] > m[0]) {
		return math.Inf(1)
	}
	i := 0
	for i < last-1 && m[i+1] < wanted {
		i++
	}
	for i > 0 && m[i] == m[i+1] {
		i--
	}
	for i < last-1 && m[i] == m[i+1] {
		i++
	}
	part := math.Log(wanted/m[i]) / math.Log(m[i+1]/m[i])
	return rates[i] * math.Pow(rates[i+1]/rates[i], part)
}

// rateFor returns the rate at which the given share of requests breaks the limit that breaks first.
func (t truth) rateFor(share float64) float64 { return crossOne(t.rates, t.shares[t.limit], share) }

// monotone returns the nearest non-decreasing sequence by least squares (pool adjacent violators).
func monotone(values []float64) []float64 {
	type pool struct {
		sum float64
		n   int
	}
	var pools []pool
	for _, v := range values {
		pools = append(pools, pool{v, 1})
		for k := len(pools) - 1; k > 0 && pools[k].sum/float64(pools[k].n) < pools[k-1].sum/float64(pools[k-1].n); k-- {
			pools[k-1].sum += pools[k].sum
			pools[k-1].n += pools[k].n
			pools = pools[:k]
		}
	}
	var m []float64
	for _, p := range pools {
		for range p.n {
			m = append(m, p.sum/float64(p.n))
		}
	}
	return m
}

// nearCapacity finds the capacity within 4 %, with one draw. It begins at the rate firstRate. If the capacity is not
// between lowest and highest, it returns the nearer of these two rates.
func (w world) nearCapacity(firstRate, lowest, highest float64) (float64, error) {
	const step, narrow = 1.4, 1.04
	keeps := func(rate float64) (bool, error) {
		w.guess = rate
		run, err := w.runStretch(rate, 1<<20, stretch{2000, 120 * time.Second})
		if err != nil {
			return false, err
		}
		for _, n := range w.broken(run.Samples) {
			if float64(n) > goal*float64(len(run.Samples)) {
				return false, nil
			}
		}
		return true, nil
	}
	low, high := 0.0, math.Inf(1)
	for rate := min(max(firstRate, lowest), highest); high/low > narrow; {
		ok, err := keeps(rate)
		if err != nil {
			return 0, err
		}
		if ok {
			low = rate
		} else {
			high = rate
		}
		switch {
		case low >= highest || high <= lowest:
			return rate, nil
		case math.IsInf(high, 1):
			rate = min(low*step, highest)
		case low == 0:
			rate = max(high/step, lowest)
		default:
			rate = math.Sqrt(low * high)
		}
	}
	return math.Sqrt(low * high), nil
}

func meanSD(values []float64) (mean, sd float64) { return stat.MeanStdDev(values, nil) }
