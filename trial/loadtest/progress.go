package loadtest

import (
	"fmt"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
)

// stage is how far the run is.
func (r Run) stage(at bench.Progress) render.Stage {
	step := r.step(at)
	s := render.Stage{Head: r.String(), Step: step, Plain: fmt.Sprintf("%s  %s", r, step), Share: float64(at.Ended) / float64(max(1, r.planned))}
	switch {
	case r.window > 0:
		length := r.leadIn + r.window
		s.Share, s.Until = at.Now.Seconds()/length.Seconds(), render.After(length-at.Now)
	case at.Ended > 0:
		s.Until = render.After(time.Duration(float64(at.Now) * float64(r.planned-at.Ended) / float64(at.Ended)))
	}
	return s
}

// step says in which phase the run is, and what it has measured.
func (r Run) step(at bench.Progress) string {
	phase := "window"
	switch {
	case at.Counted == 0:
		phase = "lead-in"
	case at.RunOut, at.Counted >= r.planned:
		phase = "run-out"
	}
	text := fmt.Sprintf("%s %d/%d done, %d in flight", phase, at.Ended, r.planned, at.InFlight)
	if at.Failed > 0 {
		text += fmt.Sprintf(", %d failed", at.Failed)
	}
	if at.TTFT99 > 0 {
		text += fmt.Sprintf(", p99 TTFT %.0f ms", at.TTFT99)
	}
	return text
}
