package slo

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
)

const ms = time.Millisecond

var chatSLO = SLO{Limits: []Limit{{TTFT, 99, 1000 * ms}, {TPOT, 99, 60 * ms}}}

// good returns a completed request of eleven tokens with the given TTFT and TPOT.
func good(ttft, tpot time.Duration) bench.Sample {
	return bench.Sample{First: ttft, Last: ttft + 10*tpot, End: ttft + 10*tpot, OutputTokens: 11, WantTokens: 11}
}

func samples(n int, odd ...bench.Sample) []bench.Sample {
	var all []bench.Sample
	for range n {
		all = append(all, good(500*ms, 40*ms))
	}
	return append(all, odd...)
}

func TestJudge(t *testing.T) {
	failed := bench.Sample{Failure: bench.Reset, End: ms, WantTokens: 11}
	pending := bench.Sample{Due: 0}
	oneToken := bench.Sample{First: 100 * ms, Last: 100 * ms, End: 100 * ms, OutputTokens: 1, WantTokens: 1}
	some := SLO{Limits: chatSLO.Limits, MaxErrorRate: 0.02}
	for _, row := range []struct {
		name    string
		slo     SLO
		samples []bench.Sample
		planned int
		pass    bool
		binding string
		reason  string
	}{
		{"all is well", chatSLO, samples(300), 300, true, "p99 TPOT", "keeps 60 ms (0 of 300 over the limit, 3 allowed)"},
		{"one slow answer breaks p99 of 50", chatSLO, samples(49, good(1200*ms, 40*ms)), 50, false, "p99 TTFT", "breaks"},
		{"three slow answers of 300 are allowed", chatSLO, samples(297, good(1001*ms, 40*ms), good(1001*ms, 40*ms), good(1001*ms, 40*ms)), 300, true, "", ""},
		{"good answers that are too few to tell", chatSLO, samples(99), 99, false, tooFew, "no verdict: 99 requests are too few for p99, which needs 100"},
		{"good answers that are just enough", chatSLO, samples(100), 100, true, "", ""},
		{"four slow answers of 300 are too many", chatSLO, samples(296, good(1001*ms, 40*ms), good(1001*ms, 40*ms), good(1001*ms, 40*ms), good(1001*ms, 40*ms)), 300, false, "p99 TTFT", "4 of 300 over the limit, 3 allowed"},
		{"three slow answers whose interpolated p99 is over the limit", chatSLO, samples(297, good(90000*ms, 40*ms), good(90000*ms, 40*ms), good(90000*ms, 40*ms)), 300, false, "p99 TTFT", "3 of 300 over the limit"},
		{"a failed request breaks an SLO without an error rate", chatSLO, samples(299, failed), 300, false, "error rate", "1 of 300 requests failed"},
		{"an error rate of 2 % allows one of 300, as p99 does", some, samples(299, failed), 300, true, "", ""},
		{"failed requests break every limit", some, samples(296, failed, failed, failed, failed), 300, false, "p99 TTFT", "0 over the limit and 4 failed of 300, 3 allowed"},
		{"nothing completed is a failure, not 0 ms", chatSLO, nil, 300, false, "", "no request was completed"},
		{"where all requests failed it is not by a latency", chatSLO, samples(0, failed, failed), 300, false, "error rate", "no request was completed"},
		{"pending requests that are overdue break TTFT", chatSLO, samples(10, pending, pending, pending, pending), 300, false, "p99 TTFT", "4 of 14 over the limit, 3 allowed"},
		{"a probe that ended early cannot pass", chatSLO, samples(100), 300, false, "", "the probe ended after 100 of 300 requests"},
		{"answers of one token have no TPOT", chatSLO, samples(299, oneToken), 300, true, "p99 TPOT", "0 of 299"},
	} {
		v := row.slo.Judge(row.samples, row.planned, 2*time.Second)
		if v.Pass != row.pass || row.binding != "" && v.Binding != row.binding || !strings.Contains(v.Reason, row.reason) {
			t.Errorf("%s: %+v, want pass %v by %q because %q", row.name, v, row.pass, row.binding, row.reason)
		}
		if (v.Headroom < 0) == v.Pass || math.IsInf(v.Headroom, 0) || math.IsNaN(v.Headroom) {
			t.Errorf("%s: headroom %g contradicts the verdict %v", row.name, v.Headroom, v.Pass)
		}
	}
}

func TestJudgeOtherMetrics(t *testing.T) {
	s := good(500*ms, 40*ms)
	s.Gaps = []time.Duration{30 * ms, 30 * ms, 200 * ms}
	for _, row := range []struct {
		limit Limit
		want  float64
	}{
		{Limit{ITL, 50, 100 * ms}, 30},
		{Limit{E2E, 95, 2000 * ms}, 900},
		{Limit{TTFT, 99.9, 2000 * ms}, 500},
	} {
		v := SLO{Limits: []Limit{row.limit}}.Judge([]bench.Sample{s}, 1, time.Second)
		if got := v.Checks[0].ValueMS; got != row.want {
			t.Errorf("%s = %g ms, want %g", row.limit, got, row.want)
		}
	}
}

func TestHeadroomIsTheLogOfLimitOverValue(t *testing.T) {
	v := chatSLO.Judge(samples(300), 300, time.Minute)
	if want := math.Log(60.0 / 40); math.Abs(v.Headroom-want) > 1e-9 {
		t.Errorf("headroom %g, want %g", v.Headroom, want)
	}
}

func TestHeadroomFallsWithTheFailures(t *testing.T) {
	failed := bench.Sample{Failure: bench.Status, End: ms, WantTokens: 11}
	last := 0.0
	for _, n := range []int{1, 10, 200} {
		all := samples(300 - n)
		for range n {
			all = append(all, failed)
		}
		h := chatSLO.Judge(all, 300, time.Minute).Headroom
		if h >= last {
			t.Errorf("with %d of 300 failed the headroom is %g, want less than %g", n, h, last)
		}
		last = h
	}
}

func TestStopOnlyEverFails(t *testing.T) {
	stop := chatSLO.Stop(300)
	slow, failed := good(1200*ms, 40*ms), bench.Sample{Failure: bench.Status, End: ms}
	for _, row := range []struct {
		name    string
		samples []bench.Sample
		now     time.Duration
		want    bool
	}{
		{"a good start goes on", samples(100), time.Second, false},
		{"three slow ones may still pass", samples(10, slow, slow, slow), time.Second, false},
		{"eighty have failed, but not yet clearly", samples(10, slices.Repeat([]bench.Sample{slow}, 80)...), time.Second, false},
		{"eighty-one have failed clearly", samples(10, slices.Repeat([]bench.Sample{slow}, 81)...), time.Second, true},
		{"a failed request ends a probe without an error rate", samples(10, failed), time.Second, true},
		{"pending requests are not late yet", make([]bench.Sample, 81), time.Second, false},
		{"pending requests without a first token are late after the limit", make([]bench.Sample, 81), 1001 * ms, true},
	} {
		if got := stop(row.now, row.samples); got != row.want {
			t.Errorf("%s: Stop = %v, want %v", row.name, got, row.want)
		}
	}
}

func TestAVerdictSaysThatTheClientWasLate(t *testing.T) {
	late := func(n int, lag, ttft time.Duration) []bench.Sample {
		all := samples(300 - n)
		for range n {
			s := good(ttft, 40*ms)
			s.Sent = lag
			all = append(all, s)
		}
		return all
	}
	for _, row := range []struct {
		name    string
		samples []bench.Sample
		pass    bool
		want    string
	}{
		{"a client in time", late(0, 0, 0), true, ""},
		{"a late client whose lateness broke the limit", late(10, 300*ms, 1200*ms), false, "300 ms late at p99; without its lateness the probe would have passed"},
		{"a late client and a server that is slower still", late(10, 300*ms, 1400*ms), false, ""},
		{"a client so late that its bursts were thinned out", late(10, 150*ms, 500*ms), true, "150 ms late at p99, more than a tenth of the limit of 1000 ms for p99 TTFT"},
		{"a client that is late once", late(1, 300*ms, 1200*ms), true, ""},
	} {
		v := chatSLO.Judge(row.samples, 300, time.Minute)
		if v.Pass != row.pass || (row.want == "") != (v.ClientLimited == "") || !strings.Contains(v.ClientLimited, row.want) {
			t.Errorf("%s: pass %t, client limited %q, want %t and %q", row.name, v.Pass, v.ClientLimited, row.pass, row.want)
		}
	}
}

func TestAVerdictInOneWord(t *testing.T) {
	for _, row := range []struct {
		verdict Verdict
		want    string
	}{
		{Verdict{Pass: true}, "passed"}, {Verdict{}, "failed"},
		{Verdict{Pass: true, ClientLimited: "late"}, "client-limited"}, {Verdict{ClientLimited: "late"}, "client-limited"},
	} {
		if got := row.verdict.Word(); got != row.want {
			t.Errorf("%+v in one word is %q, want %q", row.verdict, got, row.want)
		}
	}
}

func TestAVerdictNamesWhatItFailedBy(t *testing.T) {
	failed := bench.Sample{Failure: bench.Reset, End: ms, WantTokens: 11}
	both := SLO{Limits: []Limit{{TTFT, 99, 1000 * ms}, {TTFT, 50, 100 * ms}, {TPOT, 99, 60 * ms}}, MaxErrorRate: 0.5}
	for _, row := range []struct {
		name    string
		slo     SLO
		samples []bench.Sample
		planned int
		want    string
	}{
		{"nothing", chatSLO, samples(300), 300, ""},
		{"a slow first token", chatSLO, samples(0, good(1200*ms, 40*ms)), 1, "TTFT"},
		{"slow tokens", chatSLO, samples(0, good(100*ms, 70*ms)), 1, "TPOT"},
		{"both, and a metric with two limits once", both, samples(0, good(1200*ms, 70*ms)), 1, "TTFT TPOT"},
		{"a failed request among many", chatSLO, samples(299, failed), 300, "errors"},
		{"failed requests alone", chatSLO, samples(0, failed), 1, "TTFT TPOT errors"},
		{"an early end", chatSLO, samples(100), 300, ""},
	} {
		if got := strings.Join(row.slo.Judge(row.samples, row.planned, time.Minute).Broken(), " "); got != row.want {
			t.Errorf("%s: broken are %q, want %q", row.name, got, row.want)
		}
	}
}

func TestEachSaysWhatARequestDid(t *testing.T) {
	streaming := func(due, first time.Duration, chunks int) bench.Sample {
		return bench.Sample{Due: due, First: first, Last: first, Chunks: chunks, WantTokens: 11}
	}
	waiting := func(due time.Duration) bench.Sample { return bench.Sample{Due: due, WantTokens: 11} }
	slo := SLO{Limits: []Limit{{TTFT, 99, 1000 * ms}, {TPOT, 99, 60 * ms}, {E2E, 99, 3000 * ms}, {ITL, 99, 60 * ms}}}
	for _, row := range []struct {
		name   string
		sample bench.Sample // judged 4 s after the start
		each   string       // one character for each of the limits on TTFT, TPOT and E2E
	}{
		{"a good answer", good(500*ms, 40*ms), "..."},
		{"an answer at the limits", good(1000*ms, 60*ms), "..."},
		{"a slow first token", good(1001*ms, 40*ms), "x.."},
		{"slow tokens", good(500*ms, 61*ms), ".x."},
		{"slow to the end", good(500*ms, 260*ms), ".xx"},
		{"a failed one breaks every limit", bench.Sample{Failure: bench.Reset, End: ms, WantTokens: 11}, "xxx"},
		{"a single token has no time between tokens", bench.Sample{First: ms, Last: ms, End: ms, OutputTokens: 1, WantTokens: 1}, ".?."},
		{"one that waits may still keep all", waiting(3500 * ms), "???"},
		{"one that waits for too long is over TTFT", waiting(2500 * ms), "x??"},
		{"one that waits for much too long is over E2E too", waiting(500 * ms), "x?x"},
		{"a first token in time, of an answer that goes on", streaming(3000*ms, 3500*ms, 2), ".??"},
		{"a first token that was late", streaming(2000*ms, 3500*ms, 2), "x??"},
		{"a token that is so late that the mean must be over", streaming(3000*ms, 3300*ms, 9), ".x?"},
		{"all tokens have come and the end has not", streaming(500*ms, 1000*ms, 11), ".??"},
	} {
		each := ""
		for _, c := range slo.Judge([]bench.Sample{row.sample}, 1, 4*time.Second).Checks {
			each += c.Each
		}
		if each != row.each {
			t.Errorf("%s: TTFT, TPOT and E2E are %q, want %q", row.name, each, row.each)
		}
	}
}

// When a probe ends early, the last quick requests have ended and the last slow requests have not. To count only the
// quick ones would be too favourable, so none of these last requests count.
func TestQuickRequestsBeforeAnEarlyEndDoNotCount(t *testing.T) {
	at := func(due time.Duration) bench.Sample {
		s := good(100*ms, 10*ms) // a request of 200 ms; the E2E limit is 3 s
		s.Due, s.First, s.Last, s.End = due, due+s.First, due+s.Last, due+s.End
		return s
	}
	slo := SLO{Limits: []Limit{{TTFT, 99, 1000 * ms}, {TPOT, 99, 60 * ms}, {E2E, 99, 3000 * ms}}}
	samples := []bench.Sample{at(0), at(1500 * ms), at(3200 * ms), at(3600 * ms)}
	for _, row := range []struct {
		planned int
		each    [3]string
	}{
		{5, [3]string{"..??", "...?", ".???"}},
		{4, [3]string{"....", "....", "...."}}, // all planned requests have ended
	} {
		v := slo.Judge(samples, row.planned, 4*time.Second)
		for i, want := range row.each {
			if got := v.Checks[i].Each; got != want {
				t.Errorf("%s of four of %d requests, after 4 s: %q, want %q", v.Checks[i].Limit, row.planned, got, want)
			}
			if n := v.Checks[i].N; n != len(samples) {
				t.Errorf("%s of four of %d requests counts %d in its verdict, want all that are known", v.Checks[i].Limit, row.planned, n)
			}
		}
	}
}
