package bench

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

// sample returns a good sample of 11 tokens, sent when it was due. Times are in milliseconds.
func sample(due, first, last int) Sample {
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	return Sample{
		Due: ms(due), Sent: ms(due), First: ms(first), Last: ms(last), End: ms(last + 1),
		PromptTokens: 100, CachedTokens: 60, OutputTokens: 11, WantTokens: 11,
	}
}

func TestMeasureCountsByVLLMsRules(t *testing.T) {
	samples := []Sample{sample(10000, 10100, 10600), sample(11000, 11300, 14000), sample(12000, 12200, 13200)}
	one := sample(12500, 12600, 12600)
	one.OutputTokens, one.WantTokens = 1, 1
	failed := sample(12600, 12700, 0)
	failed.Failure, failed.End = Reset, 15*time.Second
	pending := Sample{Due: 13 * time.Second, WantTokens: 11}
	run := Run{Samples: append(samples, one, failed, failed, pending)}
	m := Measure(run, Scope{Rate: 1.5, Start: 10 * time.Second, Length: 4 * time.Second})

	if m.Requests != 7 || m.Completed != 4 || m.Failed != 2 || m.Failures[Reset] != 2 {
		t.Errorf("requests %d, completed %d, failed %d %v, want 7, 4, 2", m.Requests, m.Completed, m.Failed, m.Failures)
	}
	if m.TPOT.N != 3 || m.TPOT.Max != 270 {
		t.Errorf("TPOT %+v, want three values without the answer of one token, and at most 270 ms", m.TPOT)
	}
	if m.TTFT.N != 4 || m.TTFT.Max != 300 || m.E2E.Max != 3000 || m.SendLag.N != 6 {
		t.Errorf("TTFT %+v, E2E %+v, send lag %+v, want completed requests only, but the send lag of all that were sent", m.TTFT, m.E2E, m.SendLag)
	}
	if m.PromptTokens != 400 || m.CachedTokens != 240 || m.OutputTokens != 34 || m.WantTokens != 34 {
		t.Errorf("tokens %d/%d/%d/%d, want 400, 240, 34, 34", m.PromptTokens, m.CachedTokens, m.OutputTokens, m.WantTokens)
	}
	if m.RequestThroughput != 4.0/5 || m.OutputThroughput != 34.0/5 || m.TotalThroughput != 434.0/5 || m.Duration != 5*time.Second {
		t.Errorf("throughput %v requests, %v and %v tokens per second in %s, want 0.8, 6.8 and 86.8 from 10 s to 15 s, when the last request failed",
			m.RequestThroughput, m.OutputThroughput, m.TotalThroughput, m.Duration)
	}
	if !m.Exact || m.Rules != Rules033 || m.Void != "" || m.OffPlan != 0 || m.Over != nil || m.Goodput != 0 || m.Sessions != (Sessions{}) {
		t.Errorf("%+v, want exact figures by the rules of 0.33, not void, without limits and sessions", m)
	}
	if want := (0.6 + 3 + 1.2 + 0.1) / 4; math.Abs(m.MeanInFlight-want) > 1e-9 {
		t.Errorf("mean in flight %v, want %v", m.MeanInFlight, want)
	}
	if m.PeakInFlight != 3 {
		t.Errorf("peak in flight %d, want the three in the third second", m.PeakInFlight)
	}
}

func TestLimitsAreCountedAsGoodputCountsThem(t *testing.T) {
	ms := time.Millisecond
	one := sample(3000, 3100, 3100)
	one.OutputTokens, one.WantTokens = 1, 1
	failed := Sample{Due: 1, Sent: 1, End: 1000 * ms, Failure: Status}
	samples := []Sample{
		sample(0, 100, 1100),     // in ms: TTFT 100, TPOT 100, E2E 1,100
		sample(1000, 1101, 1601), // in ms: TTFT 101, TPOT 50
		sample(2000, 2050, 3060), // in ms: TTFT 50, TPOT 101
		one, failed,
	}
	limits := []Limit{{MetricTTFT, 100 * ms}, {MetricTPOT, 100 * ms}, {MetricE2EL, 1100 * ms}}
	for _, row := range []struct {
		name   string
		limits []Limit
		over   []int
		good   int
	}{
		{"a request at the limit keeps it", limits[:1], []int{1}, 3},
		{"an answer of one token keeps TPOT", limits[1:2], []int{1}, 3},
		{"a good request keeps all limits, and a failed one is over none", limits, []int{1, 1, 0}, 2},
		{"without limits nothing is counted", nil, nil, 0},
	} {
		m := Measure(Run{Samples: samples}, Scope{Limits: row.limits})
		var over []int
		for _, o := range m.Over {
			over = append(over, o.Over)
		}
		took := 3.101
		if !slices.Equal(over, row.over) || m.Good != row.good || math.Abs(m.Goodput-float64(row.good)/took) > 1e-9 {
			t.Errorf("%s: %v over, %d good, goodput %g, want %v, %d and %g", row.name, over, m.Good, m.Goodput, row.over, row.good, float64(row.good)/took)
		}
	}
}

func TestRulesDifferOnlyForChat(t *testing.T) {
	s := sample(1000, 1100, 2100)
	s.Opened, s.Closed = 1050*time.Millisecond, 2150*time.Millisecond
	s.Gaps = []time.Duration{time.Second}
	for _, row := range []struct {
		rules           Rules
		endpoint        string
		ttft, tpot, e2e float64
		gaps            int
	}{
		{Rules033, workload.Chat, 100, 100, 1100, 1},
		{"", workload.Chat, 100, 100, 1100, 1},
		{Rules0141, workload.Chat, 50, 110, 1150, 2},
		{Rules0141, workload.Completions, 100, 100, 1100, 1},
	} {
		m := Measure(Run{Samples: []Sample{s}}, Scope{Rules: row.rules.For(row.endpoint)})
		if m.TTFT.Max != row.ttft || m.TPOT.Max != row.tpot || m.E2E.Max != row.e2e || m.ITL.N != row.gaps {
			t.Errorf("%s by %q: TTFT %g, TPOT %g, E2E %g, %d gaps, want %+v", row.endpoint, row.rules, m.TTFT.Max, m.TPOT.Max, m.E2E.Max, m.ITL.N, row)
		}
	}
	s.Opened, s.Closed = 0, 0
	if m := Measure(Run{Samples: []Sample{s}}, Scope{Rules: Rules0141}); m.TTFT.Max != 100 || m.E2E.Max != 1100 {
		t.Errorf("a load that does not note the role chunk: TTFT %g, E2E %g, want 100 and 1100", m.TTFT.Max, m.E2E.Max)
	}
}

func TestWindowThroughputCountsWhatHappenedInTheWindow(t *testing.T) {
	s := sample(2000, 2100, 2600)
	s.Chunks = 5 // 11 tokens
	run := Run{Samples: []Sample{s}, Series: Series{
		{Sent: 9, Ended: 9, Chunks: 900}, // lead-in
		{Sent: 2, Ended: 1, Chunks: 40},
		{Sent: 2, Ended: 4, Chunks: 60, Failed: 1},
		{Sent: 2, Ended: 3, Chunks: 70}, // this second starts in the window and ends after it
		{Sent: 2, Ended: 3, Chunks: 80},
	}}
	m := Measure(run, Scope{Start: time.Second, Length: 2500 * time.Millisecond})
	if m.WindowRequestThroughput != 2.5 || math.Abs(m.WindowOutputThroughput-50*11.0/5) > 1e-9 {
		t.Errorf("throughput of the window %g requests, %g tokens, want 2.5 and 110 per second", m.WindowRequestThroughput, m.WindowOutputThroughput)
	}
	if m.PeakChunks != 60 {
		t.Errorf("peak of %d chunks, want 60: from the end of the lead-in to the end of the last counted request at 2.601 s", m.PeakChunks)
	}
	if m := Measure(Run{Samples: run.Samples}, Scope{Length: time.Second}); m.WindowRequestThroughput != 0 || m.PeakChunks != 0 {
		t.Errorf("without a series the window has %g requests per second and a peak of %d, want 0", m.WindowRequestThroughput, m.PeakChunks)
	}
}

func TestARunOffPlanIsVoid(t *testing.T) {
	short := sample(0, 100, 500)
	short.OutputTokens, short.Failure = 5, WrongLength
	long := sample(0, 100, 500)
	long.OutputTokens = 12
	reset := sample(0, 100, 500)
	reset.OutputTokens, reset.Failure = 0, Reset
	good := make([]Sample, 99)
	for i := range good {
		good[i] = sample(0, 100, 500)
	}
	for _, row := range []struct {
		name    string
		samples []Sample
		natural bool
		off     float64
		void    string
	}{
		{"one extra token in a thousand is on plan", append(good[:99:99], long), false, 1.0 / 1100, ""},
		{"short answers are off plan, though they failed", append(good[:9:9], short), false, 6.0 / 110, "differ by 5.5 % from the requested lengths (limit 1 %)"},
		{"long and short answers do not cancel out", []Sample{short, long, long, long, long, long, long}, false, 12.0 / 77, "differ by 16 %"},
		{"an answer that broke off does not count", append(good[:9:9], reset), false, 0, ""},
		{"natural answers have no plan", []Sample{long}, true, 0, ""},
	} {
		m := Measure(Run{Samples: row.samples}, Scope{Natural: row.natural})
		if math.Abs(m.OffPlan-row.off) > 1e-12 || (row.void == "") != (m.Void == "") || !strings.Contains(m.Void, row.void) {
			t.Errorf("%s: off plan by %g, void %q, want %g and %q", row.name, m.OffPlan, m.Void, row.off, row.void)
		}
	}
}

func TestLiveSessionsAreCounted(t *testing.T) {
	turn := func(n int, last bool) Sample {
		s := sample(1000*n, 1000*n+100, 1000*n+900)
		s.Turn, s.LastTurn = n, last
		return s
	}
	lost := turn(2, true)
	lost.Failure = Reset
	m := Measure(Run{Samples: []Sample{turn(1, false), turn(2, false), turn(3, true), turn(1, false), lost, turn(1, true)}}, Scope{})
	want := Sessions{Turns: 5, Completed: 2, PerSecond: 2 / 3.901}
	if m.Sessions.Turns != want.Turns || m.Sessions.Completed != want.Completed || math.Abs(m.Sessions.PerSecond-want.PerSecond) > 1e-9 {
		t.Errorf("sessions %+v, want %+v", m.Sessions, want)
	}
}

func TestTheClientsOwnDelaysAreMeasured(t *testing.T) {
	opened, reused := sample(1000, 1100, 1500), sample(1000, 1100, 1500)
	opened.Sent, opened.Connected, opened.ReadLag = 1010*time.Millisecond, 1013*time.Millisecond, 2*time.Millisecond
	reused.Connected = reused.Sent
	lateness := Lateness{GCPause: 3}
	m := Measure(Run{Samples: []Sample{opened, reused}, Lateness: lateness}, Scope{})
	if m.SendLag.Max != 10 || m.Connect.N != 1 || m.Connect.Mean != 3 || m.ReadLag.N != 2 || m.ReadLag.Max != 2 || m.Lateness != lateness || m.Queue.N != 0 {
		t.Errorf("send lag %+v, connect %+v, read lag %+v, queue %+v, %+v", m.SendLag, m.Connect, m.ReadLag, m.Queue, m.Lateness)
	}
	reused.Queued = 5 * time.Millisecond
	if m := Measure(Run{Samples: []Sample{opened, reused}}, Scope{}); m.Queue.N != 2 || m.Queue.Mean != 2.5 {
		t.Errorf("queue %+v, want 5 ms for one request and 0 for the other", m.Queue)
	}
}

func TestAMeasurementOfNothingIsStillJSON(t *testing.T) {
	for _, samples := range [][]Sample{nil, {{Failure: Refused, End: 1}}} {
		m := Measure(Run{Samples: samples}, Scope{})
		if _, err := json.Marshal(m); err != nil {
			t.Errorf("measurement of %v: %v", samples, err)
		}
	}
}

// Under the rules of 0.14.1 the chunk that only names the role counts in the peak, even if it came with the first
// token.
func TestTheRoleChunkCountsByTheOldRules(t *testing.T) {
	s := Sample{Sent: time.Second, Opened: 2 * time.Second, First: 2 * time.Second, Last: 2 * time.Second, Closed: 2 * time.Second, End: 2 * time.Second, OutputTokens: 1, WantTokens: 1, Chunks: 1, Role: true}
	run := Run{Samples: []Sample{s}, Series: Series{{}, {Sent: 1}, {Ended: 1, Chunks: 1}}}
	for rules, want := range map[Rules]int{Rules0141: 2, Rules033: 1} {
		if m := Measure(run, Scope{Rules: rules}); m.PeakChunks != want {
			t.Errorf("by the rules of %s the peak is %d chunks, want %d", rules, m.PeakChunks, want)
		}
	}
}
