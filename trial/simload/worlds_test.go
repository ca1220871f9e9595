package simload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
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
	about   string // the flags and lengths in a few words
	profile *sim.Profile
	args    []string
	source  workload.Source
	slo     slo.SLO
	cache   trial.Protocol
	guess   float64    // about where its capacity is, requests per second
	grid    [2]float64 // lowest and highest rate of a manual sweep of its family; not made for this world's capacity
}

// Most worlds whose requests share nothing have no prefix cache: it would find nothing, and costs the simulation half of its time.
const noReuse = "--no-enable-prefix-caching"

// reuses reports whether the prefix cache matters. Then a request depends on the requests before it.
func (w world) reuses() bool { return w.cache != trial.Reset }

// A population is an endless stream of requests with lognormal lengths. Prompts share nothing, or begin with one of some
// prefixes, or are the turns of conversations. Tokens are cheap to make: those that do not tell prompts apart are zero.
type population struct {
	seed             uint64
	prompt, output   float64 // mean tokens; of a conversation what a turn adds
	promptCV         float64
	outputCV         float64
	prefix, prefixes int  // tokens of a shared prefix, and how many different ones; 0 means none
	turns            bool // conversations of convTurns turns, each prompt holding those before it
	strata           int  // so many requests in a row fill the spread of lengths evenly; 0 draws each by itself
}

// Conversations are interleaved: in an epoch of convEpoch requests a conversation's turns are convStep requests apart.
const (
	convTurns = 5
	convEpoch = 300
	convStep  = 43 // and 43 · 7 = 301: step and inverse
	convBack  = 7
)

// The longest lengths, so that every request fits into 8,192 tokens, the max-model-len of small-fast.
const (
	mostPrompt = 5500
	mostOutput = 1500
	leastOwn   = 8
	block      = 16 // tokens of a block of the KV cache
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

func lognormal(r *rand.Rand, mean, cv float64) float64 { return lognormalAt(r.NormFloat64(), mean, cv) }

// lognormalAt returns the length at a number of standard deviations above the median.
func lognormalAt(z, mean, cv float64) float64 {
	v := math.Log(1 + cv*cv)
	return mean * math.Exp(math.Sqrt(v)*z-v/2)
}

func (p *population) chance(st workload.Stream, n int) *rand.Rand {
	return rand.New(rand.NewPCG(p.seed^uint64(st)*0x9e3779b97f4a7c15, uint64(n)))
}

func (p *population) Request(st workload.Stream, i int) *workload.Request {
	if p.turns {
		return p.turn(st, i)
	}
	r := p.chance(st, i)
	prompt, answer := r.NormFloat64(), r.NormFloat64()
	if p.strata > 0 {
		prompt, answer = p.stratum(st, i, 1), p.stratum(st, i, 2)
	}
	own := min(max(leastOwn, int(math.Round(lognormalAt(prompt, p.prompt, p.promptCV)))), mostPrompt-p.prefix)
	output := min(max(2, int(math.Round(lognormalAt(answer, p.output, p.outputCV)))), mostOutput)
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

// stratum returns a normal deviate for the i-th request of a stream. Consecutive requests fall into different parts of equal probability.
func (p *population) stratum(st workload.Stream, i int, purpose uint64) float64 {
	r := rand.New(rand.NewPCG(p.seed^uint64(st)*0x9e3779b97f4a7c15^purpose<<56, uint64(i/p.strata)))
	part := r.Perm(p.strata)[i%p.strata]
	return math.Sqrt2 * math.Erfinv(2*(float64(part)+0.5)/float64(p.strata)-1)
}

// turn returns the i-th request of a stream of conversations.
func (p *population) turn(st workload.Stream, i int) *workload.Request {
	epoch, place := i/convEpoch, i%convEpoch*convBack%convEpoch
	conversation, turn := place/convTurns, place%convTurns
	r := p.chance(st, epoch*convEpoch+conversation)
	ids, output := make([]int32, 0, mostPrompt), 0
	for range turn + 1 {
		added := min(max(leastOwn, int(math.Round(lognormal(r, p.prompt, p.promptCV)))), mostPrompt/convTurns)
		output = min(max(2, int(math.Round(lognormal(r, p.output, p.outputCV)))), mostOutput)
		n := len(ids)
		ids = ids[:n+added]
		mark(r, ids[n:])
	}
	return request(ids, output)
}

// mark makes the beginning of a text unique, and with it all blocks that follow.
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

// Request moves the stream by draw, whichever draw of the repetition it is.
func (d drawn) Request(st workload.Stream, i int) *workload.Request {
	const streams = 1 << 8 // below which a Stream names its purpose, and from which on its draw
	return d.Source.Request((st % streams).Draw(int(st/streams)+d.draw), i)
}

func limits(ttft, tpot float64) slo.SLO {
	ms := func(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }
	return slo.SLO{Limits: []slo.Limit{
		{Metric: slo.TTFT, Percentile: 99, Max: ms(ttft)},
		{Metric: slo.TPOT, Percentile: 99, Max: ms(tpot)},
	}}
}

// The grids of manual sweeps: twelve rates between these, each so many times the one before.
var (
	slowGrid = [2]float64{0.25, 25}
	fastGrid = [2]float64{0.5, 50}
	wideGrid = [2]float64{0.2, 50}
)

// namedWorlds are the worlds of every run.
func namedWorlds() ([]world, error) {
	var profiles [3]*sim.Profile
	for i, name := range []string{"h200-llama70b-fp8", "l4-qwen0.5b", "small-fast"} {
		p, err := sim.LoadProfile(name)
		if err != nil {
			return nil, err
		}
		profiles[i] = p
	}
	h, l, s := profiles[0], profiles[1], profiles[2]
	phase1, err := workload.Open(workload.Spec{Kind: "phase1"}, 1)
	if err != nil {
		return nil, err
	}
	production, err := workload.Open(workload.Spec{Kind: "production"}, 1)
	if err != nil {
		return nil, err
	}
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
	}, nil
}

// The capacities that a random world may have, requests per second: below, a benchmark takes hours; above, no grid reaches.
const (
	leastCapacity = 0.3
	mostCapacity  = 40.0
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
		w.guess, err = w.nearCapacity(2, leastCapacity, mostCapacity)
		if err != nil {
			return world{}, fmt.Errorf("random world %d: %w", seed, err)
		}
		if w.guess > leastCapacity && w.guess < mostCapacity {
			return w, nil
		}
	}
	return world{}, fmt.Errorf("random world %d: none of 100 has a capacity of %g to %g req/s", seed, leastCapacity, mostCapacity)
}

// drawWorld draws everything but the limits.
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

// promise sets the limits as multiples of the latencies of a single request. In some worlds TTFT breaks first, in others TPOT.
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
