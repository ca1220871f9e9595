package bench

import (
	"math"
	"slices"
	"time"
)

// A Trend is what is known of the counted requests while a run goes on. It says how things stand and where they go, and
// leaves it to a Stop function what that means.
type Trend struct {
	Now       time.Duration
	Requests  int // so far
	Completed int
	Failed    int
	Pending   int
	Over      []OverLimit // requests over a limit, those that have not ended but must end over it among them; failed ones are not
	Broken    int         // requests that failed or are over at least one limit, each once

	InFlight Slope // counted requests in flight, per second. The first ones follow requests that are not counted, so it rises for as long as an answer takes
	TTFT     Slope // in seconds per second, by the time at which the first token came: who still waits for his cannot be known
}

// A Slope is how fast something grows. Its error is that of a straight line through the means of equal pieces of time: values
// that follow one another closely are alike, so taken one by one they would claim to know more than they do.
type Slope struct {
	PerSecond float64
	StdErr    float64 // standard error, of two degrees of freedom less than Pieces
	Pieces    int     // of time that had values; with fewer than three nothing is known, and all is zero
}

// trendPieces is into how many pieces the span of a slope is cut: eight degrees of freedom, and pieces as long as possible.
const trendPieces = 10

// TrendOf returns how a run stands at the time now, with slopes over the last span before. counted is what a Stop function
// sees: a pending request has a zero End, and as Last what has come so far or zero.
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

// count enters one request as it stands.
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

// Overdue reports whether a pending request is bound to end over the limit, unless it fails: its tokens are pinned, so even if
// the last of them came now, the answer would be over it. One whose tokens have all come is left to its end.
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

// left is when a request left; a pending one may not say so yet.
func left(s *Sample) time.Duration { return max(s.Sent, s.Due) }

// slopes looks at the time since now - span, or since the first request was sent.
func (t *Trend) slopes(counted []Sample, span time.Duration, rules Rules) {
	from := t.Now
	for i := range counted {
		from = min(from, left(&counted[i]))
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
		start, end := left(s)-from, t.Now-from
		if s.End > 0 {
			end = s.End - from
		}
		share(&inFlight, start, end, piece)
		if came := rules.first(s) - from; rules.first(s) > 0 && came >= 0 && s.Failure == "" {
			p := &ttft[min(int(came/piece), trendPieces-1)]
			p.weight++
			p.at += (rules.first(s).Seconds() - p.at) / p.weight
			p.value += (rules.TTFT(s).Seconds() - p.value) / p.weight
		}
	}
	t.InFlight, t.TTFT = slopeOf(inFlight[:]), slopeOf(ttft[:])
}

// share adds a stay to the mean number in flight of each piece that it touches.
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

// slopeOf lays the line of weighted least squares through the points.
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
