// Package studyfile reads the YAML file of a study into typed settings, and reports each mistake with its line and column.
// It opens the study file and the model's config.json, no other file, and it starts nothing.
package studyfile

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// Version is the only version of the format.
const Version = 1

// A File is one study as its file describes it, with the defaults filled in. All settings are legal and fit each other.
type File struct {
	Path string // path of the file, as the user gave it
	Text string // text of the file; it holds no secret

	Name  string // name of the study
	Model string // Hugging Face id, or path of a directory

	Server Server

	SLO slo.SLO // limits in the order of the file

	Workload workload.Spec // as written; WorkloadSpec completes it
	Load     Load

	Parameters  []space.Parameter // in the order of the file
	Speculative map[string]any    // keys of --speculative-config except the number of tokens; nil when not given
	Constraints []string

	AllowQualityChange          bool // flags that change the answers may be searched
	AllowMeaninglessSpeculation bool // speculation may be measured on dummy weights or random tokens

	Speculation Speculation

	Sampler Sampler
	Budget  Budget
	Probe   Probe
	Cache   Cache
	Advice  Advice
	Sweep   *Sweep // what `tuner sweep` measures; nil when not given
}

// Server says what to start.
type Server struct {
	Command      []string          // the tuner appends the model and the flags; nil when simulated
	Simulate     string            // profile of the simulated server; "" when real
	Args         []string          // flags of every trial
	Current      []string          // flags that the user runs today, without Args; nil when not given
	Env          map[string]string // added to the tuner's own environment; Environment replaces the ${NAME} references in it
	StartTimeout time.Duration
	StopTimeout  time.Duration
	HangTimeout  time.Duration // the server hangs when requests run and no token comes for this long
	Port         int           // 0 means any free port

	GPU              string        // where GPU readings come from: "" or a path for nvidia-smi, the URL of a DCGM exporter, or NoGPU
	GPUMemoryTimeout time.Duration // how long a stopped server may take to release its GPU memory
	CacheDir         string        // directory for compiled graphs, shared by all trials; "" leaves the choice to the server
	ModelCopy        string        // local directory to which the model is copied once; "" reads the model in place

	Dynamo []string // flags of NVIDIA Dynamo itself, taken out of Command and Args
}

// NoGPU is the value of Server.GPU that turns GPU readings off.
const NoGPU = "none"

// Load says which program sends the requests.
type Load struct {
	Driver  string   // TunerBench or VLLMBench
	Command []string // command of VLLMBench; the tuner appends the options

	// Burstiness is the shape of the gaps between arrivals: 1 is Poisson, below it is burstier, above it smoother. 0 means 1.
	Burstiness float64
}

// The drivers of a Load.
const (
	TunerBench = "tuner"      // the tuner itself, as `tuner bench` does
	VLLMBench  = "vllm-bench" // `vllm bench serve`, whose latencies count from the POST
)

// drivers are the legal values of Load.Driver.
var drivers = []string{TunerBench, VLLMBench}

// Sampler says which sampler chooses the points.
type Sampler struct {
	Name string // one of Samplers
	Seed uint64
}

// Samplers are the legal names of a Sampler.
var Samplers = []string{"gp", "tpe", "random", "halton", "grid"}

// Budget is what the study may spend.
type Budget struct {
	Trials  int
	GPUTime time.Duration
}

// Probe says how one rate is measured, and how the capacity is searched.
type Probe struct {
	Window      time.Duration // a window lasts at least this long
	MinRequests int           // and until this many requests are due
	LeadIn      time.Duration // load that is not counted, before the window; negative when not given: see trial.DefaultLeadIn
	StartRate   float64       // first rate of the first trial, requests per second; 0 derives it from the size of the KV cache
	MinRate     float64       // requests per second
	MaxRate     float64       // requests per second
	Tolerance   float64       // the search stops when the failed rate / the passed rate - 1 is at most this
	MaxProbes   int           // per trial
	WorstCase   bool          // a measured server must survive the largest load that it admits
	Precision   float64       // the search goes on until the 95 % interval is ± this part of the capacity; 0 stops at a bracket
}

// A precision lies between these. A finer one takes days of load; a coarser one says nothing.
const MinPrecision, MaxPrecision = 0.005, 0.5

// defaultPreciseProbes is MaxProbes when the file gives a precision and no max_probes.
const defaultPreciseProbes = 60

// Advice says how far below the capacity the advised rate is.
type Advice struct {
	Margin float64 // advised rate / lower end of the capacity's interval, above 0 and up to 1
}

// Speculation says when a trial ends in its warm-up because too few drafted tokens were accepted.
type Speculation struct {
	MinAcceptance float64 // accepted / drafted tokens, 0 to 1; 0 measures every server
	MinDrafted    int     // tokens that must be drafted before acceptance is judged
}

// Cache says what the prefix cache holds when a probe begins.
type Cache struct {
	Protocol  trial.Protocol // "" when not given; File.Protocol chooses then
	PrimeRate float64        // requests per second while the cache is primed; 0 means Probe.StartRate
}

// defaults returns a File with every default. A probe has 300 requests, as the manual sweeps had. On the simulated H200
// 300 requests alone read the capacity 22 % too high, so a window also lasts two minutes.
func defaults() *File {
	return &File{
		Workload: workload.Spec{Endpoint: workload.Completions},
		Load:     Load{Driver: TunerBench},
		Server: Server{
			StartTimeout: 20 * time.Minute, StopTimeout: 30 * time.Second, HangTimeout: time.Minute, GPUMemoryTimeout: time.Minute,
		},
		Speculation: Speculation{MinAcceptance: 0.02, MinDrafted: 1000},

		Sampler: Sampler{Name: "tpe", Seed: 1},
		Budget:  Budget{Trials: 30, GPUTime: 24 * time.Hour},
		Probe: Probe{
			Window: 120 * time.Second, MinRequests: 300, LeadIn: -1,
			StartRate: 2, MinRate: 0.05, MaxRate: 1000, Tolerance: 0.2, MaxProbes: 12, WorstCase: true,
		},
		Advice: Advice{Margin: trial.DefaultMargin},
	}
}

//go:embed template.yaml
var template string

// Template returns the commented study file that `tuner init` prints: a 70B model on one H200.
func Template() string { return template }

// Read reads a study file. The error wraps ErrUnreadable, or is an *Error with the problems of a file that could be read.
func Read(path string) (*File, error) {
	text, err := foreign.Read(path, maxRead)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %w, or let `tuner init > %s` write one", ErrUnreadable, err, path)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return Parse(path, text)
}
