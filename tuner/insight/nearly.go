package insight

import (
	"cmp"
	"math"
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

const (
	// The constant good is the largest loss of capacity of a trial that is nearly as good as the best one.
	good = 0.01
	// maxLoss is the largest measured loss. A trial that lost more is not called nearly as good, even if its interval
	// is so wide that it may be nearly as good.
	maxLoss = 0.03
	// muchNearer is for a trial that changes as many flags as the best trial. Such a trial counts as nearer only if its
	// distance to the default is at most this fraction of the best trial's distance.
	muchNearer = 0.5
)

// A distance says how far a point is from the server's default.
type distance struct {
	changes int     // number of flags with another value
	far     float64 // sum of the changes in the unit cube; a flag without an order or without a known default counts as 0.5
}

// nearly returns the trial that is nearest to the default, among those that are nearly as good as the best. It returns
// nil if no such trial is nearer than the best one.
func nearly(s *space.Space, best report.Winner, trials []studies.Trial) *report.Nearly {
	byDefault := defaultOf(s, trials)
	from := func(t studies.Trial) distance { return distanceOf(s, byDefault, t.Point) }
	of := from(best.Found)
	var found *report.Nearly
	var nearest distance
	for _, t := range trials {
		d := from(t)
		nearer := d.changes < of.changes || d.changes == of.changes && d.far <= muchNearer*of.far
		if !nearer || t.Number == best.Found.Number || found != nil && !d.less(nearest) {
			continue
		}
		if n, ok := compared(t, best, trials); ok {
			changed := changesOf(byDefault, t.Point)
			n.Args, n.Env, n.Changes, n.Best = s.Args(changed), changed.Env(), d.changes, of.changes
			found, nearest = n, d
		}
	}
	return found
}

func (d distance) less(other distance) bool {
	return cmp.Or(cmp.Compare(d.changes, other.changes), cmp.Compare(d.far, other.far)) < 0
}

// compared compares a trial with the best one. It reports false if the trial is not nearly as good. A confirmed point
// counts only by its confirmation, which is compared with the confirmation of the best trial.
func compared(t studies.Trial, best report.Winner, trials []studies.Trial) (*report.Nearly, bool) {
	against := best.Found
	isConfirmation := func(c studies.Trial) bool {
		return c.Origin == studies.Confirmed && c.State == studies.Done && c.Point.String() == t.Point.String()
	}
	if t.Origin == studies.Confirmed {
		against = best.Trial
		if against.Origin != studies.Confirmed {
			return nil, false
		}
	} else if slices.ContainsFunc(trials, isConfirmation) {
		return nil, false
	}
	r := t.Result
	lost := r.Outcome == trial.Dropped && r.Class == serverctl.DroppedByRace && r.Capacity.Bound == capacity.Estimated
	if t.State != studies.Done || !t.Counts() || !t.Met() && !lost || r.Class == serverctl.ClientLimited {
		return nil, false
	}
	least := against.Result.Capacity
	least.Rate *= 1 - good
	c, ok := capacity.Compare(least, r.Capacity)
	ratio := r.Capacity.Rate / against.Result.Capacity.Rate
	if !ok || c.Distinguishable() || ratio < 1-maxLoss {
		return nil, false
	}
	return &report.Nearly{
		Trial: t.Number, Origin: t.Origin, Rate: r.Capacity.Rate, Estimated: r.Capacity.Bound == capacity.Estimated,
		Ratio: ratio, Within: good, Probable: 1 - c.Better,
	}, true
}

// defaultOf returns the values of the searched flags in the server's default, as far as they are known.
func defaultOf(s *space.Space, trials []studies.Trial) space.Point {
	p, _ := sampler.Complete(s, studies.Trial{})
	for _, t := range trials {
		if t.Origin == studies.Default {
			known, _ := sampler.Complete(s, t)
			if len(known) > len(p) {
				p = known
			}
		}
	}
	for name, text := range p { // a server may report 0.90
		if plain, err := s.Parameter(name).Read(text); err == nil {
			p[name] = plain
		}
	}
	return p
}

// changesOf returns the part of a point that differs from the default.
func changesOf(byDefault, p space.Point) space.Point {
	changed := space.Point{}
	for name, text := range p {
		if usual, known := byDefault[name]; !known || usual != text {
			changed[name] = text
		}
	}
	return changed
}

func distanceOf(s *space.Space, byDefault, p space.Point) distance {
	changed := changesOf(byDefault, p)
	d := distance{changes: len(changed)}
	at, _ := s.Unit(changed)
	usual, known := s.Unit(byDefault)
	for i, q := range s.Parameters() {
		if _, changes := changed[q.Name]; !changes {
			continue
		}
		if far := math.Abs(at[i] - usual[i]); known[i] && q.Kind != space.Categorical && q.Kind != space.JSON {
			d.far += far
		} else {
			d.far += 0.5
		}
	}
	return d
}
