package simload

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A forgetful server loses its prefix cache before one of its probes.
type forgetful struct {
	trial.Load
	server trial.Server
	before int // the probe, 0-based; -1 means never
	probes int
}

func (f *forgetful) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if stop != nil { // only probes can be stopped
		if f.probes == f.before {
			if err := f.server.ResetCache(ctx); err != nil {
				return bench.Run{}, err
			}
		}
		f.probes++
	}
	return f.Load.Run(ctx, schedule, stop)
}

// A liar reports that it emptied its cache, but did not.
type liar struct{ trial.Server }

func (liar) ResetCache(context.Context) error { return nil }

// trialOf runs a trial of a world and returns its probes. The server loses its cache before the probe with the number forgets. With lies
// it does not empty its cache when it is asked to.
func (w reuser) trialOf(t *testing.T, protocol trial.Protocol, draw, forgets int, lies bool) []trial.Probe {
	t.Helper()
	profile, err := sim.LoadProfile(w.profile)
	if err != nil {
		t.Fatal(err)
	}
	rig := &Rig{Profile: profile}
	var probes []trial.Probe
	r := &trial.Runner{
		Source: w.source, SLO: w.slo, Cache: protocol, PrimeRate: 0.7 * w.near,
		Lengths: trial.Lengths{LeadIn: 30 * time.Second, Window: 120 * time.Second, MinRequests: 300},
		Search:  capacity.Search{Hint: w.near, Min: w.near / 10, Max: w.near * 10, Factor: 1.35, Tolerance: 0.2, MaxProbes: 8},
		Start: func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
			server, load, err := rig.Start(ctx, launch)
			if err != nil {
				return nil, nil, err
			}
			load = &forgetful{Load: load, server: server, before: forgets}
			if lies {
				server = liar{server}
			}
			return server, load, nil
		},
	}
	_, err = r.Run(t.Context(), trial.Task{Number: draw + 1, Args: w.args, Draw: 100 * draw, Record: func(p trial.Probe) error {
		probes = append(probes, p)
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	return probes
}

// repeated counts the probes that were measured again, and those that were wrong again.
func repeated(probes []trial.Probe) (once, twice int) {
	for _, p := range probes {
		if p.Replaced > 0 {
			once++
		}
		if strings.Contains(p.Note, "and again") {
			twice++
		}
	}
	return once, twice
}

// No probe of a healthy server is measured again, whatever its draw and its rate. Some searches begin at twice the capacity.
func TestAHealthyCacheCostsNoProbe(t *testing.T) {
	realtime.Only(t, "simulates whole trials")
	draws := 2
	if os.Getenv("CACHE_PROTOCOLS") != "" {
		draws = 10
	}
	for _, w := range reusers(t) {
		for _, protocol := range []trial.Protocol{w.cache, trial.Reset} {
			probes := 0
			for draw := range draws {
				w := w
				if draw%2 == 1 {
					w.near *= 2
				}
				p := w.trialOf(t, protocol, draw, -1, false)
				probes += len(p)
				if again, _ := repeated(p); again > 0 {
					t.Errorf("%s, %s, draw %d: %d of %d probes were measured again", w.name, protocol, draw, again, len(p))
				}
			}
			t.Logf("%s, %s: %d probes", w.name, protocol, probes)
		}
	}
}

// When a server loses its cache before a probe, that probe is measured again, and the repetition is as good as any other probe. In the
// world production an empty cache costs 1.5 points of the hit rate; half of the draws refill it so far that the loss is below a point.
// In small-shared other prefixes fill the cache so soon that a lost cache makes no difference.
func TestALostCacheIsFound(t *testing.T) {
	realtime.Only(t, "simulates whole trials")
	least := map[string]int{"h200-phase1": 4, "h200-production": 2}
	for _, w := range reusers(t)[:2] {
		found := 0
		for i := range 4 {
			draw, before := i/2, i%2
			probes := w.trialOf(t, w.cache, draw, before, false)
			once, twice := repeated(probes)
			if once > 0 && probes[before].Replaced > 0 {
				found++
			}
			if once > 1 || twice > 0 {
				t.Errorf("%s, draw %d: the cache was lost once, and %d probes were measured again, %d in vain", w.name, draw, once, twice)
			}
		}
		if t.Logf("%s: %d of 4 lost caches are found", w.name, found); found < least[w.name] {
			t.Errorf("%s: %d of 4 lost caches are found, want at least %d", w.name, found, least[w.name])
		}
	}
}

// A server that reports a reset and did not reset is detected: the first probe whose cache holds enough is measured again, without success.
func TestAResetThatDidNotHappenIsFound(t *testing.T) {
	realtime.Only(t, "simulates whole trials")
	least := map[string]int{"h200-phase1": 2, "h200-production": 1} // probes that end early say nothing
	for _, w := range reusers(t)[:2] {
		found := 0
		for draw := range 2 {
			probes := w.trialOf(t, trial.Reset, draw, -1, true)
			switch once, twice := repeated(probes); {
			case once == 1 && twice == 1:
				found++
			case once+twice > 0:
				t.Errorf("%s, draw %d: %d probes were measured again, %d of them in vain, want one, in vain", w.name, draw, once, twice)
			}
		}
		if found < least[w.name] {
			t.Errorf("%s: found in %d of 2 draws, want %d at least", w.name, found, least[w.name])
		}
	}
}
