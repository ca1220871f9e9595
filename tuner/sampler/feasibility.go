package sampler

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// A want is what a server lacked that did not run. More of a flag may cause one want and prevent another: with a higher
// gpu-memory-utilization the KV cache is larger, but less memory is left for all else. So each want has a model of its
// own.
type want int

const (
	nothing  want = iota // the server ran
	memory               // the server ran out of memory
	kvMemory             // the KV cache was too small
	other
	wants // number of wants
)

// wantOf returns what the server of an ended trial lacked.
func wantOf(t *studies.Trial) want {
	switch {
	case t.Result.Outcome != trial.Infeasible:
		return nothing
	case t.Result.Class.OutOfMemory():
		return memory
	case t.Result.Class == serverctl.KVTooSmall:
		return kvMemory
	}
	return other
}

// A label says whether the server of a point ran, and if not, why.
type label struct {
	row     row
	want    want
	started bool // the server started, and failed under load
}

func labelOf(r row, t *studies.Trial) label {
	underLoad := []serverctl.Class{serverctl.OOMLoad, serverctl.CrashLoad, serverctl.Hang}
	return label{row: r, want: wantOf(t), started: slices.Contains(underLoad, t.Result.Class)}
}

// A feasibility predicts which points run. It has one process for each want that was seen. The process is above 0 at
// the points without this want.
type feasibility []*process

// borderNoise is the variance of the error of a label. It is small, because a point that ran out of memory does so
// again. With a variance of 1, a neighbour of a failed point seemed to run with a probability of one half: studies
// tried six such neighbours in a row.
const borderNoise = 0.1

// newFeasibility returns the model after the labels. A crash needs no precise model, so the hyperparameters of the
// processes are fixed. The linear part extends the border between points that run and points that fail over the whole
// space.
func newFeasibility(dimensions []dimension, labels []label) (f feasibility) {
	k := kernel{dimensions: dimensions, mean: 1, signal: 1, constant: 1, linear: 9}
	for range dimensions {
		k.inverse, k.alike = append(k.inverse, 1/0.5), append(k.alike, 0.7)
	}
	for of := memory; of < wants; of++ {
		if slices.ContainsFunc(labels, func(l label) bool { return l.want == of }) {
			f = append(f, fitBounds(k, bordersOf(of, labels), nil, 8))
		}
	}
	return f
}

// bordersOf returns what the labels say of one want: points without it as lower bounds of 0, points with it as upper
// bounds. A server whose KV cache is too small had enough memory for all else, and a server that failed under load had
// a KV cache. Other failures say nothing of the want.
func bordersOf(of want, labels []label) (data []datum) {
	for _, l := range labels {
		d := datum{row: l.row, side: above, variance: borderNoise, siteVariance: vagueVariance}
		switch {
		case l.want == of:
			d.side = below
		case l.want == nothing || of == memory && l.want == kvMemory || of == kvMemory && l.started:
		default:
			continue
		}
		data = append(data, d)
	}
	return data
}

// runProbabilities returns the probability that a server runs, for each row.
func (f feasibility) runProbabilities(rows []row) []float64 {
	all := slices.Repeat([]float64{1}, len(rows))
	for _, p := range f {
		means, variances := p.predict(rows)
		for i := range all {
			all[i] *= distuv.UnitNormal.CDF(means[i] / math.Sqrt(borderNoise+variances[i]))
		}
	}
	return all
}
