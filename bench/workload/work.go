package workload

import "time"

// A Weigher says how large a request is, relative to the mean of its workload. Where only the server can count a prompt's tokens its
// bytes stand for them.
type Weigher struct {
	prompts, answers []float64 // of the requests that stand for the long run
	prompt, answer   float64   // their means
}

// How many requests the long run is taken from: an endless workload is asked for so many, with which its means are right to about
// 2 % where lengths are spread as usual, and a finite one for no more than so many.
const (
	weighed     = 8192
	mostWeighed = 16384
)

// Weigh reads the workload, once. Live conversations are weighed by their first turns.
func Weigh(source Source) *Weigher {
	n := min(source.Len(), mostWeighed)
	if n == 0 {
		n = weighed
	}
	w := &Weigher{prompts: make([]float64, n), answers: make([]float64, n)}
	for i := range n {
		r := source.Request(PopulationStream, i)
		w.prompts[i], w.answers[i] = float64(length(r)), float64(r.OutputTokens)
		w.prompt += w.prompts[i] / float64(n)
		w.answer += w.answers[i] / float64(n)
	}
	return w
}

// Sizes returns how large the prompt and the answer of a request are: 1 in the mean.
func (w *Weigher) Sizes(r *Request) (prompt, answer float64) {
	return w.relative(float64(length(r)), float64(r.OutputTokens))
}

func (w *Weigher) relative(prompt, answer float64) (float64, float64) {
	if w.prompt == 0 { // requests without a text
		return 1, answer / w.answer
	}
	return prompt / w.prompt, answer / w.answer
}

// LongRun returns the sizes of n requests as they follow each other in the long run. No probe sends them.
func (w *Weigher) LongRun(n int) (prompts, answers []float64) {
	prompts, answers = make([]float64, n), make([]float64, n)
	for i := range n {
		prompts[i], answers[i] = w.relative(w.prompts[i%len(w.prompts)], w.answers[i%len(w.answers)])
	}
	return prompts, answers
}

// length is that of a prompt in tokens, or in bytes.
func length(r *Request) int {
	if r.PromptTokens > 0 {
		return r.PromptTokens
	}
	return r.TextBytes()
}

// TextBytes is the length of a prompt's text; 0 of one in tokens.
func (r *Request) TextBytes() int {
	n := len(r.Text)
	for _, m := range r.Messages {
		n += len(m.Content)
	}
	return n
}

// LongRun returns the first n arrivals at one request a second, in seconds, as the plan has them but for its rate and its phases. No
// probe has them.
func (p Plan) LongRun(n int) []float64 {
	p.Rate, p.Draw = 1, 0
	c := p.clock(PopulationStream)
	due := make([]float64, n)
	for i := range due {
		due[i] = c.next().Seconds()
	}
	return due
}

// Before yields the arrivals of a schedule until a time after the last counted one, and no further than as long again.
func Before(s Schedule, reach time.Duration) Schedule {
	return func(yield func(Arrival) bool) {
		last := time.Duration(0)
		s(func(a Arrival) bool {
			if a.Phase != RunOut {
				last = a.Due
			} else if a.Due > last+min(reach, last) {
				return false
			}
			return yield(a)
		})
	}
}
