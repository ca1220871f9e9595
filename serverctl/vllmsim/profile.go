// Package vllmsim is vLLM without a GPU: its engine in virtual time, and its HTTP server in real time with the same
// flags, log lines, metrics and failures. It knows nothing of the tuner. A figure that comes from it is simulated.
package vllmsim

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
)

//go:embed profiles/*.yaml
var profiles embed.FS

// A Profile is one model on one GPU, as data: the constants of the memory and step-time equations.
// The files under profiles/ give the source of each constant.
type Profile struct {
	Name       string   `yaml:"name"`
	Model      string   `yaml:"model"`
	Memory     Memory   `yaml:"memory"`
	Step       StepCost `yaml:"step"`
	Latency    Latency  `yaml:"latency"`
	StartUp    StartUp  `yaml:"start_up_seconds"`
	Stop       float64  `yaml:"stop_seconds"`
	Defaults   Options  `yaml:"defaults"`
	Vocabulary int      `yaml:"vocabulary"`
}

// Memory holds the constants of the KV-cache size; see Profile.KVTokens.
type Memory struct {
	GPUGiB             float64 `yaml:"gpu_gib"`
	FixedGiB           float64 `yaml:"fixed_gib"`
	KVBytesPerToken    float64 `yaml:"kv_bytes_per_token"`
	BatchBytesPerToken float64 `yaml:"batch_bytes_per_token"`
	SamplerBytesPerSeq float64 `yaml:"sampler_bytes_per_seq"`
	ActivationGiB      float64 `yaml:"activation_gib"` // at 8192 batched tokens
	ActivationExponent float64 `yaml:"activation_exponent"`
	GraphReserveGiB    float64 `yaml:"graph_reserve_gib"`
}

// StepCost holds the constants of one engine step in milliseconds; see StepCost.Milliseconds.
type StepCost struct {
	Fixed            float64 `yaml:"fixed"`
	Weights          float64 `yaml:"weights"`
	PerToken         float64 `yaml:"per_token"`
	RooflineExponent float64 `yaml:"roofline_exponent"`
	PerSequence      float64 `yaml:"per_sequence"`
	PerKVToken       float64 `yaml:"per_kv_token"`
	PerAttentionPair float64 `yaml:"per_attention_pair"`
	PrefillExtra     float64 `yaml:"prefill_extra"`
}

// Latency is what the API server adds around the engine, in milliseconds.
type Latency struct {
	BeforeScheduling float64 `yaml:"before_scheduling"`
	AfterStep        float64 `yaml:"after_step"`
}

// StartUp is how long the phases of a start take, in seconds.
type StartUp struct {
	Weights float64 `yaml:"weights"`
	Profile float64 `yaml:"profile"`
	Compile float64 `yaml:"compile"`
	Graphs  float64 `yaml:"graphs"`
}

// Total returns the whole start-up time.
func (s StartUp) Total() time.Duration {
	return time.Duration((s.Weights + s.Profile + s.Compile + s.Graphs) * float64(time.Second))
}

// StopTime returns how long the server takes to end.
func (p *Profile) StopTime() time.Duration { return time.Duration(p.Stop * float64(time.Second)) }

// ProfileNames returns the names of the built-in profiles in order.
func ProfileNames() []string {
	files, err := fs.Glob(profiles, "profiles/*.yaml")
	if err != nil { // only for a malformed pattern
		return nil
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(strings.TrimPrefix(f, "profiles/"), ".yaml")
	}
	return files
}

// LoadProfile returns the built-in profile of that name.
func LoadProfile(name string) (*Profile, error) {
	text, err := profiles.ReadFile("profiles/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("no simulator profile %q; there are: %s", name, strings.Join(ProfileNames(), ", "))
	}
	p := new(Profile)
	if err := yaml.UnmarshalWithOptions(text, p, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("simulator profile %s: %w", name, err)
	}
	return p, nil
}
