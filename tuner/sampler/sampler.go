// Package sampler turns the history of a study into the next point to try. It never measures anything.
package sampler

import (
	"errors"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// ErrExhausted is returned by Next when the sampler has no further point to offer.
var ErrExhausted = errors.New("the sampler has no further point")

// A Sampler chooses the next point. Next is a function of its arguments and the sampler's seed alone, so that a study
// resumed after a kill chooses the same points.
type Sampler interface {
	Next(number int, history []studies.Trial) (space.Point, error)
}
