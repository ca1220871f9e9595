package workload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// WithColdLeadIn returns the schedule with new beginnings for the prompts of the lead-in. No prompt of the source has
// such a beginning. So the window finds nothing of the lead-in in a prefix cache. Prompts of the lead-in still share as
// much with each other as before.
func WithColdLeadIn(s Schedule, source Source) Schedule {
	return func(yield func(Arrival) bool) {
		var b *beginning
		for a := range s {
			if a.Phase == LeadIn {
				if b == nil {
					b = unknownBeginning(source)
				}
				a.Request = b.of(a.Request)
			}
			if !yield(a) {
				return
			}
		}
	}
}

// A beginning is a new start of a prompt, as token ids and as text.
type beginning struct {
	tokens []int32
	text   string
}

// unknownBeginning returns a beginning that no prompt of the source has. It uses token ids of the source, because the
// model knows them. All ids of the beginning differ, because a prompt of the source may repeat one id a thousand times.
func unknownBeginning(source Source) *beginning {
	const samples = 16
	draw := chance(0, saltDraws, LeadInStream, 0)
	var ids []int32
	for i := range samples {
		ids = append(ids, source.Request(PopulationStream, i).Tokens...)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	draw.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return &beginning{slices.Clone(ids[:min(saltTokens, len(ids))]), saltText(draw)}
}

// saltText returns a random text for the start of a prompt. No other prompt starts with it.
func saltText(draw *rand.Rand) string { return fmt.Sprintf("[%08x] ", draw.Uint32()) }

// of returns a copy of the request with this beginning. Token ids are overwritten, so their number stays the same. A
// text gets a few tokens longer.
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
