package trial

import (
	"fmt"
	"strings"
)

// drafts are what is known of a server's drafts since its start.
type drafts struct {
	Speculation
	known bool    // the acceptance is, and it is high enough
	tpot  float64 // median of the last piece of warm-up, ms; 0 when unknown
}

// rejectedDrafts is the error of a server of whose drafts hardly anything is accepted.
type rejectedDrafts struct{ diagnosis string }

func (e *rejectedDrafts) Error() string { return e.diagnosis }

// judgeDrafts adds what was drafted, nil for nothing, and ends the trial when enough is known and too little of it was accepted. It
// judges once: what a later probe finds does not depend on whether it was measured before an interruption.
func (m *measuring) judgeDrafts(more *Speculation) error {
	d := &m.drafts
	if more == nil || d.known || m.MinAcceptance <= 0 {
		return nil
	}
	d.Drafts += more.Drafts
	d.Tokens += more.Tokens
	d.Accepted += more.Accepted
	if d.Tokens < float64(m.MinDrafted) {
		return nil
	}
	d.known = true
	if d.Accepted >= m.MinAcceptance*d.Tokens {
		return nil
	}
	return &rejectedDrafts{m.diagnoseDrafts()}
}

// diagnoseDrafts says what was accepted, what that means, and what it costs, as far as the server tells. What it would be without
// drafts is another server's to tell.
func (m *measuring) diagnoseDrafts() string {
	d := m.drafts
	text := fmt.Sprintf("%s of %s drafted tokens were accepted (%.2g %%, less than %.2g %%): the drafter belongs to another model, "+
		"tokenizer or chat template, or the answers cannot be predicted. ",
		thousands(d.Accepted), thousands(d.Tokens), 100*d.Accepted/d.Tokens, 100*m.MinAcceptance)
	text += fmt.Sprintf("Each step of an answer drafts and verifies %.1f tokens to gain %.2g", d.Tokens/d.Drafts, d.Accepted/d.Drafts)
	if d.tpot > 0 {
		text += fmt.Sprintf(", and a token takes %.1f ms at the median of a light load", d.tpot)
	}
	if gib := m.result.Facts.KVCacheGiB; gib > 0 {
		text += fmt.Sprintf("; the KV cache is left with %.2f GiB beside the drafter", gib)
	}
	return text + "."
}

// thousands writes a count with a comma between thousands.
func thousands(n float64) string {
	digits := fmt.Sprintf("%.0f", n)
	var b strings.Builder
	for i, d := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	return b.String()
}
