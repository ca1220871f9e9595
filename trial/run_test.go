package trial

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A stub is a server and its load in one. Above its capacity every first token takes two seconds. It records the calls
// that it gets.
type stub struct {
	mu       sync.Mutex
	did      []string
	capacity float64
	dieAt    int           // number of the run, from 1, in which the server dies; 0 means none
	short    int           // number of missing tokens in each answer
	whole    bool          // whether all tokens of an answer come at once, in probes
	late     time.Duration // how late the load generator sends at rates above lateFrom
	lateFrom float64
	lateIn   func(run int) bool // whether the load generator is late in a run, numbered from 1; nil means in all runs
	runs     int
	silent   int           // number of the first run without tokens; later runs have none either; 0 means that all runs have tokens
	wakes    int           // number of a later run that has tokens again
	begins   bool          // whether, in a silent run, each answer hangs after its first token
	says     bench.Failure // how requests fail in a silent run that does not end early
	status   int           // HTTP status of these failures
	exited   chan struct{}
	streams  []int // number of streams of each closed loop so far

	warming []time.Duration    // TTFT of each piece of warm-up; the last value is also for all later pieces; nil means 100 ms
	drafts  serverctl.Counters // each load adds these to the counters; AcceptedAt is set if the server drafts
	slowly  time.Duration      // added to the 5 s of each piece of warm-up
	burst   []bench.Sample     // requests of the worst-case load
	running float64            // mean number of running requests in each probe
	facts   map[string]string
	pieces  int // number of warm-up pieces so far

	// The prefix cache keeps every prompt for ever.
	kvTokens     int             // 0 means 1000
	seen         map[string]bool // prompts
	asked, found float64
	lost         func(run int) bool // whether another client empties the cache before a run, numbered from 1
	deaf         bool               // whether the server ignores a reset, and reports success
	mute         bool               // whether the server's counters leave out cached tokens
	restarted    int                // number of the run before which the server restarts
}

func (s *stub) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did = append(s.did, what)
}

func (s *stub) Facts() serverctl.Facts {
	return serverctl.Facts{StartUp: 10 * time.Second, KVCacheTokens: cmp.Or(s.kvTokens, 1000), Args: s.facts}
}
func (s *stub) Counters(context.Context) (serverctl.Counters, error) {
	n := float64(s.runs)
	return serverctl.Counters{
		PrefixQueries: s.asked, PrefixHits: s.found, PromptTokens: s.asked + 1000*n,
		Preemptions: s.drafts.Preemptions * n, Drafts: s.drafts.Drafts * n, DraftTokens: s.drafts.DraftTokens * n, AcceptedTokens: s.drafts.AcceptedTokens * n, AcceptedAt: s.drafts.AcceptedAt,
	}, nil
}
func (s *stub) ResetCache(context.Context) error {
	s.note("reset")
	if !s.deaf {
		clear(s.seen)
	}
	return nil
}
func (s *stub) Drain(context.Context) (time.Duration, error) { return time.Second, nil }
func (s *stub) Exited() <-chan struct{}                      { return s.exited }
func (s *stub) Err() error {
	return &serverctl.ExitError{Class: serverctl.OOMLoad, Evidence: "CUDA out of memory"}
}
func (s *stub) Observe(time.Time) func() *serverctl.Series {
	return func() *serverctl.Series { return &serverctl.Series{Running: []float64{s.running, float64(s.runs)}} }
}
func (s *stub) Stop(context.Context) (serverctl.Ended, error) {
	s.note("stop")
	return serverctl.Ended{Took: 2 * time.Second}, nil
}
func (s *stub) start(context.Context, Launch) (Server, Load, error) {
	s.exited = make(chan struct{})
	s.note("start")
	return s, s, nil
}

// Run computes the rate from the spacing of the window's arrivals. It answers slowly if the rate is above the capacity.
func (s *stub) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	s.runs++
	if s.runs == s.dieAt {
		close(s.exited)
		<-ctx.Done()
		return bench.Run{}, context.Cause(ctx)
	}
	if s.silent > 0 && s.runs >= s.silent && s.runs != s.wakes {
		return s.silence(schedule, stop)
	}
	if s.lost != nil && s.lost(s.runs) {
		clear(s.seen)
	}
	if s.runs == s.restarted {
		clear(s.seen)
		s.asked, s.found = 0, 0
	}
	var run bench.Run
	var first, last time.Duration
	for a := range schedule {
		if a.Phase == workload.RunOut {
			break
		}
		s.ask(a.Request)
		if a.Phase != workload.Window {
			run.Others++
			continue
		}
		if first == 0 {
			first = a.Due
		}
		last = a.Due
		run.Samples = append(run.Samples, bench.Sample{Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, WantTokens: 2, OutputTokens: 2})
	}
	if len(run.Samples) == 0 {
		s.note("pass")
		run.Elapsed = 5 * time.Second
		return run, nil
	}
	ttft, lag := 100*time.Millisecond, time.Duration(0)
	if len(run.Samples) == warmUpRequests && run.Others == 0 {
		if n := len(s.warming); n > 0 {
			ttft = s.warming[min(s.pieces, n-1)]
		}
		s.pieces++
		s.note("warm")
		run.Elapsed = 5*time.Second + s.slowly
		answer(run.Samples, ttft, s.short)
		return run, nil
	}
	if last == 0 {
		s.burst = run.Samples
		s.note("burst")
		run.Elapsed = 20 * time.Second
		answer(run.Samples, ttft, 0)
		return run, nil
	}
	rate := float64(len(run.Samples)-1) / (last - first).Seconds()
	if rate > s.capacity {
		ttft = 2 * time.Second
	}
	if rate > s.lateFrom && (s.lateIn == nil || s.lateIn(s.runs)) {
		lag = s.late
	}
	for i := range run.Samples {
		run.Samples[i].Sent += lag
	}
	answer(run.Samples, ttft, s.short)
	for i := range run.Samples {
		if s.whole {
			run.Samples[i].Last = run.Samples[i].First
		}
	}
	s.note("probe")
	run.Elapsed = time.Minute
	return run, nil
}

// silence makes a run whose requests get no tokens. If the run is a probe, it ends early.
func (s *stub) silence(schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	run := bench.Run{Stopped: stop != nil, Elapsed: 3 * time.Second, Series: make(bench.Series, 3)}
	for a := range schedule {
		if a.Phase == workload.RunOut || a.Due > run.Elapsed {
			break
		}
		sample := bench.Sample{Phase: workload.Window, Due: a.Due, Sent: a.Due, WantTokens: 2}
		if s.begins {
			sample.First = a.Due + time.Millisecond
			run.Series[min(int(sample.First/time.Second), len(run.Series)-1)].Chunks++
		}
		run.Samples = append(run.Samples, sample)
	}
	if stop == nil {
		for i := range run.Samples {
			run.Samples[i].Failure, run.Samples[i].Status, run.Samples[i].End = s.says, s.status, run.Elapsed
		}
	}
	s.note("silence")
	return run, nil
}

// ask looks a prompt up in the prefix cache, and adds it.
func (s *stub) ask(q *workload.Request) {
	if s.mute {
		return
	}
	if s.seen == nil {
		s.seen = make(map[string]bool)
	}
	s.asked += 16
	prompt, err := binary.Append([]byte(q.Text), binary.LittleEndian, q.Tokens)
	if err != nil {
		panic(err) // tokens are integers of a fixed size
	}
	if s.seen[string(prompt)] {
		s.found += 16
	}
	s.seen[string(prompt)] = true
}

// answer completes the samples. Each answer lacks as many tokens as missing says.
func answer(samples []bench.Sample, ttft time.Duration, missing int) {
	for i := range samples {
		q := &samples[i]
		if missing > 0 {
			q.Failure, q.OutputTokens = bench.WrongLength, q.WantTokens-missing
		}
		q.First, q.Last, q.End = q.Due+ttft, q.Due+ttft+10*time.Millisecond, q.Due+ttft+10*time.Millisecond
	}
}

// evenly returns a workload with even arrivals, from which the stub can compute the rate. It also returns the
// workload's LongRun, which is built only once.
var evenly = sync.OnceValues(func() (workload.Plan, *LongRun) {
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 16, OutputTokens: 2, Requests: 50}, 1)
	if err != nil {
		panic(err) // cannot happen: the spec is a constant
	}
	plan := workload.Plan{Source: source, Seed: 1, Arrivals: workload.Arrivals{Burstiness: math.Inf(1)}}
	return plan, NewLongRun(plan)
})

func runner(t *testing.T, s *stub, protocol Protocol) *Runner {
	t.Helper()
	plan, longRun := evenly()
	return &Runner{
		Start: s.start, Source: plan.Source, Cache: protocol, Seed: plan.Seed, Arrivals: plan.Arrivals, LongRun: longRun,
		SLO:     slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Second}}},
		Lengths: Lengths{LeadIn: time.Second, Window: 100 * time.Second, MinRequests: 300},
		Search:  capacity.Search{Hint: 4, Min: 0.1, Max: 100, Factor: 1.35, Tolerance: 0.2, MaxProbes: 10},
	}
}

func runTrial(t *testing.T, r *Runner, task Task) (result Result, probes []Probe) {
	t.Helper()
	task.Record = func(p Probe) error { probes = append(probes, p); return nil }
	result, err := r.Run(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	return result, probes
}

func TestRunMeasuresAPoint(t *testing.T) {
	for _, row := range []struct {
		protocol Protocol
		want     string
	}{
		{Primed, "start warm warm pass probe probe probe probe stop"},
		{Reset, "start warm warm reset probe reset probe reset probe reset probe stop"},
		{Steady, "start warm warm pass probe probe probe probe stop"},
	} {
		s := &stub{capacity: 4.8}
		result, stored := runTrial(t, runner(t, s, row.protocol), Task{Number: 3})
		if got := strings.Join(s.did, " "); got != row.want {
			t.Errorf("%s: did %q, want %q", row.protocol, got, row.want)
		}
		c := result.Capacity
		if result.Outcome != Measured || c.Bound != capacity.Exact || c.Low > 4.8 || c.High < 4.8 || c.Probes != len(stored) {
			t.Errorf("%s: result %+v with %d probes stored", row.protocol, result, len(stored))
		}
		passes := strings.Count(row.want, "pass") + strings.Count(row.want, "warm")
		want := 10*time.Second + time.Duration(passes)*6*time.Second + time.Duration(len(stored))*61*time.Second + 2*time.Second
		if result.GPUTime != want {
			t.Errorf("%s: GPU time %s, want %s: start, passes, probes, stop", row.protocol, result.GPUTime, want)
		}
	}
}

// A resumed trial does not repeat the stored probes, and gives the same answer as an uninterrupted trial.
func TestRunGoesOnWithTheProbesItHad(t *testing.T) {
	whole, all := runTrial(t, runner(t, &stub{capacity: 4.8}, Reset), Task{})
	for had := range len(all) + 1 {
		s := &stub{capacity: 4.8}
		result, again := runTrial(t, runner(t, s, Reset), Task{Done: all[:had]})
		if n := strings.Count(strings.Join(s.did, " "), "probe"); n != len(all)-had || len(again) != n {
			t.Errorf("with %d of %d probes stored, %d are measured", had, len(all), n)
		}
		if !reflect.DeepEqual(result.Capacity, whole.Capacity) {
			t.Errorf("with %d probes stored the answer is %+v, want %+v", had, result.Capacity, whole.Capacity)
		}
	}
}

func TestRunEndsOrderlyBetweenProbes(t *testing.T) {
	s := &stub{capacity: 4.8}
	r := runner(t, s, Primed)
	finish := make(chan struct{})
	_, err := r.Run(t.Context(), Task{Finish: finish, Record: func(Probe) error { close(finish); return nil }})
	if !errors.Is(err, ErrInterrupted) || !slices.Contains(s.did, "stop") {
		t.Errorf("Run = %v after %v, want ErrInterrupted and a stopped server", err, s.did)
	}
}

func TestRunWhenTheServerFails(t *testing.T) {
	fails := func(err error) Start {
		return func(context.Context, Launch) (Server, Load, error) { return nil, nil, err }
	}
	dies, resets, warms := &stub{capacity: 4.8, dieAt: 3}, &stub{capacity: 4.8}, &stub{capacity: 4.8}
	for _, row := range []struct {
		name  string
		start Start
		class serverctl.Class // class of the infeasible point; empty if an error ends the study
		err   string
	}{
		{"a refusal to start is the point's fault", fails(&serverctl.ExitError{Class: serverctl.KVTooSmall, Evidence: "KV cache is needed", KVGiB: new(1.5)}), serverctl.KVTooSmall, ""},
		{"a death under load is the point's fault", dies.start, serverctl.OOMLoad, ""},
		{"a death between two loads is the point's fault, with the server's own last words", func(ctx context.Context, l Launch) (Server, Load, error) {
			_, load, err := resets.start(ctx, l)
			return resetKiller{resets}, load, err
		}, serverctl.OOMLoad, ""},
		{"a death in the warm-up is the point's fault", func(ctx context.Context, l Launch) (Server, Load, error) {
			server, _, err := warms.start(ctx, l)
			return server, failingLoad{warms}, err
		}, serverctl.OOMLoad, ""},
		{"a missing binary ends the study", fails(errors.New("no such binary")), "", "no such binary"},
		{"a failure that no flags can cure ends the study", fails(&serverctl.ExitError{Class: serverctl.ModelNotFound, Cause: serverctl.GatedModel, Evidence: "access is restricted"}),
			"", "no choice of flags would cure this"},
	} {
		r := runner(t, &stub{}, Reset)
		r.Start = row.start
		result, err := r.Run(t.Context(), Task{Record: func(Probe) error { return nil }})
		if row.err != "" {
			if err == nil || !strings.Contains(err.Error(), row.err) || result.Outcome != "" {
				t.Errorf("%s: Run = %+v, %v, want the error %q", row.name, result, err, row.err)
			}
			continue
		}
		if err != nil || result.Outcome != Infeasible || result.Class != row.class || result.Evidence == "" || (result.KVGiB != nil) != (row.class == serverctl.KVTooSmall) {
			t.Errorf("%s: Run = %+v, %v, want an infeasible point with class %s", row.name, result, err, row.class)
		}
	}
	if dies.did[len(dies.did)-1] != "stop" {
		t.Error("the dead server was not stopped")
	}
}

func TestRunStopsTheServerWhenAProbeCannotBeStored(t *testing.T) {
	s := &stub{capacity: 4.8}
	full := errors.New("no space left on device")
	_, err := runner(t, s, Primed).Run(t.Context(), Task{Record: func(Probe) error { return full }})
	if !errors.Is(err, full) || s.did[len(s.did)-1] != "stop" {
		t.Errorf("Run = %v after %v, want the store's error and a stopped server", err, s.did)
	}
}

// A trial that is interrupted during its start or warm-up ends at once, because neither leaves a result.
func TestRunEndsAtOnceWhileNothingIsMeasured(t *testing.T) {
	finish := make(chan struct{})
	r := runner(t, &stub{}, Primed)
	r.Start = func(ctx context.Context, _ Launch) (Server, Load, error) {
		close(finish)
		<-ctx.Done() // the model loads for ever
		return nil, nil, &serverctl.ExitError{Class: serverctl.Aborted}
	}
	if _, err := r.Run(t.Context(), Task{Finish: finish}); !errors.Is(err, ErrInterrupted) {
		t.Errorf("interrupted during the start, Run = %v, want ErrInterrupted", err)
	}
	s := &stub{capacity: 4.8, dieAt: -1}
	r = runner(t, s, Primed)
	finish2 := make(chan struct{})
	task := Task{Finish: finish2, Progress: func(step string) {
		if step == "priming the prefix cache" {
			close(finish2)
		}
	}}
	if _, err := r.Run(t.Context(), task); !errors.Is(err, ErrInterrupted) || slices.Contains(s.did, "probe") {
		t.Errorf("interrupted during the priming, Run = %v after %v, want ErrInterrupted before any probe", err, s.did)
	}
}

// A failingLoad reports that every request failed. Its server dies 20 ms later.
type failingLoad struct{ s *stub }

func (d failingLoad) Run(context.Context, workload.Schedule, bench.Stop) (bench.Run, error) {
	time.AfterFunc(20*time.Millisecond, func() { close(d.s.exited) })
	return bench.Run{Others: 10, Broken: 10, BrokenDetail: "http-status: 500"}, nil
}

// A resetKiller is a server that dies when its cache is reset. The reset returns an error, and 50 ms later the server
// is known to be dead.
type resetKiller struct{ *stub }

func (s resetKiller) ResetCache(context.Context) error {
	time.AfterFunc(50*time.Millisecond, func() { close(s.exited) })
	return errors.New("reset the prefix cache: EOF")
}

func TestSpeculationIsWhatAProbeDrafted(t *testing.T) {
	before := serverctl.Counters{Drafts: 10, DraftTokens: 30, AcceptedTokens: 12, AcceptedAt: []float64{8, 4}}
	after := serverctl.Counters{Drafts: 30, DraftTokens: 90, AcceptedTokens: 42, AcceptedAt: []float64{23, 14, 5}}
	got := speculation(before, after)
	if got == nil || got.Drafts != 20 || got.Tokens != 60 || got.Accepted != 30 || !slices.Equal(got.At, []float64{15, 10, 5}) {
		t.Errorf("speculation = %+v", got)
	}
	if got := speculation(after, after); got != nil {
		t.Errorf("without drafts speculation = %+v, want nil", got)
	}
}

// If a probe completes no request, one more request shows whether the server hangs or is only slow, however early the
// probe ended.
func TestAHangIsNoBrokenLimit(t *testing.T) {
	for _, row := range []struct {
		name  string
		stub  *stub
		class serverctl.Class // empty if the server was only slow and its probe counts
		says  string
	}{
		{"no more tokens", &stub{says: bench.TimedOut}, serverctl.Hang, "no request was completed under load, and a single request afterwards was not completed within 3 s"},
		{"the first token of each, and no more", &stub{says: bench.TimedOut, begins: true}, serverctl.Hang, "no request was completed under load"},
		{"only failures", &stub{says: bench.Status}, serverctl.CrashLoad, "no request was completed, and a single request sent afterwards failed too: http-status"},
		{"only refusals", &stub{says: bench.Status, status: 503}, serverctl.Infrastructure, "no request was completed, and a single request sent afterwards failed too: http-status"},
		{"a token after all", &stub{wakes: 4}, "", ""},
	} {
		s := row.stub
		s.capacity, s.silent = 4.8, 3 // the tokens end with run 3, after the warm-up
		var probes []Probe
		r := runner(t, s, Reset)
		r.Lengths.LeadIn, r.Search.MaxProbes = time.Millisecond, 1
		synctest.Test(t, func(t *testing.T) { // Run waits in virtual time for the server's death
			result, err := r.Run(t.Context(), Task{Record: func(p Probe) error { probes = append(probes, p); return nil }})
			if err != nil || result.Class != row.class || !strings.Contains(result.Evidence, row.says) {
				t.Errorf("%s: Run = %+v, %v, want class %q with %q", row.name, result, err, row.class, row.says)
			}
		})
		if recorded := len(probes) > 0; recorded != (row.class == "") {
			t.Errorf("%s: %d probes were recorded; did %v", row.name, len(probes), s.did)
		}
	}
}

// A probe is void and not recorded if its answers were not streamed, or had other lengths than planned.
func TestAVoidProbeIsNotRecorded(t *testing.T) {
	for want, s := range map[string]*stub{
		"void: the answers are not streamed":              {capacity: 5, whole: true},
		"void: the lengths of the answers differ by 50 %": {capacity: 5, short: 1},
	} {
		_, err := runner(t, s, Reset).Run(t.Context(), Task{Record: func(Probe) error {
			t.Error("a void probe was recorded")
			return nil
		}})
		if err == nil || !strings.Contains(err.Error(), want) || s.whole && strings.Contains(err.Error(), "max_tokens") {
			t.Errorf("Run = %v, want %q", err, want)
		}
	}
}

// A late load generator proves nothing against the server. A pass with a late generator is only a lower bound. A
// generator that falls behind by more than a hundredth of the window has not offered the rate. If nothing passed,
// nothing is known.
func TestALateLoadGeneratorGivesALowerBound(t *testing.T) {
	for _, row := range []struct {
		name     string
		late     time.Duration
		from     float64
		min, max float64 // range of the lower bound, req/s
		sure     bool    // whether some rate passed with the generator in time
	}{
		{"late above 6 req/s", 500 * time.Millisecond, 6, 100, 100, true},
		{"falling behind above 6 req/s", 2 * time.Second, 6, 4, 6.5, true},
		{"late everywhere", 500 * time.Millisecond, 0, 100, 100, false},
		{"falling behind everywhere", time.Hour, 0, 0, 0, false},
	} {
		s := &stub{capacity: 100, late: row.late, lateFrom: row.from}
		result, probes := runTrial(t, runner(t, s, Reset), Task{})
		c := result.Capacity
		if result.Class != serverctl.ClientLimited || !strings.Contains(result.Evidence, "late at p99") {
			t.Fatalf("%s: Run = %+v, want that it was client-limited", row.name, result)
		}
		if last := probes[len(probes)-1]; !slices.ContainsFunc(probes, func(p Probe) bool { return strings.HasPrefix(p.Note, "client-limited: ") }) {
			t.Errorf("%s: no probe says that it was client-limited, the last one: %+v", row.name, last)
		}
		if row.max == 0 {
			if result.Outcome != Unknown || c.Bound != "" {
				t.Errorf("%s: %+v, want that nothing is known", row.name, result)
			}
			continue
		}
		if result.Outcome != Measured || c.Bound != capacity.AtLeast || c.Rate < row.min || c.Rate > row.max || (c.Low > 4) != row.sure || c.Low > 6.5 {
			t.Errorf("%s: %+v, want at least %g to %g req/s, sure %t", row.name, c, row.min, row.max, row.sure)
		}
	}
}

// A second attempt repeats only those probes of the first attempt that a late load generator decided.
func TestASecondAttemptMeasuresWhatWasLate(t *testing.T) {
	s := &stub{capacity: 10, late: 500 * time.Millisecond, lateFrom: 6}
	first, late := runTrial(t, runner(t, s, Reset), Task{})
	if first.Class != serverctl.ClientLimited {
		t.Fatalf("Run = %+v, want that it was client-limited", first)
	}
	s.lateFrom = 100
	second, again := runTrial(t, runner(t, s, Reset), Task{Done: late, Attempt: 1})
	if c := second.Capacity; second.Class != "" || c.Bound != capacity.Exact || c.Low > 10 || c.High < 10 {
		t.Errorf("the second attempt is %+v; want an exact capacity of 10", second)
	}
	for i, p := range again {
		if p.Seq != len(late)+i || p.Attempt != 1 || p.Rate <= 6 {
			t.Errorf("probe %d of attempt %d at %g req/s, want the %d-th probe, of attempt 1, at a rate that was late", p.Seq, p.Attempt, p.Rate, len(late)+i)
		}
	}
	resumed, _ := runTrial(t, runner(t, s, Reset), Task{Done: slices.Concat(late, again), Attempt: 1})
	if resumed.Capacity.Rate != second.Capacity.Rate {
		t.Errorf("resumed after its last probe it is %+v; want %+v", resumed.Capacity, second.Capacity)
	}
}

func TestRequestsThatAreTurnedAwayAreNobodysFault(t *testing.T) {
	for status, want := range map[int]serverctl.Class{
		429: serverctl.Infrastructure, 404: serverctl.Infrastructure, 400: serverctl.CrashLoad, 500: serverctl.CrashLoad, 0: serverctl.CrashLoad,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &session{server: &stub{}}
			uncounted := bench.Run{Others: 9, Broken: 9, BrokenDetail: "a text", BrokenStatus: status}
			counted := bench.Run{Samples: []bench.Sample{{Failure: bench.Status, Detail: "a text", Status: status}}}
			for _, run := range []bench.Run{uncounted, counted} {
				exit, ok := errors.AsType[*serverctl.ExitError](s.checkAnswers(t.Context(), run, "of the warm-up"))
				if !ok || exit.Class != want {
					t.Errorf("%+v: %v, want %s", run, exit, want)
				}
			}
		})
	}
}

// An engine that dies after most requests were answered leaves an API server that answers for a few seconds more.
func TestADeathAfterMostAnswersIsAwaited(t *testing.T) {
	answered := func(at time.Duration) bench.Sample { return bench.Sample{End: at * time.Second} }
	failed := func(kind bench.Failure, status int) bench.Sample {
		return bench.Sample{End: 5 * time.Second, Failure: kind, Status: status}
	}
	for _, row := range []struct {
		name   string
		last   []bench.Sample
		awaits bool
	}{
		{"all answered", nil, false},
		{"the stream of the last one has an error", []bench.Sample{failed(bench.StreamError, 0)}, true},
		{"the last connections broke", []bench.Sample{failed(bench.Reset, 0), failed(bench.Refused, 0)}, true},
		{"the last one got status 500", []bench.Sample{failed(bench.Status, 500)}, true},
		{"the last one is not allowed", []bench.Sample{failed(bench.Status, 400)}, false},
		{"the last one was too short", []bench.Sample{failed(bench.WrongLength, 0)}, false},
		{"a gateway has no server", []bench.Sample{failed(bench.Status, 503)}, false},
		{"an answer came later", []bench.Sample{failed(bench.StreamError, 0), answered(6)}, false},
		{"an answer came between two failures", []bench.Sample{{End: time.Second, Failure: bench.Reset}, answered(2), failed(bench.StreamError, 0)}, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			run := bench.Run{Samples: append([]bench.Sample{answered(1), answered(2), answered(3)}, row.last...)}
			s := &session{server: &stub{}}
			if err := s.checkAnswers(t.Context(), run, "of the worst case"); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
			if awaited := time.Since(began) == deathNotice; awaited != row.awaits || awaited != (time.Since(began) > 0) {
				t.Errorf("%s: waited %s for the server's death; want a wait: %t", row.name, time.Since(began), row.awaits)
			}
		})
	}
}

// answers is a workload whose answers all have the same length.
type answers struct{ tokens, files int }

func (a answers) Name() string { return "answers" }
func (a answers) Len() int     { return a.files }
func (a answers) Longest() int { return 0 }
func (a answers) Request(workload.Stream, int) *workload.Request {
	return &workload.Request{OutputTokens: a.tokens}
}

func TestDefaultLeadIn(t *testing.T) {
	limit := func(m slo.Metric, max time.Duration) slo.Limit { return slo.Limit{Metric: m, Percentile: 99, Max: max} }
	ttft, tpot := limit(slo.TTFT, time.Second), limit(slo.TPOT, 60*time.Millisecond)
	for _, row := range []struct {
		name   string
		limits []slo.Limit
		tokens int
		cache  Protocol
		want   time.Duration
	}{
		{"short answers", []slo.Limit{ttft, tpot}, 50, Reset, 30 * time.Second},
		{"short answers, a cache that is carried", []slo.Limit{ttft, tpot}, 50, Steady, time.Minute},
		{"answers of a minute", []slo.Limit{ttft, tpot}, 1001, Reset, 2*time.Minute + 2*time.Second},
		{"answers of a minute, a cache that is carried", []slo.Limit{ttft, tpot}, 1001, Primed, 4*time.Minute + 4*time.Second},
		{"by the limit on ITL", []slo.Limit{limit(slo.ITL, 60*time.Millisecond)}, 1001, Reset, 2 * time.Minute},
		{"by the tightest limit", []slo.Limit{ttft, limit(slo.TPOT, time.Second), tpot, limit(slo.E2E, time.Hour)}, 1001, Reset, 122 * time.Second},
		{"E2E allows no more", []slo.Limit{ttft, tpot, limit(slo.E2E, 40*time.Second)}, 1001, Reset, 80 * time.Second},
		{"E2E alone", []slo.Limit{ttft, limit(slo.E2E, 40*time.Second)}, 1001, Reset, 80 * time.Second},
		{"TTFT alone says nothing of the rest", []slo.Limit{ttft}, 1001, Reset, 30 * time.Second},
		{"no longer than five minutes", []slo.Limit{ttft, tpot}, 9000, Carried, 5 * time.Minute},
	} {
		got := DefaultLeadIn(slo.SLO{Limits: row.limits}, answers{row.tokens, 0}, row.cache)
		if got != row.want {
			t.Errorf("%s: the lead-in is %s, want %s", row.name, got, row.want)
		}
		if of := DefaultLeadIn(slo.SLO{Limits: row.limits}, answers{row.tokens, 3}, row.cache); of != got {
			t.Errorf("%s: the lead-in of a workload of three requests is %s, want %s", row.name, of, got)
		}
	}
}
