package workload

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// A cold lead-in comes from WithColdLeadIn. None of its prompts begins like a prompt of the window, whether it has
// tokens, text or messages. Prompts of the lead-in still share as much with each other as before. The window does not
// change.
func TestAColdLeadInSharesNothingWithTheWindow(t *testing.T) {
	text := func(i int) *Request {
		return &Request{Text: "The same beginning. " + strings.Repeat("x", i%3), OutputTokens: 1}
	}
	chat := func(i int) *Request {
		return &Request{Messages: []Message{{"system", "You are kind."}, {"user", strings.Repeat("y", i%3)}}, OutputTokens: 1,
			Next: func(string) (*Request, time.Duration) { return text(i), time.Second }}
	}
	for name, source := range map[string]Source{
		"phase1":     open(t, Spec{Kind: "phase1"}, 1),
		"production": open(t, Spec{Kind: "production"}, 1),
		"texts":      listed(text), "chats": listed(chat),
	} {
		plan := Plan{Source: source, Rate: 2, LeadIn: 20 * time.Second, Window: 20 * time.Second, MinRequests: 40}
		begins := func(s Schedule, phase Phase) (all []string) {
			for a := range s {
				if a.Phase == RunOut {
					break
				}
				if a.Phase == phase {
					all = append(all, beginningOf(a.Request))
				}
			}
			return all
		}
		cold := WithColdLeadIn(plan.Schedule(), source)
		window := begins(cold, Window)
		if !slices.Equal(window, begins(plan.Schedule(), Window)) {
			t.Errorf("%s: the window has other requests", name)
		}
		was, is := begins(plan.Schedule(), LeadIn), begins(cold, LeadIn)
		for i := range is {
			if slices.Contains(window, is[i]) {
				t.Errorf("%s: request %d of the lead-in begins like one of the window: %q", name, i, is[i])
			}
			for j := range i {
				if (was[i] == was[j]) != (is[i] == is[j]) {
					t.Errorf("%s: requests %d and %d began alike: %t, now: %t", name, i, j, was[i] == was[j], is[i] == is[j])
				}
			}
		}
		for a := range cold {
			if next := a.Request.Next; next != nil {
				if r, think := next(""); !strings.HasPrefix(r.Text, "[") || think != time.Second {
					t.Errorf("%s: the next turn of the lead-in asks %q after %s", name, r.Text, think)
				}
			}
			break
		}
	}
}

// listed is an endless source of made-up requests.
type listed func(i int) *Request

func (listed) Name() string                       { return "listed" }
func (listed) Len() int                           { return 0 }
func (listed) Longest() int                       { return 0 }
func (l listed) Request(_ Stream, i int) *Request { return l(i) }

// beginningOf returns the part of a prompt that falls into the first block of a prefix cache.
func beginningOf(r *Request) string {
	text := r.Text
	for _, id := range r.Tokens[:min(16, len(r.Tokens))] {
		text += string(rune(id))
	}
	for _, m := range r.Messages {
		text += m.Content
	}
	return text
}
