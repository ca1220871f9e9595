package calibrate

import (
	"context"
	"math"
	"slices"
)

const (
	// mostReleases is how many more constants may turn out to be needed than the slope says.
	mostReleases = 2
	// worse is by how much a fit may be worse for what is held, for each residual, whose cost is 0.5 where it is one standard
	// deviation.
	worse = 0.25
)

// A fit is constants that were moved to where they tell measurements best.
type fit struct {
	list      []constant
	first     []float64 // logs to begin with, and of what is held
	logs      []float64
	reading   reading
	residuals []float64
	converged bool
}

// newFit begins with constants where they are.
func newFit(list []constant, first []float64) *fit {
	return &fit{list: list, first: first, logs: slices.Clone(first)}
}

// rough moves all constants, each drawn to its first value by what was believed of it, to see how well measurements can be told at
// all. It reads nothing into where they come to.
func (f *fit) rough(ctx context.Context, p problem) (err error) {
	drawn := p
	drawn.residuals = func(ctx context.Context, logs []float64) ([]float64, error) {
		residuals, err := p.residuals(ctx, logs)
		if err != nil {
			return nil, err
		}
		for k := range logs {
			residuals = append(residuals, (logs[k]-f.first[k])/believed)
		}
		return residuals, nil
	}
	residuals, converged, err := drawn.minimise(ctx, f.logs, f.all())
	if residuals != nil { // also those of a fit that was ended
		f.residuals, f.converged = residuals[:len(residuals)-len(f.list)], converged
	}
	return err
}

// settle holds what the measurements do not tell from other constants at its first value, and fits the rest. It is asked where
// all constants are moved. What must not be held after all, because the fit is then clearly worse, is let go again.
func (f *fit) settle(ctx context.Context, p problem) (err error) {
	best := slices.Clone(f.logs)
	if f.residuals, err = p.residuals(ctx, best); err != nil {
		return err
	}
	j, err := p.jacobian(ctx, best, f.all(), f.residuals, true)
	if err != nil {
		return err
	}
	j = j.weighted(f.residuals)
	f.reading = separate(j, anchors(f.list))
	bearable := worse * float64(len(f.residuals))
	most := cost(f.residuals) + bearable
	for k, left := f.astray(j, best); left*left/2 > bearable; k, left = f.astray(j, best) {
		f.reading.tell(j, k)
	}
	for releases := 0; ; releases++ {
		copy(f.logs, best)
		f.hold()
		if f.residuals, f.converged, err = p.minimise(ctx, f.logs, f.free()); err != nil {
			return err
		}
		k, left := f.astray(j, best)
		if cost(f.residuals) <= most || left == 0 || releases == mostReleases {
			return nil
		}
		f.reading.tell(j, k)
	}
}

// astray returns the held constant that the others stand in for worst, and the length of the residuals that are left when it is
// moved to its first value; 0 when none is.
func (f *fit) astray(j slope, best []float64) (worst int, most float64) {
	for k := range f.list {
		if f.reading.told[k] || !f.reading.shows[k] {
			continue
		}
		left := unexplained(j.Dense, k, f.free())
		left = math.Abs(f.first[k]-best[k]) * math.Sqrt(max(0, left*left-j.rough[k]))
		if left > most {
			worst, most = k, left
		}
	}
	return worst, most
}

func (f *fit) all() []int {
	all := make([]int, len(f.list))
	for k := range all {
		all[k] = k
	}
	return all
}

// free are the constants that are told.
func (f *fit) free() (free []int) {
	for k, told := range f.reading.told {
		if told {
			free = append(free, k)
		}
	}
	return free
}

// hold takes what is not told back to its first value.
func (f *fit) hold() {
	for k, told := range f.reading.told {
		if !told {
			f.logs[k] = f.first[k]
		}
	}
}
