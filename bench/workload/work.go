package workload

import "time"

// A Weigher says how large a request is, relative to the mean of its workload. Where only the server can count a prompt's tokens its
// bytes stand for them.
type Weigher struct {
	prompt, output float64 // means
}

// weighed is how many requests of an endless workload its means are taken from: with the usual spreads of lengths they are then
// right to about 2 %.
const weighed = 8192

// Weigh reads the workload for its means. Live conversations are weighed by their first turns.
func Weigh(source Source) Weigher {
	n := source.Len()
	if n == 0 {
		n = weighed
	}
	var w Weigher
	for i := range min(n, weighed) {
		r := source.Request(PopulationStream, i)
		w.prompt += float64(size(r))
		w.output += float64(r.OutputTokens)
	}
	w.prompt /= float64(min(n, weighed))
	w.output /= float64(min(n, weighed))
	return w
}

// Sizes returns how large the prompt and the answer of a request are: 1 in the mean.
func (w Weigher) Sizes(r *Request) (prompt, answer float64) {
	prompt, answer = 1, float64(r.OutputTokens)/w.output
	if w.prompt > 0 {
		prompt = float64(size(r)) / w.prompt
	}
	return prompt, answer
}

// size is the length of a prompt in tokens, or in bytes.
func size(r *Request) int {
	if r.PromptTokens > 0 {
		return r.PromptTokens
	}
	n := len(r.Text)
	for _, m := range r.Messages {
		n += len(m.Content)
	}
	return n
}

// LongRun yields arrivals at one request a second for ever, as the plan has them but for its rate and its phases: of requests and
// times that no probe sends.
func (p Plan) LongRun() Schedule {
	return func(yield func(Arrival) bool) {
		p.Rate, p.Draw = 1, 0
		c := p.clock(PopulationStream)
		n := p.Source.Len()
		if n == 0 {
			n = weighed
		}
		for i := 0; ; i++ {
			// After weighed requests an endless source begins again, as no more are drawn than need be.
			if !yield(Arrival{c.next(), Window, i, p.Source.Request(PopulationStream, i%n)}) {
				return
			}
		}
	}
}

// Before yields the arrivals of a schedule until a time after the last counted one.
func Before(s Schedule, reach time.Duration) Schedule {
	return func(yield func(Arrival) bool) {
		last := time.Duration(0)
		s(func(a Arrival) bool {
			if a.Phase != RunOut {
				last = a.Due
			} else if a.Due > last+reach {
				return false
			}
			return yield(a)
		})
	}
}
