// Package landscape has a table of the true capacities of a simulated H200. Tests and benchmarks compare the answers of
// samplers and studies with it. No program for users imports it.
package landscape

import (
	"bytes"
	_ "embed"
	"encoding/csv"
	"fmt"
	"math"
	"slices"
	"strconv"

	"vllmtuner/tuner/space"
)

//go:embed h200-llama70b-fp8.csv
var table []byte

// These are the flags of the table, in the order of its columns, and the server's default of each flag.
var (
	names    = [3]string{"gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens"}
	defaults = [3]float64{0.9, 1024, 8192}
)

// meanColumn is the column with the mean capacity over five draws of requests and arrivals, in requests per second.
const meanColumn = 6

// A Landscape has the capacities of Llama 70B in FP8 for values of GPU memory utilization, sequences and batched
// tokens. The workload is the example phase1 with a primed cache. The limits are 1000 ms for p99 TTFT and 60 ms for p99
// TPOT. Each entry was found by bisection, to 0.025 req/s. Between the entries, a Landscape interpolates linearly in
// the utilization and in the logarithms of the other two values.
type Landscape struct {
	Best float64 // highest capacity in the table

	axes [3][]float64
	rate map[[3]float64]float64
}

// H200 returns the capacities for utilizations of 0.70 to 0.97, 16 to 1024 sequences and 1,024 to 32,768 batched
// tokens.
func H200() (*Landscape, error) {
	rows, err := csv.NewReader(bytes.NewReader(table)).ReadAll()
	if err != nil {
		return nil, err
	}
	l := &Landscape{rate: map[[3]float64]float64{}}
	for _, row := range rows[1:] {
		var key [3]float64
		for i := range key {
			if key[i], err = coordinate(i, row[i]); err != nil {
				return nil, err
			}
			if !slices.Contains(l.axes[i], key[i]) {
				l.axes[i] = append(l.axes[i], key[i])
			}
		}
		if l.rate[key], err = strconv.ParseFloat(row[meanColumn], 64); err != nil {
			return nil, err
		}
		l.Best = max(l.Best, l.rate[key])
	}
	for i := range l.axes {
		slices.Sort(l.axes[i])
	}
	return l, nil
}

func coordinate(i int, text string) (float64, error) {
	x, err := strconv.ParseFloat(text, 64)
	if err != nil || i == 0 {
		return x, err
	}
	return math.Log2(x), nil
}

// Capacity returns the capacity of a point in requests per second. For a flag that the point does not have, Capacity
// uses the server's default.
func (l *Landscape) Capacity(p space.Point) (float64, error) {
	var low [3]int
	var part [3]float64
	for i, axis := range l.axes {
		text, ok := p[names[i]]
		if !ok {
			text = strconv.FormatFloat(defaults[i], 'g', -1, 64)
		}
		x, err := coordinate(i, text)
		if err != nil {
			return 0, fmt.Errorf("%s=%s: %w", names[i], text, err)
		}
		last, found := slices.BinarySearch(axis, x)
		if !found {
			last--
		}
		low[i] = max(0, min(len(axis)-2, last))
		part[i] = (x - axis[low[i]]) / (axis[low[i]+1] - axis[low[i]])
	}
	sum := 0.0
	for corner := range 8 {
		weight := 1.0
		var key [3]float64
		for i := range key {
			bit := corner >> i & 1
			key[i] = l.axes[i][low[i]+bit]
			weight *= float64(bit)*part[i] + float64(1-bit)*(1-part[i])
		}
		sum += weight * l.rate[key]
	}
	return sum, nil
}

// Regret returns how far the capacity of a point is below the best one in the table, as a fraction of the best one. 0
// is the best, and 1 is the worst.
func (l *Landscape) Regret(p space.Point) (float64, error) {
	at, err := l.Capacity(p)
	return 1 - at/l.Best, err
}
