package tuner

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/simload"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A killer is a store that acts as if the process were killed before or after a write, when kill returns true.
type killer struct {
	*studies.Store
	kill func(write string, trial int, after bool) bool
}

var errKilled = errors.New("killed")

func (k *killer) write(name string, trial int, do func() error) error {
	if k.kill(name, trial, false) {
		return errKilled
	}
	if err := do(); err != nil {
		return err
	}
	if k.kill(name, trial, true) {
		return errKilled
	}
	return nil
}

func (k *killer) Begin(t studies.Trial) error {
	return k.write("begin", t.Number, func() error { return k.Store.Begin(t) })
}
func (k *killer) Record(n int, p trial.Probe) error {
	return k.write("record", n, func() error { return k.Store.Record(n, p) })
}
func (k *killer) Served(n int, version string, change studies.Change) error {
	return k.write("served", n, func() error { return k.Store.Served(n, version, change) })
}
func (k *killer) Finish(n int, r trial.Result) error {
	return k.write("finish", n, func() error { return k.Store.Finish(n, r) })
}

func (k *killer) AddPriors(sources []studies.Source) error {
	return k.write("predict", -1, func() error { return k.Store.AddPriors(sources) })
}

// killedAfter returns a store whose process is killed after the given kind of write of the given trial.
func killedAfter(store *studies.Store, write string, trial int) *killer {
	return &killer{store, func(name string, n int, after bool) bool { return after && name == write && n == trial }}
}

// killedAt returns a store whose process is killed before or after its n-th write. It also returns a pointer to the
// number of writes so far.
func killedAt(store *studies.Store, n int, after bool) (k *killer, writes *int) {
	writes = new(int)
	return &killer{store, func(_ string, _ int, isAfter bool) bool {
		if !isAfter {
			*writes++
		}
		return *writes == n && isAfter == after
	}}, writes
}

func smallSpace(t *testing.T) *space.Space {
	t.Helper()
	s, err := space.New([]space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.3, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 2, Max: 64, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 256, Max: 4096, Log: true},
	}, []string{"max-num-batched-tokens >= max-num-seqs"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// small returns a small workload and its long run. Both are built only once.
var small = sync.OnceValues(func() (workload.Source, *trial.LongRun) {
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 200, OutputTokens: 24, RangeRatio: 0.5, Requests: 400}, 1)
	if err != nil {
		panic(err) // cannot fail: the spec is constant
	}
	return source, trial.NewLongRun(workload.Plan{Source: source, Seed: 1})
})

// study returns a small study of a simulated server, which is kept in the store.
func study(t *testing.T, store Store, protocol trial.Protocol, trials int) *Study {
	t.Helper()
	profile, err := sim.LoadProfile("small-fast")
	if err != nil {
		t.Fatal(err)
	}
	source, longRun := small()
	s := smallSpace(t)
	chooser, err := sampler.New("random", s, 1, trials)
	if err != nil {
		t.Fatal(err)
	}
	rig := &simload.Rig{Profile: profile}
	return &Study{
		Store: store, Space: s, Sampler: chooser, FixedArgs: []string{"--max-model-len", "4096"},
		Current: space.Point{"max-num-seqs": "32"}, Budget: Budget{Trials: trials},
		Runner: &trial.Runner{
			Start: rig.Start, Source: source, LongRun: longRun, Cache: protocol, Seed: 1, PrimeRate: 20,
			SLO: slo.SLO{Limits: []slo.Limit{
				{Metric: slo.TTFT, Percentile: 99, Max: 100 * time.Millisecond}, {Metric: slo.TPOT, Percentile: 99, Max: 20 * time.Millisecond},
			}},
			Lengths: trial.Lengths{LeadIn: time.Second, Window: 5 * time.Second, MinRequests: 100},
			Search:  capacity.Search{Hint: 20, Min: 0.5, Max: 500, Factor: 1.35, Tolerance: 0.2, MaxProbes: 10},
		},
	}
}

func open(t *testing.T, dir string) *studies.Store {
	t.Helper()
	store, _, err := studies.Open(context.Background(), dir, studies.New{Name: "small", Seed: 1, World: map[string]string{"model": "m"}}, studies.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

// mustRun runs a study to its end.
func mustRun(t *testing.T, s *Study) {
	t.Helper()
	if _, err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// stored returns the study as it is in the store.
func stored(t *testing.T, store *studies.Store) studies.Study {
	t.Helper()
	s, err := store.Study()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// answers returns the trials of the stored study. It removes their times, which differ between two runs.
func answers(t *testing.T, store *studies.Store) []studies.Trial {
	t.Helper()
	s := stored(t, store)
	for i := range s.Trials {
		s.Trials[i].Began, s.Trials[i].Ended = time.Time{}, time.Time{}
	}
	return s.Trials
}

func TestRunMeasuresDefaultCurrentAndSampledPoints(t *testing.T) {
	store := open(t, t.TempDir())
	var kinds []EventKind
	s := study(t, store, trial.Primed, 6)
	s.Observe = func(e Event) { kinds = append(kinds, e.Kind) }
	end, err := s.Run(t.Context())
	if err != nil || !strings.Contains(end.Why, "budget.trials is used up") {
		t.Fatalf("Run = %+v, %v", end, err)
	}
	got := answers(t, store)
	for i, want := range []studies.Origin{studies.Default, studies.Current, studies.Sampled, studies.Sampled, studies.Sampled, studies.Sampled} {
		if got[i].Origin != want || got[i].State != studies.Done || !strings.HasPrefix(strings.Join(got[i].Args, " "), "--max-model-len 4096") {
			t.Errorf("trial %d: %s, %s, args %v; want a finished trial by %s with the fixed args first", i, got[i].Origin, got[i].State, got[i].Args, want)
		}
	}
	if len(got[0].Point) != 0 || got[1].Point.String() != "max-num-seqs=32" {
		t.Errorf("trial 0 is %q and trial 1 %q, want the server's default and the current args", got[0].Point, got[1].Point)
	}
	if !got[0].Result.Capacity.Met() || !got[0].Result.Facts.Simulated {
		t.Errorf("the default's result is %+v, want a simulated capacity", got[0].Result)
	}
	if kinds[0] != Began || kinds[len(kinds)-1] != Ended {
		t.Errorf("events %v, want them to begin with Began and end with Ended", kinds)
	}
}

// A countedSource counts how often the first request of the long run is read.
type countedSource struct {
	workload.Source
	builds int
}

func (c *countedSource) Request(stream workload.Stream, i int) *workload.Request {
	if stream == workload.PopulationStream && i == 0 {
		c.builds++
	}
	return c.Source.Request(stream, i)
}

// The long run of a workload has 128,000 requests and is the same for every trial. So it must be built only once.
func TestTheLongRunIsBuiltOnceForAllTrials(t *testing.T) {
	store := open(t, t.TempDir())
	const trials = 3
	s := coarse(study(t, store, trial.Primed, trials))
	source := &countedSource{Source: s.Runner.Source}
	s.Runner.Source, s.Runner.LongRun = source, nil
	mustRun(t, s)
	if got := len(answers(t, store)); got != trials || source.builds != 1 {
		t.Errorf("%d trials built the long run %d times, want %d trials and one build", got, source.builds, trials)
	}
}

func TestRunEnds(t *testing.T) {
	crash := always(serverctl.ExitError{Class: serverctl.Infrastructure, Evidence: "disk full"})
	refuse := always(serverctl.ExitError{Class: serverctl.KVTooSmall, Evidence: "KV cache is needed"})
	closed := make(chan struct{})
	close(closed)
	for _, row := range []struct {
		name   string
		change func(*Study)
		why    string
		spent  bool
		err    error
		trials int
	}{
		{"the GPU time is spent", func(s *Study) { s.Budget.GPUTime = time.Second }, "the GPU time of 1 s is spent after 1 trial", true, nil, 1},
		{"nothing starts, whatever the flags are", func(s *Study) { dying(s, forEver, crash) }, "", false, ErrNothingStarts, 3},
		{"every point is refused", func(s *Study) { dying(s, forEver, refuse) }, "budget.trials is used up", false, nil, 4},
		{"every point of many is refused", func(s *Study) { dying(s, forEver, refuse); s.Budget.Trials = 30 }, "", false, ErrNothingStarts, maxInfeasible},
		{"the user asks for an end", func(s *Study) { s.Finish = closed }, "", false, trial.ErrInterrupted, 0},
	} {
		store := open(t, t.TempDir())
		s := study(t, store, trial.Primed, 4)
		row.change(s)
		end, err := s.Run(t.Context())
		if !strings.Contains(end.Why, row.why) || end.Spent != row.spent || !errors.Is(err, row.err) {
			t.Errorf("%s: Run = %+v, %v, want %q and %v", row.name, end, err, row.why, row.err)
		}
		if n := len(answers(t, store)); n != row.trials {
			t.Errorf("%s: %d trials were begun, want %d", row.name, n, row.trials)
		}
	}
}

// notNow returns a failure that may be gone with a new server.
func notNow(class serverctl.Class) func(int) *serverctl.ExitError {
	return always(serverctl.ExitError{Class: class, Evidence: "not now", Took: time.Minute})
}

// A study that gave up continues after the repair. It first measures the default again, because its trials had failed.
// A second Run of the same Study does the same as a new process.
func TestRunGoesOnAfterItGaveUp(t *testing.T) {
	for _, sameStudy := range []bool{false, true} {
		runAfterGivingUp(t, sameStudy)
	}
}

func runAfterGivingUp(t *testing.T, sameStudy bool) {
	t.Helper()
	store := open(t, t.TempDir())
	s := coarse(study(t, store, trial.Primed, 6))
	dying(s, 2*maxUnknown, notNow(serverctl.Infrastructure)) // each trial has two starts
	if _, err := s.Run(t.Context()); !errors.Is(err, ErrNothingStarts) {
		t.Fatalf("Run = %v, want ErrNothingStarts", err)
	}
	if !sameStudy {
		s = coarse(study(t, store, trial.Primed, 6))
	}
	mustRun(t, s)
	got := answers(t, store)
	for i, want := range []studies.Origin{studies.Default, studies.Default, studies.Default, studies.Default, studies.Current, studies.Sampled} {
		if got[i].Origin != want {
			t.Errorf("trial %d is by %s, want %s", i, got[i].Origin, want)
		}
	}
	if got[0].Result.GPUTime < time.Minute {
		t.Errorf("a failed start took %s of GPU time, want its minute", got[0].Result.GPUTime)
	}
}

func TestAHangGetsASecondChance(t *testing.T) {
	for _, row := range []struct {
		name  string
		class serverctl.Class
		hangs int
		want  trial.Outcome
	}{
		{"one slow start is forgiven", serverctl.StartTimeout, 1, trial.Measured},
		{"two are the point's fault", serverctl.StartTimeout, 2, trial.Infeasible},
		{"GPU memory that another process gave back late", serverctl.Infrastructure, 1, trial.Measured},
	} {
		store := open(t, t.TempDir())
		s := coarse(study(t, store, trial.Primed, 1))
		dying(s, row.hangs, notNow(row.class))
		mustRun(t, s)
		r := answers(t, store)[0].Result
		if r.Outcome != row.want || r.GPUTime < time.Duration(row.hangs)*time.Minute {
			t.Errorf("%s: %s with %s of GPU time, want %s", row.name, r.Outcome, r.GPUTime, row.want)
		}
	}
}

// A hangingServer stops answering in its fourth load.
type hangingServer struct {
	trial.Server
	trial.Load
	exited chan struct{}
	runs   int
}

func (h *hangingServer) Exited() <-chan struct{} { return h.exited }
func (h *hangingServer) Err() error {
	return &serverctl.ExitError{Class: serverctl.Hang, Evidence: "no token"}
}

func (h *hangingServer) Run(ctx context.Context, s workload.Schedule, stop bench.Stop) (bench.Run, error) {
	const last = 4 // this load comes after the warm-up and two probes
	if h.runs++; h.runs == last {
		close(h.exited)
		<-ctx.Done()
		return bench.Run{}, context.Cause(ctx)
	}
	return h.Load.Run(ctx, s, stop)
}

// The GPU time of a trial includes both of its servers. Each probe is measured and counted once.
func TestASecondChanceCountsEachProbeOnce(t *testing.T) {
	store := open(t, t.TempDir())
	s := study(t, store, trial.Reset, 1)
	good, starts := s.Runner.Start, 0
	s.Runner.Start = func(ctx context.Context, l trial.Launch) (trial.Server, trial.Load, error) {
		server, load, err := good(ctx, l)
		if starts++; starts > 1 || err != nil {
			return server, load, err
		}
		h := &hangingServer{Server: server, Load: load, exited: make(chan struct{})}
		return h, h, nil
	}
	mustRun(t, s)
	got := answers(t, store)[0]
	known := 2*got.Result.Facts.StartUp + 2*got.Result.Ended.Took + trial.GPUTimeOf(got.Probes)
	if rest := got.Result.GPUTime - known; starts != 2 || rest < 0 || rest > trial.GPUTimeOf(got.Probes[:1]) {
		t.Errorf("%d starts, %v of GPU time beside starts, stops and probes; the first probe took %v", starts, rest, trial.GPUTimeOf(got.Probes[:1]))
	}
	if !slices.ContainsFunc(got.Result.Notes, func(n string) bool { return strings.Contains(n, "a first server ended with hang: no token") }) {
		t.Errorf("notes %q do not tell of the first server", got.Result.Notes)
	}
}

// versioned is a server that reports the given version.
type versioned struct {
	trial.Server
	version string
}

func (v versioned) Facts() serverctl.Facts {
	f := v.Server.Facts()
	f.Version = v.version
	return f
}

func TestAnotherServerVersionIsDrift(t *testing.T) {
	store := open(t, t.TempDir())
	mustRun(t, coarse(study(t, store, trial.Primed, 2)))
	s := upgrade(coarse(study(t, store, trial.Primed, 4)))
	if _, err := s.Run(t.Context()); !errors.Is(err, studies.ErrWorldChanged) || !strings.Contains(err.Error(), "simulated small-fast in trial 1 → 0.33.0") {
		t.Errorf("Run = %v, want the change of version", err)
	}
	s.AcceptDrift = true
	if _, err := s.Run(t.Context()); err != nil {
		t.Errorf("with the drift accepted Run = %v", err)
	}
	got := stored(t, store)
	// The default is measured again after the first trial on the new version.
	if worlds := got.Worlds(); len(worlds) != 2 || len(worlds[0]) != 2 || len(worlds[1]) != 2 || worlds[1][1].Origin != studies.Default {
		t.Errorf("there are %d worlds, the first of %d trials; want two trials in each, the default in both", len(worlds), len(worlds[0]))
	}
	if i := slices.IndexFunc(got.Events, func(e studies.Event) bool { return e.Kind == studies.Drift }); i < 0 ||
		got.Events[i].Text() != "server version: simulated small-fast in trial 1 → 0.33.0" {
		t.Errorf("the events are %+v, want the change of version", got.Events)
	}
}

// A capacity must not come from probes on two versions. So a trial that is half done on one version ends as Unknown on
// another version.
func TestAHalfDoneTrialIsNotFinishedOnAnotherServer(t *testing.T) {
	store := open(t, t.TempDir())
	if _, err := coarse(study(t, killedAfter(store, "record", 2), trial.Primed, 6)).Run(t.Context()); !errors.Is(err, errKilled) {
		t.Fatalf("Run = %v, want it killed", err)
	}
	s := upgrade(coarse(study(t, store, trial.Primed, 6)))
	s.AcceptDrift = true
	mustRun(t, s)
	got := stored(t, store)
	half := got.Trials[2]
	if half.State != studies.Done || half.Result.Outcome != trial.Unknown || len(half.Probes) != 1 || half.Result.GPUTime != half.Probes[0].GPUTime ||
		!strings.Contains(half.Result.Evidence, "the world changed before the trial was finished: server version: ") {
		t.Errorf("what was half done is %+v", half)
	}
	worlds := got.Worlds() // a trial whose server did not start has no version
	if len(worlds) != 2 || len(worlds[0]) < 3 || len(worlds[1]) < 2 || worlds[1][1].Origin != studies.Default {
		t.Errorf("there are %d worlds of %d trials, want some in both, and the default again after the first of the second", len(worlds), len(got.Trials))
	}
}

// upgrade makes the servers of a study report a new version.
func upgrade(s *Study) *Study { return withVersion(s, "0.33.0") }

// withVersion makes the servers of a study report the given version.
func withVersion(s *Study, version string) *Study {
	good := s.Runner.Start
	s.Runner.Start = func(ctx context.Context, l trial.Launch) (trial.Server, trial.Load, error) {
		server, load, err := good(ctx, l)
		return versioned{server, version}, load, err
	}
	return s
}

// After a kill, the server version of a half-done trial is still known. No trial is finished on another version, not
// even the first one. A change that the user has accepted is not asked for again and not stored again.
func TestTheServerOfAHalfDoneTrialIsKnown(t *testing.T) {
	store := open(t, t.TempDir())
	run := func(at int, accept bool, how func(*Study) *Study) error {
		t.Helper()
		s := how(coarse(study(t, killedAfter(store, "record", at), trial.Primed, 4)))
		s.AcceptDrift = accept
		_, err := s.Run(t.Context())
		return err
	}
	same := func(s *Study) *Study { return s }
	if err := run(0, false, same); !errors.Is(err, errKilled) {
		t.Fatalf("Run = %v, want it killed in trial 0", err)
	}
	if err := run(-1, false, upgrade); !errors.Is(err, studies.ErrWorldChanged) || !strings.Contains(err.Error(), "simulated small-fast in trial 0 → 0.33.0") {
		t.Errorf("on another server Run = %v", err)
	}
	if err := run(1, false, same); !errors.Is(err, errKilled) {
		t.Fatalf("Run = %v, want it killed in trial 1", err)
	}
	for _, at := range []int{2, 2} { // trial 1 was half done and ends as Unknown
		if err := run(at, at == 2, upgrade); !errors.Is(err, errKilled) {
			t.Fatalf("Run = %v, want it killed in trial 2", err)
		}
	}
	if err := run(-1, false, same); !errors.Is(err, studies.ErrWorldChanged) || !strings.Contains(err.Error(), "0.33.0 in trial 2 → simulated small-fast") {
		t.Errorf("back on the first server Run = %v", err)
	}
	if err := run(-1, false, upgrade); err != nil {
		t.Errorf("on the server that was accepted Run = %v", err)
	}
	got := stored(t, store)
	drifts := 0
	for _, e := range got.Events {
		if e.Kind == studies.Drift {
			drifts++
		}
	}
	if worlds := got.Worlds(); drifts != 1 || len(worlds) != 2 || worlds[1][0].Number != 2 || worlds[1][0].Result.Outcome != trial.Measured || worlds[0][1].Result.Outcome != trial.Unknown {
		t.Errorf("%d changes were stored, and there are %d worlds; trial 2 is %s", drifts, len(worlds), got.Trials[2].Result.Outcome)
	}
}

// Two things do not begin a new world: a version on which nothing was measured before the user returned to the old one,
// and a server that reports no version.
func TestAServerThatWasTakenBackIsNoDrift(t *testing.T) {
	store := open(t, t.TempDir())
	same := func(s *Study) *Study { return s }
	for _, how := range []func(*Study) *Study{same, upgrade} {
		s := how(coarse(study(t, killedAfter(store, "served", 1), trial.Primed, 4)))
		s.AcceptDrift = true
		if _, err := s.Run(t.Context()); !errors.Is(err, errKilled) {
			t.Fatalf("Run = %v, want it killed in trial 1", err)
		}
	}
	if _, err := coarse(study(t, killedAfter(store, "record", 2), trial.Primed, 4)).Run(t.Context()); !errors.Is(err, errKilled) {
		t.Fatalf("back on the first server Run = %v, want it killed in trial 2", err)
	}
	if _, err := withVersion(coarse(study(t, store, trial.Primed, 4)), "").Run(t.Context()); err != nil {
		t.Errorf("on a server that tells no version Run = %v", err)
	}
	got := stored(t, store)
	if worlds := got.Worlds(); len(worlds) != 1 || len(got.Trials) != 4 {
		t.Errorf("there are %d worlds of %d trials, want one of 4; the events are %+v", len(worlds), len(got.Trials), got.Events)
	}
}

// The first search in a changed world must not begin at a capacity of the old world.
func TestTheSearchInAnotherWorldBeginsAnew(t *testing.T) {
	store := open(t, t.TempDir())
	mustRun(t, coarse(study(t, store, trial.Primed, 3)))
	s := upgrade(coarse(study(t, store, trial.Primed, 6)))
	s.AcceptDrift = true
	mustRun(t, s)
	got := stored(t, store)
	i := slices.IndexFunc(got.Trials[3:], func(t studies.Trial) bool { return len(t.Probes) > 0 }) // trials whose server did not start have no probes
	if first, anew := got.Trials[0].Probes[0].Rate, got.Trials[3+i].Probes[0].Rate; anew != first {
		t.Errorf("the first search began at %g req/s, and that in the changed world at %g", first, anew)
	}
}

// After an accepted change of the world, or of the server's version, earlier trials cannot be the best so far.
func TestTheIncumbentIsOfThePresentWorld(t *testing.T) {
	done := func(number int, version string, rate float64) studies.Trial {
		return studies.Trial{Number: number, State: studies.Done, Version: version, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Bound: capacity.Exact}}}
	}
	study := studies.Study{
		Trials: []studies.Trial{done(0, "1", 9), done(1, "1", 2), done(2, "1", 3)},
		Events: []studies.Event{{Kind: studies.Drift, Trial: 1, Changes: studies.Changes{{Fact: "image", Was: new("a"), Is: new("b")}}}},
	}
	for _, c := range []struct {
		next studies.Trial
		want int
	}{{done(3, "1", 2.5), 2}, {done(4, "", 2.5), 2}, {done(5, "2", 2.5), 5}, {done(6, "2", 2), 5}} {
		study.Trials = append(study.Trials, c.next)
		if best, found := Incumbent(study); !found || best.Number != c.want {
			t.Errorf("after trial %d the best so far is trial %d, want %d", c.next.Number, best.Number, c.want)
		}
	}
}
