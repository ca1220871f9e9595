// Package studyfile reads the YAML file of a study into typed settings, and says what is wrong with it by line and
// column. It opens no file but the study's own and the model's config.json, and it starts nothing.
package studyfile

import (
	"errors"
	"fmt"
	"io"
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

// A File is one study as its file describes it, with the defaults filled in. Every setting in it is legal by itself and
// fits the others.
type File struct {
	Path string // of the file, as it was given
	Text string // the file as it is; it holds no secret

	Name  string // of the study
	Model string // Hugging Face id, or path

	Server Server

	Limits       []slo.Limit // in the order of the file; see SLO
	MaxErrorRate float64     // failed / requests, 0 to 1

	Workload workload.Spec // as written; see WorkloadSpec
	Load     Load

	Parameters  []space.Parameter // in the order of the file; see Space
	Speculative map[string]any    // the other keys of --speculative-config; nil when none
	Constraints []string

	AllowQualityChange          bool // flags that change the answers may be searched
	AllowMeaninglessSpeculation bool // speculation may be measured on dummy weights or random tokens

	Speculation Speculation

	Sampler Sampler
	Budget  Budget
	Probe   Probe
	Cache   Cache
	Confirm Confirm
	Advice  Advice
	Sweep   *Sweep // of `tuner sweep`; nil when there is none
}

// Server says what to start.
type Server struct {
	Command      []string          // the model and the flags are appended; nil when simulated
	Simulate     string            // profile of the simulated server; "" when real
	Args         []string          // given to every trial
	Current      []string          // what is run today, without Args; nil when not given
	Env          map[string]string // added to our own environment; references to it are kept as ${NAME}, see Environment
	StartTimeout time.Duration
	StopTimeout  time.Duration
	HangTimeout  time.Duration // without a token although requests run
	Port         int           // 0 means any that is free

	GPU              string        // who tells of the GPUs: "" or a path for nvidia-smi, the URL of a DCGM exporter, or NoGPU
	GPUMemoryTimeout time.Duration // until a stopped server's GPU memory must be back
	CacheDir         string        // where the server keeps what it compiled, over all trials; "" leaves it to the server
	ModelCopy        string        // local directory to which the model is copied once; "" reads it where it is

	Dynamo []string // flags of NVIDIA Dynamo's own that were taken out of Command and Args
}

// NoGPU is the value of Server.GPU for a machine whose GPUs nobody is to be asked about.
const NoGPU = "none"

// Sampler says who chooses the points.
type Sampler struct {
	Name string // one of Samplers
	Seed uint64
}

// Samplers are the known ones.
var Samplers = []string{"tpe", "random", "grid"}

// Budget is what the study may spend.
type Budget struct {
	Trials  int
	GPUTime time.Duration
}

// Probe says how one rate is measured, and how the capacity is searched.
type Probe struct {
	Window      time.Duration // lasts at least so long
	MinRequests int           // and at least so many requests
	LeadIn      time.Duration // load that is not counted, before the window; negative when not given: see trial.DefaultLeadIn
	StartRate   float64       // first rate of the first trial, requests per second; 0 means from the size of the KV cache
	MinRate     float64       // requests per second
	MaxRate     float64       // requests per second
	Tolerance   float64       // of the bracket: its highest/lowest rate - 1 is no more
	MaxProbes   int           // per trial
	WorstCase   bool          // a measured server must survive the largest load that it admits
	Precision   float64       // the search goes on until the 95 % interval is ± so much of the capacity; 0 is content with a bracket
}

// A precision is between these: finer ones take days of load, and coarser ones say nothing.
const FinestPrecision, CoarsestPrecision = 0.005, 0.5

// preciseProbes is how many probes a trial may have where a precision is asked for and no number is given.
const preciseProbes = 60

// Advice says how far below the capacity the advised rate is.
type Advice struct {
	Margin float64 // advised rate / lower end of the capacity's interval, above 0 and up to 1
}

// Speculation says when a server that drafts is given up before it is measured.
type Speculation struct {
	MinAcceptance float64 // accepted / drafted tokens, 0 to 1; 0 measures every server
	MinDrafted    int     // tokens to be drafted before that is judged
}

// Cache says in which state the prefix cache is when a probe begins.
type Cache struct {
	Protocol  trial.Protocol // "" when not given; see File.Protocol
	PrimeRate float64        // requests per second while the cache is primed; 0 means Probe.StartRate
}

// Confirm says how the finalists are measured again.
type Confirm struct {
	Top         int           // how many; 0 means no confirmation
	Window      time.Duration // lasts at least so long
	MinRequests int           // and at least so many requests
}

// defaults returns a File with what holds where the file is silent. Probe lengths are those of the manual sweeps:
// 300 requests alone read the capacity 22 % too high on the simulated H200, so that a window also lasts two minutes.
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
		Confirm: Confirm{Window: 240 * time.Second, MinRequests: 1000},
		Advice:  Advice{Margin: trial.DefaultMargin},
	}
}

// Read reads a study file. Its error is an *Error when the file could be read and is wrong.
func Read(path string) (*File, error) {
	f, err := foreign.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w, or let `tuner init > %s` write one", ErrUnreadable, err, path)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	// One byte more than allowed shows that a file is too long without reading all of it.
	text, err := io.ReadAll(io.LimitReader(f, mostBytes+1))
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return Parse(path, text)
}
