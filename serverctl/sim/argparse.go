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

// These files have the flags of each version of vLLM, as that version's parser reported them
// (serverctl/vllmlab/record.py).
//
//go:embed versions/*/flags.json
var flagFiles embed.FS

// A Flag is one flag of `vllm serve`, as Python's argparse describes it.
type Flag struct {
	Names    []string        `json:"names"`    // the names that the help shows
	Accepted []string        `json:"accepted"` // the names in Names, and the names that the help hides
	Dest     string          `json:"dest"`
	Nargs    json.RawMessage `json:"nargs"` // number of values: null means one, 0 means none, "?" at most one, "+" at least one, "*" any number
	Action   string          `json:"action"`
	Choices  []string        `json:"choices"`
	Default  *string         `json:"default"` // as Python's repr writes it
	Refusal  *string         `json:"refusal"` // the parser's error for the value abc; null when the parser accepts abc

	kind  valueKind
	wrong string // the part of Refusal that says what is wrong with the value abc
}

// A valueKind is the form that the values of a flag have.
type valueKind int

const (
	textValue      valueKind = iota // any text, or one of Choices
	intValue                        // an integer
	humanIntValue                   // an integer that may have a unit
	humanIntOrAuto                  // an integer that may have a unit, or auto
	floatValue                      // a number
	jsonValue                       // any JSON
)

// kindOf infers the kind of a flag's values from the parser's error for the value abc.
func kindOf(refusal string) valueKind {
	switch {
	case strings.Contains(refusal, "human_readable_int_or_auto"):
		return humanIntOrAuto
	case strings.Contains(refusal, "human_readable_int"):
		return humanIntValue
	case strings.Contains(refusal, "invalid int value"), strings.Contains(refusal, "<class 'int'>"):
		return intValue
	case strings.Contains(refusal, "invalid float value"), strings.Contains(refusal, "<class 'float'>"):
		return floatValue
	case refusal == "" || strings.Contains(refusal, "invalid choice"):
		return textValue
	}
	return jsonValue
}

// Flags returns the flags of a version in the order of its parser. The version must be in Versions.
func Flags(version string) []*Flag { return parserOf(version).flags }

// A parser reads the command lines of one version.
type parser struct {
	flags []*Flag
	named map[string]*Flag // the flag for each accepted name
}

// parserOf returns the parser of a version, which must be in Versions.
func parserOf(version string) *parser { return parsers[version]() }

// parsers has a function for each version, which reads the flags at its first call.
var parsers = func() map[string]func() *parser {
	all := map[string]func() *parser{}
	for _, v := range Versions {
		all[v] = sync.OnceValue(func() *parser { return newParser(v) })
	}
	return all
}()

// newParser reads the flags of a version. It panics if the flags are malformed. They cannot be malformed, because they
// are part of the program, and tests read them all.
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
		if f.Refusal != nil {
			f.kind = kindOf(*f.Refusal)
			_, f.wrong, _ = strings.Cut(*f.Refusal, ": ")
		}
		for _, name := range f.Accepted {
			p.named[name] = f
		}
	}
	return p
}

// parse reads a command line. It returns the model, and the value of each given flag by the flag's destination in
// argparse (dest). Its error is a *UsageError.
func (p *parser) parse(args []string) (model string, values map[string]any, err error) {
	values = map[string]any{}
	var unknown []string
	words := normalise(args)
	for i := 0; i < len(words); {
		word := words[i]
		i++
		if word == "--" || !p.isOption(word) {
			positionals := []string{word}
			if word == "--" { // no flags follow, only positional arguments
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

// isOption reports whether a word is an option and not a value. An option begins with a dash, whether it names a flag
// or not. But a negative number, or a word with a space, is an option only if it names a flag (_parse_optional in
// Python's argparse.py, 3.12).
func (p *parser) isOption(word string) bool {
	if len(word) < 2 || word[0] != '-' {
		return false
	}
	name, _, _ := strings.Cut(word, "=")
	return len(p.matching(name)) > 0 || !negativeNumber.MatchString(word) && !strings.Contains(word, " ")
}

var negativeNumber = regexp.MustCompile(`^-\d+$|^-\d*\.\d+$`)

// matching returns the full names of the flags that an abbreviated name can mean. If a flag has exactly this name, the
// result is this name alone. Otherwise the results are all long flag names that begin with the given name.
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

// find returns the flag with the given name, which may be an unambiguous abbreviation. find returns nil if there is no
// such flag.
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

// normalise changes the args as vLLM does before argparse (FlexibleArgumentParser in vllm/utils/argparse_utils.py).
// Underscores in names become dashes. -O3 becomes --optimization-level 3. All args of the form --flag.key value for one
// flag become a single --flag {"key": value}.
func normalise(args []string) (words []string) {
	nested := map[string]any{} // one JSON object for each flag
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
		text, _ := json.Marshal(nested[flag]) // cannot fail, because the values were read from JSON
		words = append(words, flag, string(text))
	}
	return words
}

// setNested stores a value in a JSON object. The keys lead to the value's place through nested objects. The value is
// the text parsed as JSON. If the text is no JSON, the value is the text itself.
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

// take reads the flag's value from the words that follow the flag. It also returns how many of these words it used. If
// inline is set, the first word came after = in the same argument.
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

// negates reports whether a name of a switch turns the switch off. The name --no-x turns --x off. In 0.33.0, --disable-x
// also turns --enable-x off, and --enable-x turns --disable-x off.
func (f *Flag) negates(name string) bool {
	first := f.Names[slices.IndexFunc(f.Names, func(n string) bool { return strings.HasPrefix(n, "--") })]
	return name != first && (strings.HasPrefix(name, "--no-") ||
		strings.HasPrefix(name, "--disable-") && strings.HasPrefix(first, "--enable-") ||
		strings.HasPrefix(name, "--enable-") && strings.HasPrefix(first, "--disable-"))
}

// read parses one value.
func (f *Flag) read(word string) (v any, err error) {
	switch f.kind {
	case textValue:
		v = word
	case intValue:
		v, err = strconv.Atoi(word)
	case humanIntValue, humanIntOrAuto:
		if f.kind == humanIntOrAuto && (word == "-1" || strings.EqualFold(word, "auto")) {
			return autoLength, nil
		}
		if v, err = humanInt(word); errors.Is(err, errDecimals) {
			return nil, err
		}
	case floatValue:
		if v, err = strconv.ParseFloat(word, 64); strings.ContainsAny(word, "xX") {
			err = strconv.ErrSyntax // Python reads no hexadecimal floats
		}
	case jsonValue:
		if !json.Valid([]byte(word)) {
			err = errors.New("no JSON")
		}
		v = json.RawMessage(word)
	}
	if err != nil {
		return nil, errors.New(strings.NewReplacer("'abc'", "'"+word+"'", " abc ", " "+word+" ").Replace(f.wrong))
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

// errDecimals is vLLM's error for a fraction of a binary unit, such as 1.5K.
//
//lint:ignore ST1005 vLLM begins this text with a capital letter
var errDecimals = errors.New("Decimals are not allowed with binary suffixes")

var humanNumber = regexp.MustCompile(`^(\d+(?:\.\d+)?)([kKmMgGtT])$`)

// humanInt parses an integer with a unit: 1k is 1,000 and 1K is 1,024 (human_readable_int in vllm/engine/arg_utils.py).
// Python's integers have no upper limit; here an integer must fit into 64 bits.
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
