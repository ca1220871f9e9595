package sim

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// The flags of each version, as its own parser reported them (serverctl/vllmlab/record.py).
//
//go:embed versions/*/flags.json
var flagFiles embed.FS

// A Flag is one flag of `vllm serve`, as argparse has it.
type Flag struct {
	Names    []string        `json:"names"`    // in the help
	Accepted []string        `json:"accepted"` // Names, and the names that the help hides
	Dest     string          `json:"dest"`
	Nargs    json.RawMessage `json:"nargs"` // null takes one value, 0 none, "?" at most one, "+" some, "*" any number
	Action   string          `json:"action"`
	Choices  []string        `json:"choices"`
	Default  *string         `json:"default"` // Python's repr
	Refusal  *string         `json:"refusal"` // the parser's complaint about the value abc; null when it accepts that
}

// Flags returns the flags of one of Versions in the order of its parser.
func Flags(version string) []*Flag { return parserOf(version).flags }

// A parser reads the command lines of one version.
type parser struct {
	flags []*Flag
	named map[string]*Flag // flags by every accepted name
}

// parserOf returns the parser of one of Versions.
func parserOf(version string) *parser { return allParsers()[version] }

var allParsers = sync.OnceValue(func() map[string]*parser {
	all := map[string]*parser{}
	for _, v := range Versions {
		all[v] = newParser(v)
	}
	return all
})

// newParser reads the flags of a version. They are part of the program, and tests read them all, so they cannot be
// malformed.
func newParser(version string) *parser {
	p := &parser{named: map[string]*Flag{}}
	text, err := flagFiles.ReadFile("versions/" + version + "/flags.json")
	if err == nil {
		err = json.Unmarshal(text, &p.flags)
	}
	if err != nil {
		panic(fmt.Sprintf("sim: the flags of vLLM %s: %v", version, err))
	}
	for _, f := range p.flags {
		for _, name := range f.Accepted {
			p.named[name] = f
		}
	}
	return p
}

// parse reads a command line: the model, and the values of the flags by destination. Its error is a *UsageError.
func (p *parser) parse(args []string) (model string, values map[string]any, err error) {
	values = map[string]any{}
	var unknown []string
	words := normalise(args)
	for i := 0; i < len(words); {
		word := words[i]
		i++
		if word == "--" || !p.isOption(word) {
			positionals := []string{word}
			if word == "--" { // no flags follow
				positionals, i = words[i:], len(words)
			}
			if model == "" && len(positionals) > 0 {
				model, positionals = positionals[0], positionals[1:]
			}
			unknown = append(unknown, positionals...)
			continue
		}
		name, inline, hasInline := strings.Cut(word, "=")
		f, err := p.find(name)
		if err != nil {
			return "", nil, err
		}
		if f == nil {
			unknown = append(unknown, word)
			continue
		}
		following := words[i:]
		if end := slices.IndexFunc(following, p.isOption); end >= 0 {
			following = following[:end]
		}
		if hasInline {
			following = []string{inline}
		}
		v, taken, err := f.take(name, following, hasInline)
		if err != nil {
			return "", nil, &UsageError{fmt.Sprintf("argument %s: %v", strings.Join(f.Names, "/"), err)}
		}
		if f.Action == "_AppendAction" { // the flag may be given several times
			before, _ := values[f.Dest].([]string)
			v = append(before, fmt.Sprint(v))
		}
		values[f.Dest] = v
		if !hasInline {
			i += taken
		}
	}
	if len(unknown) > 0 {
		return "", nil, &UsageError{"unrecognized arguments: " + strings.Join(unknown, " ")}
	}
	return model, values, nil
}

// isOption reports whether a word is an option and not a value. A word is an option when it begins with a dash and
// names a flag. A word that names no flag is a value when it is a negative number or has a space (_parse_optional in
// Python's argparse.py, 3.12).
func (p *parser) isOption(word string) bool {
	if len(word) < 2 || word[0] != '-' {
		return false
	}
	name, _, _ := strings.Cut(word, "=")
	return len(p.matching(name)) > 0 || !negativeNumber.MatchString(word) && !strings.Contains(word, " ")
}

var negativeNumber = regexp.MustCompile(`^-\d+$|^-\d*\.\d+$`)

// matching returns the full names that a name may stand for: itself, or all long names that begin with it.
func (p *parser) matching(name string) (names []string) {
	if p.named[name] != nil {
		return []string{name}
	}
	if !strings.HasPrefix(name, "--") {
		return nil
	}
	for _, f := range p.flags {
		for _, full := range f.Accepted {
			if strings.HasPrefix(full, name) {
				names = append(names, full)
			}
		}
	}
	return names
}

// find returns the flag of a name or of an unambiguous abbreviation; nil when there is none.
func (p *parser) find(name string) (*Flag, error) {
	names := p.matching(name)
	if len(names) > 1 {
		return nil, &UsageError{fmt.Sprintf("ambiguous option: %s could match %s", name, strings.Join(names, ", "))}
	}
	if len(names) == 0 {
		return nil, nil
	}
	return p.named[names[0]], nil
}

// normalise does what vLLM does before argparse (FlexibleArgumentParser in vllm/utils/argparse_utils.py). Underscores
// in names become dashes, -O3 becomes --optimization-level 3, and all --flag.key value of one flag become one --flag
// {"key": value}.
func normalise(args []string) (words []string) {
	nested := map[string]any{} // objects by flag
	for i := 0; i < len(args); i++ {
		word := args[i]
		switch {
		case strings.HasPrefix(word, "--"):
			name, value, inline := strings.Cut(word, "=")
			name, keys, dotted := strings.Cut(name, ".")
			name = strings.ReplaceAll(name, "_", "-")
			if dotted && !inline && i+1 < len(args) {
				i++
				value, inline = args[i], true
			}
			if dotted && inline {
				setNested(nested, append([]string{name}, strings.Split(keys, ".")...), value)
				continue
			}
			word = name
			if inline {
				word += "=" + value
			}
		case strings.HasPrefix(word, "-O") && word != "-O":
			words = append(words, "--optimization-level")
			word = strings.TrimPrefix(word[2:], "=")
		case word == "-O" && i+1 < len(args) && slices.Contains([]string{"0", "1", "2", "3"}, args[i+1]):
			word = "--optimization-level"
		}
		words = append(words, word)
	}
	for _, flag := range slices.Sorted(maps.Keys(nested)) {
		text, _ := json.Marshal(nested[flag]) // values that were read as JSON can be written
		words = append(words, flag, string(text))
	}
	return words
}

// setNested puts a value at the end of a chain of keys. The value is JSON, or else a text.
func setNested(object map[string]any, keys []string, text string) {
	for _, key := range keys[:len(keys)-1] {
		inner, ok := object[key].(map[string]any)
		if !ok {
			inner = map[string]any{}
			object[key] = inner
		}
		object = inner
	}
	var value any
	if json.Unmarshal([]byte(text), &value) != nil {
		value = text
	}
	object[keys[len(keys)-1]] = value
}

// take reads the flag's value from the words that follow it, and returns how many of them it used.
func (f *Flag) take(name string, words []string, inline bool) (v any, taken int, err error) {
	switch string(f.Nargs) {
	case "0":
		if inline {
			return nil, 0, fmt.Errorf("ignored explicit argument '%s'", words[0])
		}
		return !f.negates(name), 0, nil
	case `"?"`:
		if len(words) == 0 {
			return nil, 0, nil
		}
	case `"+"`, `"*"`:
		if len(words) == 0 && string(f.Nargs) == `"+"` {
			return nil, 0, errors.New("expected at least one argument")
		}
		for _, word := range words {
			if _, err := f.read(word); err != nil {
				return nil, 0, err
			}
		}
		return slices.Clone(words), len(words), nil
	}
	if len(words) == 0 {
		return nil, 0, errors.New("expected one argument")
	}
	v, err = f.read(words[0])
	return v, 1, err
}

// negates reports whether a name of a switch turns it off: --no-x for --x, and in 0.33.0 --disable-x for --enable-x and
// the reverse.
func (f *Flag) negates(name string) bool {
	first := f.Names[slices.IndexFunc(f.Names, func(n string) bool { return strings.HasPrefix(n, "--") })]
	return name != first && (strings.HasPrefix(name, "--no-") ||
		strings.HasPrefix(name, "--disable-") && strings.HasPrefix(first, "--enable-") ||
		strings.HasPrefix(name, "--enable-") && strings.HasPrefix(first, "--disable-"))
}

// read reads one value. It knows the flag's type from the complaint about the value abc.
func (f *Flag) read(word string) (v any, err error) {
	refusal := ""
	if f.Refusal != nil {
		refusal = *f.Refusal
	}
	switch {
	case strings.Contains(refusal, "human_readable_int_or_auto") && (word == "-1" || strings.EqualFold(word, "auto")):
		return autoLength, nil
	case strings.Contains(refusal, "human_readable_int"):
		v, err = humanInt(word)
		if errors.Is(err, errDecimals) {
			return nil, err
		}
	case strings.Contains(refusal, "invalid int value"), strings.Contains(refusal, "<class 'int'>"):
		v, err = strconv.Atoi(word)
	case strings.Contains(refusal, "invalid float value"), strings.Contains(refusal, "<class 'float'>"):
		if v, err = strconv.ParseFloat(word, 64); strings.ContainsAny(word, "xX") {
			err = strconv.ErrSyntax // Python reads no hexadecimal floats
		}
	case refusal == "" || strings.Contains(refusal, "invalid choice"):
		v = word
	default: // a type that is written as JSON
		if !json.Valid([]byte(word)) {
			err = errors.New("no JSON")
		}
		v = json.RawMessage(word)
	}
	if err != nil {
		_, text, _ := strings.Cut(refusal, ": ")
		return nil, errors.New(strings.NewReplacer("'abc'", "'"+word+"'", " abc ", " "+word+" ").Replace(text))
	}
	if len(f.Choices) > 0 && !slices.Contains(f.Choices, word) {
		quote := ""
		if _, isText := v.(string); isText {
			quote = "'"
		}
		return nil, fmt.Errorf("invalid choice: %s%s%s (choose from %s%s%s)", quote, word, quote,
			quote, strings.Join(f.Choices, quote+", "+quote), quote)
	}
	return v, nil
}

// errDecimals refuses a fraction of a binary unit.
//
//lint:ignore ST1005 vLLM begins this text with a capital letter
var errDecimals = errors.New("Decimals are not allowed with binary suffixes")

var humanNumber = regexp.MustCompile(`^(\d+(?:\.\d+)?)([kKmMgGtT])$`)

// humanInt reads an integer with a unit: 1k is 1,000 and 1K is 1,024 (human_readable_int in vllm/engine/arg_utils.py).
// Python's integers have no upper limit; here one must fit 64 bits.
func humanInt(word string) (int, error) {
	g := humanNumber.FindStringSubmatch(word)
	if g == nil {
		return strconv.Atoi(word)
	}
	number, unit := g[1], g[2]
	power := strings.Index("kmgt", strings.ToLower(unit)) + 1
	if unit == strings.ToLower(unit) {
		x, err := strconv.ParseFloat(number, 64)
		if x *= math.Pow(1000, float64(power)); err == nil && x >= math.MaxInt {
			err = strconv.ErrRange
		}
		return int(x), err
	}
	if strings.Contains(number, ".") {
		return 0, fmt.Errorf("%w like %s. Did you mean to use %s%s instead?", errDecimals, unit, number, strings.ToLower(unit))
	}
	n, err := strconv.Atoi(number)
	if err == nil && n > math.MaxInt>>(10*power) {
		err = strconv.ErrRange
	}
	return n << (10 * power), err
}
