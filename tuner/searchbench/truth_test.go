package searchbench

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
)

// A truth is the long-run capacity of a point: the rate at which the allowed share of requests (the constant goal)
// breaks a limit.
type truth struct {
	World    string
	Point    space.Point
	Capacity float64       // requests per second; 0 if the server does not start, or keeps no rate
	StdErr   float64       // standard error of ln(capacity), from the differences between draws (sets of random requests)
	Limit    string        // the limit that breaks first, or why there is no capacity
	Requests int           // number of requests at each rate
	Rough    bool          // whether this is only a first estimate, within about 5 %, because the point is far from the best
	Took     time.Duration // time to compute it
}

const (
	goal = 0.01
	// truthDraws is the number of the first draw (one set of random requests) of a truth. Studies use lower numbers.
	truthDraws = 1 << 12
	// The capacity is looked for between these rates, in requests per second.
	lowestRate, highestRate = 0.02, 400
)

// An effort says how many requests are spent to measure the true capacity of a point. All points get the same draws, so
// that they are compared on the same requests.
type effort struct {
	requests    int           // number of requests of one draw at one rate
	leadIn      time.Duration // load before these requests
	batch, most int           // draws are added batch by batch until the standard error is low enough
	stdErr      float64
	near        float64 // a point is measured further only if its first estimate is at least this fraction of the best known capacity
	first       int     // number of the first draw, counted from truthDraws in steps of drawsOfSeed
}

var (
	fullEffort = effort{2000, 120 * time.Second, 8, 16, 0.012, 0.85, 0}
	// finalEffort is for the few points that may be the best. These points were chosen because their measured
	// capacities are high. Part of a high capacity is luck, and other draws show how much.
	finalEffort = effort{2000, 120 * time.Second, 16, 32, 0.007, 0, 100}
)

// around has the rates at which a true capacity is measured, as multiples of a first estimate.
var around = []float64{0.93, 0.98, 1.03, 1.08}

// A subject is one started server with the flags of a point. Its cache is in the state that the world's protocol wants.
type subject struct {
	plan   *plan.Plan
	server trial.Server
	load   trial.Load
	draw   int
	sent   int // number of loads so far
}

// subject starts and primes the server for a draw (one set of random requests). primingRate is a rate at which no queue
// forms.
func (w world) subject(p *plan.Plan, point space.Point, draw int, primingRate float64) (*subject, error) {
	args := slices.Concat(p.File.Server.Args, p.Search.Space.Args(point))
	server, load, err := w.start()(background, trial.Launch{Number: truthDraws + draw, Args: args})
	if err != nil {
		return nil, err
	}
	s := &subject{plan: p, server: server, load: load, draw: truthDraws + drawsOfSeed*draw}
	if p.Load.Protocol() == trial.Reset {
		return s, nil
	}
	return s, s.prime(primingRate)
}

// prime passes once through a finite workload, or sends twice as many tokens as the KV cache holds.
func (s *subject) prime(rate float64) error {
	const maxPasses = 200
	n := s.plan.Load.Source.Len()
	finite := n > 0
	if !finite {
		n = 100
	}
	stream := workload.PrimeStream.Draw(s.draw)
	for i := range maxPasses {
		pass := workload.Pass{Source: s.plan.Load.Source, Seed: uint64(s.draw), Stream: stream, Rate: rate, First: i * n, N: n}
		if _, err := s.load.Run(background, pass.Schedule(), nil); err != nil {
			return fmt.Errorf("prime: %w", err)
		}
		c, err := s.server.Counters(background)
		if written := c.PromptTokens - c.PrefixHits + c.GenerationTokens; err != nil || finite ||
			written > 2*float64(s.server.Facts().KVCacheTokens) {
			return err
		}
	}
	return nil
}

// countBreaks sends at least n counted requests at a rate. It returns how many of them break each limit, and how many
// it counted.
func (s *subject) countBreaks(rate float64, n int, leadIn time.Duration) (broken []int, of int, err error) {
	lengths := s.plan.File.Probe
	load := workload.Plan{Source: s.plan.Load.Source, Seed: uint64(s.draw), Rate: rate, LeadIn: leadIn, MinRequests: n}
	if s.plan.Load.Protocol() == trial.Reset { // the cache fills during a window, so the window must be as long as the study's
		load.LeadIn, load.Window, load.MinRequests = lengths.LeadIn, lengths.Window, lengths.MinRequests
	}
	broken = make([]int, len(s.plan.File.SLO.Limits))
	for of < n {
		load.Draw = s.draw + s.sent%drawsOfSeed
		s.sent++
		schedule := load.Schedule()
		if s.plan.Load.Protocol() == trial.Reset {
			schedule = workload.WithColdLeadIn(schedule, s.plan.Load.Source)
			if err := s.server.ResetCache(background); err != nil {
				return nil, 0, err
			}
		}
		run, err := s.load.Run(background, schedule, nil)
		if err != nil {
			return nil, 0, err
		}
		of += len(run.Samples)
		for i, l := range s.plan.File.SLO.Limits {
			broken[i] += countBroken(l, run.Samples)
		}
	}
	return broken, of, nil
}

// countBroken counts the requests that break a limit. It shares no code with the judge of studies.
func countBroken(l slo.Limit, samples []bench.Sample) (n int) {
	for _, s := range samples {
		took := s.First - s.Due
		if l.Metric == slo.TPOT {
			took = (s.Last - s.First) / time.Duration(max(1, s.OutputTokens-1))
		}
		if s.Failure != "" || took > l.Max {
			n++
		}
	}
	return n
}

// truth measures the capacity of a point. guess is a rate near that capacity. bestKnown is the highest capacity known
// so far; 0 if none is known.
func (w world) truth(point space.Point, guess, bestKnown float64, e effort) (truth, error) {
	began := time.Now()
	t := truth{World: w.name, Point: point}
	p, err := w.open(0)
	if err != nil {
		return t, err
	}
	center, err := w.locate(p, point, guess)
	if exit, ok := errors.AsType[*serverctl.ExitError](err); ok {
		t.Limit = string(exit.Class)
		return t, nil
	}
	if err != nil || center == 0 {
		t.Limit = "no rate"
		return t, err
	}
	if center < e.near*bestKnown {
		t.Capacity, t.StdErr, t.Limit, t.Rough, t.Took = center, 0.05, "unknown", true, time.Since(began)
		return t, nil
	}
	for range 6 {
		m := &shares{world: w, plan: p, point: point, effort: e}
		for _, part := range around {
			m.rates = append(m.rates, center*part)
		}
		if err := m.measure(); err != nil {
			return t, err
		}
		t.Capacity, t.StdErr, t.Limit, t.Requests = m.capacity, m.stdErr, m.limit, m.of[0]
		if m.inside() {
			break
		}
		center = min(max(m.capacity, center*around[0]), center*around[len(around)-1])
	}
	t.Took = time.Since(began)
	return t, nil
}

// locate finds the capacity to within 4 %, with one draw (one set of random requests). It returns 0 if not even the
// lowest rate keeps the limits.
func (w world) locate(p *plan.Plan, point space.Point, guess float64) (float64, error) {
	const narrow = 1.04
	low, high, step := 0.0, math.Inf(1), 1.2
	for rate := guess; high/low > narrow; {
		s, err := w.subject(p, point, 0, 0.5*rate)
		if err != nil {
			return 0, err
		}
		broken, of, err := s.countBreaks(rate, 1500, p.File.Probe.LeadIn)
		switch {
		case err != nil:
			return 0, err
		case float64(slices.Max(broken)) <= goal*float64(of):
			low = rate
		default:
			high = rate
		}
		switch {
		case low > highestRate:
			return low, nil
		case high < lowestRate:
			return 0, nil
		case math.IsInf(high, 1):
			rate = low * step
		case low == 0:
			rate = high / step
		default:
			rate = math.Sqrt(low * high)
		}
		step *= 1.15
	}
	return math.Sqrt(low * high), nil
}

// shares are the shares of requests that break each limit, at some rates.
type shares struct {
	world
	plan  *plan.Plan
	point space.Point
	effort
	rates []float64

	counts [][][]int // by draw, rate and limit
	sizes  [][]int   // requests by draw and rate
	of     []int     // requests of all draws by rate

	capacity, stdErr float64
	limit            string
}

// inside reports whether the capacity lies between the rates.
func (m *shares) inside() bool {
	return m.rates[0] <= m.capacity && m.capacity <= m.rates[len(m.rates)-1]
}

// measure adds draws (sets of random requests) until the standard error is small enough, or until the capacity lies
// outside the rates.
func (m *shares) measure() error {
	m.of = make([]int, len(m.rates))
	for draw := 0; draw < m.most; draw++ {
		s, err := m.subject(m.plan, m.point, m.first+draw, 0.5*m.rates[0])
		if err != nil {
			return err
		}
		counts, sizes := make([][]int, len(m.rates)), make([]int, len(m.rates))
		for i, rate := range m.rates {
			if counts[i], sizes[i], err = s.countBreaks(rate, m.requests, m.leadIn); err != nil {
				return err
			}
			m.of[i] += sizes[i]
		}
		m.counts, m.sizes = append(m.counts, counts), append(m.sizes, sizes)
		if (draw+1)%m.batch != 0 {
			continue
		}
		m.read()
		if m.effort.stdErr > m.stdErr || !m.inside() {
			return nil
		}
	}
	return nil
}

// read computes the capacity. It computes the standard error by leaving out one draw at a time (jackknife).
func (m *shares) read() {
	limit := 0
	m.capacity, limit = m.goalRate(-1)
	m.limit = m.plan.File.SLO.Limits[limit].String()
	n := float64(len(m.counts))
	sum, squares := 0.0, 0.0
	for leftOut := range m.counts {
		c, _ := m.goalRate(leftOut)
		sum += math.Log(c)
		squares += math.Log(c) * math.Log(c)
	}
	m.stdErr = math.Sqrt(max(0, (n-1)/n*(squares-sum*sum/n)))
}

// goalRate returns the lowest rate at which the share of requests that break a limit reaches goal, and the index of
// that limit. leftOut is the index of a draw to leave out; -1 leaves out none.
func (m *shares) goalRate(leftOut int) (rate float64, limit int) {
	rate = math.Inf(1)
	for l := range m.plan.File.SLO.Limits {
		logs := make([]float64, len(m.rates)) // ln of the shares, never falling
		for i := range m.rates {
			broken, of := 0.5, 1.0 // count half a broken request more, so that no logarithm is infinite
			for draw := range m.counts {
				if draw != leftOut {
					broken += float64(m.counts[draw][i][l])
					of += float64(m.sizes[draw][i])
				}
			}
			logs[i] = math.Log(broken / of)
			if i > 0 {
				logs[i] = max(logs[i], logs[i-1]+1e-6)
			}
		}
		if at := cross(m.rates, logs, math.Log(goal)); at < rate {
			rate, limit = at, l
		}
	}
	return rate, limit
}

// cross returns the rate at which the logarithms reach a value. Outside the rates it extrapolates from the nearest two
// rates, by at most 10 %.
func cross(rates, logs []float64, value float64) float64 {
	i := 0
	for i < len(logs)-2 && logs[i+1] < value {
		i++
	}
	part := (value - logs[i]) / (logs[i+1] - logs[i])
	rate := rates[i] * math.Exp(part*math.Log(rates[i+1]/rates[i]))
	return min(max(rate, rates[0]/1.1), rates[len(rates)-1]*1.1)
}
