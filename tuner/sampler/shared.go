package sampler

import (
	"math"
	"slices"

	"vllmtuner/studies"
)

// Trials that raced against the same best trial share an error. Their capacities are that trial's capacity times a gain,
// so the best trial's own error is in all of them. And all of them are compared with the same probes of the best trial,
// which may have been lucky. The model must know that: otherwise eight points that all seem 7 % worse than a lucky best
// would be eight proofs against it.
//
// Against 18 best trials of simulated servers with at least three challengers each (110 races), the errors of the gains
// differed between challengers by half of their stated standard error (root mean square); the rest was common to all
// challengers. luckShare is the common part of the variance. With such errors of 6 %, the recommended point of the H200's
// surface is 3.1 ± 0.2 % below the best after 16 trials, and 3.5 % if the errors are taken as independent (the same 100
// searches). On five other surfaces both are equal.
const luckShare = 0.75

// A part is one part of the error of a value: the error of one trial's own probes, or the luck of a best trial.
type part struct {
	trial  int     // index in the history
	luck   bool    // whether it is the luck of that trial in races, and not the error of its own probes
	stdErr float64 // ln units
}

// An errorSum is the error of one value as a sum of independent parts.
type errorSum []part

// errorsOf returns the error of each trial of the history as a sum of parts. A trial that did not race has only its own
// error. A trial that raced has its own error, the luck of the best trial, and all parts of the best trial's error.
func errorsOf(history []studies.Trial) []errorSum {
	all := make([]errorSum, len(history))
	best, version := -1, ""
	for i := range history {
		t := &history[i]
		c := t.Result.Capacity
		present := t.Number >= 0 && t.Source == "" // and not of another study, or of this study before the world changed
		if present && t.Version != "" && t.Version != version {
			version, best = t.Version, -1 // servers of two versions do not race
		}
		if present && c.RatioErr > 0 && best >= 0 {
			own := math.Sqrt(max(0, squared(c.RatioErr)-squared(history[best].Result.Capacity.RatioErr)))
			all[i] = append(slices.Clone(all[best]), part{best, true, math.Sqrt(luckShare) * own}, part{i, false, own})
		} else {
			d, _ := valueOf(t)
			all[i] = errorSum{{i, false, d.err}}
		}
		if present && t.Met() && (best < 0 || c.Carried() > history[best].Result.Capacity.Carried()) {
			best = i
		}
	}
	return all
}

// common returns the covariance of two errors, apart for the errors of own probes and for luck.
func (e errorSum) common(other errorSum) (own, luck float64) {
	for _, p := range e {
		for _, q := range other {
			switch {
			case p.trial != q.trial || p.luck != q.luck:
			case p.luck:
				luck += p.stdErr * q.stdErr
			default:
				own += p.stdErr * q.stdErr
			}
		}
	}
	return own, luck
}

// A sharing holds the covariances of the errors of all values. The errors of a trial's own probes are multiplied by the
// factor of the hyperparameters, because much of them is common to all trials. The luck is not.
type sharing struct{ own, luck covariances }

// covariances is a symmetric matrix of covariances.
type covariances struct {
	n     int
	cells []float64 // row by row
}

func newCovariances(n int) covariances { return covariances{n, make([]float64, n*n)} }

func (c *covariances) at(i, j int) float64 { return c.cells[i*c.n+j] }

// grown returns the matrix with more data, whose errors are independent; nil stays nil.
func (c *covariances) grown(more int) *covariances {
	if c == nil {
		return nil
	}
	all := newCovariances(c.n + more)
	for i := range c.n {
		copy(all.cells[i*all.n:], c.cells[i*c.n:(i+1)*c.n])
	}
	return &all
}

// share returns what the errors of the training set's values have in common. The values that standardise compressed have
// smaller errors.
func (l *trainingSet) share(history []studies.Trial) *sharing {
	sums := errorsOf(history)
	s := &sharing{newCovariances(len(l.values)), newCovariances(len(l.values))}
	for i, a := range l.trials {
		for j, b := range l.trials {
			compressed := l.values[i].compressed * l.values[j].compressed
			own, luck := sums[a].common(sums[b])
			s.own.cells[i*s.own.n+j] = own * compressed
			s.luck.cells[i*s.luck.n+j] = luck * compressed
		}
	}
	return s
}

// covariances returns the covariances of the errors; nil if s is nil.
func (s *sharing) covariances(factor float64) *covariances {
	if s == nil {
		return nil
	}
	all := newCovariances(s.own.n)
	for i := range all.cells {
		all.cells[i] = squared(factor)*s.own.cells[i] + s.luck.cells[i]
	}
	return &all
}
