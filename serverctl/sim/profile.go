// Package sim computes how long vLLM's engine would take on a GPU that a profile describes. It simulates the scheduler,
// the KV cache and the steps in virtual time. It never waits and never uses the network; serverctl/sim/vllm serves it
// over HTTP.
package sim

import (
	"embed"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vllmtuner/foreign"
	"vllmtuner/tuner/space"
)

//go:embed profiles/*.yaml
var profiles embed.FS

// A Profile describes one model on one GPU by the constants of the memory and step-time equations.
type Profile struct {
	Name  string // name of a built-in profile, or path of a file
	Model string
	About string // where the profile's constants come from

	Memory      Memory
	Step        StepCost
	Latency     Latency
	Speculation Speculation
	Noise       Noise
	StartUp     StartUp
	Stop        float64 // seconds from SIGTERM to the end
	Vocabulary  float64 // tokens
	Defaults    Options

	Constants []Constant // in the order of the file's keys
}

// A Constant is one figure of a profile with its origin.
type Constant struct {
	Path       string    // such as step.weights
	Unit       string    // "1" for a plain number
	Values     []float64 // one value; acceptance may have several
	Source     string
	Confidence string // given, solved, measured, fit, assumed or made up
}

// confidences are the degrees of confidence in a constant, best first.
var confidences = []string{"given", "solved", "measured", "fit", "assumed", "made up"}

// Memory holds the constants of the KV-cache size (KVGiB).
type Memory struct {
	GPUGiB             float64
	FixedGiB           float64
	KVBytesPerToken    float64
	BatchBytesPerToken float64
	SamplerBytesPerSeq float64
	ActivationGiB      float64 // at 8192 batched tokens
	ActivationExponent float64
	GraphReserveGiB    float64 // memory for CUDA graphs, which comes on top of gpu-memory-utilization
}

// StepCost holds the constants of one engine step, in milliseconds (stepTimer.milliseconds).
type StepCost struct {
	Fixed            float64
	Weights          float64
	PerToken         float64
	RooflineExponent float64
	PerSequence      float64
	PerKVToken       float64
	PerAttentionPair float64
	PrefillExtra     float64
	EagerExtra       float64 // added to a decode without a CUDA graph
	GraphPadding     float64 // fraction of the time for a CUDA graph's empty places that counts: 0 means none, 1 means all
}

// Latency is the time that the API server adds before and after the engine's work, in milliseconds.
type Latency struct {
	BeforeScheduling float64
	AfterStep        float64
}

// StartUp is how long each phase of a start takes, in seconds.
type StartUp struct {
	Weights float64
	Profile float64
	Compile float64
	Graphs  float64
}

// Total returns the start-up time.
func (s StartUp) Total() time.Duration {
	return Seconds(s.Weights + s.Profile + s.Compile + s.Graphs)
}

// StopTime returns how long the server takes to stop.
func (p *Profile) StopTime() time.Duration { return Seconds(p.Stop) }

// Seconds converts a time of the engine or of a profile, in seconds, to a Duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// ProfileNames returns the sorted names of the built-in profiles.
func ProfileNames() []string {
	files, err := fs.Glob(profiles, "profiles/*.yaml")
	if err != nil { // Glob fails only for a malformed pattern
		return nil
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(strings.TrimPrefix(f, "profiles/"), ".yaml")
	}
	slices.Sort(files)
	return files
}

// IsProfileFile reports whether the name of a profile is the path of a file.
func IsProfileFile(name string) bool {
	return strings.ContainsRune(name, filepath.Separator) || strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml")
}

// LoadProfile returns the built-in profile with that name, or the profile in the file at that path.
func LoadProfile(name string) (*Profile, error) {
	if IsProfileFile(name) {
		text, err := foreign.Read(name, 1<<20)
		if err != nil {
			return nil, fmt.Errorf("simulator profile: %w", err)
		}
		return ParseProfile(name, text)
	}
	text, err := profiles.ReadFile("profiles/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("%q is neither a simulator profile nor the path of a YAML file; %s", name, space.DidYouMean(name, ProfileNames()))
	}
	return ParseProfile("profiles/"+name+".yaml", text)
}
