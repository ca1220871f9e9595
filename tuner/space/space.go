// Package space describes the flags and environment variables that a study searches: their ranges, conditions and
// constraints. A Point has one value for each of them. The package also returns the vLLM args and the environment of a
// Point. It never runs a program.
package space

import (
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"
)

// SpeculativeTokens is the only parameter that is neither a flag of vLLM nor an environment variable. Its value becomes
// num_speculative_tokens in --speculative-config. For 0 the args have no such flag, because vLLM refuses
// num_speculative_tokens 0 (vLLM 0.14.1 and 0.33, vllm/config/speculative.py).
const SpeculativeTokens = "num-speculative-tokens"

// A Kind says which values a parameter has.
type Kind string

// The kinds of parameter.
const (
	Float       Kind = "float"       // a number in [Min, Max]
	Int         Kind = "int"         // a whole number in [Min, Max]
	Bool        Kind = "bool"        // "true" gives --name, "false" gives --no-name
	Categorical Kind = "categorical" // one of Choices
	JSON        Kind = "json"        // one of Choices, each a JSON text
)

// A Parameter is one searched flag or environment variable of the server.
type Parameter struct {
	Name    string   // the flag without leading dashes, such as max-num-seqs; a name in capitals is a variable
	Kind    Kind     // how its values are read
	Min     float64  // smallest value, for Float and Int
	Max     float64  // largest value, for Float and Int
	Log     bool     // search on a logarithmic scale; needs Min > 0
	Step    float64  // distance between legal values, counted from Min; 0 means any value (Float) or 1 (Int)
	Choices []string // legal values, for Categorical and JSON
	When    string   // condition: the parameter is active if this expression holds; "" means always
}

// A Point is one choice of flags and variables: the value of each active parameter by name, as a text for vLLM. A flag
// that is absent is inactive, or has the server's default. A variable that is absent is not set. The empty Point is the
// server's default.
type Point map[string]string

// String returns the point as name=value pairs in the order of the names, such as "max-num-seqs=128 x=1".
// Equal points have equal strings.
func (p Point) String() string {
	words := lo.Map(slices.Sorted(maps.Keys(p)), func(name string, _ int) string { return name + "=" + p[name] })
	return strings.Join(words, " ")
}
