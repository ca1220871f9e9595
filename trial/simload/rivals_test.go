package simload

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"gonum.org/v1/gonum/interp"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A cost is what a method spent on one server after its start and priming.
type cost struct {
	probes, requests       int // the field requests has the counted requests that were sent; a probe that ends early sends fewer
	window, leadIn, runOut time.Duration
}

func (c cost) total() time.Duration { return c.window + c.leadIn + c.runOut }

func (c *cost) add(requests int, leadIn, window, elapsed time.Duration) {
	c.probes++
	c.requests += requests
	c.leadIn += min(leadIn, elapsed)
	c.window += max(0, min(window, elapsed-leadIn))
	c.runOut += max(0, elapsed-leadIn-window)
}

// An answer is the capacity that a method reports. If the method finds only a bound of the capacity, the field rate has
// that bound.
type answer struct {
	rate   float64 // requests per second
	bound  capacity.Bound
	lo, hi float64 // 95 % interval; 0 if the method gives none
	cost

	found    capacity.Capacity // set only by our search
	forecast capacity.Forecast // set only by our search, if it has a precision
	then     cost              // cost before the forecast
}

// A method is a named way to find the capacity of a world.
type method struct {
	name string
	find finder
}

// cheapest is the rival that needs the least server time.
const cheapest = "bisection"

// A finder finds the capacity of a world. The draw (a number) decides the requests, their arrivals and the noise. The
// parameter hint is a rate near the capacity, which only some methods use.
type finder func(w world, draw int, hint float64) (answer, error)

// withHintTimes returns the same finder, with its hint multiplied by a factor.
func (find finder) withHintTimes(factor float64) finder {
	return func(w world, draw int, hint float64) (answer, error) { return find(w, draw, factor*hint) }
}

// rivals returns the methods that people use instead of ours.
func rivals() []method {
	return []method{
		{"sweep", sweep},
		{cheapest, bisection},
		{"AIPerf, 300", func(w world, draw int, _ float64) (answer, error) { return isotonic(w, draw, 300) }},
		{"closed loop", closedLoop},
	}
}

// manualRequests is the number of requests in a manual probe.
const manualRequests = 300

// rates returns the rates of a manual sweep. The draw shifts the grid by a fraction of a step, so that the true
// capacity lies at a random distance from the next rate.
func (w world) rates(draw int) []float64 {
	const n = 12
	shift := rand.New(rand.NewPCG(uint64(draw), 0x42)).Float64() - 0.5
	rates := make([]float64, n)
	for i := range rates {
		rates[i] = w.grid[0] * math.Pow(w.grid[1]/w.grid[0], (float64(i)+shift)/(n-1))
	}
	return rates
}

// manual probes one rate as vllm bench serve does. It sends 300 requests to an idle server, counts all of them, and
// sends none after them.
func (s *subject) manual(rate float64, c *cost) (slo.Verdict, error) {
	plan := workload.Plan{Source: s.source, Seed: s.seed(), Rate: rate, MinRequests: manualRequests, Rescale: true}
	n, window := plan.Counted()
	run, err := s.open(plan.Schedule(), nil)
	if err != nil {
		return slo.Verdict{}, err
	}
	c.add(n, 0, window, run.Elapsed)
	return s.slo.Judge(run.Samples, n, run.Elapsed), nil
}

// sweep measures the whole grid upwards. Its answer is the highest rate before the first failure, as people read such a table.
func sweep(w world, draw int, _ float64) (a answer, err error) {
	s, err := w.start(draw)
	if err != nil {
		return a, err
	}
	a.bound = capacity.AtLeast
	for i, rate := range w.rates(draw) {
		v, err := s.manual(rate, &a.cost)
		switch {
		case err != nil:
			return a, err
		case a.bound == capacity.Exact || a.bound == capacity.AtMost: // the answer is already known; this rate only adds to the cost
		case v.Pass:
			a.rate = rate
		case i == 0:
			a.rate, a.bound = rate, capacity.AtMost
		default:
			a.bound = capacity.Exact
		}
	}
	return a, nil
}

// bisection finds the highest passing rate of the sweep's grid by bisection.
func bisection(w world, draw int, _ float64) (a answer, err error) {
	s, err := w.start(draw)
	if err != nil {
		return a, err
	}
	rates := w.rates(draw)
	low, high := -1, len(rates)
	for high-low > 1 {
		middle := (low + high) / 2
		v, err := s.manual(rates[middle], &a.cost)
		if err != nil {
			return a, err
		}
		if v.Pass {
			low = middle
		} else {
			high = middle
		}
	}
	a.rate, a.bound = rates[max(low, 0)], capacity.Exact
	switch {
	case low < 0:
		a.bound = capacity.AtMost
	case high == len(rates):
		a.bound = capacity.AtLeast
	}
	return a, nil
}

// The settings of AIPerf 0.13 (aiperf/common/environment.py, orchestrator/search_planner).
const (
	aiperfWarmUp    = 60 * time.Second // FIRST_PROBE_WARMUP_FLOOR
	aiperfPrecision = 0.05             // SLA_PRECISION_DEFAULT
	aiperfProbes    = 30               // max_iterations
	aiperfFits      = 3                // _MAX_REFIT_CYCLES
	aiperfDistinct  = 3                // _FIT_MIN_DISTINCT
)

// An isotonicSearch searches for a request rate as AIPerf's planner smooth_isotonic does.
type isotonicSearch struct {
	*subject
	requests  int
	low, high float64               // highest rate that passed, lowest rate that failed
	margins   map[float64][]float64 // for each rate, p99 minus the limit, in ms; one value for each limit
	cost      *cost
}

// probe offers a rate, first for AIPerf's warm-up and then for the window. The bracket is the range from the highest
// passing to the lowest failing rate. Verdicts outside the bracket have no effect, so the bracket never widens. AIPerf
// lets the server run empty between warm-up and window; probe does not.
func (s *isotonicSearch) probe(rate float64) (pass bool, err error) {
	plan := workload.Plan{Source: s.source, Seed: s.seed(), Rate: rate, LeadIn: aiperfWarmUp, MinRequests: s.requests}
	n, window := plan.Counted()
	run, err := s.open(workload.WithoutRunOut(plan.Schedule()), nil)
	if err != nil {
		return false, err
	}
	s.cost.add(n, plan.LeadIn, window, run.Elapsed)
	v := s.slo.Judge(run.Samples, n, run.Elapsed)
	for _, c := range v.Checks {
		s.margins[rate] = append(s.margins[rate], c.ValueMS-c.MaxMS)
	}
	switch {
	case v.Pass && rate < s.high:
		s.low = max(s.low, rate)
	case !v.Pass && rate > s.low:
		s.high = min(s.high, rate)
	}
	return v.Pass, nil
}

// isotonic is AIPerf's search (smooth_isotonic, 0.13). Its answer is the lower end of the last bracket: the highest
// passing rate that is lower than every failed rate.
//
//  1. It doubles the lowest rate of the grid until a probe fails or the grid's highest rate passes.
//  2. It makes three probes at even distances inside the bracket.
//  3. It fits the p99 of the limit that breaks first over all rates so far: isotonic regression, then PCHIP. It probes the
//     rate at which the curve crosses the limit, or the middle of the bracket if the curve does not cross it. It repeats this
//     until the bracket is within 5 % of its upper end, the next rate was already probed, or 30 probes are made. While the
//     regression has fewer than three levels, each of the first two fits is followed by two more probes, at 1/8 and 5/8 of the
//     bracket.
//
// Two parts of AIPerf are left out. One is replicates, which are off by default. The other is the bisection that AIPerf makes
// after it has detected a cliff.
func isotonic(w world, draw, requests int) (a answer, err error) {
	sub, err := w.start(draw)
	if err != nil {
		return a, err
	}
	s := &isotonicSearch{subject: sub, requests: requests, high: math.Inf(1), margins: make(map[float64][]float64), cost: &a.cost}
	for rate := w.grid[0]; math.IsInf(s.high, 1); rate = min(2*rate, w.grid[1]) {
		pass, err := s.probe(rate)
		switch {
		case err != nil:
			return a, err
		case pass && rate >= w.grid[1]:
			a.rate, a.bound = rate, capacity.AtLeast
			return a, nil
		case !pass && s.low == 0:
			a.rate, a.bound = rate, capacity.AtMost
			return a, nil
		}
	}
	next := s.bracketRates(0.25, 0.5, 0.75)
	for fits := 1; ; fits++ {
		for _, rate := range next {
			if _, err := s.probe(rate); err != nil {
				return a, err
			}
		}
		candidate, levels := s.fit()
		if next = s.bracketRates(0.125, 0.625); levels < aiperfDistinct && fits < aiperfFits && len(next) > 0 {
			continue
		}
		if (s.high-s.low)/s.high < aiperfPrecision || s.margins[candidate] != nil || a.probes >= aiperfProbes {
			a.rate, a.bound = s.low, capacity.Exact
			return a, nil
		}
		next = []float64{candidate}
	}
}

// bracketRates returns one rate for each position in the bracket. Position 0 is the lower end, 0.5 the middle, and 1
// the upper end. bracketRates leaves out rates that were already probed.
func (s *isotonicSearch) bracketRates(positions ...float64) []float64 {
	var rates []float64
	for _, position := range positions {
		if rate := s.low + position*(s.high-s.low); s.margins[rate] == nil {
			rates = append(rates, rate)
		}
	}
	return rates
}

// fit returns the rate at which the fitted margin is zero, and the number of levels of the regression.
func (s *isotonicSearch) fit() (candidate float64, levels int) {
	var rates []float64
	for rate := range s.margins {
		rates = append(rates, rate)
	}
	slices.Sort(rates)
	binding, largest := 0, math.Inf(-1) // the limit with the largest relative margin at the highest rate
	for i, l := range s.slo.Limits {
		if m := s.margins[rates[len(rates)-1]][i] / l.Max.Seconds(); m > largest {
			binding, largest = i, m
		}
	}
	var values []float64
	for _, rate := range rates {
		values = append(values, s.margins[rate][binding])
	}
	values = monotone(values)
	levels = len(slices.Compact(slices.Clone(values)))
	candidate = (s.low + s.high) / 2
	var curve interp.FritschButland // the method of scipy's PchipInterpolator
	if curve.Fit(rates, values) != nil {
		return candidate, levels
	}
	if low, high := s.low, s.high; curve.Predict(low) < 0 && curve.Predict(high) > 0 {
		for range 60 {
			if middle := (low + high) / 2; curve.Predict(middle) < 0 {
				low = middle
			} else {
				high = middle
			}
		}
		if low > s.low && high < s.high {
			candidate = low
		}
	}
	return candidate, levels
}

// closedLoop finds the highest number of streams that keeps the SLO. It doubles the number until a probe fails, and
// then bisects to 5 %. A probe counts 300 requests, or ten per stream if that is more. Two uncounted requests per
// stream come first, so that the initial burst of a closed loop does not count. The answer is the throughput at the
// highest number of streams that passed.
func closedLoop(w world, draw int, _ float64) (a answer, err error) {
	const maxStreams = 4096
	s, err := w.start(draw)
	if err != nil {
		return a, err
	}
	probe := func(streams int) (bool, error) {
		n := max(manualRequests, 10*streams)
		run, err := s.closed(streams, n, 2*streams)
		if err != nil {
			return false, err
		}
		m := bench.Measure(run, bench.Scope{}.ByCount(run))
		leadIn := run.Samples[0].Due
		a.add(n, leadIn, run.Elapsed-leadIn, run.Elapsed)
		pass := w.slo.Judge(run.Samples, n, run.Elapsed).Pass
		if pass || a.rate == 0 {
			a.rate = m.RequestThroughput
		}
		return pass, nil
	}
	low, high := 0, maxStreams+1
	for high-low > max(1, low/20) {
		streams := (low + high) / 2
		if high > maxStreams {
			streams = max(1, 2*low)
		}
		pass, err := probe(streams)
		switch {
		case err != nil:
			return a, err
		case pass && streams >= maxStreams:
			a.bound = capacity.AtLeast
			return a, nil
		case pass:
			low = streams
		default:
			high = streams
		}
	}
	a.bound = capacity.Exact
	if low == 0 {
		a.bound = capacity.AtMost
	}
	return a, nil
}

// The window lengths of a trial in a study of the tuner, and of the confirmation of its result.
var (
	searchLengths  = trial.Lengths{Window: 120 * time.Second, MinRequests: 300}
	confirmLengths = trial.Lengths{Window: 240 * time.Second, MinRequests: 1000}
)

// drawsOfTrial is the number of draws reserved for one repetition, because each probe of a trial has its own draw.
const drawsOfTrial = 64

// ours returns a finder that runs one whole trial with our search. If the precision is above 0, the search goes on
// until the interval is as narrow as the precision says.
func ours(lengths trial.Lengths, precision float64) finder {
	return func(w world, draw int, hint float64) (a answer, err error) {
		rig := &Rig{Profile: w.profile}
		runner := &trial.Runner{
			Start: rig.Start, Source: drawn{w.source, drawsOfTrial * draw}, SLO: w.slo, Lengths: w.lengths(lengths),
			Cache: w.cache, PrimeRate: primeRate(w.guess), Seed: uint64(draw),
			// The defaults of a study file.
			Search: capacity.Search{Min: 0.05, Max: 1000, Factor: 1.35, Tolerance: 0.2, MaxProbes: 12, Precision: precision},
		}
		if precision > 0 {
			runner.Search.MaxProbes = 40
			runner.Search.Plan = func(f capacity.Forecast) { a.forecast, a.then = f, a.cost }
		}
		record := func(p trial.Probe) error {
			a.add(p.Measurement.Requests, runner.Lengths.LeadIn, p.Measurement.Window, p.GPUTime)
			return nil
		}
		result, err := runner.Run(context.Background(), trial.Task{Number: draw + 1, Args: w.args, Hint: func() float64 { return hint }, Record: record})
		if err == nil && result.Outcome != trial.Measured {
			err = fmt.Errorf("the trial ends as %s: %s", result.Outcome, result.Evidence)
		}
		if err != nil {
			return a, fmt.Errorf("%s, draw %d: %w", w.name, draw, err)
		}
		c := result.Capacity
		a.rate, a.bound, a.lo, a.hi, a.found = c.Rate, c.Bound, c.Lowest, c.Highest, c
		return a, nil
	}
}

// lengths adds the default lead-in for this world.
func (w world) lengths(l trial.Lengths) trial.Lengths {
	l.LeadIn = trial.DefaultLeadIn(w.slo, w.source, w.cache)
	return l
}
