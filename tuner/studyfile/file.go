// Package studyfile reads the YAML file of a study into typed settings, and reports each mistake with its line and
// column. It opens only the study file and the model's config.json, and never starts a program.
package studyfile

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// Version is the only version of the file format so far.
const Version = 1

// A File has the settings of a study file, with defaults for missing keys. All settings are legal and fit together.
type File struct {
	Path string // path of the file, as the user gave it
	Text string // text of the file; it contains no secret

	Name  string // name of the study
	Model string // Hugging Face id, or path of a directory

	Server Server

	SLO slo.SLO // limits in the order of the file

	Workload workload.Spec // the workload as in the file; WorkloadSpec also fills in missing values
	Load     Load

	Objective studies.Objective // what the study maximises

	Parameters  []space.Parameter // searched flags and variables in the order of the file
	Speculative map[string]any    // keys of --speculative-config except the number of tokens; nil if not given
	Constraints []string

	AllowQualityChange          bool // allow a search of flags that change the answers
	AllowMeaninglessSpeculation bool // allow speculation on dummy weights or random tokens

	Speculation Speculation

	Sampler Sampler
	Prior   Prior
	Budget  Budget
	Probe   Probe
	Cache   Cache
	Advice  Advice
	Sweep   *Sweep // settings of `tuner sweep`; nil if not given

	places map[string]string // line and column of keys, by their path; see Place
}

// Place returns where the file has a key, such as "study.yaml:14:3: parameters.max-num-seqs". It returns only the paths
// of the file and of the key if the file does not have the key.
func (f *File) Place(key string) string {
	if place := f.places[key]; place != "" {
		return f.Path + ":" + place + ": " + key
	}
	return f.Path + ": " + key
}

// Server says how to start the server.
type Server struct {
	Command      []string          // command, to which the tuner appends the model and the flags; nil if simulated
	Simulate     string            // profile of the simulated server; "" for a real server
	Args         []string          // flags of every trial
	Current      []string          // flags that the user's server has today, without Args; nil if not given
	CurrentEnv   []string          // searched variables that the user's server has today, as NAME=value words
	Env          map[string]string // variables to add to the tuner's own environment, with ${NAME} references; Environment replaces them
	StartTimeout time.Duration
	StopTimeout  time.Duration
	HangTimeout  time.Duration // the server counts as hanging if requests run but no token comes for this long
	Port         int           // 0 means any free port

	GPU              string        // source of GPU readings: "" for nvidia-smi, a path of nvidia-smi, the URL of a DCGM exporter, or NoGPU
	GPUMemoryTimeout time.Duration // how long a stopped server may take to release its GPU memory
	CacheDir         string        // directory for compiled graphs, shared by all trials; "" means the server's own default
	ModelCopy        string        // local directory to which the model is copied once; "" means no copy

	Dynamo []string // flags of NVIDIA Dynamo itself, which were removed from Command and Args
}

// NoGPU is the value of Server.GPU that switches GPU readings off.
const NoGPU = "none"

// Load says which program sends the requests, and how.
type Load struct {
	Driver  string   // TunerBench or VLLMBench
	Command []string // command of VLLMBench; the tuner appends the options

	// Burstiness is the shape of the distribution of gaps between arrivals: 1 is Poisson, less is burstier, more is
	// smoother. 0 means 1.
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
	Name    string // one of Samplers, or Ask
	Seed    uint64
	Presets bool          // whether points that do well on many servers are measured first
	Command []string      // for Ask: the program that chooses the points; it runs in the directory of the study file
	Timeout time.Duration // for Ask: how long the program may take for one answer
}

// Ask is the name of the sampler that asks a program of the user.
const Ask = "ask"

// Learns reports whether the sampler learns from earlier trials. Only such a sampler gains by presets.
func (s Sampler) Learns() bool { return s.Name == "gp" || s.Name == "tpe" || s.Name == Ask }

// Samplers are the names of the samplers that need no other program.
var Samplers = []string{"gp", "tpe", "random", "sobol", "halton", "grid"}

// Prior says whether the simulator predicts the other points after the first measured trial.
type Prior struct {
	Simulate bool
	Asked    bool   // the file asks for predictions; without this, a study of a simulated server is not predicted
	Profile  string // name or path of the profile that is scaled to this server; "" means the built-in one that fits best
}

// The values of the key prior in a study file. The value may also be a mapping.
const simulatePrior, noPrior = "simulate", "none"

// Budget limits what the study may spend.
type Budget struct {
	Trials  int // trials of the search, without those that confirm its best points
	GPUTime time.Duration
	MinGain float64 // gain in the capacity that is worth more GPU time, 0.01 for 1 %
	Confirm int     // number of best points that are measured once more at the end; 0 means none
}

// Planned is the expected number of trials: the trials of the search, and one confirmation of each of its best points and
// of the default. Further rounds of confirmations depend on what the first round finds.
func (b Budget) Planned() int {
	if b.Confirm == 0 {
		return b.Trials
	}
	return b.Trials + b.Confirm + 1
}

// Probe says how one rate is measured, and how the search for the capacity works.
type Probe struct {
	Window      time.Duration // shortest length of a window
	MinRequests int           // fewest requests in a window
	LeadIn      time.Duration // uncounted load before the window; negative if not given, which means trial.SearchLeadIn
	StartRate   float64       // first rate of the first trial, requests per second; 0 means a guess from the size of the KV cache
	MinRate     float64       // requests per second
	MaxRate     float64       // requests per second
	Tolerance   float64       // the search stops if failed rate / passed rate - 1 is at most this
	MaxProbes   int           // largest number of probes in a trial
	WorstCase   bool          // every measured server must also survive the largest load that it admits
	Precision   float64       // the search continues until the 95 % interval is ± this share of the capacity; 0 means that Tolerance decides
}

// MinPrecision and MaxPrecision are the limits of a precision. A smaller precision would need days of load; a larger
// one would have no use.
const MinPrecision, MaxPrecision = 0.005, 0.5

// defaultPreciseProbes is the default of MaxProbes if the file has a precision.
const defaultPreciseProbes = 60

// Advice says how far the advised rate is below the capacity.
type Advice struct {
	Margin float64 // advised rate / lower end of the capacity's interval; above 0, at most 1
}

// Speculation says when a trial ends early because the server accepts too few drafted tokens.
type Speculation struct {
	MinAcceptance float64 // lowest accepted / drafted tokens, 0 to 1; 0 means no limit
	MinDrafted    int     // number of drafted tokens after which the acceptance is judged
}

// Cache says what the prefix cache contains when a probe begins.
type Cache struct {
	Protocol  trial.Protocol // "" if not given; then File.Protocol chooses
	PrimeRate float64        // requests per second while the cache is primed; 0 means as many requests as the server takes
}

// defaults returns a File with all default values. A probe has 300 requests, as in sweeps made by hand. With 300
// requests only, the measured capacity of the simulated H200 was 22 % too high, so a window also lasts at least two
// minutes.
func defaults() *File {
	return &File{
		Objective: studies.TotalCapacity,

		Workload: workload.Spec{Endpoint: workload.Completions},
		Load:     Load{Driver: TunerBench},
		Server: Server{
			StartTimeout: 20 * time.Minute, StopTimeout: 30 * time.Second, HangTimeout: time.Minute, GPUMemoryTimeout: time.Minute,
		},
		Speculation: Speculation{MinAcceptance: 0.02, MinDrafted: 1000},

		Sampler: Sampler{Name: "gp", Seed: 1, Presets: true, Timeout: 5 * time.Minute},
		Prior:   Prior{Simulate: true},
		Budget:  Budget{Trials: 16, GPUTime: 24 * time.Hour, MinGain: 0.01, Confirm: 2},
		Probe: Probe{
			Window: 120 * time.Second, MinRequests: 300, LeadIn: -1,
			StartRate: 2, MinRate: 0.05, MaxRate: 1000, Tolerance: 0.2, MaxProbes: 12, WorstCase: true,
		},
		Advice: Advice{Margin: trial.DefaultMargin},
	}
}

//go:embed template.yaml
var template string

// Template returns the study file that `tuner init` prints, with comments. Its example is a 70B model on one H200.
func Template() string { return template }

// Read reads a study file. The error wraps ErrUnreadable if the file cannot be read. Otherwise it is an *Error with the
// problems in the file.
func Read(path string) (*File, error) {
	text, err := foreign.Read(path, maxRead)
	switch {
	case errors.Is(err, fs.ErrNotExist) && path == "-":
		return nil, fmt.Errorf("%w: a study file cannot be read from standard input; save it as a file", ErrUnreadable)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %w, or let `tuner init > %s` write one", ErrUnreadable, err, path)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return Parse(path, text)
}
