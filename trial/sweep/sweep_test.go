package sweep

import (
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// swept returns a sweep with one config for each string. The letters of a string are the verdicts at 1, 2 and 4 req/s;
// rowLetters explains them. A dot means that the load was not measured.
func swept(letters ...string) *Sweep {
	s := &Sweep{
		Name: "s", Simulated: "small-fast", Cache: trial.Carried, Plan: trial.Sweep{Requests: 300, Levels: []trial.Level{{Rate: 1}, {Rate: 2}, {Rate: 4}}},
		SLO: slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Second}, {Metric: slo.TPOT, Percentile: 95, Max: 60 * time.Millisecond}}},
	}
	for i := range letters {
		s.Configs = append(s.Configs, &Config{Name: string(rune('a' + i)), Number: i})
	}
	s.setRows(letters...)
	return s
}

// setRows replaces the results of all configs; swept explains the letters.
func (s *Sweep) setRows(letters ...string) {
	for i, word := range letters {
		c := s.Configs[i]
		c.Result.Outcome, c.Probes = trial.Measured, nil
		for j, letter := range word {
			if letter == '.' {
				continue
			}
			p := trial.Probe{Seq: j, Rate: s.Plan.Levels[j].Rate, Verdict: slo.Verdict{Pass: letter == 'p' || letter == 'L', Binding: "p99 TTFT"}}
			if letter == 'l' || letter == 'L' {
				p.Verdict.ClientLimited = "the load generator was 17.5 ms late at p99"
			}
			p.Measurement.Completed = 1
			if letter == 'f' {
				p.Verdict.Checks = []slo.Check{{Metric: slo.TTFT, Broken: 9}, {Metric: slo.TPOT, MaxMS: 60}}
			}
			c.Probes = append(c.Probes, p)
		}
	}
}

func TestASweepNamesItsWinner(t *testing.T) {
	for _, row := range []struct {
		name       string
		letters    []string
		marks      string // "winner", "tie" or "-" for each config
		versus     string
		conclusion string
		limits     string // must be in the text about what the tables cannot show
	}{
		{"one is better", []string{"pff", "ppf", "pff"}, "- winner -", "- +100 % 0 %", "b is 100 % above the baseline on this grid; one draw does not prove it better.", "nothing was measured between 2.00 and 4.00. A highest load of 2.00 may really be up to 100 % higher"},
		{"the baseline is best", []string{"ppf", "pff"}, "- -", "- -50 %", "No config reaches the baseline.", "One random seed: the 3 slowest of 300 requests decide the p99."},
		{"all tie", []string{"ppf", "ppf", "ppf"}, "tie tie tie", "- 0 % 0 %", "3 of 3 configs tie at 2 req/s, the baseline among them: none improved on it.", "Ties: 3 of 3 configs share the highest load"},
		{"two tie above the baseline", []string{"pff", "ppf", "ppf"}, "- tie tie", "- +100 % +100 %", "2 of 3 configs tie at 2 req/s: this grid names no winner.", "Ties: 2 of 3"},
		{"the baseline keeps it nowhere", []string{"fff", "pff"}, "- winner", "- -", "b alone reaches 1 req/s; the baseline kept the SLO at no load.", ""},
		{"none keeps it", []string{"fff", "fff"}, "- -", "- -", "No config kept the SLO at any load.", ""},
		{"the others were not measured", []string{"ppf", "..."}, "- -", "- -", "", ""},
		{"alone", []string{"ppf"}, "-", "-", "", ""},
		{"a late client for the baseline", []string{"pLL", "ppf"}, "- -", "- -", "No winner can be named: the load generator was late for a, so its highest load is not known; " + loadtest.MoreCores + ".", ""},
		{"a late client where it does not matter", []string{"lff", "ppf"}, "- winner", "- -", "b alone reaches 2 req/s.", ""},
		{"a late client for the winner", []string{"pff", "ppl"}, "- winner", "- -", "b is above the baseline on this grid, but by how much is not known: the load generator was late.", ""},
		{"a late client everywhere", []string{"lll", "fff"}, "- -", "- -", "No winner can be named: the load generator was late for a, so its highest load is not known; " + loadtest.MoreCores + ".", ""},
		{"a pass above a fail counts, and is said", []string{"pff", "pfp"}, "- winner", "- +300 %", "b is 300 % above the baseline on this grid; one draw does not prove it better.", ""},
	} {
		s := swept(row.letters...)
		var marks, versus []string
		c := s.compare()
		for _, st := range c.all {
			if st.mark == "" {
				st.mark = "-"
			}
			marks, versus = append(marks, st.mark), append(versus, st.versus())
		}
		if got := strings.Join(marks, " "); got != row.marks || strings.Join(versus, " ") != row.versus {
			t.Errorf("%s: %s and %s, want %s and %s", row.name, got, strings.Join(versus, " "), row.marks, row.versus)
		}
		if got := c.conclusion(); got != row.conclusion {
			t.Errorf("%s: %q, want %q", row.name, got, row.conclusion)
		}
		if got := strings.Join(c.limits(), "\n"); !strings.Contains(got, row.limits) || strings.Contains(got, "Ties") != strings.Contains(row.marks, "tie") {
			t.Errorf("%s: cannot tell\n%s\nwant %q", row.name, got, row.limits)
		}
	}
	single := swept("ppf")
	single.Plan.Requests = 1
	if got := single.compare().drawLimit(); !strings.HasPrefix(got, "One random seed: the slowest of 1 request decides the p99.") {
		t.Errorf("drawLimit of one request = %q", got)
	}
	var t2 render.Text
	swept("pff", "pfp").compare().writeHighestLoads(&t2)
	if !strings.Contains(t2.String(), "    not monotone: it failed at 2.00, below its highest passed load\n") {
		t.Errorf("the verdicts are not monotone, and the text does not say so:\n%s", &t2)
	}
}

func TestVerdictsAsSweepsWriteThem(t *testing.T) {
	broken := func(metrics ...slo.Metric) slo.Verdict {
		v := slo.Verdict{}
		for _, m := range metrics {
			v.Checks = append(v.Checks, slo.Check{Metric: m, Broken: 1})
		}
		return v
	}
	late := broken(slo.TTFT)
	late.ClientLimited = "late"
	for _, row := range []struct {
		verdict   slo.Verdict
		completed int
		want      string
	}{
		{slo.Verdict{Pass: true}, 300, "PASS"},
		{broken(slo.TTFT, slo.TPOT), 300, "FAIL (TTFT+TPOT)"},
		{broken(slo.ITL), 300, "FAIL (ITL)"},
		{slo.Verdict{Binding: "error rate"}, 299, "FAIL (errors)"},
		{broken(slo.TTFT), 0, "FAIL (none done)"},
		{late, 300, "client-limited"},
	} {
		p := trial.Probe{Verdict: row.verdict}
		p.Measurement.Completed = row.completed
		if got := verdictCell(nil, p); got != row.want {
			t.Errorf("%+v: %q, want %q", row.verdict, got, row.want)
		}
		names, values := loadtest.Record(loadtest.ResultOf(p))
		if word := values[slices.Index(names, "slo")]; (word == "client-limited") != (row.want == "client-limited") {
			t.Errorf("%+v: the CSV says %q, and the table %q", row.verdict, word, row.want)
		}
	}
}

func TestTroubleSaysWhenAServerFailed(t *testing.T) {
	for _, row := range []struct {
		result trial.Result
		want   string
	}{
		{trial.Result{Outcome: trial.Measured}, ""},
		{trial.Result{}, ""},
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: "CUDA out of memory"}, "cannot start: oom-start: CUDA out of memory"},
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.CrashLoad, Cause: serverctl.NCCL, Evidence: "peer is gone", Facts: serverctl.Facts{StartUp: time.Second}}, "failed under load: crash-load (nccl): peer is gone"},
	} {
		if got := (&Config{Result: row.result}).trouble(); got != row.want {
			t.Errorf("%+v: %q, want %q", row.result, got, row.want)
		}
	}
}
