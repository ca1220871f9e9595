package trial

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// sharers is a workload. Its value is the number of its requests; 0 means endless. The requests form twelve groups. A
// prompt begins with the 496 tokens of its group and ends with 16 tokens of its own.
type sharers int

func (sharers) Name() string { return "twelve prefixes" }
func (s sharers) Len() int   { return int(s) }
func (sharers) Longest() int { return 514 }

func (s sharers) Request(stream workload.Stream, i int) *workload.Request {
	if s > 0 {
		stream, i = 0, i%int(s)
	}
	ids := make([]int32, 512)
	for j := range ids[:496] {
		ids[j] = 100 + int32(i%12) // all tokens of a prefix have the same id
	}
	for j := range ids[496:] {
		ids[496+j] = 1000 + int32(uint64(stream)*7919+uint64(i)>>(j%12))%20_000
	}
	ids[511], ids[510] = 30_000+int32(i), 30_000+int32(stream>>8)
	return &workload.Request{Tokens: ids, PromptTokens: len(ids), OutputTokens: 2, Conversation: -1}
}

// A teller is a server that answers one request after the other. Its prefix cache keeps every prompt for ever. It
// records how many tokens the requests of each window found in the cache.
type teller struct {
	stub
	cache        map[uint64]bool
	foreign      bool // another client fills the cache with the prefixes right after each reset
	asked, found float64
	windows      []window
	tokens       float64
}

// A window counts the prompt tokens of its requests, and how many of them were found in the cache.
type window struct{ asked, found float64 }

func (e *teller) Run(_ context.Context, schedule workload.Schedule, _ bench.Stop) (bench.Run, error) {
	var run bench.Run
	var free time.Duration
	var w window
	for a := range schedule {
		if a.Phase == workload.RunOut {
			break
		}
		found := e.find(a.Request.Tokens)
		asked := float64(len(a.Request.Tokens))
		e.asked, e.found, e.tokens = e.asked+asked, e.found+found, e.tokens+asked+2
		free = max(free, a.Due) + time.Duration((asked-found)*float64(time.Millisecond))
		if a.Phase != workload.Window {
			run.Others++
			continue
		}
		w.asked, w.found = w.asked+asked, w.found+found
		run.Samples = append(run.Samples, bench.Sample{
			Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, First: free, Last: free + 10*time.Millisecond, End: free + 10*time.Millisecond,
			WantTokens: 2, OutputTokens: 2, Chunks: 2, PromptTokens: len(a.Request.Tokens),
		})
	}
	if len(run.Samples) > warmUpRequests {
		e.windows = append(e.windows, w)
	}
	run.Elapsed = free + time.Second
	return run, nil
}

// find returns how many tokens of a prompt the cache holds, in whole blocks of 16. Then it adds the prompt to the
// cache.
func (e *teller) find(ids []int32) (found float64) {
	known, sum := true, fnv.New64a()
	for block := range slices.Chunk(ids[:len(ids)/16*16], 16) {
		for _, id := range block {
			sum.Write(binary.AppendVarint(nil, int64(id)))
		}
		if known = known && e.cache[sum.Sum64()]; known {
			found += 16
		}
		e.cache[sum.Sum64()] = true
	}
	return found
}

func (e *teller) Facts() serverctl.Facts { return serverctl.Facts{KVCacheTokens: 100_000} }
func (e *teller) Counters(context.Context) (serverctl.Counters, error) {
	return serverctl.Counters{PrefixQueries: e.asked, PrefixHits: e.found, PromptTokens: e.tokens}, nil
}
func (e *teller) ResetCache(context.Context) error {
	e.cache = make(map[uint64]bool)
	if e.foreign {
		for i := range 12 {
			e.find(sharers(0).Request(workload.WindowStream, i).Tokens[:496])
		}
	}
	return nil
}
func (e *teller) start(context.Context, Launch) (Server, Load, error) { return e, e, nil }

func (e *teller) runner(protocol Protocol, source sharers) *Runner {
	return &Runner{
		Start: e.start, Source: source, Cache: protocol, Seed: 1, PrimeRate: 2,
		SLO:     slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Second}}},
		Lengths: Lengths{LeadIn: 30 * time.Second, Window: 60 * time.Second, MinRequests: 300},
		Search:  capacity.Search{Hint: 4, Min: 0.1, Max: 12, Factor: 1.35, Tolerance: 0.2, MaxProbes: 3},
	}
}

// Each cache protocol has its stated effect on a server that shares no code with the simulator. Under Reset the window
// finds what it would find in an empty cache, whatever the lead-in sent before. Under Steady and Primed it finds the
// carried prompts.
func TestEachProtocolMeasuresWhatItSays(t *testing.T) {
	const prefix = 496.0 / 512
	for _, row := range []struct {
		protocol Protocol
		source   sharers
		finds    float64 // share of prompt tokens that each window finds; 0 means the share in an empty cache
	}{
		{Reset, 0, 0},
		{Reset, 96, 0},
		{Steady, 0, prefix},
		{Primed, 96, 1},
	} {
		e := &teller{cache: make(map[uint64]bool)}
		r := e.runner(row.protocol, row.source)
		result, probes := runTrial(t, r, Task{})
		if len(e.windows) != len(probes) || len(probes) < 2 {
			t.Fatalf("%s: %d windows in %d probes, want one each", row.protocol, len(e.windows), len(probes))
		}
		t.Logf("%s: %.3g req/s, hit rate of the first probe %.2f", row.protocol, result.Capacity.Rate, probes[0].HitRate)
		for i, p := range probes {
			if p.Note != "" || p.Replaced > 0 {
				t.Errorf("%s, probe %d: note %q, replaced %s; want neither", row.protocol, i, p.Note, p.Replaced)
			}
			want := row.finds
			if want == 0 {
				search := newSearchRun(newSession(r, Task{}, e, e, NewBooks(true)))
				alone := &teller{cache: make(map[uint64]bool)}
				if _, err := alone.Run(t.Context(), onlyWindow(search.plan(p.Seq, p.Rate).Schedule()), nil); err != nil {
					t.Fatal(err)
				}
				want = alone.found / alone.asked
			}
			if is := e.windows[i].found / e.windows[i].asked; math.Abs(is-want) > 1e-9 {
				t.Errorf("%s, probe %d: the window found %.4f of its prompts, want %.4f", row.protocol, i, is, want)
			}
		}
	}
}

// A reset is found to have failed if the cache holds prompts of another client, even before the trial's first request.
func TestAResetThatLeavesForeignPromptsIsFound(t *testing.T) {
	e := &teller{cache: make(map[uint64]bool), foreign: true}
	r := e.runner(Reset, 0)
	r.Lengths = Lengths{LeadIn: time.Second, Window: time.Second, MinRequests: 20}
	_, probes := runTrial(t, r, Task{})
	if note := probes[0].Note; !strings.Contains(note, "was not empty") {
		t.Errorf("the first probe says %q, want that its cache was not empty", note)
	}
}

// onlyWindow returns a schedule without its lead-in and run-out.
func onlyWindow(schedule workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for a := range workload.WithoutRunOut(schedule) {
			if a.Phase == workload.Window && !yield(a) {
				return
			}
		}
	}
}

// Cached predicts the share of prompt tokens that a server with its own prefix cache finds there.
func TestTheShareOfCachedPromptsIsKnownBeforehand(t *testing.T) {
	for _, row := range []struct {
		protocol Protocol
		source   sharers
	}{{Reset, 0}, {Reset, 96}, {Steady, 0}, {Primed, 96}} {
		plan := workload.Plan{Source: row.source, Seed: 1, Rate: 4, LeadIn: 10 * time.Second, Window: 20 * time.Second, MinRequests: 100}
		e := &teller{cache: make(map[uint64]bool)}
		schedule := plan.Schedule()
		if row.protocol == Reset {
			schedule = onlyWindow(schedule)
		} else {
			pass := workload.Pass{Source: row.source, Stream: workload.PrimeStream, Rate: 1, N: 96}
			if _, err := e.Run(t.Context(), pass.Schedule(), nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.Run(t.Context(), schedule, nil); err != nil {
			t.Fatal(err)
		}
		want := e.windows[0].found / e.windows[0].asked
		if is := Cached(plan, row.protocol); math.Abs(is-want) > 1e-9 {
			t.Errorf("%s, %s (%d): predicted %.4f of the prompts in the cache, want %.4f", row.protocol, row.source.Name(), row.source, is, want)
		}
	}
}
