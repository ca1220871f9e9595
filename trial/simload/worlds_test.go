package simload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
)

// A world is one simulated server with one workload and its limits. It has one capacity.
type world struct {
	name    string
	about   string // a few words about lengths and flags
	profile *sim.Profile
	args    []string
	source  workload.Source
	slo     slo.SLO
	cache   trial.Protocol
	guess   float64    // rough capacity, requests per second
	grid    [2]float64 // lowest and highest rate of a manual sweep, chosen for the kind of server and not for this capacity
}

// noReuse turns the prefix cache off in most worlds whose requests share nothing. In those worlds the cache would find
// nothing, but would cost half of the simulation's time.
const noReuse = "--no-enable-prefix-caching"

// reuses reports whether the prefix cache matters, so that a request depends on earlier requests.
func (w world) reuses() bool { return w.cache != trial.Reset }

// A population is an endless stream of requests with lognormal lengths. Prompts share nothing, or begin with one of
// several prefixes, or are the turns of conversations. Only the tokens that make a prompt unique are drawn; all others
// are zero.
type population struct {
	seed             uint64
	prompt, output   float64 // mean tokens; in a conversation, mean tokens that a turn adds
	promptCV         float64 // coefficient of variation
	outputCV         float64
	prefix, prefixes int  // tokens of a shared prefix, and number of different prefixes; 0 means no prefix
	turns            bool // whether requests are turns of conversations with convTurns turns each; a prompt holds all earlier turns
}

// Conversations are interleaved: within an epoch of convEpoch requests, the turns of a conversation are 43 requests apart.
const (
	convTurns = 5
	convEpoch = 300
	convBack  = 7 // inverse of the step: 43 · 7 = 1 modulo convEpoch
)

// The limits of lengths in tokens. Every request fits into 8,192 tokens, the max-model-len of small-fast.
const (
	maxPrompt = 5500
	maxOutput = 1500
	minOwn    = 8  // shortest own part of a prompt, after its shared prefix
	block     = 16 // tokens in a block of the KV cache
)

func (p *population) Name() string {
	name := fmt.Sprintf("%.0f/%.0f", p.prompt, p.output)
	if p.prefixes > 0 {
		name = fmt.Sprintf("%d × %d + %s", p.prefixes, p.prefix, name)
	}
	if p.turns {
		name += " in conversations"
	}
	return name
}

func (p *population) Len() int     { return 0 }
func (p *population) Longest() int { return 0 }

// tokens draws a lognormal length between two limits.
func tokens(r *rand.Rand, mean, cv float64, shortest, longest int) int {
	v := math.Log(1 + cv*cv)
	return min(max(shortest, int(math.Round(mean*math.Exp(math.Sqrt(v)*r.NormFloat64()-v/2)))), longest)
}

func (p *population) chance(st workload.Stream, n int) *rand.Rand {
	return rand.New(rand.NewPCG(p.seed^uint64(st)*0x9e3779b97f4a7c15, uint64(n)))
}

func (p *population) Request(st workload.Stream, i int) *workload.Request {
	if p.turns {
		return p.turn(st, i)
	}
	r := p.chance(st, i)
	own := tokens(r, p.prompt, p.promptCV, minOwn, maxPrompt-p.prefix)
	output := tokens(r, p.output, p.outputCV, 2, maxOutput)
	ids := make([]int32, p.prefix+own)
	if p.prefixes > 0 {
		which := 7 + int32(r.IntN(p.prefixes))
		for j := range p.prefix {
			ids[j] = which
		}
	}
	mark(r, ids[p.prefix:])
	return request(ids, output)
}

// turn returns the i-th request of a stream of conversations.
func (p *population) turn(st workload.Stream, i int) *workload.Request {
	epoch, slot := i/convEpoch, i%convEpoch*convBack%convEpoch
	conversation, turn := slot/convTurns, slot%convTurns
	r := p.chance(st, epoch*convEpoch+conversation)
	ids, output := make([]int32, 0, maxPrompt), 0
	for range turn + 1 {
		added := tokens(r, p.prompt, p.promptCV, minOwn, maxPrompt/convTurns)
		output = tokens(r, p.output, p.outputCV, 2, maxOutput)
		n := len(ids)
		ids = ids[:n+added]
		mark(r, ids[n:])
	}
	return request(ids, output)
}

// mark makes the first block of a text unique. All later blocks are then unique too, because a block's hash covers its prefix.
func mark(r *rand.Rand, ids []int32) {
	for j := range min(block, len(ids)) {
		ids[j] = r.Int32N(30000)
	}
}

func request(ids []int32, output int) *workload.Request {
	return &workload.Request{Tokens: ids, PromptTokens: len(ids), OutputTokens: output, Conversation: -1}
}

// A drawn source gives each repetition different requests from the same population.
type drawn struct {
	workload.Source
	draw int
}

// Request adds d.draw to the draw of the stream.
func (d drawn) Request(st workload.Stream, i int) *workload.Request {
	const streams = 1 << 8 // the low 8 bits of a Stream name its purpose, the higher bits its draw
	return d.Source.Request((st % streams).Draw(int(st/streams)+d.draw), i)
}

func limits(ttft, tpot float64) slo.SLO {
	ms := func(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }
	return slo.SLO{Limits: []slo.Limit{
		{Metric: slo.TTFT, Percentile: 99, Max: ms(ttft)},
		{Metric: slo.TPOT, Percentile: 99, Max: ms(tpot)},
	}}
}

// These are the lowest and highest rates of manual sweeps. A sweep has twelve rates, each higher than the one before by
// the same factor.
var (
	slowGrid = [2]float64{0.25, 25}
	fastGrid = [2]float64{0.5, 50}
	wideGrid = [2]float64{0.2, 50}
)

func named(tb testing.TB, name string) world {
	tb.Helper()
	worlds := namedWorlds(tb)
	return worlds[slices.IndexFunc(worlds, func(w world) bool { return w.name == name })]
}

// namedWorlds returns the worlds that every run of the table has.
func namedWorlds(tb testing.TB) []world {
	tb.Helper()
	h, l, s := profile(tb, "h200-llama70b-fp8"), profile(tb, "l4-qwen0.5b"), profile(tb, "small-fast")
	phase1, production := source(tb, workload.Spec{Kind: "phase1"}, 1), source(tb, workload.Spec{Kind: "production"}, 1)
	long := []string{"--max-model-len", "16384"}
	with := func(args ...string) []string { return append(args, long...) }
	alone := []string{noReuse}
	chats := &population{seed: 1, prompt: 1000, output: 250, promptCV: .7, outputCV: .6}
	return []world{
		{"h200-phase1", "phase1, default flags", h, long, phase1, limits(1000, 60), trial.Primed, 2.2, slowGrid},
		{"h200-phase1-u95", "phase1, utilization .95, 96 sequences, 2048 tokens", h,
			with("--gpu-memory-utilization", "0.95", "--max-num-seqs", "96", "--max-num-batched-tokens", "2048"),
			phase1, limits(1000, 60), trial.Primed, 2.7, slowGrid},
		{"h200-production", "production, default flags", h, long, production, limits(2000, 60), trial.Steady, .95, slowGrid},
		{"h200-plain", "1000/250, default flags", h, with(noReuse), chats, limits(1000, 60), trial.Reset, 5, slowGrid},
		{"h200-seqs48", "500/200, 48 sequences", h, with(noReuse, "--max-num-seqs", "48"),
			&population{seed: 1, prompt: 500, output: 200, promptCV: .7, outputCV: .6}, limits(1000, 60), trial.Reset, 6, slowGrid},
		{"l4-plain", "600/150, default flags", l, alone,
			&population{seed: 2, prompt: 600, output: 150, promptCV: .7, outputCV: .6}, limits(500, 25), trial.Reset, 24, fastGrid},
		{"l4-tpot", "300/300, TPOT of 12 ms", l, alone,
			&population{seed: 2, prompt: 300, output: 300, promptCV: .5, outputCV: .6}, limits(2000, 12), trial.Reset, 15, fastGrid},
		{"small-plain", "800/200, default flags", s, alone,
			&population{seed: 3, prompt: 800, output: 200, promptCV: .8, outputCV: .6}, limits(500, 40), trial.Reset, 10, fastGrid},
		{"small-seqs16", "400/200, 16 sequences", s, []string{noReuse, "--max-num-seqs", "16"},
			&population{seed: 3, prompt: 400, output: 200, promptCV: .8, outputCV: .6}, limits(800, 40), trial.Reset, 6, fastGrid},
		{"small-kv", "1500/200, utilization .7", s, []string{"--gpu-memory-utilization", "0.7"},
			&population{seed: 3, prompt: 1500, output: 200, promptCV: .6, outputCV: .6}, limits(1000, 60), trial.Reset, 5, fastGrid},
		{"small-tpot", "400/150, TPOT of 20 ms", s, alone,
			&population{seed: 5, prompt: 400, output: 150, promptCV: .6, outputCV: .6}, limits(2000, 20), trial.Reset, 10, fastGrid},
		{"small-shared", "40 × 1500 + 200/150, utilization .8", s, []string{"--gpu-memory-utilization", "0.8"},
			&population{seed: 4, prompt: 200, output: 150, promptCV: .6, outputCV: .6, prefix: 1500, prefixes: 40}, limits(500, 40), trial.Steady, 10, fastGrid},
	}
}

// A random world must have a capacity in this range, in requests per second. A lower capacity takes hours to measure; a
// higher one is above every grid.
const (
	minCapacity = 0.3
	maxCapacity = 40.0
)

// randomWorld draws a random world. The same seed gives the same world.
func randomWorld(seed uint64) (world, error) {
	for attempt := range uint64(100) {
		w, err := drawWorld(rand.New(rand.NewPCG(seed, attempt)), seed*100+attempt)
		if err != nil {
			return world{}, fmt.Errorf("random world %d: %w", seed, err)
		}
		w.name = fmt.Sprintf("random-%d", seed)
		if !w.starts() {
			continue
		}
		if err := w.promise(rand.New(rand.NewPCG(seed, 1000+attempt))); err != nil {
			return world{}, fmt.Errorf("random world %d: %w", seed, err)
		}
		w.guess, err = w.nearCapacity(2, minCapacity, maxCapacity)
		if err != nil {
			return world{}, fmt.Errorf("random world %d: %w", seed, err)
		}
		if w.guess > minCapacity && w.guess < maxCapacity {
			return w, nil
		}
	}
	return world{}, fmt.Errorf("random world %d: none of 100 has a capacity of %g to %g req/s", seed, minCapacity, maxCapacity)
}

// drawWorld draws a random world without its limits.
func drawWorld(r *rand.Rand, seed uint64) (world, error) {
	name := []string{"h200-llama70b-fp8", "l4-qwen0.5b", "small-fast"}[r.IntN(3)]
	base, err := sim.LoadProfile(name)
	if err != nil {
		return world{}, err
	}
	profile := *base
	vary := func(fields ...*float64) {
		for _, x := range fields {
			*x *= math.Exp(0.3 * r.NormFloat64())
		}
	}
	c := &profile.Step
	vary(&c.Fixed, &c.Weights, &c.PerToken, &c.PerSequence, &c.PerKVToken, &c.PerAttentionPair, &c.PrefillExtra, &c.EagerExtra)
	vary(&profile.Latency.BeforeScheduling, &profile.Latency.AfterStep)
	between := func(low, high float64) float64 { return low * math.Exp(r.Float64()*math.Log(high/low)) }
	people := &population{seed: seed, prompt: between(150, 2500), output: between(40, 400), promptCV: between(.3, 1.1), outputCV: between(.3, 1)}
	w := world{profile: &profile, source: people, cache: trial.Reset, guess: 1, grid: wideGrid}
	switch r.IntN(5) {
	case 0:
		people.prefix, people.prefixes = block*(10+r.IntN(90)), 5+r.IntN(100)
		w.cache = trial.Steady
	case 1:
		people.turns, w.cache = true, trial.Steady
		people.prompt = min(people.prompt, 600)
	}
	w.about = name + " varied, " + people.Name()
	flag := func(name, word string, values ...float64) {
		if i := r.IntN(len(values) + 1); i < len(values) {
			w.args = append(w.args, name, strconv.FormatFloat(values[i], 'g', -1, 64))
			w.about += fmt.Sprintf(", %s %g", word, values[i])
		}
	}
	flag("--gpu-memory-utilization", "utilization", .75, .85, .93)
	flag("--max-num-seqs", "sequences", 16, 32, 64, 128)
	flag("--max-num-batched-tokens", "tokens", 1024, 4096, 8192)
	w.args = append(w.args, "--max-model-len", "8192")
	if !w.reuses() {
		w.args = append(w.args, noReuse)
	}
	return w, nil
}

// starts reports whether the server starts with its flags.
func (w world) starts() bool {
	options, err := w.profile.ParseArgs(w.args)
	if err != nil {
		return false
	}
	engine, err := sim.NewEngine(w.profile, options)
	return err == nil && engine.KVTokens() > 2*options.MaxModelLen
}

// promise sets limits that are random multiples of a single request's latencies. TTFT breaks first in some worlds, TPOT in
// others.
func (w *world) promise(r *rand.Rand) error {
	alone, err := w.start(0)
	if err != nil {
		return err
	}
	run, err := alone.closed(1, 300, 0)
	if err != nil {
		return err
	}
	m := bench.Measure(run, bench.Scope{}.ByCount(run))
	between := func(low, high float64) float64 { return low * math.Exp(r.Float64()*math.Log(high/low)) }
	w.slo = limits(m.TTFT.P99*between(2, 12), m.TPOT.P99*between(1.2, 3))
	return nil
}
