package loadtest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// An Answer is the result of a search in the form for programs, such as JSON.
type Answer struct {
	Capacity capacity.Capacity `json:"capacity"` // without its steps, which are in Runs
	Met      bool              `json:"met"`      // whether a rate kept the SLO with the load generator on time; if not, capacity.rate is the lowest rate that failed, or that passed with a late generator
	Advice   *trial.Advice     `json:"advice,omitempty"`
	Floor    *AnswerRun        `json:"floor,omitempty"` // the run at the lowest rate, if every rate failed
	Runs     []AnswerRun       `json:"runs"`            // runs in the order in which they were made

	lowest float64 // lowest rate that the search may try
	budget time.Duration
	ended  bool // whether the user or an error ended the search
}

// An AnswerRun is one run of a search with its verdict.
type AnswerRun struct {
	Rate     float64               `json:"rate"`
	Pass     bool                  `json:"pass"`
	Binding  string                `json:"binding"`
	Reason   string                `json:"reason"`
	Limited  string                `json:"client_limited,omitempty"`
	InFlight float64               `json:"in_flight"` // mean number of requests in flight; 0 if no request was completed
	Measured []trial.MeasuredLimit `json:"measured"`

	failing string // a text with the number of failed requests; "" if they are not too many
}

func newAnswer(found capacity.Capacity, s *Search) Answer {
	a := Answer{Capacity: found, Met: found.Met() && found.Low > 0, lowest: s.Min, budget: s.Budget, Runs: []AnswerRun{}}
	a.Capacity.Steps = nil
	for _, run := range s.runs {
		v := run.Verdict
		a.Runs = append(a.Runs, AnswerRun{run.Rate, v.Pass, v.Binding, v.Reason, v.ClientLimited, inFlight(run), trial.MeasuredLimits(v), failing(v)})
	}
	if advice, ok := trial.Advise(found, s.Margin, s.runs); ok {
		a.Advice = &advice
	}
	if !a.Met && len(a.Runs) > 0 {
		a.Floor = new(slices.MinFunc(a.Runs, func(x, y AnswerRun) int { return cmp.Compare(x.Rate, y.Rate) }))
	}
	return a
}

// failing returns a text with the number of failed requests. It returns "" if they are not too many for the error rate
// or for a latency limit.
func failing(v slo.Verdict) string {
	tooMany := v.Binding == slo.ErrorRate
	for _, c := range v.Checks {
		if c.Failed > c.Allowed || tooMany && c.Failed > 0 {
			return fmt.Sprintf("%s failed", render.Of(c.Failed, c.N, "request"))
		}
	}
	return ""
}

// text returns the answer as a text for people, in lines of at most width columns.
func (a Answer) text(width int) string {
	t := render.Text{Width: width}
	c := a.Capacity
	text := c.RateText("req/s", render.Rate)
	switch {
	case c.Bound == capacity.AtMost:
		a.writeFloor(&t)
	case c.PassedLate():
		t.Item("capacity", "%s, passed while the load generator was late: %s", text, c.Why)
		if a.Met {
			t.Item("", "at least %s req/s with the load generator on time", render.Rate(c.Low))
		}
	case c.Bound == capacity.AtLeast:
		t.Item("capacity", "%s, %s requests in flight: %s", text, render.Number(c.InFlight), c.Why)
	case c.StdErr > 0:
		t.Item("capacity", "%s, %s requests in flight", text, render.Number(c.InFlight))
	default:
		t.Item("capacity", "%s, %s requests in flight; no interval can be given", text, render.Number(c.InFlight))
	}
	if c.Bound == capacity.Exact {
		t.Item("proof", "passed %s, failed %s; all runs in order: %s", render.Rate(c.Low), render.Rate(c.High), a.runsText())
	}
	if a.Met {
		t.Item("limit", "%s breaks first", c.Binding)
	}
	if c.Limited != "" {
		t.Item("remedy", "%s", MoreCores)
	}
	t.Item("search", "%s; %s", render.Count(c.Probes, "run"), c.Why)
	if c.Doubt != "" {
		t.Item("doubt", "%s", c.Doubt)
	}
	if a.Advice != nil {
		t.Item("advice", "%s", a.Advice)
	}
	return t.String()
}

// runsText names all rates in the order in which they were tried, such as "1 passed, 1.35 failed".
func (a Answer) runsText() string {
	texts := make([]string, len(a.Runs))
	for i, run := range a.Runs {
		verdict := slo.Verdict{Pass: run.Pass, ClientLimited: run.Limited}
		texts[i] = render.Rate(run.Rate) + " " + verdict.Word()
	}
	return strings.Join(texts, ", ")
}

// maxAlone is the highest mean number of requests in flight at which requests hardly ever overlap.
const maxAlone = 0.5

// writeFloor reports a search in which every rate failed. It writes what was measured at the lowest rate, and what may
// help.
func (a Answer) writeFloor(t *render.Text) {
	f := a.Floor
	none := "none"
	if a.ended {
		none = "none yet"
	}
	t.Item("capacity", "%s: even at %s req/s, the lowest rate that was tried, %s", none, render.Rate(f.Rate), f.Reason)
	switch {
	case a.ended:
		t.Item("", "the search was ended before it tried a lower rate")
	case f.failing != "":
		t.Item("", "%s there: the server must answer before its latencies can be judged; see the failures of the run", f.failing)
	case f.InFlight > 0 && f.InFlight < maxAlone:
		t.Item("", "on average only %.2g requests were in flight there, so even a request that runs alone takes too long, and no lower rate will help; raise the limit of %s", f.InFlight, f.Binding)
	case f.Rate > a.lowest:
		t.Item("", "begin lower with --rate, or raise --budget, now %s", render.Span(a.budget))
	default:
		t.Item("", "begin lower with --rate, or raise the limit of %s", f.Binding)
	}
}
