package calibrate

import (
	"context"
	"math"
	"slices"
)

const (
	// maxReleases limits how often refit fits again because holding a constant made the fit worse.
	maxReleases = 2
	// maxAdded is the largest increase of the cost per residual that held constants may cause. A residual of one
	// standard deviation costs 0.5.
	maxAdded = 0.25
)

// A fit searches for the values of constants that predict the measurements best.
type fit struct {
	list       []constant
	first      []float64 // first values of the field logs; held constants keep these values
	logs       []float64
	separation separation
	residuals  []float64
	converged  bool
}

// newFit returns a fit that begins at the given logs.
func newFit(list []constant, first []float64) *fit {
	return &fit{list: list, first: first, logs: slices.Clone(first)}
}

// fitAll fits all constants. A penalty grows with the distance of a constant from its first value. The residuals show
// how well the profile can predict the measurements if all constants are free. refit begins with the values that fitAll
// has found.
func (f *fit) fitAll(ctx context.Context, p problem) (err error) {
	penalised := p
	penalised.residuals = func(ctx context.Context, logs []float64) ([]float64, error) {
		residuals, err := p.residuals(ctx, logs)
		if err != nil {
			return nil, err
		}
		for k := range logs {
			residuals = append(residuals, (logs[k]-f.first[k])/priorWidth)
		}
		return residuals, nil
	}
	residuals, converged, err := penalised.minimise(ctx, f.logs, indexes(len(f.list)))
	if residuals != nil { // minimise returns residuals even if the fit ended early
		f.residuals, f.converged = residuals[:len(residuals)-len(f.list)], converged
	}
	return err
}

// refit finds the constants that the measurements cannot separate from others. It holds these constants at their first
// values and fits the rest. It begins with the values that fitAll has found. If holding a constant makes the fit
// clearly worse, refit frees that constant again.
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
	for k, remainder := f.worstHeld(j, best); remainder*remainder/2 > tolerated; k, remainder = f.worstHeld(j, best) {
		f.separation.release(j, k)
	}
	for releases := 0; ; releases++ {
		copy(f.logs, best)
		f.hold()
		if f.residuals, f.converged, err = p.minimise(ctx, f.logs, f.separation.free()); err != nil {
			return err
		}
		k, remainder := f.worstHeld(j, best)
		if cost(f.residuals) <= maxCost || remainder == 0 || releases == maxReleases {
			return nil
		}
		f.separation.release(j, k)
	}
}

// worstHeld returns the held constant whose effect the free constants can replace least. Suppose that this constant
// returns to its first value and the free constants adapt. Then remainder is the estimated length of the residuals. If
// no constant is held, remainder is 0.
func (f *fit) worstHeld(j slope, best []float64) (worst int, remainder float64) {
	for k := range f.list {
		if f.separation.known[k] || !f.separation.visible[k] {
			continue
		}
		rest := unexplained(j.Dense, k, f.separation.free())
		rest = math.Abs(f.first[k]-best[k]) * math.Sqrt(max(0, rest*rest-j.rough[k]))
		if rest > remainder {
			worst, remainder = k, rest
		}
	}
	return worst, remainder
}

// hold gives each constant that is not known its first value.
func (f *fit) hold() {
	for k, known := range f.separation.known {
		if !known {
			f.logs[k] = f.first[k]
		}
	}
}
