package trial

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
)

// RunClosed answers as Run does. The requests are evenly spaced: 10 per second for each stream.
func (s *stub) RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error) {
	s.streams = append(s.streams, streams)
	at := time.Duration(0)
	return s.Run(ctx, func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			at += time.Second / time.Duration(10*streams)
			if a.Due != workload.Asap || a.Phase != workload.Window {
				s.note("not asap")
			}
			a.Due = at
			if !yield(a) {
				return
			}
		}
	}, stop)
}

func manual(levels ...float64) Sweep {
	s := Sweep{Requests: 100, WarmUp: 4, WarmUpRate: 2, WarmUpCooldown: 5 * time.Second, Cooldown: 10 * time.Second}
	for _, rate := range levels {
		s.Levels = append(s.Levels, Level{Rate: rate})
	}
	return s
}

func (s *stub) pauses(_ context.Context, d time.Duration) error {
	s.note("rest " + d.String())
	return nil
}

func TestSweepMeasuresEveryLevelOnOneServer(t *testing.T) {
	for _, row := range []struct {
		name  string
		cache Protocol
		warm  int
		want  string
	}{
		{"carried", Carried, 4, "start pass rest 5s probe rest 10s probe rest 10s probe stop"},
		{"emptied", Reset, 4, "start pass rest 5s reset probe rest 10s reset probe rest 10s reset probe stop"},
		{"without a warm-up", Carried, 0, "start probe rest 10s probe rest 10s probe stop"},
	} {
		s := &stub{capacity: 2.5}
		sweep := manual(1, 2, 4)
		sweep.WarmUp, sweep.Pause = row.warm, s.pauses
		var probes []Probe
		result, err := runner(t, s, row.cache).Sweep(t.Context(), Task{Record: func(p Probe) error { probes = append(probes, p); return nil }}, sweep)
		if err != nil || result.Outcome != Measured || strings.Join(s.did, " ") != row.want {
			t.Fatalf("%s: Sweep = %+v, %v after %v, want %s", row.name, result.Outcome, err, s.did, row.want)
		}
		if c := result.Capacity; c.Rate != 2 || c.High != 4 || c.Bound != capacity.Exact || c.Probes != 3 {
			t.Errorf("%s: the capacity is %+v, want 2, a rate of the grid", row.name, c)
		}
		for i, p := range probes {
			if p.Seq != i || p.Measurement.Requests != 100 || p.Stopped || p.Measurement.Window != sweep.Takes(p.Level()) {
				t.Errorf("%s: probe %d is %+v, want 100 requests within 100/rate, to its end", row.name, i, p)
			}
		}
		gpu := 10*time.Second + 2*time.Second + 3*61*time.Second + 20*time.Second // start + stop + 3 probes with drain + pauses
		if row.warm > 0 {
			gpu += 5*time.Second + time.Second + 5*time.Second
		}
		if result.GPUTime != gpu {
			t.Errorf("%s: GPU time %s, want %s", row.name, result.GPUTime, gpu)
		}
	}
}

// A sweep repeats a level if the load generator was late and the cache is emptied before each level. The GPU time of a
// repeated level is the sum of both measurements.
func TestASweepRepeatsALateLevel(t *testing.T) {
	for _, row := range []struct {
		cache   Protocol
		bound   capacity.Bound
		high    float64
		limited bool
		want    string
	}{
		{Reset, capacity.Exact, 4, false, "start reset probe rest 10s reset probe reset probe rest 10s reset probe stop"},
		{Carried, capacity.AtLeast, 4, true, "start probe rest 10s probe rest 10s probe stop"},
	} {
		s := &stub{capacity: 2.5, late: 500 * time.Millisecond}
		s.lateIn = func(run int) bool { return run == 2 }
		sweep := manual(1, 2, 4)
		sweep.WarmUp, sweep.Pause = 0, s.pauses
		var probes []Probe
		result, err := runner(t, s, row.cache).Sweep(t.Context(), Task{Record: func(p Probe) error { probes = append(probes, p); return nil }}, sweep)
		c := result.Capacity
		if err != nil || strings.Join(s.did, " ") != row.want || c.Bound != row.bound || c.High != row.high || (c.Limited != "") != row.limited {
			t.Errorf("%s: %+v, %v after %v; want %s, limited %t, after %s", row.cache, c, err, s.did, row.bound, row.limited, row.want)
		}
		if again := probes[1].Replaced > 0; again == row.limited || again && (probes[1].GPUTime != 2*probes[0].GPUTime || !strings.Contains(probes[1].Note, "measured again, because the load generator was 500 ms late")) {
			t.Errorf("%s: the late level is %+v, want repeated: %t", row.cache, probes[1], !row.limited)
		}
	}
}

// A sweep sends the same requests at every rate. The warm-up sends the first few of these requests.
func TestSweepAsksTheSameAtEachRate(t *testing.T) {
	s := &stub{capacity: 100}
	r := runner(t, s, Carried)
	spy := &arrivalRecorder{stub: s}
	r.Start = func(ctx context.Context, l Launch) (Server, Load, error) {
		server, _, err := s.start(ctx, l)
		return server, spy, err
	}
	sweep := manual(1, 2)
	sweep.Pause = s.pauses
	if _, err := r.Sweep(t.Context(), Task{Record: func(Probe) error { return nil }}, sweep); err != nil {
		t.Fatal(err)
	}
	warm, slow, fast := spy.runs[0], spy.runs[1], spy.runs[2]
	if len(warm) != 4 || len(slow) != 100 || len(fast) != 100 {
		t.Fatalf("%d, %d and %d requests, want 4, 100 and 100", len(warm), len(slow), len(fast))
	}
	for i := range slow {
		if slow[i].Request != fast[i].Request || i < len(warm) && warm[i].Request != slow[i].Request {
			t.Errorf("request %d differs between the two rates, or between warm-up and level", i)
		}
		if d := slow[i].Due - 2*fast[i].Due; d.Abs() > time.Microsecond {
			t.Errorf("request %d is due at %s, and at twice the rate at %s; want half the time", i, slow[i].Due, fast[i].Due)
		}
	}
	if last := slow[29]; last.Due.Round(time.Millisecond) != 30*time.Second || last.Phase != workload.Window {
		t.Errorf("the last of 30 requests at 1 req/s is %s at %s, want the window's at 30 s", last.Phase, last.Due)
	}
}

// An arrivalRecorder is a stub that records the arrivals of each run.
type arrivalRecorder struct {
	*stub
	runs [][]workload.Arrival
}

func (a *arrivalRecorder) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	var all []workload.Arrival
	for arrival := range schedule {
		all = append(all, arrival)
	}
	a.runs = append(a.runs, all)
	return a.stub.Run(ctx, slices.Values(all), stop)
}

func TestSweepOverAClosedLoop(t *testing.T) {
	s := &stub{capacity: 25}
	sweep := Sweep{Levels: []Level{{Streams: 1}, {Streams: 2}, {Streams: 4}}, Requests: 100}
	var probes []Probe
	result, err := runner(t, s, Carried).Sweep(t.Context(), Task{Record: func(p Probe) error { probes = append(probes, p); return nil }}, sweep)
	if err != nil || !slices.Equal(s.streams, []int{1, 2, 4}) || strings.Join(s.did, " ") != "start probe probe probe stop" {
		t.Fatalf("Sweep = %v after %v with %v in flight", err, s.did, s.streams)
	}
	if c := result.Capacity; c.Rate != 2 || c.High != 4 {
		t.Errorf("the capacity is %+v, want a concurrency of 2", c)
	}
	if p := probes[1]; p.Streams != 2 || p.Rate != 0 || p.Level().String() != "concurrency 2" || p.Measurement.Requests != 100 ||
		p.Measurement.Window != 99*50*time.Millisecond+110*time.Millisecond {
		t.Errorf("the probe is %+v, want one from its first request to its last answer", p)
	}
	r := runner(t, s, Carried)
	r.Start = func(ctx context.Context, l Launch) (Server, Load, error) {
		server, load, err := s.start(ctx, l)
		return server, openOnly{load}, err
	}
	if _, err := r.Sweep(t.Context(), Task{}, sweep); err == nil || !strings.Contains(err.Error(), "no closed loop") {
		t.Errorf("with a load that has none, Sweep = %v", err)
	}
}

// openOnly hides the method RunClosed of a load.
type openOnly struct{ Load }

func TestASweepThatEndsEarlyKeepsWhatItHas(t *testing.T) {
	dies := &stub{capacity: 100, dieAt: 3}
	sweep := manual(1, 2, 4)
	sweep.Pause, sweep.WarmUp = dies.pauses, 0
	var probes []Probe
	record := func(p Probe) error { probes = append(probes, p); return nil }
	result, err := runner(t, dies, Carried).Sweep(t.Context(), Task{Record: record}, sweep)
	if err != nil || result.Class != serverctl.OOMLoad || len(probes) != 2 || result.Capacity.Rate != 2 || dies.did[len(dies.did)-1] != "stop" {
		t.Errorf("a server that dies at the third rate: Sweep = %+v, %v with %d probes", result, err, len(probes))
	}

	finish := make(chan struct{})
	s := &stub{capacity: 100}
	r := runner(t, s, Carried)
	probes = nil
	sweep.Pause = nil // the sweep waits in real time, and the end of the sweep must cut the wait short
	sweep.Cooldown = time.Hour
	task := Task{Finish: finish, Record: func(p Probe) error { close(finish); return record(p) }}
	result, err = r.Sweep(t.Context(), task, sweep)
	if !errors.Is(err, ErrInterrupted) || len(probes) != 1 || result.Capacity.Rate != 1 || strings.Join(s.did, " ") != "start probe stop" {
		t.Errorf("interrupted after the first rate: Sweep = %+v, %v after %v", result.Capacity, err, s.did)
	}
}

func TestAPauseWaitsOnTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{capacity: 100}
		began := time.Now()
		if _, err := runner(t, s, Carried).Sweep(t.Context(), Task{Record: func(Probe) error { return nil }}, manual(1, 2, 4)); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != 25*time.Second {
			t.Errorf("the pauses took %s, want 5 s after the warm-up and 10 s twice", took)
		}
	})
}

func TestPlannedIsTheTimeOfASweep(t *testing.T) {
	s := manual(1, 2)
	if got, want := s.Planned(), 2*time.Second+5*time.Second+100*time.Second+10*time.Second+50*time.Second; got != want {
		t.Errorf("Planned = %s, want %s", got, want)
	}
	s.Levels, s.WarmUp = []Level{{Streams: 1}, {Streams: 2}}, 0
	if got := s.Planned(); got != 10*time.Second {
		t.Errorf("Planned = %s for a closed loop, want the 10 s of its one pause", got)
	}
}
