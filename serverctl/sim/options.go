package sim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Options are the server's flags that the simulation knows.
type Options struct {
	GPUMemoryUtilization float64
	MaxNumSeqs           int
	MaxNumBatchedTokens  int
	MaxModelLen          int
	NoPrefixCaching      bool
	EnforceEager         bool   // no CUDA graphs
	SpeculativeTokens    int    // draft tokens per step; 0 means no speculative decoding
	SpeculativeMethod    string // such as eagle3 or ngram

	Model  string // served model name
	Host   string
	Port   int
	Leader string // the model, if it was given as a positional argument

	Version      string   // version of vLLM; empty means the first of Versions
	Aliases      []string // further served names
	APIKeys      []string // a request must have one of these keys; empty means that it needs no key
	NoStats      bool     // /metrics is empty
	TokenDetails bool     // answers report the cached tokens in their usage

	Given map[string]any // values of the flags on the command line by destination: bool, int, float64, string, []string or json.RawMessage
}

// Source returns where the model comes from: the name of a repository, or a folder.
func (o Options) Source() string { return cmp.Or(o.Leader, o.Model) }

// Serves reports whether a request may name the model.
func (o Options) Serves(model string) bool {
	return model == o.Model || slices.Contains(o.Aliases, model)
}

// A UsageError is a command line that vLLM's parser refuses. vLLM exits with code 2.
type UsageError struct{ Text string }

// Error returns argparse's line.
func (e *UsageError) Error() string { return "vllm serve: error: " + e.Text }

// A ConfigError is a combination of flags that vLLM refuses after parsing. vLLM exits with code 1.
type ConfigError struct{ Text string }

// Error returns the text.
func (e *ConfigError) Error() string { return e.Text }

// effects has a function for each flag that changes what the simulation does. The function stores the flag's value in
// the options. The keys are argparse's destinations. The parser has already checked the type of the value. All other
// flags of vLLM are accepted and have no effect.
var effects = map[string]func(o *Options, value any) error{
	"gpu_memory_utilization": func(o *Options, v any) error { return set(&o.GPUMemoryUtilization, v) },
	"max_num_seqs":           func(o *Options, v any) error { return set(&o.MaxNumSeqs, v) },
	"max_num_batched_tokens": func(o *Options, v any) error { return set(&o.MaxNumBatchedTokens, v) },
	"max_model_len": func(o *Options, v any) error {
		if v == autoLength { // vLLM takes the longest length that fits; the simulation takes the profile's default
			return nil
		}
		return set(&o.MaxModelLen, v)
	},
	"enable_prefix_caching": func(o *Options, v any) error { o.NoPrefixCaching = v == false; return nil },
	"served_model_name": func(o *Options, v any) error {
		names, _ := v.([]string)
		o.Model, o.Aliases = names[0], names[1:]
		return nil
	},
	"host":                         func(o *Options, v any) error { return set(&o.Host, v) },
	"port":                         func(o *Options, v any) error { return set(&o.Port, v) },
	"api_key":                      func(o *Options, v any) error { return set(&o.APIKeys, v) },
	"disable_log_stats":            func(o *Options, v any) error { return set(&o.NoStats, v) },
	"enable_prompt_tokens_details": func(o *Options, v any) error { return set(&o.TokenDetails, v) },
	"enforce_eager":                func(o *Options, v any) error { return set(&o.EnforceEager, v) },
	"speculative_config":           func(o *Options, v any) error { return o.setSpeculation(v) },
}

// autoLength is the value of --max-model-len that lets vLLM choose the length.
const autoLength = -1

// set stores a value in a field.
func set[T any](field *T, v any) error {
	value, ok := v.(T)
	if !ok {
		return fmt.Errorf("got a %T, want a %T", v, *field)
	}
	*field = value
	return nil
}

// ParseArgs reads the args of `vllm serve` in the first of Versions; see ParseArgsOf.
func (p *Profile) ParseArgs(args []string) (Options, error) { return p.ParseArgsOf(Versions[0], args) }

// ParseArgsOf reads the args of `vllm serve` in a version of vLLM: a model and flags in any order. Flags that are not
// given have the profile's defaults. Its error is a *UsageError or a *ConfigError if vLLM would refuse the args.
func (p *Profile) ParseArgsOf(version string, args []string) (Options, error) {
	o := p.Defaults
	o.Version = version
	o.Host, o.Port = "127.0.0.1", 8000
	err := CheckVersion(version)
	if err != nil {
		return o, err
	}
	if o.Leader, o.Given, err = parserOf(version).parse(args); err != nil {
		return o, err
	}
	for _, dest := range slices.Sorted(maps.Keys(o.Given)) {
		if effect := effects[dest]; effect != nil {
			if err := effect(&o, o.Given[dest]); err != nil {
				return o, err
			}
		}
	}
	if o.Model == "" {
		o.Model = cmp.Or(o.Leader, p.Model)
	}
	return o, o.check()
}

// check refuses the combinations that vLLM refuses (vllm/config/scheduler.py and cache.py, 0.14.1 and 0.33).
func (o Options) check() error {
	switch {
	case !(o.GPUMemoryUtilization > 0 && o.GPUMemoryUtilization <= 1): // NaN fails both comparisons
		return &ConfigError{Text: fmt.Sprintf("gpu_memory_utilization must be in (0, 1], got %v.", o.GPUMemoryUtilization)}
	case o.MaxNumSeqs < 1 || o.MaxNumBatchedTokens < 1 || o.MaxModelLen < 1:
		return &ConfigError{Text: "Input should be greater than or equal to 1"}
	case o.MaxNumBatchedTokens < o.MaxNumSeqs:
		return &ConfigError{Text: fmt.Sprintf("max_num_batched_tokens (%d) must be greater than or equal to max_num_seqs (%d).",
			o.MaxNumBatchedTokens, o.MaxNumSeqs)}
	}
	return nil
}
