package vllmsim

import (
	"embed"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// What each version's own parser said of itself (serverctl/vllmlab/record.py): its flags as data, and its help.
//
//go:embed versions/*/flags.json versions/*/help.txt versions/*/help-all.txt
var parsers embed.FS

// A flagSpec is one flag of `vllm serve`, as argparse has it.
type flagSpec struct {
	Names    []string        `json:"names"`    // as the help shows them
	Accepted []string        `json:"accepted"` // and those that it hides
	Dest     string          `json:"dest"`
	Nargs    json.RawMessage `json:"nargs"` // null takes one value, 0 none, "?" at most one, "+" some, "*" any number
	Action   string          `json:"action"`
	Choices  []string        `json:"choices"`
	Default  *string         `json:"default"` // Python's repr
	Refusal  *string         `json:"refusal"` // what is said of the value abc; null when it is taken
}

// An argParser reads the command lines of one version.
type argParser struct {
	face  *face
	flags []*flagSpec
	named map[string]*flagSpec
}

// parserOf returns the parser of one of Versions.
func parserOf(version string) *argParser {
	parsersOnce.Do(func() {
		for _, v := range Versions {
			allParsers[v] = newParser(v)
		}
	})
	return allParsers[version]
}

var (
	parsersOnce sync.Once
	allParsers  = map[string]*argParser{}
)

// newParser reads the data of a version, which is part of the program: tests read it all, so it cannot be malformed.
func newParser(version string) *argParser {
	text, err := parsers.ReadFile("versions/" + version + "/flags.json")
	p := &argParser{face: faces[version], named: map[string]*flagSpec{}}
	if err == nil {
		err = json.Unmarshal(text, &p.flags)
	}
	if err != nil {
		panic(fmt.Sprintf("vllmsim: the flags of vLLM %s: %v", version, err))
	}
	for _, f := range p.flags {
		for _, name := range f.Accepted {
			p.named[name] = f
		}
	}
	return p
}

// commandLine is what was read from a command line.
type commandLine struct {
	model  string
	values map[string]any // by destination: bool, int, float64, string, []string or jsonText
}

// jsonText is the value of a flag that takes JSON.
type jsonText string

// parse reads a command line. Its error is a *UsageError.
func (p *argParser) parse(args []string) (read commandLine, err error) {
	read.values = map[string]any{}
	var unknown []string
	words := p.normalise(args)
	afterModel := -1
	for i := 0; i < len(words); {
		word := words[i]
		i++
		if word == "--" { // no flags any more; it is dropped where the model is before or behind it
			if read.model != "" && afterModel != i-1 {
				unknown = append(unknown, word)
			}
			rest := words[i:]
			if read.model == "" && len(rest) > 0 {
				read.model, rest = rest[0], rest[1:]
			}
			unknown = append(unknown, rest...)
			break
		}
		if !p.isOption(word) {
			if read.model == "" {
				read.model, afterModel = word, i
			} else {
				unknown = append(unknown, word)
			}
			continue
		}
		name, inline, hasInline := strings.Cut(word, "=")
		f, err := p.find(name)
		if err != nil {
			return read, err
		}
		if f == nil {
			unknown = append(unknown, word)
			continue
		}
		end := i
		for end < len(words) && !p.isOption(words[end]) {
			end++
		}
		values := words[i:end]
		if hasInline {
			values = []string{inline}
		}
		v, taken, err := f.take(name, values, hasInline)
		if err != nil {
			return read, p.refuse("argument %s: %v", strings.Join(f.Names, "/"), err)
		}
		if f.Action == "_AppendAction" { // each time one more
			before, _ := read.values[f.Dest].([]string)
			v = append(before, fmt.Sprint(v))
		}
		read.values[f.Dest] = v
		if !hasInline {
			i += taken
		}
	}
	if len(unknown) > 0 {
		return read, &UsageError{Text: "unrecognized arguments: " + strings.Join(unknown, " "), usage: p.face.usage, prog: "vllm"}
	}
	return read, nil
}

// serveUsage is the usage line of `vllm serve`.
const serveUsage = "usage: vllm serve [model_tag] [options]"

func (p *argParser) refuse(format string, args ...any) error {
	return &UsageError{Text: fmt.Sprintf(format, args...), usage: serveUsage}
}

// isOption reports whether a word is no value: it begins with a dash, and is a flag of which a value may follow behind an equals
// sign, or at least no negative number and without a space (_parse_optional in Python's argparse.py, 3.12).
func (p *argParser) isOption(word string) bool {
	if len(word) < 2 || word[0] != '-' {
		return false
	}
	name, _, _ := strings.Cut(word, "=")
	return p.begins(name) || !negativeNumber.MatchString(word) && !strings.Contains(word, " ")
}

// begins reports whether a name is that of a flag, or the beginning of a long one's.
func (p *argParser) begins(name string) bool {
	if p.named[name] != nil {
		return true
	}
	for full := range p.named {
		if strings.HasPrefix(name, "--") && strings.HasPrefix(full, name) {
			return true
		}
	}
	return false
}

var negativeNumber = regexp.MustCompile(`^-\d+$|^-\d*\.\d+$`)

// normalise does what vLLM does before argparse (FlexibleArgumentParser in vllm/utils/argparse_utils.py): underscores in names
// become dashes, -O3 becomes --optimization-level 3, and all --flag.key value of one flag become one --flag {"key": value} at
// the end.
func (p *argParser) normalise(args []string) (words []string) {
	var nested object // by flag
	for i := 0; i < len(args); i++ {
		word := args[i]
		switch {
		case strings.HasPrefix(word, "--"):
			name, value, inline := strings.Cut(word, "=")
			base, keys, dotted := strings.Cut(name, ".")
			base = strings.ReplaceAll(base, "_", "-")
			switch {
			case dotted && !inline && i+1 < len(args):
				i++
				value, inline = args[i], true
				fallthrough
			case dotted && inline:
				nested = merge(nested, object{{base, p.nested(keys, value)}})
				continue
			case inline:
				word = base + "=" + value
			default:
				word = base
			}
		case strings.HasPrefix(word, "-O") && word != "-O":
			words = append(words, "--optimization-level")
			word = strings.TrimPrefix(word[2:], "=")
		case word == "-O" && i+1 < len(args) && slices.Contains([]string{"0", "1", "2", "3"}, args[i+1]):
			word = "--optimization-level"
		}
		words = append(words, word)
	}
	for _, m := range nested {
		words = append(words, m.name, jsonOf(m.value))
	}
	return words
}

// nested is the value of --flag.keys: an object for each key, and in the innermost one the value as JSON, as a number with a
// unit since 0.32.0, or as a text. Behind keys that end with a plus sign it is a list.
func (p *argParser) nested(keys, text string) (v any) {
	n, err := humanInt(text)
	switch {
	case strings.HasSuffix(keys, "+"):
		keys = strings.TrimSuffix(keys, "+")
		list := []any{}
		for one := range strings.SplitSeq(text, ",") {
			list = append(list, one)
		}
		v = list
	case json.Valid([]byte(text)):
		v = decode([]byte(text))
	case p.face.modern && err == nil:
		v = json.Number(strconv.Itoa(n))
	default:
		v = text
	}
	for _, key := range slices.Backward(strings.Split(keys, ".")) {
		v = object{{key, v}}
	}
	return v
}

// merge adds the members of an object to another one: objects are merged, lists are joined, and of other values the later
// one counts.
func merge(to, more object) object {
	for _, m := range more {
		i := slices.IndexFunc(to, func(x member) bool { return x.name == m.name })
		if i < 0 {
			to = append(to, m)
			continue
		}
		switch value := m.value.(type) {
		case object:
			if before, ok := to[i].value.(object); ok {
				m.value = merge(before, value)
			}
		case []any:
			if before, ok := to[i].value.([]any); ok {
				m.value = slices.Concat(before, value)
			}
		}
		to[i] = m
	}
	return to
}

// find returns the flag of a name: itself, or the only one that begins so; nil when there is none.
func (p *argParser) find(name string) (*flagSpec, error) {
	if f := p.named[name]; f != nil {
		return f, nil
	}
	if !strings.HasPrefix(name, "--") {
		return nil, nil
	}
	var names []string
	for _, f := range p.flags {
		for _, full := range f.Accepted {
			if strings.HasPrefix(full, name) {
				names = append(names, full)
			}
		}
	}
	switch len(names) {
	case 0:
		return nil, nil
	case 1:
		return p.named[names[0]], nil
	}
	return nil, p.refuse("ambiguous option: %s could match %s", name, strings.Join(names, ", "))
}

// take reads the flag's value from the words that follow it, and returns how many of them it is.
func (f *flagSpec) take(name string, words []string, inline bool) (v any, taken int, err error) {
	switch string(f.Nargs) {
	case "0":
		if inline {
			return nil, 0, fmt.Errorf("ignored explicit argument %s", pythonQuote(words[0]))
		}
		return !f.negates(name), 0, nil
	case `"?"`:
		if len(words) == 0 {
			return nil, 0, nil
		}
	case `"+"`, `"*"`:
		if len(words) == 0 && string(f.Nargs) == `"+"` {
			return nil, 0, fmt.Errorf("expected at least one argument")
		}
		for _, word := range words {
			if _, err := f.read(word); err != nil {
				return nil, 0, err
			}
		}
		return slices.Clone(words), len(words), nil
	}
	if len(words) == 0 {
		return nil, 0, fmt.Errorf("expected one argument")
	}
	v, err = f.read(words[0])
	return v, 1, err
}

// negates reports whether a name of a switch turns it off: --no-x of --x, and in 0.33.0 --disable-x of --enable-x and the
// reverse.
func (f *flagSpec) negates(name string) bool {
	first := f.Names[slices.IndexFunc(f.Names, func(n string) bool { return strings.HasPrefix(n, "--") })]
	return name != first && (strings.HasPrefix(name, "--no-") ||
		strings.HasPrefix(name, "--disable-") && strings.HasPrefix(first, "--enable-") ||
		strings.HasPrefix(name, "--enable-") && strings.HasPrefix(first, "--disable-"))
}

// read reads one value. How a flag refuses the value abc tells of which type it is.
func (f *flagSpec) read(word string) (v any, err error) {
	refusal := ""
	if f.Refusal != nil {
		refusal = *f.Refusal
	}
	switch {
	case strings.Contains(refusal, "human_readable_int_or_auto") && (word == "-1" || strings.EqualFold(word, "auto")):
		return autoLength, nil
	case strings.Contains(refusal, "human_readable_int"):
		v, err = humanInt(word)
		if decimals, ok := err.(decimalsError); ok {
			return nil, decimals
		}
	case strings.Contains(refusal, "invalid int value"), strings.Contains(refusal, "<class 'int'>"):
		v, err = strconv.Atoi(strings.ReplaceAll(word, "_", ""))
	case strings.Contains(refusal, "invalid float value"), strings.Contains(refusal, "<class 'float'>"):
		v, err = parseFloat(strings.ReplaceAll(word, "_", ""))
	case refusal == "" || strings.Contains(refusal, "invalid choice"):
		v = word
	default: // JSON of one kind or another
		if !json.Valid([]byte(word)) {
			err = fmt.Errorf("no JSON")
		}
		v = jsonText(word)
	}
	if err != nil {
		_, text, _ := strings.Cut(refusal, ": ")
		return nil, fmt.Errorf("%s", strings.NewReplacer("'abc'", pythonQuote(word), " abc ", " "+word+" ").Replace(text))
	}
	if len(f.Choices) > 0 && !slices.Contains(f.Choices, word) {
		quote := pythonQuote
		if _, isText := v.(string); !isText {
			quote = func(s string) string { return s }
		}
		choices := make([]string, len(f.Choices))
		for i, c := range f.Choices {
			choices[i] = quote(c)
		}
		return nil, fmt.Errorf("invalid choice: %s (choose from %s)", quote(word), strings.Join(choices, ", "))
	}
	return v, nil
}

// decimalsError is a fraction of a binary unit.
type decimalsError struct{ number, unit string }

func (e decimalsError) Error() string {
	return fmt.Sprintf("Decimals are not allowed with binary suffixes like %s. Did you mean to use %s%s instead?", e.unit, e.number, strings.ToLower(e.unit))
}

var humanNumber = regexp.MustCompile(`^(\d+(?:\.\d+)?)([kKmMgGtT])$`)

// humanInt reads an integer with a unit: 1k is 1,000 and 1K is 1,024 (human_readable_int in vllm/engine/arg_utils.py). Python's
// integers have no end; one that does not fit 64 bits is refused here.
func humanInt(word string) (int, error) {
	g := humanNumber.FindStringSubmatch(word)
	if g == nil {
		return strconv.Atoi(word)
	}
	power := strings.Index("kmgt", strings.ToLower(g[2])) + 1
	if g[2] == strings.ToLower(g[2]) {
		x, err := strconv.ParseFloat(g[1], 64)
		if x *= math.Pow(1000, float64(power)); err == nil && x >= math.MaxInt {
			err = strconv.ErrRange
		}
		return int(x), err
	}
	n, err := strconv.Atoi(g[1])
	switch {
	case strings.Contains(g[1], "."):
		return 0, decimalsError{g[1], g[2]}
	case err != nil || n > math.MaxInt>>(10*power):
		return 0, strconv.ErrRange
	}
	return n << (10 * power), nil
}
