package workload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// WithColdLeadIn returns the schedule with a salt (random text or token ids) at the start of each prompt of the
// lead-in. No prompt of the source starts with this salt. So the window finds nothing of the lead-in in a prefix cache.
// Prompts of the lead-in still share as much with each other as before.
func WithColdLeadIn(s Schedule, source Source) Schedule {
	return func(yield func(Arrival) bool) {
		var leadIn *salt
		for a := range s {
			if a.Phase == LeadIn {
				if leadIn == nil {
					leadIn = unknownSalt(source)
				}
				a.Request = leadIn.salted(a.Request)
			}
			if !yield(a) {
				return
			}
		}
	}
}

// A salt is the text, or the token ids, with which prompts start so that a prefix cache does not know them.
type salt struct {
	tokens []int32
	text   string
}

// unknownSalt returns a salt with which no prompt of the source starts. The salt uses token ids of the source, because
// the model knows these ids. All ids of the salt differ, because a prompt of the source may repeat one id a thousand
// times.
func unknownSalt(source Source) *salt {
	const samples = 16
	draw := chance(0, saltDraws, leadInStream, 0)
	var ids []int32
	for i := range samples {
		ids = append(ids, source.Request(PopulationStream, i).Tokens...)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	draw.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return &salt{slices.Clone(ids[:min(saltTokens, len(ids))]), saltText(draw)}
}

// saltText returns a random text for the start of a prompt. No other prompt starts with it.
func saltText(draw *rand.Rand) string { return fmt.Sprintf("[%08x] ", draw.Uint32()) }

// salted returns a copy of the request that starts with the salt. Token ids are overwritten, so their number stays the
// same. A text gets a few tokens longer.
func (t *salt) salted(r *Request) *Request {
	s := *r
	switch {
	case r.Tokens != nil:
		s.Tokens = slices.Clone(r.Tokens)
		copy(s.Tokens, t.tokens)
	case len(r.Messages) > 0:
		s.Messages = slices.Clone(r.Messages)
		s.Messages[0].Content = t.text + s.Messages[0].Content
	default:
		s.Text = t.text + r.Text
	}
	if r.Next != nil {
		s.Next = func(answer string) (*Request, time.Duration) {
			next, think := r.Next(answer)
			if next == nil {
				return nil, think
			}
			return t.salted(next), think
		}
	}
	return &s
}
