package workload

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"slices"
	"testing"
	"time"
)

// sum returns a checksum of arrivals and of the times of a pass.
func sum(t *testing.T, all []Arrival, pass Pass) uint64 {
	t.Helper()
	h := fnv.New64a()
	add := func(v any) {
		if err := binary.Write(h, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range all {
		add([]int64{int64(a.Due), int64(a.Phase), int64(a.Index), int64(a.Request.OutputTokens), int64(a.Request.Conversation)})
		add(a.Request.Tokens)
		add([]byte(a.Request.Text))
	}
	for a := range pass.Schedule() {
		add(int64(a.Due))
	}
	return h.Sum64()
}

func TestRescaledArrivalsEndAtNOverRate(t *testing.T) {
	for _, arrivals := range []Arrivals{{}, {Burstiness: 0.5}, {Burstiness: math.Inf(1)}} {
		p := plan(t, 4)
		p.Arrivals, p.MinRequests = arrivals, 100
		drawn := windowOf(p)
		p.Rescale = true
		if n, length := p.Counted(); n != 100 || length != 25*time.Second {
			t.Errorf("%+v: Counted() = %d, %s, want 100 in 25 s", arrivals, n, length)
		}
		var all []Arrival
		for a := range p.Schedule() { // ends by itself, because a rescaled schedule has no run-out
			all = append(all, a)
		}
		if len(all) != 100 || all[0].Phase != Window || all[99].Phase != Window || (all[99].Due-25*time.Second).Abs() > time.Microsecond {
			t.Fatalf("%+v: %d arrivals, the last at %s, want 100 in the window, the last at 25 s", arrivals, len(all), all[len(all)-1].Due)
		}
		factor := 25 / (drawn[99].Due - p.LeadIn).Seconds()
		for i, a := range all {
			if want := (drawn[i].Due - p.LeadIn).Seconds() * factor; math.Abs(a.Due.Seconds()-want) > 1e-6 {
				t.Fatalf("%+v: arrival %d at %s, want every time stretched by %.4f", arrivals, i, a.Due, factor)
			}
		}
	}
}

func TestARampHasVLLMsRates(t *testing.T) {
	tests := []struct {
		name string
		ramp Ramp
		want map[int]float64
	}{
		{"a linear one goes up by steps", Ramp{From: 1, To: 5, N: 5}, map[int]float64{0: 1, 1: 2, 2: 3, 4: 5}},
		{"an exponential one by factors", Ramp{From: 1, To: 16, N: 5, Exponential: true}, map[int]float64{0: 1, 1: 2, 2: 4, 4: 16}},
		{"down is a direction too", Ramp{From: 8, To: 2, N: 3}, map[int]float64{0: 8, 1: 5, 2: 2}},
		{"a single request has the first rate", Ramp{From: 3, To: 9, N: 1}, map[int]float64{0: 3}},
	}
	for _, test := range tests {
		for i, want := range test.want {
			if got := test.ramp.rate(i); math.Abs(got-want) > 1e-9 {
				t.Errorf("%s: rate(%d) = %g, want %g", test.name, i, got, want)
			}
		}
	}
}

func TestARampHasItsGapsAndARunOut(t *testing.T) {
	r := Ramp{Source: open(t, Spec{Kind: "random", InputTokens: 4, OutputTokens: 2}, 1), Seed: 2, From: 1, To: 10, N: 50, Burstiness: math.Inf(1)}
	all := arrivals(r.Schedule(), 30)
	at := 0.0
	for i, a := range all[:50] {
		at += 1 / r.rate(i)
		if a.Phase != Window || a.Index != i || math.Abs(a.Due.Seconds()-at) > 1e-6 {
			t.Fatalf("arrival %d is %s %d at %s, want window %d at %.3f s", i, a.Phase, a.Index, a.Due, i, at)
		}
	}
	if n, length := r.Counted(); n != 50 || length != all[49].Due {
		t.Errorf("Counted() = %d, %s, want 50 until %s", n, length, all[49].Due)
	}
	if gap := all[79].Due - all[78].Due; len(all) != 80 || all[79].Phase != RunOut || (gap-100*time.Millisecond).Abs() > time.Microsecond {
		t.Errorf("%d arrivals, the last gap %s, want a run-out at the last rate", len(all), gap)
	}
	poisson := r
	poisson.Burstiness = 0
	if p := arrivals(poisson.Schedule(), 0); p[0].Due == all[0].Due || len(p) != 50 {
		t.Error("a Poisson ramp has constant gaps")
	}
	for _, none := range []Ramp{{Source: r.Source, To: 1, N: 5}, {Source: r.Source, From: 1, N: 5}, {Source: r.Source, From: 1, To: 1}} {
		if n, _ := none.Counted(); n != 0 || len(arrivals(none.Schedule(), 1)) != 0 {
			t.Errorf("a ramp from %g to %g of %d has arrivals", none.From, none.To, none.N)
		}
	}
}

func TestALoopIsDueAsSoonAsPossible(t *testing.T) {
	source := open(t, Spec{Kind: "random", InputTokens: 4, OutputTokens: 2}, 1)
	all := arrivals(Loop{Source: source, LeadIn: 3, N: 5}.Schedule(), 4)
	var phases []Phase
	for _, a := range all {
		phases = append(phases, a.Phase)
		stream := map[Phase]Stream{LeadIn: leadInStream, Window: WindowStream, RunOut: runOutStream}[a.Phase]
		if a.Due != Asap || !slices.Equal(a.Request.Tokens, source.Request(stream, a.Index).Tokens) {
			t.Errorf("%s %d is due at %s, or another stream's", a.Phase, a.Index, a.Due)
		}
	}
	if want := []Phase{0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2}; !slices.Equal(phases, want) {
		t.Errorf("phases %v, want %v", phases, want)
	}
}

func TestAReplayKeepsRecordedTimes(t *testing.T) {
	trace, err := OpenTrace(Spec{Kind: "trace", Path: examples + "mooncake.jsonl"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	other := open(t, Spec{Kind: "random", InputTokens: 4, OutputTokens: 2}, 1)
	ms := func(all ...int) (times []time.Duration) {
		for _, n := range all {
			times = append(times, time.Duration(n)*time.Millisecond)
		}
		return times
	}
	tests := []struct {
		name   string
		replay Replay
		times  []time.Duration
		n      int
		length time.Duration
	}{
		{"as recorded", Replay{Trace: trace}, ms(0, 0, 3052, 3052, 6100, 9003), 6, 9003 * time.Millisecond},
		{"twice as fast", Replay{Trace: trace, Speed: 2}, ms(0, 0, 1526, 1526, 3050, 4501), 6, 4501500 * time.Microsecond},
		{"the first four, and the rest as run-out", Replay{Trace: trace, N: 4}, ms(0, 0, 3052, 3052, 6100, 9003), 4, 3052 * time.Millisecond},
		{"more than there are", Replay{Trace: trace, N: 40}, ms(0, 0, 3052, 3052, 6100, 9003), 6, 9003 * time.Millisecond},
		{"with other requests", Replay{Trace: trace, Source: other, N: 5}, ms(0, 0, 3052, 3052, 6100, 9003), 5, 6100 * time.Millisecond},
	}
	for _, test := range tests {
		if n, length := test.replay.Counted(); n != test.n || length != test.length {
			t.Errorf("%s: Counted() = %d, %s, want %d, %s", test.name, n, length, test.n, test.length)
		}
		i := 0
		for a := range test.replay.Schedule() {
			want := Arrival{Due: test.times[i], Phase: Window, Index: i, Request: trace.request(i)}
			stream := WindowStream
			if i >= test.n {
				want.Phase, want.Index, stream = RunOut, i-test.n, runOutStream
			}
			if test.replay.Source != nil {
				want.Request = other.Request(stream, want.Index)
			}
			if (a.Due-want.Due).Abs() > time.Millisecond || a.Phase != want.Phase || a.Index != want.Index || !slices.Equal(a.Request.Tokens, want.Request.Tokens) {
				t.Errorf("%s: arrival %d = %s %d at %s, want %s %d at %s", test.name, i, a.Phase, a.Index, a.Due, want.Phase, want.Index, want.Due)
			}
			i++
		}
		if i != 6 {
			t.Errorf("%s: %d arrivals, want the 6 of the trace", test.name, i)
		}
	}
}
