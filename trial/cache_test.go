package trial

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

// longSource is a workload with more requests than one probe sends. Its prompts fit into the cache of 20,000 tokens
// that useLongSource gives to the stub.
var longSource = sync.OnceValues(func() (workload.Source, *LongRun) {
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 16, OutputTokens: 2, Requests: 600}, 1)
	if err != nil {
		panic(err) // cannot happen: the spec is a constant
	}
	even, _ := evenly()
	return source, NewLongRun(workload.Plan{Source: source, Seed: 1, Arrivals: even.Arrivals})
})

func useLongSource(r *Runner, s *stub) {
	r.Source, r.LongRun = longSource()
	s.kvTokens = 20_000
}

// A probe counts only if the server's own counters show that its prefix cache was in the state that the protocol wants.
func TestAProbeCountsWithItsCacheInTheProtocolsState(t *testing.T) {
	const firstProbe = 4 // runs 1 and 2 are the warm-up; run 3 is the pass that primes the cache
	lostIn := func(runs ...int) func(int) bool {
		return func(run int) bool {
			return slices.Contains(runs, run)
		}
	}
	for _, row := range []struct {
		name     string
		protocol Protocol
		server   *stub
		replaced int    // number of repeated probes
		first    string // a part of the first probe's Note; "" means no Note
		second   string // a part of the second probe's Note; "" means no Note
		noted    string // the result's Notes
	}{
		{"a carried cache", Primed, &stub{}, 0, "", "", ""},
		{"an emptied cache", Reset, &stub{}, 0, "", "", ""},
		{"lost once", Primed, &stub{lost: lostIn(firstProbe)}, 1, "measured again, because the prefix cache had lost its content", "", ""},
		{"lost again", Primed, &stub{lost: lostIn(firstProbe, firstProbe+1)}, 1, "measured again, and again the prefix cache had lost", "", ""},
		{"lost every time is repeated once in the trial", Primed, &stub{lost: func(run int) bool { return run >= firstProbe }}, 1,
			"measured again, and again the prefix cache had lost", "the prefix cache had lost", ""},
		{"a restart behind our back", Primed, &stub{restarted: firstProbe}, 1, "because the server's counters went back", "", ""},
		{"a reset that did not happen", Reset, &stub{deaf: true}, 1, "measured again, and again the prefix cache was not empty", "was not empty", ""},
		{"counters that say nothing", Primed, &stub{mute: true}, 0, "", "", "the state of the prefix cache was not verified: the server does not report its hit rate"},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := row.server
			s.capacity = 4.8
			r := runner(t, s, row.protocol)
			useLongSource(r, s)
			result, probes := runTrial(t, r, Task{})
			replaced, spent := 0, 12*time.Second // time of the server's start and stop
			for _, did := range s.did {
				switch did {
				case "probe":
					spent += 61 * time.Second
				case "pass", "warm":
					spent += 6 * time.Second
				}
			}
			for i, p := range probes {
				if p.Seq != i {
					t.Errorf("probe %d is recorded as %d", i, p.Seq)
				}
				if p.Replaced > 0 {
					replaced++
				}
			}
			if replaced != row.replaced || strings.Count(strings.Join(s.did, " "), "probe") != len(probes)+row.replaced {
				t.Errorf("%d of %d probes were measured again, want %d; did %v", replaced, len(probes), row.replaced, s.did)
			}
			if result.GPUTime != spent {
				t.Errorf("GPU time %s, want %s: both times of a repeated probe count", result.GPUTime, spent)
			}
			for i, want := range []string{row.first, row.second} {
				if note := probes[i].Note; (note == "") != (want == "") || !strings.Contains(note, want) {
					t.Errorf("probe %d says %q, want %q", i, note, want)
				}
			}
			if notes := strings.Join(result.Notes, " | "); notes != row.noted {
				t.Errorf("the result says %q, want %q", notes, row.noted)
			}
		})
	}
}

// If requests in flight fill the KV cache, the hit rate is below the prediction for an empty cache. The cache has lost
// nothing, so the probe is not repeated: a repetition would have the same hit rate.
func TestACrowdedCacheIsNotLost(t *testing.T) {
	for _, row := range []struct {
		hitRate float64
		wrong   bool
		unknown string
	}{{0.48, false, ""}, {0.41, true, ""}, {0.25, false, "requests in flight"}} {
		c := newPrefixCache(Steady, 1000, true)
		c.recall.asked, c.recall.carried, c.recall.empty = 1000, 500, 400
		unknown := c.judge(Probe{HitRate: row.hitRate}, serverctl.Counters{}, serverctl.Counters{})
		if (c.wrong != "") != row.wrong || (unknown == "") != (row.unknown == "") || !strings.Contains(unknown, row.unknown) {
			t.Errorf("a hit rate of %g: wrong %q, unknown %q; want wrong %v, unknown %q", row.hitRate, c.wrong, unknown, row.wrong, row.unknown)
		}
	}
}

// A Runner with a KnownCache verifies nothing: it neither repeats a probe of a server that lost its cache, nor notes it.
func TestAKnownCacheIsNotVerified(t *testing.T) {
	attempts := func(known bool) (probes int, notes []string) {
		s := &stub{capacity: 4.8, restarted: 4} // runs 1 to 3 are warm-up and priming; the cache is lost before run 4, the first probe
		r := runner(t, s, Primed)
		useLongSource(r, s)
		r.KnownCache = known
		result, recorded := runTrial(t, r, Task{})
		repeated := 0
		for _, p := range recorded {
			if p.Replaced > 0 {
				repeated++
			}
		}
		return repeated, result.Notes
	}
	if repeated, _ := attempts(false); repeated == 0 {
		t.Error("a lost cache was not noticed, so this test proves nothing")
	}
	if repeated, notes := attempts(true); repeated != 0 || slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "cache") }) {
		t.Errorf("%d probes were repeated, notes %q; want none", repeated, notes)
	}
}

// A sleeper is a stub whose loads really take the time that they report.
type sleeper struct{ *stub }

func (s sleeper) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	run, err := s.stub.Run(ctx, schedule, stop)
	time.Sleep(run.Elapsed)
	return run, err
}

// If the server dies in the second attempt of a probe, the first attempt counts once in the trial's GPU time.
func TestTheTimeOfAFailedRepetitionCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{capacity: 4.8, restarted: 4, dieAt: 5} // runs 1 to 3 are warm-up and priming; run 4 is the first attempt of the first probe
		r := runner(t, s, Primed)
		useLongSource(r, s)
		r.Start = func(ctx context.Context, l Launch) (Server, Load, error) {
			_, _, err := s.start(ctx, l)
			return s, sleeper{s}, err
		}
		result, _ := runTrial(t, r, Task{})
		if want := 10*time.Second + 3*6*time.Second + time.Minute + 2*time.Second; result.Outcome != Infeasible || result.GPUTime.Round(10*time.Second) != want {
			t.Errorf("%s after %s, want infeasible after about %s: start, three loads, the first attempt, and the stop", result.Outcome, result.GPUTime, want)
		}
	})
}

// A carried cache holds the requests of a probe's first attempt, so the repetition sends other requests. An emptied
// cache holds none of them, so the repetition sends the same requests, which keeps a resumed study exact.
func TestARepetitionAsksOtherRequestsUnlessTheCacheIsEmpty(t *testing.T) {
	for protocol, same := range map[Protocol]bool{Primed: false, Steady: false, Reset: true} {
		c := newPrefixCache(protocol, 1000, true)
		if is := c.draw(3, true) == c.draw(3, false); is != same {
			t.Errorf("%s: the repetition has the same draw: %t, want %t", protocol, is, same)
		}
	}
}

func TestARecallForgetsWhatWasUsedLongestAgo(t *testing.T) {
	prompt := func(first, length int32) *workload.Request {
		ids := make([]int32, length)
		for i := range ids {
			ids[i] = first
		}
		return &workload.Request{Tokens: ids, PromptTokens: int(length), OutputTokens: 10}
	}
	a, b, longer := prompt(1, 32), prompt(2, 32), prompt(1, 64)
	for _, row := range []struct {
		name           string
		capacity       float64
		before, during []*workload.Request
		carried, empty float64
	}{
		{"nothing was asked before", 1000, nil, []*workload.Request{a}, 0, 0},
		{"the same was asked before", 1000, []*workload.Request{a}, []*workload.Request{a}, 1, 0},
		{"the same was asked before, and twice in the probe", 1000, []*workload.Request{a}, []*workload.Request{a, a}, 1, 0.5},
		{"the first half was asked before", 1000, []*workload.Request{a}, []*workload.Request{longer}, 0.5, 0},
		{"there was no room for both", 45, []*workload.Request{a, b}, []*workload.Request{a}, 0, 0},
		{"what was used again is kept", 90, []*workload.Request{a, b, a, prompt(3, 16)}, []*workload.Request{a}, 1, 0},
		{"answers take room", 45, []*workload.Request{a, {OutputTokens: 40}}, []*workload.Request{a}, 0, 0},
	} {
		c := newRecall(row.capacity)
		for _, q := range row.before {
			c.ask(q)
		}
		c.begin()
		for _, q := range row.during {
			c.ask(q)
		}
		if carried, empty := c.rates(); carried != row.carried || empty != row.empty {
			t.Errorf("%s: hit rates %g and %g, want %g and %g", row.name, carried, empty, row.carried, row.empty)
		}
	}
}

// A recall (the simulation of a prefix cache) never holds more than the cache that it simulates, however long a trial
// lasts.
func TestARecallStaysAsSmallAsItsCache(t *testing.T) {
	c := newRecall(16_000)
	ids := make([]int32, 160)
	for i := range int32(20_000) {
		ids[0] = i % 5000
		c.ask(&workload.Request{Tokens: ids, PromptTokens: len(ids), OutputTokens: 3})
		if c.tokens > c.capacity || len(c.held) > 4000 || len(c.slots) > 1000 {
			t.Fatalf("after %d requests the recall holds %g tokens in %d blocks, with %d slots; its cache has 16,000 tokens", i+1, c.tokens, len(c.slots), len(c.held))
		}
	}
}
