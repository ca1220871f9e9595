package report

import (
	"fmt"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// cached says in which state the prefix cache was when the trial was measured, and what of the prompts was found in it at the highest
// rate that passed. A study that does not say how it treats the cache has no such line.
func (l *lines) cached(study studies.Study, t studies.Trial) {
	protocol, ok := strings.CutPrefix(study.World["cache"], "protocol ")
	if !ok {
		return
	}
	text := "carried from probe to probe"
	if strings.HasPrefix(protocol, string(trial.Reset)) {
		text = "emptied before each probe"
	}
	var at trial.Probe
	for _, p := range t.Probes {
		if p.Verdict.Pass && p.Rate >= at.Rate {
			at = p
		}
	}
	switch {
	case at.Rate == 0: // none passed
	case at.HitRate < 0:
		text += "; the server does not say what it found there"
	case at.HitRate < 0.005:
		text += fmt.Sprintf("; at %s req/s none of the prompt tokens were found there", render.Number(at.Rate))
	default:
		text += fmt.Sprintf("; at %s req/s %.0f %% of the prompt tokens were found there", render.Number(at.Rate), 100*at.HitRate)
	}
	l.Item("cache", "%s", text)
}
