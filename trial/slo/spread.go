package slo

import (
	"cmp"
	"math"
	"slices"

	"vllmtuner/bench"
)

// spreadBlocks is the number of blocks into which standardError cuts a window. A block must be longer than a burst of
// slow requests, but fewer blocks give a less exact error. This was measured for p99 TTFT and TPOT of three simulated
// servers at 0.95 of their capacity. The root mean square of the estimated errors was 0.60 to 1.05 times the true error
// with five blocks. With ten blocks it was 0.48 to 1.09 times the true error.
const spreadBlocks = 5

// standardError returns the standard error of ln(percentile), and the number of independent values that would have the
// same error. The values are in the order of their requests. Both results are 0 if there are too few values.
//
// Slow requests come in clusters, so their number varies more than if requests were independent. The jackknife computes
// the percentile without one block of requests, for each block in turn. This keeps the clusters (Künsch, Annals of
// Statistics 17, 1989) and needs no density at the percentile. A jackknife that leaves out single values is not valid
// for a percentile (Shao and Wu, Annals of Statistics 17, 1989). With five blocks the jackknife has four degrees of
// freedom, so by chance its error can be smaller than the error of independent values. Then standardError returns the
// error of independent values.
func standardError(values []float64, percentile float64) (se, effective float64) {
	n := len(values)
	if n < max(minRequests(percentile), 4*spreadBlocks) {
		return 0, 0
	}
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(values[a], values[b]) })
	sorted := make([]float64, n)
	for i, at := range order {
		sorted[i] = values[at]
	}
	if sorted[0] <= 0 {
		return 0, 0
	}
	var without [spreadBlocks]float64
	mean, kept := 0.0, make([]float64, 0, n)
	for block := range spreadBlocks {
		kept = kept[:0]
		for i, at := range order {
			if at*spreadBlocks/n != block {
				kept = append(kept, sorted[i])
			}
		}
		without[block] = math.Log(bench.Percentile(kept, percentile))
		mean += without[block] / spreadBlocks
	}
	squares := 0.0
	for _, v := range without {
		squares += (v - mean) * (v - mean)
	}
	jackknife := math.Sqrt(squares * (spreadBlocks - 1) / spreadBlocks)
	independent := independentError(sorted, percentile)
	if jackknife <= independent {
		return independent, float64(n)
	}
	return jackknife, float64(n) * (independent / jackknife) * (independent / jackknife)
}

// independentError is the standard error of ln(percentile) of independent values: half the distance between the
// percentiles one binomial standard error above and below (Woodruff, JASA 47, 1952). If the values are too few for the
// upper percentile, it is the whole distance to the lower one.
func independentError(sorted []float64, percentile float64) float64 {
	n, p := float64(len(sorted)), percentile/100
	off := math.Sqrt(p * (1 - p) / n)
	low := math.Log(bench.Percentile(sorted, 100*max(0, p-off)))
	if p+off > 1-1/n {
		return math.Log(bench.Percentile(sorted, percentile)) - low
	}
	return (math.Log(bench.Percentile(sorted, 100*(p+off))) - low) / 2
}

// minRequests returns how many requests a limit on the percentile needs. With fewer requests, not even one of them may
// exceed the limit. For p99 it is 100.
func minRequests(percentile float64) int { return int(math.Ceil(100/(100-percentile) - 1e-6)) }
