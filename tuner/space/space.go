// Package space describes the flags that a study searches: their ranges, conditions and constraints. It also has one
// choice of values for them (a Point), and the vLLM args of a Point. It never runs a program.
package space

import (
	"strings"

	"github.com/samber/lo"
)

// SpeculativeTokens is the only parameter that is not a flag of vLLM. Its value becomes num_speculative_tokens in
// --speculative-config. For 0 the args have no such flag, because vLLM refuses num_speculative_tokens 0 (vLLM 0.14.1
// and 0.33, vllm/config/speculative.py).
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

// A Parameter is one searched flag of the server.
type Parameter struct {
	Name    string   // the flag without leading dashes, such as max-num-seqs
	Kind    Kind     // how its values are read
	Min     float64  // smallest value, for Float and Int
	Max     float64  // largest value, for Float and Int
	Log     bool     // search on a logarithmic scale; needs Min > 0
	Step    float64  // distance between legal values, counted from Min; 0 means any value (Float) or 1 (Int)
	Choices []string // legal values, for Categorical and JSON
	When    string   // condition: the parameter is active if this expression holds; "" means always
}

// A Point is one choice of flags: the value of each active parameter by name, as a text for vLLM. A parameter that is
// absent is inactive, or has the server's default. The empty Point is the server's default.
type Point map[string]string

// String returns the point as name=value pairs in the order of the names, such as "max-num-seqs=128 x=1".
// Equal points have equal strings.
func (p Point) String() string {
	words := lo.Map(sortedNames(p), func(name string, _ int) string { return name + "=" + p[name] })
	return strings.Join(words, " ")
}
