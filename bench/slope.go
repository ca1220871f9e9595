package bench

import (
	"math"
	"slices"
	"time"
)

// A Slope is how fast a value grows. It is the slope of a straight line through the means of equal pieces of time. The
// line is not fitted to single values, because neighbouring values are correlated. Such a fit would claim too small an
// error.
type Slope struct {
	PerSecond float64
	StdErr    float64 // standard error; the degrees of freedom are the number of pieces with values, minus 2
}

// slopePieces is the number of pieces of time. Ten pieces give eight degrees of freedom, and each piece is still long.
const slopePieces = 10

// TTFTSlope returns the growth of TTFT in seconds per second. A TTFT belongs to the time at which the first token came.
// The slope covers the time from the first request until the given time. It leaves out requests that failed or have no
// first token. If fewer than three pieces of time have values, the Slope is zero.
func TTFTSlope(samples []Sample, until time.Duration) Slope {
	from := until
	for i := range samples {
		from = min(from, max(samples[i].Sent, samples[i].Due)) // a pending request may have no Sent yet
	}
	piece := (until - from) / slopePieces
	if piece <= 0 {
		return Slope{}
	}
	points := make([]point, slopePieces)
	for i := range samples {
		s := &samples[i]
		if s.First < max(1, from) || s.Failure != "" {
			continue
		}
		p := &points[min(int((s.First-from)/piece), slopePieces-1)]
		p.weight++
		p.at += (s.First.Seconds() - p.at) / p.weight
		p.value += (s.TTFT().Seconds() - p.value) / p.weight
	}
	return slopeOf(slices.DeleteFunc(points, func(p point) bool { return p.weight == 0 }))
}

// A point is the mean of one piece of time. Its weight is the number of values in that piece.
type point struct{ at, value, weight float64 }

// slopeOf fits a line to the points by weighted least squares.
func slopeOf(points []point) Slope {
	if len(points) < 3 {
		return Slope{}
	}
	var weight, at, value float64
	for _, p := range points {
		weight += p.weight
		at += p.weight * p.at
		value += p.weight * p.value
	}
	at, value = at/weight, value/weight
	var spread, slope, rest float64
	for _, p := range points {
		spread += p.weight * (p.at - at) * (p.at - at)
		slope += p.weight * (p.at - at) * (p.value - value)
	}
	if spread == 0 {
		return Slope{}
	}
	slope /= spread
	for _, p := range points {
		miss := p.value - value - slope*(p.at-at)
		rest += p.weight * miss * miss
	}
	return Slope{PerSecond: slope, StdErr: math.Sqrt(rest / float64(len(points)-2) / spread)}
}
