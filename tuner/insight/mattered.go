package insight

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/studies/report"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// minShare is the share that the lower end of a flag's interval must exceed. Only then is the flag named.
const minShare = 0.05

// mostlyKnown is the fraction of a flag's effect that the model must know before the flag is named. The functions drawn
// from the model disagree on the rest of the effect.
const mostlyKnown = 0.5

// mattered returns which share of the variation each flag explains, or nil if fewer than two flags can vary.
//
// A share is the mean of the flag's first-order and total Sobol index, divided by the sum of these means over all
// flags. For interactions of two flags, the mean is the flag's Shapley effect. The indices of many functions drawn from
// the model give an interval. The less the trials say about a flag, the wider its interval is.
func mattered(s *space.Space, m *sampler.Model, rng *rand.Rand) *report.Mattered {
	flags := varied(s)
	if len(flags) < 2 {
		return nil
	}
	known := &report.Mattered{Trials: m.Values()}
	plan := newSobol(s, m, flags, rng)
	if plan.fewest(len(flags)) < minPairs {
		known.Unknown = "few points of the space are legal and likely to run"
		return known
	}
	var of, mean indices
	all := m.Draw(draws, plan.points, rng)
	for _, values := range all {
		of.add(plan.indices(values, len(flags)))
	}
	mean.add(plan.indices(meanOf(all), len(flags)))
	known.Variation = math.Sqrt(stat.Mean(of.variance, nil))
	for i, flag := range flags {
		share := of.share(i)
		f := report.FlagShare{
			Flag: s.Parameters()[flag].Name, Share: stat.Mean(share, nil), Lowest: slices.Min(share), Highest: slices.Max(share),
			First: stat.Mean(of.first[i], nil), Total: stat.Mean(of.total[i], nil),
		}
		f.Known = mean.effect(i) / max(of.effect(i), 1e-12)
		f.Matters = f.Lowest > minShare && f.Known >= mostlyKnown
		known.Flags = append(known.Flags, f)
	}
	slices.SortStableFunc(known.Flags, func(a, b report.FlagShare) int { return cmp.Compare(b.Share, a.Share) })
	if !slices.ContainsFunc(known.Flags, func(f report.FlagShare) bool { return f.Matters }) {
		known.Unknown = fmt.Sprintf("%d trials do not tell the flags apart", known.Trials)
	}
	return known
}

// varied returns the indexes of the flags that have more than one value.
func varied(s *space.Space) (flags []int) {
	parameters := s.Parameters()
	for i := range parameters {
		if len(parameters[i].Levels(2)) > 1 {
			flags = append(flags, i)
		}
	}
	return flags
}

// indices are the Sobol indices of some functions: for each flag, one number for each function.
type indices struct {
	variance     []float64
	first, total [][]float64
}

// add adds the indices of one function.
func (all *indices) add(variance float64, first, total []float64) {
	if all.first == nil {
		all.first, all.total = make([][]float64, len(first)), make([][]float64, len(first))
	}
	all.variance = append(all.variance, variance)
	for i := range first {
		all.first[i], all.total[i] = append(all.first[i], first[i]), append(all.total[i], total[i])
	}
}

// share returns the share of one flag, for each function.
func (all *indices) share(flag int) (shares []float64) {
	for n := range all.variance {
		sum := 0.0
		for i := range all.first {
			sum += all.first[i][n] + all.total[i][n]
		}
		if sum > 0 { // all indices of a constant function are 0
			shares = append(shares, (all.first[flag][n]+all.total[flag][n])/sum)
		} else {
			shares = append(shares, 1/float64(len(all.first)))
		}
	}
	return shares
}

// effect returns the mean variance that a flag explains.
func (all *indices) effect(flag int) float64 {
	sum := 0.0
	for n, v := range all.variance {
		sum += v * (all.first[flag][n] + all.total[flag][n]) / 2
	}
	return sum / float64(len(all.variance))
}

// meanOf returns the mean of some functions.
func meanOf(all [][]float64) []float64 {
	mean := make([]float64, len(all[0]))
	for _, values := range all {
		floats.AddScaled(mean, 1/float64(len(all)), values)
	}
	return mean
}
