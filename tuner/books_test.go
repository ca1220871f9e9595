package tuner

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A clocked server adds up the time of everything that is done with the servers of a study. It does not use the books
// of the code under test. If it sleeps, its time also passes on the clock of the test, as with a real server.
type clocked struct {
	trial.Server
	trial.Load
	took   *time.Duration
	sleeps bool
	onLoad func() error // returns the error with which a load ends
}

// clock wraps each server that the study starts in a clocked server. took points to the total time of these servers.
func clock(s *Study, sleeps bool, onLoad func(load int) error) (took *time.Duration) {
	took = new(time.Duration)
	start, loads := s.Runner.Start, 0
	s.Runner.Start = func(ctx context.Context, l trial.Launch) (trial.Server, trial.Load, error) {
		server, load, err := start(ctx, l)
		if exit, ok := errors.AsType[*serverctl.ExitError](err); ok {
			c := clocked{took: took, sleeps: sleeps}
			c.pass(exit.Took)
		}
		if err != nil {
			return server, load, err
		}
		c := &clocked{Server: server, Load: load, took: took, sleeps: sleeps, onLoad: func() error { loads++; return onLoad(loads) }}
		c.pass(server.Facts().StartUp)
		return c, c, nil
	}
	return took
}

func (c *clocked) pass(d time.Duration) {
	*c.took += d
	if c.sleeps {
		time.Sleep(d)
	}
}

func (c *clocked) Facts() serverctl.Facts {
	f := c.Server.Facts()
	f.Virtual = !c.sleeps
	return f
}

func (c *clocked) Run(ctx context.Context, s workload.Schedule, stop bench.Stop) (bench.Run, error) {
	run, err := c.Load.Run(ctx, s, stop)
	c.pass(run.Elapsed)
	return run, errors.Join(err, c.onLoad())
}

func (c *clocked) Stop(ctx context.Context) (serverctl.Ended, error) {
	ended, err := c.Server.Stop(ctx)
	c.pass(ended.Took)
	return ended, err
}

func neverFails(int) error { return nil }

// wantBooked expects that the parts of the stored study add up to the given time, within 1 %.
func wantBooked(t *testing.T, name string, store *studies.Store, took time.Duration) trial.Spent {
	t.Helper()
	if err := store.SetState(studies.Stopped, "the test ends"); err != nil {
		t.Fatal(err)
	}
	spent := stored(t, store).Spent
	if sum := spent.Sum(); sum < took*99/100 || sum > took*101/100 {
		t.Errorf("%s: the parts add up to %s, and the study took %s: %v", name, sum, took, spent)
	}
	return spent
}

// In virtual time the parts of a study add up to the time of its servers, whatever happens to the servers. The parts of
// each finished trial add up to its GPU time.
func TestEachVirtualSecondIsBooked(t *testing.T) {
	for _, row := range []struct {
		name  string
		study func(*Study)
		has   trial.Part // a part that this study must have
	}{
		{"every trial in full", func(*Study) {}, trial.RunOut},
		{"races and confirmations", func(s *Study) { s.Budget.MinGain, s.Confirm = 0.01, 1 }, trial.Windows},
		{"a worst case", func(s *Study) { s.Runner.WorstCase = true }, trial.WorstLoad},
		{"a primed cache", func(s *Study) { s.Runner.Cache = trial.Primed }, trial.Priming},
		{"servers that do not start", func(s *Study) { dying(s, 2, notNow(serverctl.StartTimeout)) }, trial.Starting},
	} {
		store := open(t, t.TempDir())
		s := coarse(study(t, store, trial.Reset, 5))
		row.study(s)
		s.Runner.Simulated = true
		took := clock(s, false, neverFails)
		mustRun(t, s)
		spent := wantBooked(t, row.name, store, *took)
		if spent[row.has] == 0 || spent[trial.Choosing] != 0 {
			t.Errorf("%s: the parts are %v", row.name, spent)
		}
		for _, one := range stored(t, store).Trials {
			if r := one.Result; (r.GPUTime - r.Spent.Sum()).Abs() > time.Second/10 {
				t.Errorf("%s: trial %d took %s of GPU time, and its parts add up to %s: %v", row.name, one.Number, r.GPUTime, r.Spent.Sum(), r.Spent)
			}
		}
	}
}

// A resumed study has the time of all its runs.
func TestAResumedStudyBooksBothRuns(t *testing.T) {
	dir := t.TempDir()
	var both time.Duration
	for probes := range 6 { // each run ends after one more probe than the run before it
		store := open(t, dir)
		s := coarse(study(t, store, trial.Reset, 3))
		s.Runner.Simulated = true
		finish := make(chan struct{})
		s.Finish = finish
		s.Observe = func(e Event) {
			if e.Kind == Probed {
				if probes--; probes == -1 {
					close(finish)
				}
			}
		}
		took := clock(s, false, neverFails)
		if _, err := s.Run(t.Context()); err != nil && !errors.Is(err, trial.ErrInterrupted) {
			t.Fatal(err)
		}
		both += *took
		wantBooked(t, "after a run", store, both)
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A slowStore takes time for each write, as a shared disk does.
type slowStore struct{ *studies.Store }

const slowly = 700 * time.Millisecond

func (s slowStore) Begin(t studies.Trial) error { time.Sleep(slowly); return s.Store.Begin(t) }
func (s slowStore) Record(n int, p trial.Probe) error {
	time.Sleep(slowly)
	return s.Store.Record(n, p)
}
func (s slowStore) Finish(n int, r trial.Result) error {
	time.Sleep(slowly)
	return s.Store.Finish(n, r)
}

// A slowSampler needs ten seconds for each choice.
type slowSampler struct{ sampler.Sampler }

func (s slowSampler) Next(number int, history []studies.Trial) (space.Point, error) {
	time.Sleep(10 * time.Second)
	return s.Sampler.Next(number, history)
}

// On a real clock each second of a run is booked. Here servers, the sampler, predictions and the disk take time, and a
// server dies under load.
func TestEachSecondOfTheClockIsBooked(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		store, _, err := studies.Open(context.Background(), dir, studies.New{Name: "small", Seed: 1, World: map[string]string{"model": "m"}}, studies.Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := coarse(study(t, slowStore{store}, trial.Reset, 4))
		s.Runner.WorstCase = true
		s.Sampler = slowSampler{s.Sampler}
		s.Predict = func(context.Context, studies.Study) ([]studies.Trial, string, error) {
			time.Sleep(40 * time.Second)
			return []studies.Trial{{Number: -1, Origin: studies.Prior, Point: space.Point{"max-num-seqs": "8"}}}, "predicted", nil
		}
		clock(s, true, func(load int) error {
			if load == 4 {
				return &serverctl.ExitError{Class: serverctl.Hang, Evidence: "no token"}
			}
			return nil
		})
		began := time.Now()
		mustRun(t, s)
		spent := wantBooked(t, "a run", store, time.Since(began))
		for part, least := range map[trial.Part]time.Duration{
			trial.Choosing: 10 * time.Second, trial.Predicting: 40 * time.Second, trial.Idling: slowly, trial.Lost: time.Second,
			trial.WorstLoad: 1, trial.Starting: 5 * time.Second, trial.Stopping: 1, trial.Windows: time.Second,
		} {
			if spent[part] < least {
				t.Errorf("%s has %s, want at least %s", part, spent[part], least)
			}
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
