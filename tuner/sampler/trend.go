package sampler

import (
	"slices"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// minTrend is the number of capacities that a source of priors needs for a trend. Fewer priors are values with a large
// error.
const minTrend = 12

// minPredicted is the number of predictions of the simulator that are needed for a trend. If there are fewer, they are
// ignored, because a prediction is not a measured value.
const minPredicted = 3

// A trend is the shape of the capacity over the space, as one source of priors knows it. A source is a simulator, an
// earlier study or another tool. The model learns how much of the shape is true here: the expected capacity is a +
// b·trend, and b may shrink to 0.
type trend struct {
	source string
	belief *belief
	best   []space.Point // best points of the source
	centre float64       // mean of the trend over the study's measured values, without bounds; ln units
	misfit float64       // how far the source misses what the study has measured, ln units; 0 if it is not known
}

// trends returns a trend for each source with enough priors that have a capacity. Predictions of the simulator need
// minPredicted priors, and other sources need minTrend.
func trends(s *space.Space, history []studies.Trial) (all []trend) {
	var sources []string
	priors := map[string][]studies.Trial{}
	for _, t := range history {
		if t.Number >= 0 {
			continue
		}
		if !slices.Contains(sources, t.Source) {
			sources = append(sources, t.Source)
		}
		// A prior has a negative number, and may be predicted. The belief of a trend treats the trials of its source as its
		// own, so they get other numbers.
		if t.Predicted() {
			t.Result.Capacity.RatioErr = 0 // the misfit is the error of the whole trend, and not the noise of one value
		}
		t.Number, t.PredictedFor = len(priors[t.Source]), 0
		priors[t.Source] = append(priors[t.Source], t)
	}
	for i, source := range sources {
		least, misfit := minTrend, 0.0
		if first := history[slices.IndexFunc(history, func(t studies.Trial) bool { return t.Source == source })]; first.Predicted() {
			least, misfit = minPredicted, first.Result.Capacity.RatioErr
		}
		l := learn(s, -1, priors[source])
		if len(l.values) < least {
			continue
		}
		one := trend{source: source, misfit: misfit, belief: newBelief(s, l, stream(uint64(i), "trend", len(l.values)))}
		one.best = one.belief.bestPoints(priors[source], 5)
		all = append(all, one)
	}
	return all
}

// centre gives each trend its mean over the points of the exact values, or over the points of all values if none is
// exact. So the slope of a trend does not move the mean of the values.
func (l *trainingSet) centre(parameters int) {
	values := slices.DeleteFunc(slices.Clone(l.values), func(d datum) bool { return d.side != exact })
	if len(values) == 0 {
		values = l.values
	}
	for i := range l.trends {
		for _, d := range values {
			l.trends[i].centre += d.row[parameters+i].at / float64(len(values))
		}
	}
}

// valueAt returns the trend at a row, in ln units.
func (t *trend) valueAt(r row) float64 {
	sum := 0.0
	for _, p := range t.belief.processes {
		sum += p.meanAt(r)
	}
	return sum / float64(len(t.belief.processes))
}

// isTrend reports whether a trial counts only through the trend of its source.
func (l *trainingSet) isTrend(t *studies.Trial) bool {
	return t.Predicted() || t.Number < 0 && slices.ContainsFunc(l.trends, func(one trend) bool { return one.source == t.Source })
}

// centres returns the centre of each trend.
func (l *trainingSet) centres() (all []float64) {
	for _, t := range l.trends {
		all = append(all, t.centre)
	}
	return all
}

// misfit returns the smallest known misfit of the trends; 0 if none is known.
func (l *trainingSet) misfit() (least float64) {
	for _, t := range l.trends {
		if t.misfit > 0 && (least == 0 || t.misfit < least) {
			least = t.misfit
		}
	}
	return least
}

// row returns a point as a row, with the value of each trend at the point.
func (l *trainingSet) row(s *space.Space, p space.Point) row {
	r := rowOf(s, p)
	own := r
	for i := range l.trends {
		r = append(r, coordinate{at: l.trends[i].valueAt(own)})
	}
	return r
}
