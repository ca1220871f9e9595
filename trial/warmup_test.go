package trial

import (
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
)

// trialOf runs a trial on the stub. It returns the calls that the stub received, and the trial's result.
func trialOf(t *testing.T, s *stub, protocol Protocol, set func(*Runner)) (string, Result) {
	t.Helper()
	r := runner(t, s, protocol)
	if set != nil {
		set(r)
	}
	result, _ := runTrial(t, r, Task{})
	return strings.Join(s.did, " "), result
}

func TestTheWarmUpEndsWhenTheServerIsWarm(t *testing.T) {
	ms := func(values ...int) (all []time.Duration) {
		for _, v := range values {
			all = append(all, time.Duration(v)*time.Millisecond)
		}
		return all
	}
	for _, row := range []struct {
		name    string
		warming []time.Duration
		pieces  int
		note    string
	}{
		{"warm from its start", nil, 2, ""},
		{"slow at first", ms(5000, 100), 3, ""},
		{"slow for three pieces", ms(9000, 3000, 1000, 100), 5, ""},
		{"quicker from piece to piece, within what the draw does", ms(100, 60, 35), 2, ""},
		{"slower from piece to piece is not cold", ms(100, 200, 400), 2, ""},
		{"never settles", ms(1<<23, 1<<21, 1<<19, 1<<17, 1<<15, 1<<13, 1<<11, 1<<9, 1<<7, 1<<5, 1<<3, 1<<1), maxWarmUps,
			"the server was not warm after 120 requests and 72 s: its latencies still fell"},
	} {
		s := &stub{capacity: 4.8, warming: row.warming}
		did, result := trialOf(t, s, Reset, nil)
		if s.pieces != row.pieces || !strings.HasPrefix(did, "start"+strings.Repeat(" warm", row.pieces)+" reset probe") {
			t.Errorf("%s: did %q, want %d pieces of warm-up", row.name, did, row.pieces)
		}
		if got := strings.Join(result.Notes, " "); got != row.note {
			t.Errorf("%s: notes %q, want %q", row.name, got, row.note)
		}
	}
}

func TestLatenciesFall(t *testing.T) {
	samples := func(ttft, tpot time.Duration) (all []bench.Sample) {
		for i := range warmUpRequests {
			spread := 1 + float64(i)/10 // the slowest request takes nearly twice as long as the quickest
			first := time.Duration(spread * float64(ttft))
			last := first + time.Duration(10*spread*float64(tpot))
			all = append(all, bench.Sample{First: first, Last: last, End: last, OutputTokens: 11})
		}
		return all
	}
	const ttft, tpot = 100 * time.Millisecond, 20 * time.Millisecond
	stall := samples(ttft, tpot)
	for i := range 3 {
		stall[i].First += 10 * time.Second
		stall[i].Last += 10 * time.Second
	}
	failed := samples(ttft, tpot)
	for i := range failed {
		failed[i].End, failed[i].Failure = 0, bench.Status
	}
	for _, row := range []struct {
		name        string
		before, now []bench.Sample
		want        bool
	}{
		{"the same", samples(ttft, tpot), samples(ttft, tpot), false},
		{"a TPOT that is a fifth lower is within the spread of ten", samples(ttft, tpot), samples(ttft, tpot*4/5), false},
		{"a TPOT that is a third lower", samples(ttft, tpot), samples(ttft, tpot*2/3), true},
		{"a TTFT of half is the draw", samples(ttft, tpot), samples(ttft/2, tpot), false},
		{"a TTFT of a quarter", samples(ttft, tpot), samples(ttft/4, tpot), true},
		{"both higher", samples(ttft, tpot), samples(3*ttft, 3*tpot), false},
		{"only the first requests were slow", stall, samples(ttft, tpot), false},
		{"nothing is known of the piece before", failed, samples(ttft, tpot), false},
	} {
		if got := latenciesOf(row.now).fellFrom(latenciesOf(row.before)); got != row.want {
			t.Errorf("%s: fell %v, want %v", row.name, got, row.want)
		}
	}
}

func TestTheWarmUpEndsWithItsTime(t *testing.T) {
	s := &stub{capacity: 4.8, warming: []time.Duration{1 << 40, 1 << 38, 1 << 36, 1 << 34}}
	s.slowly = 2 * time.Minute
	if _, result := trialOf(t, s, Reset, nil); s.pieces != 3 || len(result.Notes) != 1 {
		t.Errorf("pieces of two minutes: %d were sent, notes %q; want an end after %s", s.pieces, result.Notes, warmUpLimit)
	}
}

func TestTheWarmUpGoesOnUntilTheAcceptanceIsKnown(t *testing.T) {
	drafts := func(tokens, accepted float64) serverctl.Counters {
		return serverctl.Counters{Drafts: tokens / 3, DraftTokens: tokens, AcceptedTokens: accepted, AcceptedAt: []float64{accepted, 0, 0}}
	}
	asked := func(r *Runner) { r.MinAcceptance, r.MinDrafted = 0.02, 1000 }
	for _, row := range []struct {
		name   string
		drafts serverctl.Counters
		set    func(*Runner)
		pieces int
		want   Outcome
		says   []string // must be in the evidence, or in the notes if the trial is measured
	}{
		{"nothing is drafted", serverctl.Counters{}, asked, 2, Measured, nil},
		{"much is accepted", drafts(3000, 1500), asked, 2, Measured, nil},
		{"just enough is accepted", drafts(500, 10), asked, 2, Measured, nil},
		{"hardly any is accepted", drafts(12591, 1), asked, 2, Dropped, []string{
			"2 of 25,182 drafted tokens were accepted (0.0079 %, less than 2 %)", "another model, tokenizer or chat template",
			"Each decoding step drafts and verifies 3.0 tokens and accepts 0.00024 of them on average", "a token takes 10.0 ms"}},
		{"few tokens are drafted at a time", drafts(210, 0), asked, 5, Dropped, []string{"0 of 1,050 drafted"}},
		{"nobody asks", drafts(12591, 1), nil, 2, Measured, nil},
		{"too few are ever drafted to know in the warm-up, a probe tells", drafts(80, 0), asked, maxWarmUps, Dropped, []string{"0 of 1,040 drafted"}},
		{"too few are ever drafted to know", drafts(30, 0), asked, maxWarmUps, Measured,
			[]string{"the acceptance of drafts is not known: 360 tokens were drafted, 1000 are needed"}},
	} {
		s := &stub{capacity: 4.8, drafts: row.drafts}
		did, result := trialOf(t, s, Reset, row.set)
		if s.pieces != row.pieces || result.Outcome != row.want {
			t.Errorf("%s: did %q with %d pieces of warm-up: %s; want %d and %s", row.name, did, s.pieces, result.Outcome, row.pieces, row.want)
		}
		text := result.Evidence
		if row.want == Measured {
			text = strings.Join(result.Notes, " ")
		}
		for _, words := range row.says {
			if !strings.Contains(text, words) {
				t.Errorf("%s: the result says %q, want %q in it", row.name, text, words)
			}
		}
		if row.want == Dropped && (result.Class != serverctl.AcceptanceNearZero || result.Capacity.Met() || !strings.HasSuffix(did, "stop")) {
			t.Errorf("%s: result %+v after %q, want its class, no capacity and a stopped server", row.name, result, did)
		}
		if row.says == nil && len(result.Notes) > 0 {
			t.Errorf("%s: notes %q", row.name, result.Notes)
		}
	}
}

// A trial that is dropped must also be dropped if it is interrupted and resumed before that.
func TestADroppedTrialIsDroppedAgain(t *testing.T) {
	run := func(done []Probe) (Result, []Probe, string) {
		s := &stub{capacity: 4.8, drafts: serverctl.Counters{Drafts: 20, DraftTokens: 75, AcceptedTokens: 1, AcceptedAt: []float64{1}}}
		r := runner(t, s, Reset)
		r.MinAcceptance, r.MinDrafted = 0.02, 1000
		result, probes := runTrial(t, r, Task{Done: done})
		return result, probes, strings.Join(s.did, " ")
	}
	whole, probes, _ := run(nil)
	if whole.Outcome != Dropped || len(probes) != 2 {
		t.Fatalf("Run = %+v after %d probes, want a trial that its second probe drops", whole, len(probes))
	}
	for had := range len(probes) + 1 {
		again, _, did := run(probes[:had])
		if again.Outcome != Dropped || again.Evidence != whole.Evidence || strings.Count(did, "probe") != len(probes)-had {
			t.Errorf("with %d of %d probes: %q after %q, want %q", had, len(probes), again.Evidence, did, whole.Evidence)
		}
	}
}

// Drafts are judged once, as soon as enough tokens were drafted. Later drafts do not change the judgement.
func TestDraftsAreJudgedOnce(t *testing.T) {
	d := drafts{runner: &Runner{MinAcceptance: 0.02, MinDrafted: 1000}}
	for _, more := range []Speculation{{Drafts: 300, Tokens: 900, Accepted: 5}, {Drafts: 100, Tokens: 300, Accepted: 50}, {Drafts: 1e6, Tokens: 3e6}} {
		if err := d.judge(&more); err != nil {
			t.Errorf("after %+v: %v", d, err)
		}
	}
}
