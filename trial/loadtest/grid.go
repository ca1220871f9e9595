package loadtest

import (
	"fmt"
	"math"
	"strconv"

	"vllmtuner/trial/capacity"
)

// HighestText names the highest load of a grid that kept the SLO, and lower loads that broke it.
func HighestText(steps []capacity.Step, closed bool) string {
	h, below := capacity.Highest(steps)
	switch {
	case h.Limited != "" && !h.Met():
		return "no load is known to be within the SLO: " + h.Why
	case h.Bound == "":
		return h.Why
	case !h.Met():
		return "no load within the SLO: " + h.Why
	}
	text := fmt.Sprintf("%s is the highest within the SLO; %s", LoadText(h.Rate, closed), h.Why)
	if h.Limited != "" {
		text = fmt.Sprintf("%s is within the SLO, and may not be the highest: %s", LoadText(h.Rate, closed), h.Why)
	}
	for _, load := range below {
		text += fmt.Sprintf("; but %s failed", LoadText(load, closed))
	}
	return text
}

// LoadText names a load of the grid.
func LoadText(load float64, closed bool) string {
	if closed {
		return fmt.Sprintf("concurrency %g", load)
	}
	return fmt.Sprintf("%s req/s", RateText(load))
}

// RateText writes a rate with at least two digits behind the point: 0.50, and 0.125.
func RateText(rate float64) string {
	if cents := 100 * rate; math.Abs(cents-math.Round(cents)) > 1e-9*cents {
		return strconv.FormatFloat(rate, 'f', -1, 64)
	}
	return strconv.FormatFloat(rate, 'f', 2, 64)
}
