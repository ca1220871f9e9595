package trial

import (
	"fmt"

	"vllmtuner/render"
	"vllmtuner/serverctl"
)

// drafts adds up the tokens that a server has drafted since its start (speculative decoding). It judges whether enough
// of these tokens are accepted.
type drafts struct {
	Speculation
	runner     *Runner // has MinAcceptance and MinDrafted
	kvCacheGiB float64 // 0 when unknown
	judged     bool
	tpot       float64 // median TPOT in the last part of the warm-up, ms; 0 when unknown
}

// rejectedDrafts is the error of a server that accepts hardly any of its drafts.
type rejectedDrafts string

func (e rejectedDrafts) Error() string { return string(e) }

// judge adds the drafts of one load to the sum. If the load had no drafts, added is nil. Once enough tokens were
// drafted, judge returns an error if too few were accepted; the error ends the trial. It judges only once, so that a
// resumed trial judges the same drafts as an uninterrupted one.
func (d *drafts) judge(added *Speculation) error {
	if added == nil || d.judged || d.runner.MinAcceptance <= 0 {
		return nil
	}
	d.Drafts += added.Drafts
	d.Tokens += added.Tokens
	d.Accepted += added.Accepted
	if d.Tokens < float64(d.runner.MinDrafted) {
		return nil
	}
	d.judged = true
	if d.Accepted >= d.runner.MinAcceptance*d.Tokens {
		return nil
	}
	return rejectedDrafts(d.diagnosis())
}

// lacking says how many tokens were drafted and how many are needed to judge. It returns "" if enough tokens were
// drafted.
func (d *drafts) lacking(now serverctl.Counters) string {
	if d.runner.MinAcceptance <= 0 || len(now.AcceptedAt) == 0 || now.DraftTokens >= float64(d.runner.MinDrafted) {
		return ""
	}
	return fmt.Sprintf("the acceptance of drafts is not known: %.0f tokens were drafted, %d are needed", now.DraftTokens, d.runner.MinDrafted)
}

// diagnosis says how many drafted tokens were accepted, and what that means. If the server reports what the drafts
// cost, diagnosis says that too. It cannot say how fast the server would be without drafts.
func (d *drafts) diagnosis() string {
	text := fmt.Sprintf("%s of %s drafted tokens were accepted (%.2g %%, less than %.2g %%): the drafter belongs to another model, "+
		"tokenizer or chat template, or the answers cannot be predicted. ",
		render.Thousands(d.Accepted), render.Thousands(d.Tokens), 100*d.Accepted/d.Tokens, 100*d.runner.MinAcceptance)
	text += fmt.Sprintf("Each decoding step drafts and verifies %.1f tokens and accepts %.2g of them on average", d.Tokens/d.Drafts, d.Accepted/d.Drafts)
	if d.tpot > 0 {
		text += fmt.Sprintf(", and a token takes %.1f ms at the median of a light load", d.tpot)
	}
	if d.kvCacheGiB > 0 {
		text += fmt.Sprintf("; the drafter leaves %.2f GiB for the KV cache", d.kvCacheGiB)
	}
	return text + "."
}
