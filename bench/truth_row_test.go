package bench_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/truth"
)

// trueTTFT is the server's TTFT in every row.
const trueTTFT = 20 * time.Millisecond

// A row is one line of the table of results. It describes a load: a number of streams in flight, in a closed or an open
// loop.
type row struct {
	streams, tokens int
	tpot            time.Duration
	open            bool
	step            bool // the tokens of all streams are due together
}

func (r row) String() string {
	return fmt.Sprintf("%s loop, %d streams × %d tokens × %d ms", r.loop(), r.streams, r.tokens, r.tpot.Milliseconds())
}

func (r row) loop() string {
	loop := "closed"
	if r.open {
		loop = "open"
	}
	if r.step {
		loop += " in step"
	}
	return loop
}

// server returns the configuration of the row's server.
func (r row) server() truth.Config {
	return truth.Config{TTFT: trueTTFT, TPOT: r.tpot, Step: r.step}
}

// answer returns how long one answer takes.
func (r row) answer() time.Duration { return trueTTFT + time.Duration(r.tokens-1)*r.tpot }

// rate returns the arrivals per second that keep r.streams streams in flight on average.
func (r row) rate() float64 { return float64(r.streams) / r.answer().Seconds() }

// leadIn returns how many uncounted requests come first in an open loop, to fill the server.
func (r row) leadIn() int {
	if r.open {
		return r.streams
	}
	return 0
}

// figures are the results of one run of a row. Latencies are in milliseconds.
type figures struct {
	Failed, Unpaired int
	TTFT, TrueTTFT   bench.Stats
	Error            bench.Stats // for each request: reported TTFT - true TTFT - the client's own send lag (if reported)
	SendLag, ReadLag bench.Stats // empty if the client does not report them
	TPOT, TrueTPOT   bench.Stats
	TPOTError        bench.Stats // for each request: difference between the reported and the true TPOT, without sign
	ITL, TrueITL     bench.Stats
	Late             bench.Stats // how late the server wrote its tokens
	CPU              float64     // client's CPU time, microseconds per token
	ServerCPU        float64     // microseconds per token
	Memory           float64     // MiB resident
}

// A pair is one request with two records: the client's and the server's.
type pair struct {
	ttft, tpot, lag time.Duration
	truth           truth.Request
}

// compare computes the figures that need both records of each request.
func (f *figures) compare(pairs []pair) {
	var ttft, trueTTFTs, errs, tpot, trueTPOT, tpotErrs, gaps, late []time.Duration
	for _, p := range pairs {
		ttft, trueTTFTs = append(ttft, p.ttft), append(trueTTFTs, p.truth.TTFT())
		errs = append(errs, p.ttft-p.truth.TTFT()-p.lag)
		tpot, trueTPOT = append(tpot, p.tpot), append(trueTPOT, p.truth.TPOT())
		tpotErrs = append(tpotErrs, (p.tpot - p.truth.TPOT()).Abs())
		gaps, late = append(gaps, p.truth.Gaps()...), append(late, p.truth.Lateness()...)
	}
	f.TTFT, f.TrueTTFT, f.Error = statsOf(ttft), statsOf(trueTTFTs), statsOf(errs)
	f.TPOT, f.TrueTPOT, f.TPOTError = statsOf(tpot), statsOf(trueTPOT), statsOf(tpotErrs)
	f.TrueITL, f.Late = statsOf(gaps), statsOf(late)
}

// runOurs measures the client of this package with the given number of counted requests.
func (r row) runOurs(ctx context.Context, t *testing.T, requests int) figures {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Minute+20*r.answer()*time.Duration(1+requests/r.streams))
	defer cancel()
	url, stop := startTruth(t, r.server())
	defer stop()
	l := load{URL: url, Requests: requests, Tokens: r.tokens, Samples: true, InFlight: r.streams}
	if r.open {
		l.InFlight, l.Rate, l.LeadIn = 0, r.rate(), r.answer()
	}
	o, c, err := runClient(ctx, t, l, nil)
	if err != nil {
		t.Fatal(err)
	}
	report, err := truth.Fetch(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	f := figures{
		Failed: o.Measurement.Failed, ITL: o.Measurement.ITL, Memory: float64(c.memory) / (1 << 20),
		CPU: perToken(c.cpu, report.Tokens), ServerCPU: perToken(report.CPU, report.Tokens),
	}
	f.SendLag, f.ReadLag = o.Measurement.SendLag, o.Measurement.ReadLag
	known := indexed(report, "-window-")
	var pairs []pair
	for _, s := range o.Samples {
		q, ok := known[s.Index]
		if !s.OK || !ok || len(q.Writes) != r.tokens {
			f.Unpaired++
			continue
		}
		pairs = append(pairs, pair{s.TTFT, s.TPOT, s.SendLag, q})
	}
	f.compare(pairs)
	return f
}

// perToken returns the CPU time per token in microseconds. CPU seconds per million tokens are the same number.
func perToken(cpu time.Duration, tokens int) float64 {
	return float64(cpu.Microseconds()) / float64(max(1, tokens))
}
