package loadtest

import (
	"fmt"
	"io"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
)

// A progress shows how far one run is.
type progress struct {
	run    Run
	shown  *render.Progress
	length time.Duration // until the window ends; 0 when the run ends after a number of requests
}

func newProgress(w io.Writer, r Run) *progress {
	p := &progress{run: r, shown: render.NewProgress(w).Quietly()}
	if r.window > 0 {
		p.length = r.leadIn + r.window
	}
	return p
}

// show is called once a second.
func (p *progress) show(at bench.Progress) {
	step := p.step(at)
	p.shown.Show(render.Stage{
		Head: fmt.Sprint(p.run), Share: p.share(at), Until: render.After(p.left(at)), Step: step, Plain: fmt.Sprintf("%s  %s", p.run, step),
	})
}

// share is the part of the run that is over.
func (p *progress) share(at bench.Progress) float64 {
	if p.length > 0 {
		return at.Now.Seconds() / p.length.Seconds()
	}
	return float64(at.Ended) / float64(max(1, p.run.planned))
}

// step says in which phase the run is, and what it has measured.
func (p *progress) step(at bench.Progress) string {
	phase := "window"
	switch {
	case at.Counted == 0:
		phase = "lead-in"
	case at.RunOut, at.Counted >= p.run.planned:
		phase = "run-out"
	}
	text := fmt.Sprintf("%s %d/%d done, %d in flight", phase, at.Ended, p.run.planned, at.InFlight)
	if at.Failed > 0 {
		text += fmt.Sprintf(", %d failed", at.Failed)
	}
	if at.TTFT99 > 0 {
		text += fmt.Sprintf(", p99 TTFT %.0f ms", at.TTFT99)
	}
	return text
}

// left returns the remaining time, or 0 when it is not known.
func (p *progress) left(at bench.Progress) time.Duration {
	if p.length == 0 && at.Ended > 0 {
		return time.Duration(float64(at.Now) * float64(p.run.planned-at.Ended) / float64(at.Ended))
	}
	return p.length - at.Now
}
