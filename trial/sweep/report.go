package sweep

import (
	"errors"
	"fmt"
	"slices"

	"vllmtuner/trial/loadtest"
)

// A Report compares the configs of a sweep by their measurements so far, and writes them as text, CSV and JSON.
type Report struct{ comparison }

// Report compares the measurements so far.
func (s *Sweep) Report() Report { return Report{s.compare()} }

// ErrNoConfigKept is the outcome if no config kept the SLO at a load for which the load generator was in time.
var ErrNoConfigKept = errors.New("no config kept the SLO at any load")

// Outcome returns the error of a completed sweep. It is nil if at least one config kept the SLO.
func (s Report) Outcome() error {
	switch {
	case !s.measuredAny():
		return errors.New("no config could be measured; the table says why")
	case len(s.best) > 0:
		return nil
	case slices.ContainsFunc(s.all, func(r configResult) bool { return r.Limited != "" }):
		return fmt.Errorf("%w while the load generator was on time; %s", ErrNoConfigKept, loadtest.MoreCores)
	}
	return ErrNoConfigKept
}
