package calibrate

import (
	"context"
	"math"
	"slices"
)

const (
	// maxReleases limits how often refit fits again because holding a constant made the fit worse.
	maxReleases = 2
	// maxAdded is how much the cost per residual may rise because constants are held. A residual of one standard
	// deviation costs 0.5.
	maxAdded = 0.25
)

// A fit searches the values of constants that predict the measurements best.
type fit struct {
	list       []constant
	first      []float64 // first values of logs; held constants keep them
	logs       []float64
	separation separation
	residuals  []float64
	converged  bool
}

// newFit returns a fit that begins at the given logs.
func newFit(list []constant, first []float64) *fit {
	return &fit{list: list, first: first, logs: slices.Clone(first)}
}

// rough fits all constants, each with a penalty for the distance from its first value. The result shows how well the
// measurements can be predicted at all. refit begins with its values.
func (f *fit) rough(ctx context.Context, p problem) (err error) {
	penalised := p
	penalised.residuals = func(ctx context.Context, logs []float64) ([]float64, error) {
		residuals, err := p.residuals(ctx, logs)
		if err != nil {
			return nil, err
		}
		for k := range logs {
			residuals = append(residuals, (logs[k]-f.first[k])/believed)
		}
		return residuals, nil
	}
	residuals, converged, err := penalised.minimise(ctx, f.logs, indexes(len(f.list)))
	if residuals != nil { // minimise returns residuals even if the fit ended early
		f.residuals, f.converged = residuals[:len(residuals)-len(f.list)], converged
	}
	return err
}

// refit finds the constants that the measurements cannot separate from others. It holds them at their first values and
// fits the rest. It begins with the values that rough has found. It frees a held constant again if holding it makes the
// fit clearly worse.
func (f *fit) refit(ctx context.Context, p problem) (err error) {
	best := slices.Clone(f.logs)
	if f.residuals, err = p.residuals(ctx, best); err != nil {
		return err
	}
	j, err := p.jacobian(ctx, best, indexes(len(f.list)), f.residuals, true)
	if err != nil {
		return err
	}
	j = j.weighted(f.residuals)
	f.separation = separate(j, anchors(f.list))
	tolerated := maxAdded * float64(len(f.residuals))
	maxCost := cost(f.residuals) + tolerated
	for k, left := f.worstHeld(j, best); left*left/2 > tolerated; k, left = f.worstHeld(j, best) {
		f.separation.release(j, k)
	}
	for releases := 0; ; releases++ {
		copy(f.logs, best)
		f.hold()
		if f.residuals, f.converged, err = p.minimise(ctx, f.logs, f.separation.free()); err != nil {
			return err
		}
		k, left := f.worstHeld(j, best)
		if cost(f.residuals) <= maxCost || left == 0 || releases == maxReleases {
			return nil
		}
		f.separation.release(j, k)
	}
}

// worstHeld returns the held constant whose effect the free constants can replace least. left estimates the length of
// the residuals that remain when this constant returns to its first value and the free constants adapt. left is 0 if no
// constant is held.
func (f *fit) worstHeld(j slope, best []float64) (worst int, left float64) {
	for k := range f.list {
		if f.separation.known[k] || !f.separation.visible[k] {
			continue
		}
		rest := unexplained(j.Dense, k, f.separation.free())
		rest = math.Abs(f.first[k]-best[k]) * math.Sqrt(max(0, rest*rest-j.rough[k]))
		if rest > left {
			worst, left = k, rest
		}
	}
	return worst, left
}

// hold sets the constants that are not known to their first values.
func (f *fit) hold() {
	for k, known := range f.separation.known {
		if !known {
			f.logs[k] = f.first[k]
		}
	}
}
