package bench

import (
	"math"
	"slices"
	"time"
)

// A Trend sums up the counted requests while a run goes on. A Stop function judges it.
type Trend struct {
	Now       time.Duration
	Requests  int // so far
	Completed int
	Failed    int
	Pending   int
	Over      []OverLimit // requests over a limit, including pending ones that must end over it, without failed ones
	Broken    int         // requests that failed or are over at least one limit, each counted once

	// InFlight is the growth of counted requests in flight, per second. It is positive at first, for as long as an answer
	// takes, because the requests before the window are not counted.
	InFlight Slope
	// TTFT grows in seconds per second, by the time of the first token. Requests without a first token are not in it.
	TTFT Slope
}

// A Slope is how fast a value grows, from a straight line through the means of equal pieces of time. The means are used
// because neighbouring values are correlated: a fit to single values would claim too small an error.
type Slope struct {
	PerSecond float64
	StdErr    float64 // standard error, with Pieces - 2 degrees of freedom
	Pieces    int     // pieces of time with values; with fewer than three the Slope is zero
}

// trendPieces is the number of pieces of time: enough for eight degrees of freedom, and few enough for long pieces.
const trendPieces = 10

// TrendOf returns the trend of a run at the time now, with slopes over the time span before it. counted is what a Stop
// function sees: a pending request has a zero End.
func TrendOf(counted []Sample, now, span time.Duration, rules Rules, limits []Limit) Trend {
	t := Trend{Now: now, Requests: len(counted)}
	for _, limit := range limits {
		t.Over = append(t.Over, OverLimit{Limit: limit})
	}
	for i := range counted {
		t.count(&counted[i], rules)
	}
	t.slopes(counted, span, rules)
	return t
}

// count adds one request in its present state.
func (t *Trend) count(s *Sample, rules Rules) {
	broken := s.Failure != ""
	switch {
	case s.Failure != "":
		t.Failed++
	case s.End > 0:
		t.Completed++
	default:
		t.Pending++
	}
	for i := range t.Over {
		l := t.Over[i].Limit
		if s.OK() && l.over(s, rules) || s.Failure == "" && s.End == 0 && l.Overdue(s, rules, t.Now) {
			t.Over[i].Over++
			broken = true
		}
	}
	if broken {
		t.Broken++
	}
}

// Overdue reports whether a pending request must end over the limit or fail: even if its last pinned token came now, the
// answer would be over. It is false if all tokens have come and only the end is missing.
func (l Limit) Overdue(s *Sample, rules Rules, now time.Duration) bool {
	first := rules.first(s)
	served := s.WantTokens > 0 && s.Chunks >= s.WantTokens
	switch l.Metric {
	case MetricTTFT:
		if first > 0 {
			return first-s.Due > l.Max
		}
		return now-s.Due > l.Max
	case MetricTPOT:
		return first > 0 && s.WantTokens > 1 && !served && (now-first)/time.Duration(s.WantTokens-1) > l.Max
	}
	return now-s.Due > l.Max && !served
}

// sentAt returns when a request was sent. A pending request may not have Sent yet.
func sentAt(s *Sample) time.Duration { return max(s.Sent, s.Due) }

// slopes computes the slopes over the last span, or since the first request if that is shorter.
func (t *Trend) slopes(counted []Sample, span time.Duration, rules Rules) {
	from := t.Now
	for i := range counted {
		from = min(from, sentAt(&counted[i]))
	}
	from = max(from, t.Now-span)
	piece := (t.Now - from) / trendPieces
	if piece <= 0 {
		return
	}
	var inFlight, ttft [trendPieces]point
	for i := range trendPieces {
		inFlight[i] = point{at: (from + time.Duration(2*i+1)*piece/2).Seconds(), weight: 1}
	}
	for i := range counted {
		s := &counted[i]
		start, end := sentAt(s)-from, t.Now-from
		if s.End > 0 {
			end = s.End - from
		}
		share(&inFlight, start, end, piece)
		if came := rules.first(s) - from; rules.first(s) > 0 && came >= 0 && s.Failure == "" {
			p := &ttft[min(int(came/piece), trendPieces-1)]
			p.weight++
			p.at += (rules.first(s).Seconds() - p.at) / p.weight
			p.value += (rules.ttft(s).Seconds() - p.value) / p.weight
		}
	}
	t.InFlight, t.TTFT = slopeOf(inFlight[:]), slopeOf(ttft[:])
}

// share adds a request's time in flight to the mean number in flight of each piece that it overlaps.
func share(pieces *[trendPieces]point, start, end, piece time.Duration) {
	for i := max(0, int(start/piece)); i < trendPieces; i++ {
		begin := time.Duration(i) * piece
		overlap := min(end, begin+piece) - max(start, begin)
		if overlap <= 0 {
			return
		}
		pieces[i].value += float64(overlap) / float64(piece)
	}
}

// A point is the mean of one piece of time.
type point struct{ at, value, weight float64 }

// slopeOf fits a line to the points by weighted least squares.
func slopeOf(points []point) Slope {
	points = slices.DeleteFunc(slices.Clone(points), func(p point) bool { return p.weight == 0 })
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
	return Slope{PerSecond: slope, StdErr: math.Sqrt(rest / float64(len(points)-2) / spread), Pieces: len(points)}
}
