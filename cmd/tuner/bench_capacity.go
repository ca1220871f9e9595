package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// A capacitySearch is --find-capacity with what its answer needs.
type capacitySearch struct {
	capacity.Search
	margin  float64       // of the advised rate
	whole   bool          // runs are to tell of the boundary, and not only on which side of it they are: none ends early
	prime   bool          // fill the prefix cache before the first run
	primed  time.Duration // that took so long
	weigher *workload.Weigher
	runs    []capacityRun
	runOut  time.Duration // the longest so far
}

// A capacityRun is one run of a search.
type capacityRun struct {
	trial.Probe // its number, rate, verdict and measurement
	took        time.Duration
}

// inFlight is how many requests were in the server in the mean, by Little's law over the completed ones: it holds also where the run
// was ended early.
func (r capacityRun) inFlight() float64 { return r.Rate * r.Measurement.E2E.Mean / 1000 }

// capacityFlags are those that mean something with --find-capacity alone.
var capacityFlags = []string{"tolerance", "precision", "budget", "max-rate", "margin", "no-prime"}

// usualBudget is how long a search may take unless it is told. A run that is to have 300 requests takes hours at a rate of one in
// a minute, and whoever has mistyped a limit would wait for it.
const usualBudget = 2 * time.Hour

// usualWindow is how long the runs of a search last at least, where neither --seconds nor --requests says so: 300 requests are
// 15 s at 20 req/s, in which no queue has the time to grow, and read the capacity 22 % too high on simulated engines.
const usualWindow = 2 * time.Minute

// aimAtCapacity prepares the search.
func (b *benching) aimAtCapacity(c *cli.Context, rates []float64) error {
	precision, err := parsePrecision(c.String("precision"))
	tolerance, highest, margin, budget := c.Float64("tolerance"), c.Float64("max-rate"), c.Float64("margin"), c.Duration("budget")
	switch {
	case b.slo == nil:
		return usage("--find-capacity needs the limits to keep: --slo 'p99 ttft <= 1000ms'")
	case c.IsSet("concurrency") || c.IsSet("ramp-up") || c.String("arrivals") == replayed:
		return usage("--find-capacity looks for a rate; leave out --concurrency, --ramp-up and --arrivals replay")
	case len(rates) > 1:
		return usage("--find-capacity needs one --rate at most, where to begin")
	case !(tolerance > 0 && tolerance <= 10):
		return usage("--tolerance %g: must be above 0 and at most 10", tolerance)
	case err != nil:
		return err
	case budget <= 0:
		return usage("--budget %s: must be above 0; write a time such as 30m", budget)
	case !(margin > 0 && margin <= 1):
		return usage("--margin %g: must be above 0 and at most 1: the advised rate as a part of the capacity's lower end", margin)
	case !(highest >= leastRate && highest <= mostRate):
		return usage("--max-rate %g: must be at least %g and at most %d", highest, leastRate, mostRate)
	case c.Bool("no-prime") && b.resetCache:
		return usage("--reset-cache empties the cache before each run; leave out --no-prime")
	case len(rates) == 1 && rates[0] > highest:
		return usage("--rate %g is above --max-rate %g; begin lower", rates[0], highest)
	}
	hint := min(1.0, highest)
	if len(rates) == 1 {
		hint = rates[0]
	}
	if !c.IsSet("seconds") && !c.IsSet("requests") && !b.load.rescale {
		b.load.window = usualWindow
	}
	if !c.IsSet("lead-in") && !b.load.rescale {
		protocol := trial.Carried // whatever its server caches
		if c.Bool("reset-cache") {
			protocol = trial.Reset
		}
		b.load.leadIn = trial.DefaultLeadIn(*b.slo, b.load.source, protocol)
	}
	// A server that fails at a hundredth of what it was taken for will not be found out by waiting. A precise search ends by its budget.
	most, least := 12, 100.0
	if precision > 0 {
		most = 200
	}
	b.search = &capacitySearch{margin: margin, prime: !b.resetCache && !c.Bool("no-prime"), Search: capacity.Search{
		Hint: hint, Min: max(hint/least, leastRate), Max: highest, Factor: plan.Gallop, Tolerance: tolerance, MaxProbes: most, Precision: precision, Budget: budget,
	}}
	if err := b.checkEnough(); err != nil {
		return err
	}
	b.shots = []shot{b.load.open(hint)} // whose requests are looked at before the first run
	if takes := b.planned(hint); takes > budget {
		return usage("--budget %s: %s", budget, b.tooLong(hint, takes))
	}
	return nil
}

// tooLong says why a single run takes longer than it may, and what helps.
func (b *benching) tooLong(rate float64, takes time.Duration) string {
	single := fmt.Sprintf("a single run of %s at %g req/s takes %s; raise it, begin at a higher --rate, or take ", render.Count(b.shots[0].planned, "request"), rate, render.Span(takes))
	least, limit := b.slo.MinRequests()
	if b.load.atLeast() > least {
		return single + "fewer --requests"
	}
	return single + fmt.Sprintf("a lower percentile (a verdict on %s takes %d requests)", limit, least)
}

// parsePrecision reads half the width of an interval as a part of the rate, such as 5% or 0.05; "" is 0.
func parsePrecision(text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	v, err := parseShare(text)
	if err != nil || !(v > studyfile.MinPrecision && v < studyfile.MaxPrecision) {
		return 0, usage("--precision %s: write more than %g %% and less than %g %%, such as 5%% or 0.05",
			text, 100*studyfile.MinPrecision, 100*studyfile.MaxPrecision)
	}
	return v, nil
}

// planned is what a run at a rate takes, without its run-out, which is as long as the longest answers.
func (b *benching) planned(rate float64) time.Duration {
	n, window := b.load.plan(rate, 0).Counted()
	if n == 0 || b.load.rescale {
		return window
	}
	return b.load.leadIn + window
}

// cost is what a run at a rate will take, with a run-out as long as those so far.
func (b *benching) cost(rate float64) time.Duration { return b.planned(rate) + b.search.runOut }

// spent is what all runs took, and what came before them.
func (s *capacitySearch) spent() (all time.Duration) {
	all = s.primed
	for _, run := range s.runs {
		all += run.took
	}
	return all
}

// findCapacity looks for the highest rate that keeps the SLO, measures the rate that it advises, and reports both.
func (b *benching) findCapacity(ctx context.Context, out *benchReport) error {
	s := b.search
	s.weigher = workload.Weigh(b.load.source)
	s.Population = trial.PopulationOf(b.load.plan(s.Hint, 0), s.weigher)
	s.Cost, s.Plan = b.cost, b.sayForecast
	b.client.MaxSamples = math.MaxInt // each request is judged by itself
	if err := b.prime(ctx); err != nil {
		return err
	}
	found, err := s.Find(ctx, func(ctx context.Context, rate float64) (capacity.Outcome, error) { return b.seek(ctx, out, rate, true) })
	if errors.Is(err, capacity.ErrLimited) {
		err = fmt.Errorf("%w; %s", err, moreCores)
	}
	if err != nil {
		return b.sofar(out, found, err)
	}
	a := newCapacityAnswer(found, s)
	if a.Advice != nil && !a.Advice.Near() {
		switch takes := b.cost(a.Advice.Rate); {
		case s.spent()+takes > s.Budget:
			fmt.Fprint(b.stderr, wrapped(fmt.Sprintf("the advised rate is not measured: that takes %s more, and --budget is %s", render.Span(takes), s.Budget), "  "))
		default:
			if _, err := b.seek(ctx, out, a.Advice.Rate, false); err != nil {
				return b.sofar(out, found, err)
			}
			a = newCapacityAnswer(found, s)
		}
	}
	return out.capacity(a)
}

// mostPriming is how much of the budget may be spent before the first run.
const mostPriming = 0.1

// prime sends the workload once, or of an endless one as many requests as a run has at least: the first run would find the prefix
// cache colder than the others do.
func (b *benching) prime(ctx context.Context) error {
	s := b.search
	if !s.prime {
		return nil
	}
	n := cmp.Or(b.load.source.Len(), b.load.atLeast())
	n = min(n, int(mostPriming*s.Budget.Seconds()*s.Hint))
	if n == 0 {
		return nil
	}
	pass := workload.Pass{Source: b.load.source, Seed: b.seed, Stream: workload.PrimeStream, Rate: s.Hint, N: n}
	r, err := b.run(ctx, shot{primes: true, rate: s.Hint, planned: n, schedule: pass.Schedule()}, nil)
	s.primed = r.took
	if err == nil && r.m.Failed > 0 {
		fmt.Fprintf(b.stderr, "of the %d requests that were sent before the first run %d failed\n", r.m.Requests, r.m.Failed)
	}
	return err
}

// sofar says what is known where a search is ended by a person, or by an error.
func (b *benching) sofar(out *benchReport, found capacity.Capacity, why error) error {
	if found.Probes == 0 {
		return why
	}
	a := newCapacityAnswer(found, b.search)
	a.ended = true
	if err := out.capacity(a); err != nil && !errors.Is(err, errNoRunKept) {
		return errors.Join(why, err)
	}
	return why
}

// seek measures one rate on requests and arrivals of its own: what one draw has too many bursts of, others have not. A run that has
// failed clearly may be ended early.
func (b *benching) seek(ctx context.Context, out *benchReport, rate float64, early bool) (capacity.Outcome, error) {
	s := b.load.drawn(rate, len(b.search.runs))
	var stop bench.Stop
	if early && !b.search.whole {
		stop = b.slo.Stop(s.planned)
	}
	r, err := b.run(ctx, s, stop)
	if err != nil {
		return capacity.Outcome{}, err
	}
	if err := out.add(r); err != nil {
		return capacity.Outcome{}, err
	}
	if r.m.Void != "" {
		return capacity.Outcome{}, fmt.Errorf("%s is void: %s", s, r.m.Void)
	}
	if r.verdict == nil {
		return capacity.Outcome{}, usage("%d requests at %g req/s are too many to be judged; lower --requests or --seconds", s.planned, rate)
	}
	b.search.runs = append(b.search.runs, capacityRun{
		Probe: trial.Probe{Seq: len(b.search.runs), Rate: rate, Verdict: *r.verdict, Measurement: r.m}, took: r.took,
	})
	if stop == nil || r.verdict.Pass { // it was not ended early
		b.search.runOut = max(b.search.runOut, r.took-b.planned(rate))
	}
	o := r.outcome()
	if o.Took = r.took; len(b.search.runs) == 1 {
		o.Took += b.search.primed
	}
	o.Evidence = trial.EvidenceOf(s.schedule, b.search.weigher, rate, len(b.search.runs)-1, *b.slo, *r.verdict)
	return o, nil
}

// sayForecast says what a precision will take, once something is known.
func (b *benching) sayForecast(f capacity.Forecast) {
	known := fmt.Sprintf("about %.3g req/s, known to ±%.2g %%", f.Rate, 100*f.Precision)
	if f.Probes == 0 {
		fmt.Fprintf(b.stderr, "%s\n", known)
		return
	}
	b.search.whole = true
	aim := fmt.Sprintf("±%.3g %%", 100*b.search.Precision)
	if f.Reaches > 1.05*b.search.Precision {
		aim = fmt.Sprintf("%s cannot be had of this server; ±%.2g %%", aim, 100*f.Reaches)
	}
	text := fmt.Sprintf("%s; %s takes about %s more, %s", known, aim, render.Count(f.Probes, "run"), render.Span(f.Takes))
	if left := b.search.Budget - b.search.spent(); f.Takes > left {
		text += fmt.Sprintf("; --budget ends it in %s", render.Span(max(0, left)))
	}
	fmt.Fprint(b.stderr, wrapped(text, "  "))
}

// A capacityAnswer is the answer of a search, as programs read it.
type capacityAnswer struct {
	Capacity capacity.Capacity `json:"capacity"` // without its steps: see Runs
	Met      bool              `json:"met"`      // some rate kept the SLO in time; if not, capacity.rate is the lowest that failed, or that passed late
	Advice   *trial.Advice     `json:"advice,omitempty"`
	Floor    *capacityStep     `json:"floor,omitempty"` // the run at the lowest rate, where it failed too
	Runs     []capacityStep    `json:"runs"`            // in their order

	lowest float64 // rate that might have been tried
	budget time.Duration
	ended  bool // before the search was over
}

// A capacityStep is what one run says of the capacity.
type capacityStep struct {
	Rate     float64         `json:"rate"`
	Pass     bool            `json:"pass"`
	Binding  string          `json:"binding"`
	Reason   string          `json:"reason"`
	Limited  string          `json:"client_limited,omitempty"`
	InFlight float64         `json:"in_flight"` // in the mean; 0 where no request was completed
	Measured []trial.Reading `json:"measured"`

	failing string // how many requests failed, where too many did
}

func newCapacityAnswer(found capacity.Capacity, s *capacitySearch) capacityAnswer {
	a := capacityAnswer{Capacity: found, Met: found.Met() && found.Low > 0, lowest: s.Min, budget: s.Budget, Runs: []capacityStep{}}
	a.Capacity.Steps = nil
	var probes []trial.Probe
	for _, run := range s.runs {
		v := run.Verdict
		probes = append(probes, run.Probe)
		a.Runs = append(a.Runs, capacityStep{run.Rate, v.Pass, v.Binding, v.Reason, v.ClientLimited, run.inFlight(), trial.Readings(v), failing(v)})
	}
	if advice, ok := trial.Advise(found, s.margin, probes); ok {
		a.Advice = &advice
	}
	for i := range a.Runs {
		if step := &a.Runs[i]; !a.Met && (a.Floor == nil || step.Rate < a.Floor.Rate) {
			a.Floor = step
		}
	}
	return a
}

// failing says how many requests failed, if they were too many for a limit on a latency, or for the error rate.
func failing(v slo.Verdict) string {
	tooMany := slices.Contains(v.Broken(), "errors")
	for _, c := range v.Checks {
		if c.Failed > c.Allowed || tooMany && c.Failed > 0 {
			return fmt.Sprintf("%d of %d requests failed", c.Failed, c.N)
		}
	}
	return ""
}

// text is the answer for people.
func (a capacityAnswer) text() string {
	var t textLines
	c := a.Capacity
	switch {
	case c.Bound == capacity.AtMost:
		a.floorText(&t)
	case c.Limited != "" && c.Low < c.Rate:
		t.item("capacity", "at least about %.4g req/s, passed while the load generator was late: %s", c.Rate, c.Why)
		if a.Met {
			t.item("", "at least %.4g req/s with the load generator in time", c.Low)
		}
	case c.Bound == capacity.AtLeast:
		t.item("capacity", "at least %.4g req/s, %.3g requests in flight: %s", c.Rate, c.InFlight, c.Why)
	case c.StdErr > 0:
		t.item("capacity", "%.4g req/s, 95 %%: %.4g to %.4g, %.3g requests in flight", c.Rate, c.Lowest, c.Highest, c.InFlight)
	default:
		t.item("capacity", "%.4g req/s, %.3g requests in flight; no interval can be given", c.Rate, c.InFlight)
	}
	if c.Bound == capacity.Exact {
		t.item("proof", "passed %.4g, failed %.4g; all runs in order: %s", c.Low, c.High, a.runsText())
	}
	if a.Met {
		t.item("limit", "%s breaks first", c.Binding)
	}
	if c.Limited != "" {
		t.item("remedy", "%s", moreCores)
	}
	t.item("search", "%s; %s", render.Count(c.Probes, "run"), c.Why)
	if c.Doubt != "" {
		t.item("doubt", "%s", c.Doubt)
	}
	if a.Advice != nil {
		t.item("advice", "%s", a.Advice)
	}
	return t.String()
}

// runsText names all rates in the order in which they were tried, such as "1 passed, 1.35 failed".
func (a capacityAnswer) runsText() string {
	words := make([]string, len(a.Runs))
	for i, run := range a.Runs {
		verdict := "failed"
		switch {
		case run.Limited != "":
			verdict = "client-limited"
		case run.Pass:
			verdict = "passed"
		}
		words[i] = fmt.Sprintf("%.4g %s", run.Rate, verdict)
	}
	return strings.Join(words, ", ")
}

// alone is as many requests in flight as hardly ever meet another.
const alone = 0.5

// floorText says what nothing could meet, and what was measured there.
func (a capacityAnswer) floorText(t *textLines) {
	f := a.Floor
	none := "none"
	if a.ended {
		none = "none yet"
	}
	t.item("capacity", "%s: at %.4g req/s, the lowest rate that was tried, still %s", none, f.Rate, f.Reason)
	switch {
	case a.ended:
		t.item("", "the search was ended before it came lower")
	case f.failing != "":
		t.item("", "%s there: before its latencies matter the server must answer; see the failures of the run", f.failing)
	case f.InFlight > 0 && f.InFlight < alone:
		t.item("", "%.2g requests were in flight there in the mean: a request alone takes so long, and no rate will do; raise the limit of %s", f.InFlight, f.Binding)
	case f.Rate > a.lowest:
		t.item("", "begin lower with --rate, or raise --budget, now %s", a.budget)
	default:
		t.item("", "begin lower with --rate, or raise the limit of %s", f.Binding)
	}
}
