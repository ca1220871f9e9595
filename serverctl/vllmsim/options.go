package vllmsim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Options are the server's flags that the simulation knows.
type Options struct {
	GPUMemoryUtilization float64
	MaxNumSeqs           int
	MaxNumBatchedTokens  int
	MaxModelLen          int
	NoPrefixCaching      bool
	EnforceEager         bool   // no CUDA graphs
	SpeculativeTokens    int    // of a draft; 0 means no speculative decoding
	SpeculativeMethod    string // such as eagle3 or ngram

	Model  string // served model name
	Host   string
	Port   int
	Leader string // positional model argument

	Version      string   // of vLLM; empty is the first of Versions
	Aliases      []string // further served names
	APIKeys      []string // one of them must come with a request; none are wanted when there is none
	NoStats      bool     // no metrics of vLLM's
	AlwaysUsage  bool     // streams tell their usage unasked
	TokenDetails bool     // usage tells the cached tokens

	cacheFlags map[string]string // labels of vllm:cache_config_info that flags have set
	given      map[string]any    // flags that were given, by destination
	refused    error             // why the speculative config is refused; nil when it is not
}

// source is where the model comes from: the name of a repository, or a folder.
func (o Options) source() string { return cmp.Or(o.Leader, o.Model) }

// serves reports whether a request may name the model.
func (o Options) serves(model string) bool {
	return model == o.Model || slices.Contains(o.Aliases, model)
}

// A UsageError is a command line that vLLM would refuse, with its text; vLLM exits with 2 for it.
type UsageError struct {
	Text  string
	usage string // of the parser that refuses
	prog  string // its name
}

// Error returns argparse's line.
func (e *UsageError) Error() string { return cmp.Or(e.prog, "vllm serve") + ": error: " + e.Text }

// A ConfigError is a combination of flags that vLLM refuses after parsing them, with its text; vLLM exits with 1 for it.
type ConfigError struct{ Text string }

// Error returns the text.
func (e *ConfigError) Error() string { return e.Text }

// effects are the flags that change what the simulation does, by destination. All others of vLLM are taken without effect.
// A value that is not of the flag's type has been refused before.
var effects = map[string]func(o *Options, value any) error{
	"gpu_memory_utilization": func(o *Options, v any) error { return set(&o.GPUMemoryUtilization, v) },
	"max_num_seqs":           func(o *Options, v any) error { return set(&o.MaxNumSeqs, v) },
	"max_num_batched_tokens": func(o *Options, v any) error { return set(&o.MaxNumBatchedTokens, v) },
	"max_model_len": func(o *Options, v any) error {
		if v == autoLength { // the longest that fits, which is the profile's
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
	"enable_force_include_usage":   func(o *Options, v any) error { return set(&o.AlwaysUsage, v) },
	"enable_prompt_tokens_details": func(o *Options, v any) error { return set(&o.TokenDetails, v) },
	"enforce_eager":                func(o *Options, v any) error { return set(&o.EnforceEager, v) },
	"speculative_config":           setSpeculation,
	"kv_cache_dtype":               func(o *Options, v any) error { return o.setCache("cache_dtype", v) },
	"swap_space":                   func(o *Options, v any) error { return o.setCache("swap_space", v) },
}

// autoLength is the value of max_model_len that leaves it to vLLM (human_readable_int_or_auto in vllm/engine/arg_utils.py).
const autoLength = -1

// set puts a value where it belongs.
func set[T any](to *T, v any) error {
	value, ok := v.(T)
	if !ok {
		return fmt.Errorf("a %T is no %T", v, *to)
	}
	*to = value
	return nil
}

func (o *Options) setCache(label string, v any) error {
	text, ok := v.(string)
	if !ok {
		text = pythonValue(v)
	}
	if o.cacheFlags == nil {
		o.cacheFlags = map[string]string{}
	}
	o.cacheFlags[label] = text
	return nil
}

// ParseArgs reads what follows `vllm serve` in the first of Versions; see ParseArgsOf.
func (p *Profile) ParseArgs(args []string) (Options, error) { return p.ParseArgsOf(Versions[0], args) }

// ParseArgsOf reads what follows `vllm serve` in a version of vLLM: a model and flags in any order, over the profile's defaults.
// It returns a *VersionError, or a *UsageError or a *ConfigError where vLLM would refuse.
func (p *Profile) ParseArgsOf(version string, args []string) (Options, error) {
	o := p.Defaults
	o.Version = version
	o.Host, o.Port = "127.0.0.1", 8000
	if faces[version] == nil {
		return o, &VersionError{version}
	}
	read, err := parserOf(version).parse(args)
	if err != nil {
		return o, err
	}
	o.Leader, o.given = read.model, read.values
	for _, dest := range slices.Sorted(maps.Keys(read.values)) {
		if effect := effects[dest]; effect != nil {
			if err := effect(&o, read.values[dest]); err != nil {
				return o, fmt.Errorf("flag of %s: %w", dest, err)
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
	case o.refused != nil:
		return o.refused
	case !(o.GPUMemoryUtilization > 0 && o.GPUMemoryUtilization <= 1): // not a number is none of both
		return &ConfigError{Text: fmt.Sprintf("gpu_memory_utilization must be in (0, 1], got %s.", pythonRepr(o.GPUMemoryUtilization))}
	case o.MaxNumSeqs < 1 || o.MaxNumBatchedTokens < 1 || o.MaxModelLen < 1:
		return &ConfigError{Text: "Input should be greater than or equal to 1"}
	case o.MaxNumBatchedTokens < o.MaxNumSeqs:
		return &ConfigError{Text: fmt.Sprintf("max_num_batched_tokens (%d) must be greater than or equal to max_num_seqs (%d).",
			o.MaxNumBatchedTokens, o.MaxNumSeqs)}
	}
	return nil
}

// nonDefault is the dict of vLLM's log line "non-default args", in the order of its parser.
func (o Options) nonDefault() string {
	var pairs []string
	add := func(name string, v any) {
		if slices.Contains(secretArgs, name) && o.face().modern {
			v = "***"
		}
		pairs = append(pairs, pythonValue(name)+": "+pythonValue(v))
	}
	if o.Leader != "" {
		add("model_tag", o.Leader)
	}
	seen := map[string]bool{}
	for _, f := range parserOf(o.face().version).flags {
		v, given := o.given[f.Dest]
		switch {
		case seen[f.Dest]:
		case f.Dest == "model" && o.Leader != "":
			add("model", o.Leader)
		case given && (f.Default == nil || pythonValue(v) != *f.Default):
			add(f.Dest, v)
		}
		seen[f.Dest] = true
	}
	return "{" + strings.Join(pairs, ", ") + "}"
}

// secretArgs are not shown in the log since 0.32.0 (redact_sensitive_args in vllm/entrypoints/serve/utils/api_utils.py).
var secretArgs = []string{"api_key", "hf_token", "watermark_config"}

// pythonValue writes a value of a flag as Python's repr does.
func pythonValue(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return pythonBool(v)
	case int:
		return strconv.Itoa(v)
	case float64:
		return pythonRepr(v)
	case jsonText:
		return pythonJSON(string(v))
	case []string:
		texts := make([]string, len(v))
		for i, s := range v {
			texts[i] = pythonValue(s)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case string:
		return pythonQuote(v)
	}
	return fmt.Sprint(v)
}

// pythonQuote writes a text as Python's repr does: in single quotes unless it has such and no double ones.
func pythonQuote(s string) string {
	quote := `'`
	if strings.Contains(s, `'`) && !strings.Contains(s, `"`) {
		quote = `"`
	}
	escaped := strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`, quote, `\`+quote).Replace(s)
	return quote + escaped + quote
}
