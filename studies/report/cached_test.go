package report

import (
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
)

func TestBestReportsThePrefixCache(t *testing.T) {
	probe := func(rate, hits float64, pass bool) trial.Probe {
		return trial.Probe{Rate: rate, HitRate: hits, Verdict: slo.Verdict{Pass: pass}}
	}
	for _, row := range []struct {
		world  string
		probes []trial.Probe
		want   string
	}{
		{"protocol reset, prime rate 0 req/s", []trial.Probe{probe(1, 0.2, true), probe(2, 0.431, true), probe(4, 0.9, false)},
			"cache     emptied before each probe; at 2 req/s it held 43 % of the prompt\n          tokens\n"},
		{"protocol of the workload, prime rate 0 req/s", []trial.Probe{probe(2.618, 0, true)},
			"cache     carried from probe to probe; at 2.62 req/s it held none of the prompt\n          tokens\n"},
		{"protocol steady, prime rate 1 req/s", []trial.Probe{probe(2, -1, true)},
			"cache     carried from probe to probe; the server does not report its hit rate\n"},
		{"protocol primed, prime rate 1 req/s", nil, "cache     carried from probe to probe\n"},
		{"", []trial.Probe{probe(2, 0.5, true)}, ""},
	} {
		var l lines
		l.cached(studies.Study{World: map[string]string{"cache": row.world}}, studies.Trial{Probes: row.probes})
		if got := l.String(); got != row.want {
			t.Errorf("%q: cached = %q, want %q", row.world, got, row.want)
		}
	}
}
