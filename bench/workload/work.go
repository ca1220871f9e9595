package workload

import "time"

// A Weigher computes the size of a request relative to the mean of its workload. It measures prompts in bytes if only
// the server can count their tokens.
type Weigher struct {
	prompts, answers []float64 // lengths of a sample of the workload
	prompt, answer   float64   // the means of these lengths
}

// These constants limit the sample of a workload that a Weigher reads. For an endless workload with usual lengths,
// endlessSample requests give means within about 2 %. For a finite workload, the sample is the whole workload, up to
// maxSample requests.
const (
	endlessSample = 8192
	maxSample     = 16384
)

// Weigh reads a sample of the workload. For live conversations it reads first turns.
func Weigh(source Source) *Weigher {
	n := min(source.Len(), maxSample)
	if n == 0 {
		n = endlessSample
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

// Sizes returns the sizes of a request's prompt and answer, relative to their means.
func (w *Weigher) Sizes(r *Request) (prompt, answer float64) {
	return w.relative(float64(length(r)), float64(r.OutputTokens))
}

func (w *Weigher) relative(prompt, answer float64) (float64, float64) {
	if w.prompt == 0 { // requests without text
		return 1, answer / w.answer
	}
	return prompt / w.prompt, answer / w.answer
}

// LongRun returns the sizes of n typical requests in sequence. No probe sends these requests.
func (w *Weigher) LongRun(n int) (prompts, answers []float64) {
	prompts, answers = make([]float64, n), make([]float64, n)
	for i := range n {
		prompts[i], answers[i] = w.relative(w.prompts[i%len(w.prompts)], w.answers[i%len(w.answers)])
	}
	return prompts, answers
}

// length returns the length of a prompt in tokens, or in bytes if only the server can count tokens.
func length(r *Request) int {
	if r.PromptTokens > 0 {
		return r.PromptTokens
	}
	return r.TextBytes()
}

// TextBytes returns the length of a prompt's text, or 0 for a prompt of token ids.
func (r *Request) TextBytes() int {
	n := len(r.Text)
	for _, m := range r.Messages {
		n += len(m.Content)
	}
	return n
}

// LongRun returns n arrival times in seconds, at one request a second, with the plan's distribution of gaps. No probe uses
// these arrivals.
func (p Plan) LongRun(n int) []float64 {
	p.Rate, p.Draw = 1, 0
	c := p.clock(PopulationStream)
	due := make([]float64, n)
	for i := range due {
		due[i] = c.next().Seconds()
	}
	return due
}

// Before cuts a schedule. It keeps all arrivals up to the last counted one, and a short run-out after them. The run-out
// lasts at most reach, and not longer than the schedule before it.
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
