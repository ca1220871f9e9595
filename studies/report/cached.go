package report

import (
	"fmt"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// cached says whether the prefix cache was emptied before each probe, and the hit rate at the highest rate that passed.
// It adds nothing when the study does not say how it treats the cache.
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
	case at.Rate == 0: // no probe passed
	case at.HitRate < 0:
		text += "; the server does not report its hit rate"
	case at.HitRate < 0.005:
		text += fmt.Sprintf("; at %s req/s it held none of the prompt tokens", render.Number(at.Rate))
	default:
		text += fmt.Sprintf("; at %s req/s it held %s of the prompt tokens", render.Number(at.Rate), render.Share(at.HitRate))
	}
	l.Item("cache", "%s", text)
}
