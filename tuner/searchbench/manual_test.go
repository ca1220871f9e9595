package searchbench

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
)

// A manual method measures servers as vllm bench serve does. It sends a number of requests at a rate to an idle server,
// and counts all of them. It does not warm the server up, and does not prime its cache.
type manual struct {
	methodRun
	plan  *plan.Plan
	meter *meter
	draw  int // number of the next load's draw (one set of random requests)
}

func newManual(w world, name string, seed uint64) (*manual, error) {
	p, err := w.open(seed)
	return &manual{
		methodRun: methodRun{World: w.name, Method: name, Seed: seed}, plan: p, meter: &meter{start: w.start(), manual: true},
	}, err
}

// A manualServer is a started server of a manual method.
type manualServer struct {
	*manual
	point  space.Point
	server trial.Server
	load   trial.Load
}

// start starts a server with a point. It returns nil if the server does not run.
func (m *manual) start(number int, point space.Point) (*manualServer, error) {
	args := append(append([]string{}, m.plan.File.Server.Args...), m.plan.Search.Space.Args(point)...)
	server, load, err := m.meter.Start(background, trial.Launch{Number: number, Args: args})
	if _, ok := errors.AsType[*serverctl.ExitError](err); ok {
		return nil, nil
	}
	return &manualServer{m, point, server, load}, err
}

// atOnce is a rate, in requests per second, at which all requests are due at once.
const atOnce = 1e9

// keeps sends n requests at a rate. It reports whether the requests keep the limits, and returns their throughput in
// requests per second.
func (s *manualServer) keeps(rate float64, n int) (bool, float64, error) {
	load := workload.Plan{Source: s.plan.Load.Source, Seed: s.Seed, Rate: rate, MinRequests: n, Rescale: true, Draw: s.draw % drawsOfSeed}
	s.draw++
	run, err := s.load.Run(background, load.Schedule(), nil)
	if err != nil {
		return false, 0, err
	}
	throughput := float64(n) / run.Elapsed.Seconds()
	return s.plan.File.SLO.Judge(run.Samples, n, run.Elapsed).Pass, throughput, nil
}

// stopServer stops a server, and notes the best answer so far. s is nil if the server never ran.
func (m *manual) stopServer(s *manualServer, point space.Point, rate float64) error {
	if rate > 0 && (m.Best == nil || rate > m.Best.Rate) {
		m.Best = &answer{Point: point, Rate: rate, Bound: capacity.AtLeast}
	}
	var err error
	if s != nil {
		_, err = s.server.Stop(background)
	}
	note := step{GPU: m.meter.spent.total(), Crashed: s == nil}
	if m.Best != nil {
		note.Point, note.Rate = m.Best.Point, m.Best.Rate
	}
	m.Steps = append(m.Steps, note)
	return err
}

// result returns what the method did, with its GPU time and its real time.
func (m *manual) result(began time.Time) methodRun {
	m.Spent, m.Took = m.meter.spent, time.Since(began)
	return m.methodRun
}

// A manual sweep sends 300 requests at each of twelve rates.
const sweepRates, sweepRequests = 12, 300

// sweep12 measures the server's default and then random points, each at all rates of one grid. The capacity of a point
// is the highest rate below the first rate that failed, because people read such a table in this way. The seed shifts
// the grid by a fraction of a step.
func sweep12(w world, seed uint64, trials int) (methodRun, error) {
	began := time.Now()
	m, err := newManual(w, "sweep12", seed)
	if err != nil {
		return methodRun{}, err
	}
	choose, err := newBlind("random", seed, trials)(m.plan)
	if err != nil {
		return methodRun{}, err
	}
	shift := rand.New(rand.NewPCG(seed, 0x42)).Float64() - 0.5
	for n := range trials {
		point := space.Point{}
		if n > 0 {
			if point, err = choose.next(n); err != nil {
				return methodRun{}, err
			}
		}
		if err := m.sweep(n, point, w.grid, shift); err != nil {
			return methodRun{}, err
		}
	}
	return m.result(began), nil
}

// sweep measures one point at all rates.
func (m *manual) sweep(number int, point space.Point, grid [2]float64, shift float64) error {
	s, err := m.start(number, point)
	if err != nil || s == nil {
		return errors.Join(err, m.stopServer(nil, point, 0))
	}
	highest, failed := 0.0, false
	for i := range sweepRates {
		rate := grid[0] * math.Pow(grid[1]/grid[0], (float64(i)+shift)/(sweepRates-1))
		ok, _, err := s.keeps(rate, sweepRequests)
		if err != nil {
			return err
		}
		failed = failed || !ok
		if !failed {
			highest = rate
		}
	}
	return m.stopServer(s, point, highest)
}

// The settings of auto_tune.sh (vLLM, benchmarks/auto_tune/auto_tune.sh, 0.14.1).
var (
	autoTuneSeqs   = []int{128, 256}
	autoTuneTokens = []int{512, 1024, 2048, 4096}
)

const (
	autoTuneFirst, autoTuneEach = 1000, 100        // requests
	autoTuneReset               = 5 * time.Second  // wait after it has emptied the prefix cache
	autoTuneWait                = 10 * time.Second // wait after it has killed a server
)

// autoTune is the algorithm of auto_tune.sh with the world's limits. It lowers the memory utilization until a server
// with the largest flags starts. Then it measures each pair of max-num-seqs and max-num-batched-tokens. It sends 1,000
// requests at once. If they break a limit, it empties the cache and sends 100 requests at a lower rate. The rates are
// whole numbers, downward from the throughput, until a rate keeps the limits.
func autoTune(w world, seed uint64, _ int) (methodRun, error) {
	began := time.Now()
	m, err := newManual(w, "auto_tune", seed)
	if err != nil {
		return methodRun{}, err
	}
	util, err := m.utilization()
	if err != nil {
		return methodRun{}, err
	}
	for _, seqs := range autoTuneSeqs {
		for _, tokens := range autoTuneTokens {
			point := autoTunePoint(util, seqs, tokens)
			if util == 0 || m.plan.Search.Space.Check(point) != nil && m.outside(point) {
				continue
			}
			if err := m.autoTuneOne(point); err != nil {
				return methodRun{}, err
			}
		}
	}
	return m.result(began), nil
}

func autoTunePoint(util float64, seqs, tokens int) space.Point {
	return space.Point{
		"gpu-memory-utilization": strconv.FormatFloat(util, 'f', 2, 64),
		"max-num-seqs":           strconv.Itoa(seqs), "max-num-batched-tokens": strconv.Itoa(tokens),
	}
}

// outside reports whether a value of the point is outside the world's ranges. Inactive or missing parameters do not
// matter.
func (m *manual) outside(p space.Point) bool {
	for name, text := range p {
		if parameter := m.plan.Search.Space.Parameter(name); parameter == nil || parameter.Check(text) != nil {
			return true
		}
	}
	return false
}

// utilization returns the highest memory utilization with which a server with the largest flags starts. It tries the
// legal values from 0.98 down to 0.90, in steps of 0.01. It returns 0 if no server starts.
func (m *manual) utilization() (float64, error) {
	highest := m.plan.Search.Space.Parameter("gpu-memory-utilization").Max
	for cents := int(100*min(0.98, highest) + 1e-9); cents >= 90; cents-- {
		util := float64(cents) / 100
		point := autoTunePoint(util, autoTuneSeqs[len(autoTuneSeqs)-1], autoTuneTokens[len(autoTuneTokens)-1])
		s, err := m.start(0, point)
		switch {
		case err != nil:
			return 0, err
		case s != nil:
			_, err := s.server.Stop(background)
			return util, err
		}
		m.Steps = append(m.Steps, step{GPU: m.meter.spent.total(), Crashed: true})
	}
	return 0, nil
}

func (m *manual) autoTuneOne(point space.Point) error {
	s, err := m.start(len(m.Steps), point)
	if err != nil || s == nil {
		return errors.Join(err, m.stopServer(nil, point, 0))
	}
	ok, throughput, err := s.keeps(atOnce, autoTuneFirst)
	if err != nil {
		return err
	}
	rate := throughput
	for r := int(throughput) + 1; !ok; r-- {
		if rate = float64(r); r == 0 {
			break
		}
		if err := s.server.ResetCache(background); err != nil {
			return fmt.Errorf("auto_tune: %w", err)
		}
		m.meter.spent.Stop += autoTuneReset
		if ok, _, err = s.keeps(rate, autoTuneEach); err != nil {
			return err
		}
	}
	m.meter.spent.Stop += autoTuneWait
	return m.stopServer(s, point, rate)
}
