package vllmsim

import (
	"cmp"
	"fmt"
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
}

// source is where the model comes from: the name of a repository, or a folder.
func (o Options) source() string { return cmp.Or(o.Leader, o.Model) }

// A UsageError is a command line that vLLM would refuse, with its text; vLLM exits with 2 for it.
type UsageError struct{ Text string }

// Error returns argparse's line.
func (e *UsageError) Error() string { return "vllm serve: error: " + e.Text }

// A ConfigError is a combination of flags that vLLM refuses after parsing them, with its text; vLLM exits with 1 for it.
type ConfigError struct{ Text string }

// Error returns the text.
func (e *ConfigError) Error() string { return e.Text }

// A flag is one accepted flag: what it sets, or nil when it is accepted without effect.
type flag struct {
	name string
	bool bool // --name and --no-name, without a value
	help string
	set  func(o *Options, value string) error
}

// The flags with an effect, and the usual ones of a production command line that change nothing here. Names and texts
// follow vLLM 0.14.1, vllm/engine/arg_utils.py.
var flags = []flag{
	{"gpu-memory-utilization", false, "The fraction of GPU memory to be used for the model executor, which can range from 0 to 1.",
		func(o *Options, v string) error { return setFloat(&o.GPUMemoryUtilization, v) }},
	{"max-num-seqs", false, "Maximum number of sequences to be processed in a single iteration.",
		func(o *Options, v string) error { return setInt(&o.MaxNumSeqs, v) }},
	{"max-num-batched-tokens", false, "Maximum number of tokens to be processed in a single iteration.",
		func(o *Options, v string) error { return setInt(&o.MaxNumBatchedTokens, v) }},
	{"max-model-len", false, "Model context length (prompt and output).",
		func(o *Options, v string) error { return setInt(&o.MaxModelLen, v) }},
	{"enable-prefix-caching", true, "Whether to enable prefix caching.",
		func(o *Options, v string) error { o.NoPrefixCaching = v == "false"; return nil }},
	{"served-model-name", false, "The model name used in the API.",
		func(o *Options, v string) error { o.Model = v; return nil }},
	{"host", false, "Host name.", func(o *Options, v string) error { o.Host = v; return nil }},
	{"port", false, "Port number.", func(o *Options, v string) error { return setInt(&o.Port, v) }},
	{"block-size", false, "Size of a contiguous cache block in number of tokens.", nil},
	{"disable-log-stats", true, "Disable logging statistics.", nil},
	{"download-dir", false, "Directory to download and load the weights.", nil},
	{"dtype", false, "Data type for model weights and activations.", nil},
	{"enable-chunked-prefill", true, "Whether prefill requests can be chunked.", nil},
	{"enforce-eager", true, "Whether to always use eager-mode PyTorch.",
		func(o *Options, v string) error { o.EnforceEager = v == "true"; return nil }},
	{"speculative-config", false, "Speculative decoding configuration.", setSpeculation},
	{"load-format", false, "The format of the model weights to load.", nil},
	{"seed", false, "Random seed for reproducibility.", nil},
	{"tensor-parallel-size", false, "Number of tensor parallel groups.", nil},
	{"trust-remote-code", true, "Trust remote code.", nil},
}

func setFloat(to *float64, v string) (err error) {
	*to, err = strconv.ParseFloat(v, 64)
	return err
}

func setInt(to *int, v string) (err error) {
	*to, err = strconv.Atoi(v)
	return err
}

// ParseArgs reads what follows `vllm serve`: a model and flags in any order, over the profile's defaults. It returns a
// *UsageError or a *ConfigError where vLLM would.
func (p *Profile) ParseArgs(args []string) (Options, error) {
	o := p.Defaults
	o.Host, o.Port = "127.0.0.1", 8000
	var unknown []string
	for i := 0; i < len(args); i++ {
		word := args[i]
		if !strings.HasPrefix(word, "--") {
			if o.Leader != "" {
				unknown = append(unknown, word)
			}
			o.Leader = word
			continue
		}
		name, value, inline := strings.Cut(strings.ReplaceAll(word[2:], "_", "-"), "=")
		if inline { // the value keeps its underscores
			_, value, _ = strings.Cut(word, "=")
		}
		f, negated, ok := findFlag(name)
		switch {
		case !ok:
			unknown = append(unknown, word)
			continue
		case f.bool:
			value = strconv.FormatBool(!negated)
		case !inline && i+1 == len(args):
			return o, &UsageError{Text: fmt.Sprintf("argument --%s: expected one argument", f.name)}
		case !inline:
			i++
			value = args[i]
		}
		if f.set == nil {
			continue
		}
		if err := f.set(&o, value); err != nil {
			return o, &UsageError{Text: fmt.Sprintf("argument --%s: invalid value: '%s'", f.name, value)}
		}
	}
	if len(unknown) > 0 {
		return o, &UsageError{Text: "unrecognized arguments: " + strings.Join(unknown, " ")}
	}
	if o.Model == "" {
		o.Model = cmp.Or(o.Leader, p.Model)
	}
	return o, o.check()
}

func findFlag(name string) (f flag, negated, ok bool) {
	if i := slices.IndexFunc(flags, func(f flag) bool { return f.name == name }); i >= 0 {
		return flags[i], false, true
	}
	if positive, found := strings.CutPrefix(name, "no-"); found {
		if i := slices.IndexFunc(flags, func(f flag) bool { return f.name == positive && f.bool }); i >= 0 {
			return flags[i], true, true
		}
	}
	return flag{}, false, false
}

// check refuses the combinations that vLLM refuses (vllm/config/scheduler.py and cache.py, 0.14.1 and 0.33).
func (o Options) check() error {
	switch {
	case o.GPUMemoryUtilization <= 0 || o.GPUMemoryUtilization > 1:
		return &ConfigError{Text: fmt.Sprintf("gpu_memory_utilization must be in (0, 1], got %g.", o.GPUMemoryUtilization)}
	case o.MaxNumSeqs < 1 || o.MaxNumBatchedTokens < 1 || o.MaxModelLen < 1:
		return &ConfigError{Text: "Input should be greater than or equal to 1"}
	case o.MaxNumBatchedTokens < o.MaxNumSeqs:
		return &ConfigError{Text: fmt.Sprintf("max_num_batched_tokens (%d) must be greater than or equal to max_num_seqs (%d).",
			o.MaxNumBatchedTokens, o.MaxNumSeqs)}
	}
	return nil
}

// Help returns the text of `--help=all` in the layout of argparse.
func Help() string {
	var b strings.Builder
	b.WriteString("usage: vllm serve [model_tag] [options]\n\npositional arguments:\n  model_tag             The model tag to serve (optional if specified in config)\n\noptions:\n")
	for _, f := range flags {
		names := "--" + f.name + " " + strings.ToUpper(strings.ReplaceAll(f.name, "-", "_"))
		if f.bool {
			names = "--" + f.name + ", --no-" + f.name
		}
		fmt.Fprintf(&b, "  %s\n                        %s\n", names, f.help)
	}
	return b.String()
}
