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
	for i := 0; i < len(words); {
		word := words[i]
		i++
		if !isOption(word) {
			if read.model == "" {
				read.model = word
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
		for end < len(words) && !isOption(words[end]) {
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

// isOption reports whether a word is no value: it begins with a dash and is no negative number, nor has a space in its name.
func isOption(word string) bool {
	name, _, _ := strings.Cut(word, "=")
	if len(word) < 2 || word[0] != '-' || strings.Contains(name, " ") {
		return false
	}
	return !negativeNumber.MatchString(word)
}

var negativeNumber = regexp.MustCompile(`^-\d+$|^-\d*\.\d+$`)

// normalise does what vLLM does before argparse (FlexibleArgumentParser in vllm/utils/argparse_utils.py): underscores in names
// become dashes, -O3 becomes --optimization-level 3, and --flag.key value becomes --flag {"key": value}.
func (p *argParser) normalise(args []string) (words []string) {
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
			case dotted:
				word = base + "=" + nested(strings.Split(strings.TrimSuffix(keys, "+"), "."), value)
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
	return words
}

// nested is the JSON of one key of a flag.
func nested(keys []string, value string) string {
	if !json.Valid([]byte(value)) {
		value = quoteJSON(value)
	}
	for _, key := range slices.Backward(keys) {
		value = "{" + quoteJSON(key) + ": " + value + "}"
	}
	return value
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
		v, err = strconv.ParseFloat(strings.ReplaceAll(word, "_", ""), 64)
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

// humanInt reads an integer with a unit: 1k is 1,000 and 1K is 1,024 (human_readable_int in vllm/engine/arg_utils.py).
func humanInt(word string) (int, error) {
	g := humanNumber.FindStringSubmatch(word)
	if g == nil {
		return strconv.Atoi(word)
	}
	power := strings.Index("kmgt", strings.ToLower(g[2])) + 1
	if g[2] == strings.ToLower(g[2]) {
		x, err := strconv.ParseFloat(g[1], 64)
		return int(x * math.Pow(1000, float64(power))), err
	}
	n, err := strconv.Atoi(g[1])
	if err != nil {
		return 0, decimalsError{g[1], g[2]}
	}
	return n << (10 * power), nil
}
