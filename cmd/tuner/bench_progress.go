package main

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/schollz/progressbar/v3"

	"vllmtuner/bench"
)

// A benchProgress tells how far one run is: on a terminal in a bar, else in a line now and then. It sees the run once a
// second, through the Stop of the client.
type benchProgress struct {
	w       io.Writer
	shot    shot
	bar     *progressbar.ProgressBar // nil when w is no terminal
	began   time.Time
	last    time.Time
	planned time.Duration // until the window ends; 0 when it ends by number
}

func newBenchProgress(w io.Writer, s shot) *benchProgress {
	p := &benchProgress{w: w, shot: s, began: time.Now(), last: time.Now()}
	steps := s.planned
	if s.window > 0 {
		p.planned = s.leadIn + s.window
		steps = int(p.planned / time.Second)
	}
	p.bar = terminalBar(w, max(1, steps))
	return p
}

// watch returns a Stop that shows what it sees, and asks the other one, which may be nil.
func (p *benchProgress) watch(stop bench.Stop) bench.Stop {
	return func(now time.Duration, counted []bench.Sample) bool {
		p.show(now, counted)
		return stop != nil && stop(now, counted)
	}
}

// lineEvery is how often a log is told that a run goes on.
const lineEvery = 10 * time.Second

func (p *benchProgress) show(now time.Duration, counted []bench.Sample) {
	if p.bar == nil && time.Since(p.last) < lineEvery {
		return
	}
	p.last = time.Now()
	done, text := p.text(now, counted)
	if p.bar == nil {
		fmt.Fprintf(p.w, "%s  %s%s\n", p.shot, text, p.left(now, done))
		return
	}
	step := done
	if p.planned > 0 {
		step = int(now / time.Second)
	}
	p.bar.Describe(text)
	_ = p.bar.Set(min(step, p.bar.GetMax()-1)) // a bar that cannot be drawn is no reason to stop
}

// text says in a few words where the run is.
func (p *benchProgress) text(now time.Duration, counted []bench.Sample) (done int, text string) {
	inFlight, failed := 0, 0
	for i := range counted {
		switch s := &counted[i]; {
		case s.End > 0:
			done++
			if s.Failure != "" {
				failed++
			}
		case s.Sent > 0:
			inFlight++
		}
	}
	phase := "window"
	switch {
	case len(counted) == 0:
		phase = "lead-in"
	case p.planned > 0 && now >= p.planned, p.planned == 0 && len(counted) >= p.shot.planned:
		phase = "run-out"
	}
	text = fmt.Sprintf("%s %d/%d done, %d in flight", phase, done, p.shot.planned, inFlight)
	if failed > 0 {
		text += fmt.Sprintf(", %d failed", failed)
	}
	if ttft, ok := runningTTFT(counted); ok {
		text += fmt.Sprintf(", p99 TTFT %.0f ms", ttft)
	}
	return done, text
}

// recent is over how many requests the running percentile goes: sorting all would cost the load generator its punctuality.
const recent = 2000

// runningTTFT is the p99 of the last requests that have a first token, in milliseconds.
func runningTTFT(counted []bench.Sample) (ms float64, ok bool) {
	var all []float64
	for _, s := range counted[max(0, len(counted)-recent):] {
		if s.First > 0 {
			all = append(all, float64(s.TTFT())/float64(time.Millisecond))
		}
	}
	slices.Sort(all)
	return bench.Percentile(all, 99), len(all) > 0
}

// left says how long it will take still, for a log; a bar has its own.
func (p *benchProgress) left(now time.Duration, done int) string {
	left := p.planned - now
	if p.planned == 0 && done > 0 {
		left = now * time.Duration(p.shot.planned-done) / time.Duration(done)
	}
	if left < time.Second {
		return ""
	}
	return fmt.Sprintf(", %s left", left.Round(time.Second))
}

// done removes the bar.
func (p *benchProgress) done() error {
	if p.bar == nil {
		return nil
	}
	return p.bar.Clear()
}
