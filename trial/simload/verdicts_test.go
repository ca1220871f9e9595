package simload

import (
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
)

// A verdictRow has the verdicts of windows of one length at one rate.
type verdictRow struct {
	world    string
	goal     float64 // true share of requests that break the limit that breaks first
	share    float64 // measured share in these windows
	window   window
	requests float64 // in a window
	windows  int
	passed   float64 // share of the windows that pass
	binomial float64 // share of windows that would pass if requests were independent
	design   float64 // SD of the windows' shares, divided by the SD for independent requests
}

// A window is a rule for the length of a window.
type window struct {
	name     string
	requests int
	seconds  float64
}

var windows = []window{{"300", 300, 0}, {"max(300, 120 s)", 300, 120}, {"max(1000, 240 s)", 1000, 240}}

func (w window) at(rate float64) int { return max(w.requests, int(math.Ceil(rate*w.seconds))) }

// brokenShares lists the true shares of broken requests for which passing windows are counted.
var brokenShares = []float64{0.005, 0.0075, 0.01, 0.015, 0.02}

// verdicts cuts long stationary loads into windows and judges each window.
func verdicts(s study, draws int) ([]verdictRow, error) {
	load := stretch{20000, 300 * time.Second}
	var rows []verdictRow
	for _, share := range brokenShares {
		rate := s.at(share)
		all := make([][]bench.Sample, draws)
		w := s.world
		w.guess = s.capacity
		err := each(draws, func(i int) error {
			run, err := w.long(rate, verdictDraws+i, load)
			all[i] = run.Samples
			return err
		})
		if err != nil {
			return nil, err
		}
		for _, win := range windows {
			rows = append(rows, s.judge(all, share, win, win.at(rate)))
		}
	}
	return rows, nil
}

func (s study) judge(runs [][]bench.Sample, share float64, win window, n int) verdictRow {
	row := verdictRow{world: s.name, goal: share, window: win, requests: float64(n)}
	var shares []float64
	for _, samples := range runs {
		for cut := range slices.Chunk(samples, n) {
			if len(cut) < n {
				continue
			}
			v := s.slo.Judge(cut, n, math.MaxInt64)
			if v.Pass {
				row.passed++
			}
			shares = append(shares, float64(v.Checks[s.limit].Broken)/float64(n))
		}
	}
	row.windows = len(shares)
	row.passed /= float64(len(shares))
	var sd float64
	row.share, sd = meanSD(shares)
	row.binomial = atMostBroken(n, share)
	row.design = sd / math.Sqrt(row.share*(1-row.share)/float64(n))
	return row
}

// atMostBroken returns the probability that of n independent requests at most 1 % break a limit, if each does with
// probability share.
func atMostBroken(n int, share float64) float64 {
	sum, term := 0.0, math.Pow(1-share, float64(n))
	for k := range int(goal*float64(n)+1e-9) + 1 {
		sum += term
		term *= float64(n-k) / float64(k+1) * share / (1 - share)
	}
	return sum
}
