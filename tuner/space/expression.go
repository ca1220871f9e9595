package space

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/types"
	"github.com/expr-lang/expr/vm"
)

// functions are the only functions of an expression. The library also has a clock, but an expression must depend on the
// point alone.
var functions = []string{"min", "max", "abs", "floor", "ceil"}

// reserved are the words of an expression that cannot be flags.
var reserved = append([]string{"and", "or", "not", "in", "true", "false"}, functions...)

// An expression is a condition or a constraint.
type expression struct {
	text    string   // as the user wrote it
	names   []string // flags in the text, sorted
	program *vm.Program
}

// A vocabulary holds the words that an expression may use.
type vocabulary struct {
	names   []string  // flags, longest first
	types   types.Map // type of each flag, by its identifier
	choices []string  // texts that need quotes in an expression
}

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
	slices.SortFunc(v.names, func(a, b string) int {
		if d := len(b) - len(a); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return v
}

// identifier returns the name of a flag in the compiled expression. It is as long as the flag's name, so that columns in
// errors stay right.
func identifier(name string) string { return strings.ReplaceAll(name, "-", "_") }

// compile compiles an expression. Flags keep their dashes: the dash of max-num-seqs is not a minus.
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

// withFlagNames replaces the identifiers in a message of the compiler by the names of the flags.
func (v vocabulary) withFlagNames(names []string, message string) string {
	for _, name := range names {
		message = strings.ReplaceAll(message, identifier(name), name)
	}
	return message
}

// rewrite replaces each flag by its identifier and returns the flags. It takes the longest flag first, and only whole words.
func (v vocabulary) rewrite(text string) (source string, names []string, err error) {
	var out strings.Builder
	for i := 0; i < len(text); {
		n := 1
		switch c := text[i]; {
		case c == '"' || c == '\'' || c == '`':
			n = quotedLength(text[i:])
		case c >= '0' && c <= '9':
			n = wordLength(text[i:], ".")
		case isWord(c):
			name, length := v.longest(text[i:])
			if length == 0 {
				n = wordLength(text[i:], "-")
				if word := text[i : i+n]; !slices.Contains(reserved, word) {
					return "", nil, v.unknownFlag(strings.TrimRight(word, "-"))
				}
				break
			}
			out.WriteString(identifier(name))
			names = append(names, name)
			i += length
			continue
		}
		out.WriteString(text[i : i+n])
		i += n
	}
	slices.Sort(names)
	return out.String(), slices.Compact(names), nil
}

// longest returns the longest flag at the beginning of the text, and its length. An underscore counts as a dash, as in vLLM.
func (v vocabulary) longest(text string) (name string, length int) {
	word := strings.ReplaceAll(text[:wordLength(text, "-")], "_", "-")
	for _, name := range v.names {
		if strings.HasPrefix(word, name) && (len(word) == len(name) || word[len(name)] == '-') {
			return name, len(name)
		}
	}
	return "", 0
}

func (v vocabulary) unknownFlag(word string) error {
	if slices.Contains(v.choices, word) {
		return fmt.Errorf("%q is a value, not a flag; put it in quotes", word)
	}
	names := slices.Sorted(slices.Values(v.names))
	return fmt.Errorf("unknown flag %q; %s", word, DidYouMean(word, names))
}

func isWord(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// wordLength returns the length in bytes of the word at the beginning of the text. others are further bytes of a word.
func wordLength(text, others string) int {
	for i := range len(text) {
		if !isWord(text[i]) && strings.IndexByte(others, text[i]) < 0 {
			return i
		}
	}
	return len(text)
}

// quotedLength returns the length of the quoted string at the beginning of the text. Without a closing quote it is the
// whole text.
func quotedLength(text string) int {
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case text[0]:
			return i + 1
		}
	}
	return len(text)
}

// holds reports whether the expression is true, and whether lookup knows every flag in it.
func (e *expression) holds(lookup func(name string) (any, bool)) (holds, known bool, err error) {
	env := make(map[string]any, len(e.names))
	for _, name := range e.names {
		value, ok := lookup(name)
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

// parseLiteral returns a text as an int, a float64 or a bool if it is one, and else as a string.
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

// exprType returns the type of the parameter's values in expressions, or Any for choices of several types.
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
		case common == nil || common.Equal(t):
			common = t
		case isNumber(common) && isNumber(t):
			common = types.Float64
		default:
			return types.Any
		}
	}
	return common
}

func isNumber(t types.Type) bool { return t.Equal(types.Int) || t.Equal(types.Float64) }

// value returns the parameter's value in expressions, and whether the text is legal for its type.
func (p *Parameter) value(text string) (any, bool) {
	want := p.exprType()
	switch {
	case want.Equal(types.String):
		return text, true
	case want.Equal(types.Float64):
		f, err := strconv.ParseFloat(text, 64)
		return f, err == nil
	}
	v := parseLiteral(text)
	return v, want.Equal(types.Any) || want.Equal(types.TypeOf(v))
}
