package space

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/types"
	"github.com/expr-lang/expr/vm"
)

// functions are the only functions that an expression may use. The library also has a clock, for example, but an
// expression must depend only on the point.
var functions = []string{"min", "max", "abs", "floor", "ceil"}

// reserved are words with a meaning in expressions, so they cannot be names of flags.
var reserved = append([]string{"and", "or", "not", "in", "true", "false"}, functions...)

// An expression is a condition or a constraint.
type expression struct {
	text    string   // as written by the user
	names   []string // flags in the text, sorted
	program *vm.Program
}

// A vocabulary has the words that an expression may use.
type vocabulary struct {
	names   []string       // flags and variables, longest first
	types   types.Map      // type of each flag, by identifier
	choices []string       // values of parameters; they need quotes in an expression
	token   *regexp.Regexp // matches a quoted text, a number, a flag or another word
}

// flagWithoutDot matches a flag that an expression can use. A flag with a dot, such as compilation-config.mode, cannot
// be used.
var flagWithoutDot = regexp.MustCompile(`^[A-Za-z](?:[\w-]*\w)?$`)

func newVocabulary(parameters []Parameter, defaults map[string]string) vocabulary {
	v := vocabulary{types: types.Map{}}
	for name := range defaults {
		v.types[identifier(name)] = types.Any
		v.names = append(v.names, name)
	}
	for i := range parameters {
		p := &parameters[i]
		v.types[identifier(p.Name)] = p.exprType()
		if !slices.Contains(v.names, p.Name) {
			v.names = append(v.names, p.Name)
		}
		v.choices = append(v.choices, p.Choices...)
	}
	slices.SortFunc(v.names, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) })
	tokens := []string{`"(?:\\.|[^"\\])*"?`, `'(?:\\.|[^'\\])*'?`, "`[^`]*`?", `[0-9][\w.]*`}
	for _, name := range v.names {
		if flagWithoutDot.MatchString(name) { // an underscore means the same as a dash, as in vLLM
			tokens = append(tokens, strings.ReplaceAll(name, "-", "[-_]")+`\b`)
		}
	}
	v.token = regexp.MustCompile("(?s)" + strings.Join(append(tokens, `[A-Za-z_][\w-]*`), "|"))
	return v
}

// identifier returns the name of a flag in the compiled expression. It has the same length as the flag's name, so that
// the columns in error messages are right.
func identifier(name string) string { return strings.ReplaceAll(name, "-", "_") }

// compile compiles an expression. Users write flags with dashes, so the dashes of max-num-seqs are not read as minus.
func (v vocabulary) compile(text string) (*expression, error) {
	source, names, err := v.rewrite(text)
	if err != nil {
		return nil, err
	}
	options := []expr.Option{expr.Env(v.types), expr.AsBool(), expr.DisableAllBuiltins()}
	for _, f := range functions {
		options = append(options, expr.EnableBuiltin(f))
	}
	program, err := expr.Compile(source, options...)
	if err != nil {
		message := err.Error()
		if at, ok := errors.AsType[*file.Error](err); ok {
			message = at.Message
		}
		return nil, fmt.Errorf("cannot read %q: %s; write a comparison such as max-num-batched-tokens >= max-num-seqs",
			text, v.withFlagNames(names, message))
	}
	return &expression{text: text, names: names, program: program}, nil
}

// withFlagNames replaces the identifiers in a message of the compiler by the flags' names.
func (v vocabulary) withFlagNames(names []string, message string) string {
	for _, name := range names {
		message = strings.ReplaceAll(message, identifier(name), name)
	}
	return message
}

// rewrite replaces each flag in the text by its identifier, and returns the flags. It tries long flags first, and
// replaces only whole words.
func (v vocabulary) rewrite(text string) (source string, names []string, err error) {
	source = v.token.ReplaceAllStringFunc(text, func(word string) string {
		name := word
		if !IsVariable(word) {
			name = strings.ReplaceAll(word, "_", "-")
		}
		isWord := !strings.ContainsAny(word[:1], "\"'`0123456789")
		switch {
		case slices.Contains(v.names, name):
			names = append(names, name)
			return identifier(name)
		case isWord && err == nil && !slices.Contains(reserved, word):
			err = v.unknownFlag(strings.TrimRight(word, "-"))
		}
		return word
	})
	slices.Sort(names)
	return source, slices.Compact(names), err
}

func (v vocabulary) unknownFlag(word string) error {
	if slices.Contains(v.choices, word) {
		return fmt.Errorf("%q is a value, not a flag; put it in quotes", word)
	}
	names := slices.Sorted(slices.Values(v.names))
	return fmt.Errorf("unknown flag %q; %s", word, DidYouMean(word, names))
}

// holds reports whether the expression is true. If valueOf does not know one of the flags, known is false.
func (e *expression) holds(valueOf func(name string) (any, bool)) (holds, known bool, err error) {
	env := make(map[string]any, len(e.names))
	for _, name := range e.names {
		value, ok := valueOf(name)
		if !ok {
			return false, false, nil
		}
		env[identifier(name)] = value
	}
	result, err := expr.Run(e.program, env)
	if err != nil {
		return false, true, fmt.Errorf("%q has no value: %w", e.text, err)
	}
	holds, ok := result.(bool)
	if !ok {
		return false, true, fmt.Errorf("%q is %v, not true or false", e.text, result)
	}
	return holds, true, nil
}

// parseLiteral converts a text to an int, a float64 or a bool. If that is not possible, it returns the text.
func parseLiteral(text string) any {
	if n, err := strconv.Atoi(text); err == nil {
		return n
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil {
		return f
	}
	if text == "true" || text == "false" {
		return text == "true"
	}
	return text
}

// exprType returns the type of the parameter's values in expressions. It is Any if the choices have several types.
func (p *Parameter) exprType() types.Type {
	switch p.Kind {
	case Float:
		return types.Float64
	case Int:
		return types.Int
	case Bool:
		return types.Bool
	case JSON:
		return types.String
	}
	var common types.Type
	for _, c := range p.Choices {
		switch t := types.TypeOf(parseLiteral(c)); {
		case p.IsUnset(c): // it has no value
		case common == nil || common.Equal(t):
			common = t
		case isNumber(common) && isNumber(t):
			common = types.Float64
		default:
			return types.Any
		}
	}
	if common == nil { // the only choice is Unset
		return types.Any
	}
	return common
}

func isNumber(t types.Type) bool { return t.Equal(types.Int) || t.Equal(types.Float64) }

// value converts a text to the parameter's value in expressions. If the text does not fit the type, or the variable is
// not set, the second result is false.
func (p *Parameter) value(text string) (any, bool) {
	want := p.exprType()
	switch {
	case p.IsUnset(text):
		return nil, false
	case want.Equal(types.String):
		return text, true
	case want.Equal(types.Float64):
		f, err := strconv.ParseFloat(text, 64)
		return f, err == nil
	}
	v := parseLiteral(text)
	return v, want.Equal(types.Any) || want.Equal(types.TypeOf(v))
}
