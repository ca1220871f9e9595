package searchbench

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/searchbench/otherengine"
	"vllmtuner/tuner/studyfile"
)

// A world is all that stays the same while methods are compared: one engine with one workload, its limits and a space
// of flags. All worlds have the settings of `tuner init`.
type world struct {
	name   string
	file   string             // a study file, with the settings that differ from the defaults
	engine string             // everything that decides how the engine behaves, as text
	start  func() trial.Start // returns a new Start for each study
	grid   [2]float64         // lowest and highest rate of a manual sweep, requests per second
}

// These are the rate grids of manual sweeps. They fit the kind of server, and were chosen without knowing the capacity
// of any server.
var (
	slowGrid = [2]float64{0.25, 25}
	fastGrid = [2]float64{0.5, 50}
)

// The parts of study files.
const (
	header = "version: 1\nname: bench\nmodel: example/model\nserver: {command: [vllm, serve], args: [--max-model-len, %q]}\n"
	limits = "slo: {ttft_p99: %dms, tpot_p99: %dms}\n"
	flags  = `parameters:
  gpu-memory-utilization: {float: [%g, 0.97], step: 0.01}
  max-num-seqs: {int: [%d, 1024], log: true}
  max-num-batched-tokens: {int: [%d, 32768], log: true}
`
	legal = "constraints: [\"max-num-batched-tokens >= max-num-seqs\"]\n"
	// drafts must come after flags. The prompts of the workloads are random tokens, so the simulator decides by chance
	// which draft tokens are accepted.
	drafts = `  num-speculative-tokens: [0, 1, 2, 3, 5]
speculative_config: {method: eagle3, model: example/drafter}
allow_meaningless_speculation: true
speculation: {min_acceptance: 2%}
`
)

// h200 returns a study file for the H200, with some further lines.
func h200(ttft int, lowest float64, lines string) string {
	return fmt.Sprintf(header+limits+flags, "16384", ttft, 60, lowest, 16, 1024) + lines + legal
}

// simulated returns a world on the simulator's engine.
func simulated(name, profile, file string, grid [2]float64, change func(*sim.Profile)) (world, error) {
	base, err := sim.LoadProfile(profile)
	if err != nil {
		return world{}, err
	}
	changed := *base
	if change != nil {
		change(&changed)
	}
	start := func() trial.Start { return (&simload.Rig{Profile: &changed}).Start }
	return world{name, file, changed.Text(), start, grid}, nil
}

// set returns a function that changes one constant of a profile.
func set(path string, values ...float64) func(*sim.Profile) {
	return func(p *sim.Profile) { p.Set(path, values, "made up", "for this world") }
}

func otherWorld(machine otherengine.Machine, file string, grid [2]float64) world {
	start := func() trial.Start { return machine.Start }
	return world{machine.Name, file, fmt.Sprintf("%+v", machine), start, grid}
}

const (
	phase1     = "workload: {kind: phase1}\n"
	production = "workload: {kind: production}\n"
)

// namedWorlds returns the worlds that are not drawn at random.
func namedWorlds() ([]world, error) {
	tight := func(p *sim.Profile) {
		set("memory.gpu", 90)(p)
		set("memory.graph_reserve", 5)(p)
	}
	var worlds []world
	for _, w := range []struct {
		name, profile, file string
		grid                [2]float64
		change              func(*sim.Profile)
	}{
		{"h200-phase1", "h200-llama70b-fp8", h200(1000, 0.7, "") + phase1, slowGrid, nil},
		{"h200-production", "h200-llama70b-fp8", h200(2000, 0.8, "") + production, slowGrid, nil},
		{"h200-reset", "h200-llama70b-fp8", h200(1000, 0.7, "") + phase1 + "cache: {protocol: reset}\n", slowGrid, nil},
		{"h200-tight", "h200-llama70b-fp8", h200(2000, 0.8, "") + phase1, slowGrid, tight},
		{"l4", "l4-qwen0.5b", fmt.Sprintf(header+limits+flags+legal, "8192", 500, 25, 0.7, 8, 512) +
			"workload: {kind: random, input_tokens: 600, output_tokens: 150, range_ratio: 0.8}\n", fastGrid, nil},
		{"draft-0", "h200-llama70b-fp8", h200(1000, 0.8, drafts) + phase1, slowGrid, set("speculation.acceptance", 0)},
		{"draft-0.3", "h200-llama70b-fp8", h200(1000, 0.8, drafts) + phase1, slowGrid, set("speculation.acceptance", 0.3)},
		{"draft-0.7", "h200-llama70b-fp8", h200(1000, 0.8, drafts) + phase1, slowGrid, set("speculation.acceptance", 0.7)},
	} {
		made, err := simulated(w.name, w.profile, w.file, w.grid, w.change)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
		worlds = append(worlds, made)
	}
	return append(worlds, otherWorlds()...), nil
}

// otherWorlds returns the worlds on the other engine.
func otherWorlds() []world {
	ordinary := otherengine.Machine{
		Name: "other", Memory: 600_000, Weights: 430_000, PerSeq: 60, PerBatch: 3, OOMUtil: 1, OOMSeqs: 2e-5, OOMBatch: 2e-6,
		Decode: 2400, Half: 60, Prefill: 22_000, Chunk: 1500, Share: 6000, PauseEvery: 900, PauseLeast: 0.2, PauseMost: 0.5,
		Seqs: 256, Batch: 8192, MaxModelLen: 8192, StartUp: 90 * time.Second, Stop: 5 * time.Second,
	}
	tight := ordinary
	tight.Name, tight.Memory, tight.PerSeq, tight.PerBatch, tight.OOMSeqs, tight.OOMBatch = "other-tight", 400_000, 80, 2.5, 1e-4, 5e-6
	tight.Weights = 260_000
	tight.NoCache = true
	pauses := ordinary
	pauses.Name, pauses.PauseEvery, pauses.PauseMost, pauses.NoCache = "other-pauses", 40, 1, true
	pauses.Weights = 260_000
	file := fmt.Sprintf(header+flags+legal, "8192", 0.7, 8, 512)
	return []world{
		otherWorld(ordinary, file+fmt.Sprintf(limits, 1500, 60)+"workload: {kind: prefix-repetition, prefixes: 40, prefix_tokens: 1500, suffix_tokens: 500, output_tokens: 250}\n", slowGrid),
		otherWorld(tight, file+fmt.Sprintf(limits, 2000, 60)+"workload: {kind: random, input_tokens: 1500, output_tokens: 300, range_ratio: 0.8}\n", slowGrid),
		otherWorld(pauses, file+fmt.Sprintf(limits, 500, 60)+"workload: {kind: random, input_tokens: 700, output_tokens: 150, range_ratio: 0.8}\n", slowGrid),
	}
}

// randomWorld makes a random world. The same seed gives the same world. It varies the constants of one of the
// simulator's profiles and the size of the memory. It also varies the lengths of the requests, how much their prompts
// share, and the limits.
func randomWorld(seed uint64) (world, error) {
	for attempt := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, attempt))
		w, err := drawWorld(r, fmt.Sprintf("random-%d", seed))
		if err != nil {
			return w, fmt.Errorf("random world %d: %w", seed, err)
		}
		ttft, tpot, err := w.singleLatencies()
		if err != nil {
			continue // the server does not start with its defaults
		}
		w.file += fmt.Sprintf(limits, int(ttft*logUniform(r, 2, 12)), int(math.Ceil(tpot*logUniform(r, 1.2, 3))))
		return w, nil
	}
	return world{}, fmt.Errorf("random world %d: no server of 100 starts", seed)
}

func logUniform(r *rand.Rand, low, high float64) float64 {
	return low * math.Exp(r.Float64()*math.Log(high/low))
}

// drawWorld makes a random world without its limits.
func drawWorld(r *rand.Rand, name string) (world, error) {
	profile := []string{"h200-llama70b-fp8", "l4-qwen0.5b", "small-fast"}[r.IntN(3)]
	vary := func(p *sim.Profile) {
		vary := func(sd float64, fields ...*float64) {
			for _, x := range fields {
				*x *= math.Exp(sd * r.NormFloat64())
			}
		}
		c, m := &p.Step, &p.Memory
		vary(0.3, &c.Fixed, &c.Weights, &c.PerToken, &c.PerSequence, &c.PerKVToken, &c.PerAttentionPair, &c.PrefillExtra, &c.EagerExtra)
		vary(0.3, &m.KVBytesPerToken, &m.SamplerBytesPerSeq, &m.ActivationGiB, &m.GraphReserveGiB)
		vary(0.1, &m.GPUGiB)
		p.StartUp = sim.StartUp{Weights: logUniform(r, 20, 200), Profile: 15, Compile: 35, Graphs: 25}
	}
	file := fmt.Sprintf(header+flags+legal, "8192", []float64{0.5, 0.7, 0.8}[r.IntN(3)], 8<<r.IntN(3), 512<<r.IntN(3))
	input, output := int(logUniform(r, 150, 2500)), int(logUniform(r, 40, 400))
	if r.IntN(3) == 0 {
		file += fmt.Sprintf("workload: {kind: prefix-repetition, prefixes: %d, prefix_tokens: %d, suffix_tokens: %d, output_tokens: %d}\n",
			5+r.IntN(100), 160+16*r.IntN(90), min(input, 1500), output)
	} else {
		file += fmt.Sprintf("workload: {kind: random, input_tokens: %d, output_tokens: %d, range_ratio: {input: %.2g, output: %.2g}}\n",
			input, output, 0.9*r.Float64(), 0.9*r.Float64())
	}
	return simulated(name, profile, file, [2]float64{0.2, 50}, vary)
}

// singleLatencies returns the p99 TTFT and p99 TPOT, in milliseconds, of requests that the server gets one at a time.
// The server has its default flags.
func (w world) singleLatencies() (ttft, tpot float64, err error) {
	p, err := (world{file: w.file + fmt.Sprintf(limits, 1000, 1000)}).open(1)
	if err != nil {
		return 0, 0, err
	}
	_, load, err := w.start()(background, trial.Launch{Number: 1, Args: p.File.Server.Args})
	if err != nil {
		return 0, 0, err
	}
	schedule := workload.WithoutRunOut(workload.Loop{Source: p.Load.Source, N: 300}.Schedule())
	run, err := load.(trial.ClosedLoad).RunClosed(background, schedule, 1, nil)
	if err != nil {
		return 0, 0, err
	}
	m := bench.Measure(run, bench.Scope{}.ByCount(run))
	return m.TTFT.P99, m.TPOT.P99, nil
}

// drawsOfSeed is the number of draws (sets of random requests) that one study may use. Truths (true capacities) use
// draws with higher numbers.
const drawsOfSeed = 64

// A drawnSource gives the studies of each seed different requests of the same population.
type drawnSource struct {
	workload.Source
	draw int
}

// Request adds d.draw to the draw of the stream.
func (d drawnSource) Request(st workload.Stream, i int) *workload.Request {
	const streams = 1 << 8 // the low 8 bits of a Stream name its purpose, the higher bits its draw
	return d.Source.Request((st % streams).Draw(int(st/streams)+d.draw), i)
}

// open opens the study of one seed. The seed decides the points, the requests and their arrivals. The population of
// requests is the same for every seed, because it belongs to the world.
func (w world) open(seed uint64) (*plan.Plan, error) {
	file, err := studyfile.Parse(w.name+".yaml", []byte(w.file))
	if err != nil {
		return nil, err
	}
	p, err := plan.OpenSearch(file)
	if err != nil {
		return nil, err
	}
	p.Load.Seed, p.Load.Source = seed, drawnSource{p.Load.Source, drawsOfSeed * int(seed)}
	return p, nil
}
