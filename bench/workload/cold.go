package workload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// WithColdLeadIn returns the schedule with a lead-in whose prompts begin as no other prompt of the source does. The window then finds
// nothing in a prefix cache of what the lead-in has left there. Among each other the prompts of the lead-in share what they shared before.
func WithColdLeadIn(s Schedule, source Source) Schedule {
	return func(yield func(Arrival) bool) {
		var b *beginning
		for a := range s {
			if a.Phase == LeadIn {
				if b == nil {
					b = strange(source)
				}
				a.Request = b.of(a.Request)
			}
			if !yield(a) {
				return
			}
		}
	}
}

// A beginning takes the place of a prompt's own.
type beginning struct {
	tokens []int32
	text   string
}

// strange returns a beginning that no prompt of the source has. Its ids are the source's own, so that the model knows all of them: several
// different ones, for a source may repeat one id a thousand times.
func strange(source Source) *beginning {
	const looked = 16
	draw := chance(0, saltDraws, LeadInStream, 0)
	var ids []int32
	for i := range looked {
		ids = append(ids, source.Request(PopulationStream, i).Tokens...)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	draw.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return &beginning{slices.Clone(ids[:min(saltTokens, len(ids))]), saltText(draw)}
}

// saltText is a beginning that no text has.
func saltText(draw *rand.Rand) string { return fmt.Sprintf("[%08x] ", draw.Uint32()) }

// of returns the request with this beginning. Token ids are replaced, so that no length changes; texts become some tokens longer.
func (b *beginning) of(r *Request) *Request {
	s := *r
	switch {
	case r.Tokens != nil:
		s.Tokens = slices.Clone(r.Tokens)
		copy(s.Tokens, b.tokens)
	case len(r.Messages) > 0:
		s.Messages = slices.Clone(r.Messages)
		s.Messages[0].Content = b.text + s.Messages[0].Content
	default:
		s.Text = b.text + r.Text
	}
	if r.Next != nil {
		s.Next = func(answer string) (*Request, time.Duration) {
			next, think := r.Next(answer)
			if next == nil {
				return nil, think
			}
			return b.of(next), think
		}
	}
	return &s
}
