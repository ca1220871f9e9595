package space

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// vLLM reads the number of speculative tokens from the key speculativeKey in the JSON value of the flag speculativeFlag
// (vLLM 0.14.1 and 0.33, vllm/config/speculative.py).
const (
	speculativeFlag = "speculative-config"
	speculativeKey  = "num_speculative_tokens"
)

// Args returns the point as args of `vllm serve`, in the order of the parameters. It leaves out names that are not
// parameters, because Check reports them. It also leaves out environment variables, which Point.Env returns.
func (s *Space) Args(p Point) []string {
	var args []string
	for i := range s.parameters {
		name := s.parameters[i].Name
		text, ok := p[name]
		switch {
		case !ok || IsVariable(name):
		case name == SpeculativeTokens:
			args = append(args, s.speculativeArgs(text)...)
		case s.parameters[i].Kind == Bool && text == "false":
			args = append(args, "--no-"+name)
		case s.parameters[i].Kind == Bool:
			args = append(args, "--"+name)
		default:
			args = append(args, "--"+name, text)
		}
	}
	return args
}

// speculativeArgs returns the args for a number of speculative tokens; nil for 0.
func (s *Space) speculativeArgs(tokens string) []string {
	k, err := strconv.Atoi(tokens)
	if err != nil || k <= 0 {
		return nil
	}
	config := maps.Clone(s.speculative) // New has checked that it is not empty and can be written as JSON
	config[speculativeKey] = k
	text, _ := encode(config)
	return []string{"--" + speculativeFlag, text}
}

// A Flag is one flag of a command line.
type Flag struct {
	Name   string   // without leading dashes; underscores are replaced by dashes, as in vLLM
	Values []string // the words between this flag and the next
	Index  int      // 0-based index of the flag's word in the args
}

// Base returns the name of the flag that is set: for --compilation-config.mode it is compilation-config, and for --no-x
// it is x.
func (f Flag) Base() string {
	name, _, _ := strings.Cut(f.Name, ".")
	return strings.TrimPrefix(name, "no-")
}

var flagWord = regexp.MustCompile(`^--?[A-Za-z]`)

// IsFlag reports whether a word of args is a flag. A value such as -1 is not.
func IsFlag(word string) bool { return flagWord.MatchString(word) }

// Flags splits args into flags. It accepts --name value, --name=value, --name, and --name a b c. A word before the
// first flag is an error.
func Flags(args []string) ([]Flag, error) {
	var flags []Flag
	for i, word := range args {
		switch {
		case IsFlag(word):
			name, value, hasValue := strings.Cut(strings.TrimLeft(word, "-"), "=")
			f := Flag{Name: dashedName(name), Index: i}
			if hasValue {
				f.Values = []string{value}
			}
			flags = append(flags, f)
		case len(flags) == 0:
			return nil, fmt.Errorf("%q belongs to no flag; write --name before it", word)
		default:
			f := &flags[len(flags)-1]
			f.Values = append(f.Values, word)
		}
	}
	return flags, nil
}

// FlagValues returns the value of each flag in args, by name without leading dashes. The value of a switch is "true" or
// "false". It returns nil if Flags returns an error for args.
func FlagValues(args []string) map[string]string {
	flags, err := Flags(args)
	if err != nil {
		return nil
	}
	values := make(map[string]string, len(flags))
	for _, flag := range flags {
		name, negated := strings.CutPrefix(flag.Name, "no-")
		switch {
		case len(flag.Values) > 0:
			values[flag.Name] = strings.Join(flag.Values, " ")
		case negated:
			values[name] = "false"
		default:
			values[flag.Name] = "true"
		}
	}
	return values
}

// dashedName replaces underscores in a flag's name by dashes. The key after a dot does not change, as in
// --compilation-config.cudagraph_mode.
func dashedName(name string) string {
	flag, key, dotted := strings.Cut(name, ".")
	flag = strings.ReplaceAll(flag, "_", "-")
	if dotted {
		return flag + "." + key
	}
	return flag
}

// ParseArgs returns the point that the args of a server stand for. Values may be out of range, because the user's
// current args may be. NAME=value words before the first flag are environment variables, as in a shell. A flag or
// variable that is not searched is an error. If a flag is given twice, the last one counts, as in vLLM.
func (s *Space) ParseArgs(args []string) (Point, error) {
	env, args := CutEnv(args)
	flags, err := Flags(args)
	if err != nil {
		return nil, err
	}
	p := Point{}
	var errs []error
	for _, word := range env {
		name, value, err := s.ParseVariable(word)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		p[name] = value
	}
	for _, f := range flags {
		name, value, err := s.ParseFlag(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		p[name] = value
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return p, nil
}

// ParseFlag returns the name of the parameter that a flag sets, and the value. The value may be out of range, as in
// ParseArgs.
func (s *Space) ParseFlag(f Flag) (name, value string, err error) {
	if f.Name == speculativeFlag && s.Parameter(SpeculativeTokens) != nil {
		value, err = s.parseSpeculation(f)
		return SpeculativeTokens, value, err
	}
	p := s.Parameter(f.Name)
	on, negated := strings.CutPrefix(f.Name, "no-")
	if q := s.Parameter(on); p == nil && negated && q != nil && q.Kind == Bool {
		return on, "false", noValue(f)
	}
	switch {
	case p == nil || p.Name == SpeculativeTokens || IsVariable(p.Name):
		return "", "", s.notSearchedError(f)
	case p.Kind == Bool:
		return p.Name, "true", noValue(f)
	case len(f.Values) != 1:
		return "", "", fmt.Errorf("--%s has %d values (%s); write one after it", f.Name, len(f.Values), strings.Join(f.Values, " "))
	}
	value, err = p.Read(f.Values[0])
	return p.Name, value, err
}

func noValue(f Flag) error {
	if len(f.Values) > 0 {
		return fmt.Errorf("--%s takes no value; remove %q", f.Name, strings.Join(f.Values, " "))
	}
	return nil
}

func (s *Space) notSearchedError(f Flag) error {
	remedy := "move it to server.args, or search it under parameters"
	if best := Nearest(f.Name, slices.Sorted(maps.Keys(s.index))); best != "" && best != SpeculativeTokens {
		remedy = fmt.Sprintf("did you mean --%s? If not, %s", best, remedy)
	}
	return fmt.Errorf("--%s is not searched; %s", f.Name, remedy)
}

// parseSpeculation returns the number of tokens in --speculative-config. All other keys must have the same values as in
// the study.
func (s *Space) parseSpeculation(f Flag) (string, error) {
	var config map[string]any
	if len(f.Values) != 1 || json.Unmarshal([]byte(f.Values[0]), &config) != nil {
		return "", fmt.Errorf("--%s needs one JSON object, such as '{\"method\":\"ngram\",\"num_speculative_tokens\":3}'", speculativeFlag)
	}
	k, ok := config[speculativeKey].(float64)
	if !ok || k < 1 || k != math.Trunc(k) || k > maxInt {
		return "", fmt.Errorf("--%s needs %s with a whole number above 0; add it, or remove the flag", speculativeFlag, speculativeKey)
	}
	delete(config, speculativeKey)
	theirs, _ := encode(config) // no error: config was parsed from JSON
	if ours, _ := encode(s.speculative); theirs != ours {
		return "", fmt.Errorf("--%s is %s, but speculative_config is %s; make them equal", speculativeFlag, theirs, ours)
	}
	return formatNumber(k), nil
}

// Read returns a value in the form that a Point uses. The value may be out of range.
func (p *Parameter) Read(text string) (string, error) {
	if p.Kind == Int {
		text = plainInt(text)
	}
	if p.Kind == Int || p.Kind == Float {
		v, err := p.Number(text)
		if err != nil {
			return "", fmt.Errorf("%s %s is not a number; write one, such as %g", p.title(), text, p.Min)
		}
		return formatNumber(v), nil
	}
	return p.canonical(text), nil
}

// title returns the parameter's name in the form of a command line.
func (p *Parameter) title() string {
	if IsVariable(p.Name) {
		return p.Name
	}
	return "--" + p.Name
}

var humanInt = regexp.MustCompile(`^([0-9]{1,6}(?:\.[0-9]{1,3})?)([kKmM])$`)

// plainInt replaces 1k by 1000 and 1K by 1024, as vLLM does for max-model-len and max-num-batched-tokens (vLLM 0.14.1,
// vllm/engine/arg_utils.py, human_readable_int).
func plainInt(text string) string {
	match := humanInt.FindStringSubmatch(text)
	if match == nil {
		return text
	}
	factor := map[string]float64{"k": 1e3, "K": 1 << 10, "m": 1e6, "M": 1 << 20}[match[2]]
	v, _ := strconv.ParseFloat(match[1], 64) // no error: humanInt has matched a number
	return formatNumber(math.Trunc(v * factor))
}

// canonical returns the choice that is equal to the text, or the text itself if there is none.
func (p *Parameter) canonical(text string) string {
	if i := slices.IndexFunc(p.choices(), func(c string) bool { return p.equalChoices(c, text) }); i >= 0 {
		return p.choices()[i]
	}
	return text
}

// equalChoices reports whether two choices are equal as texts, as numbers or as JSON.
func (p *Parameter) equalChoices(a, b string) bool {
	if a == b {
		return true
	}
	if p.Kind == JSON {
		x, errX := compact(a)
		y, errY := compact(b)
		return errX == nil && errY == nil && x == y
	}
	x, errX := p.Number(a)
	y, errY := p.Number(b)
	return errX == nil && errY == nil && x == y
}

// compact rewrites a JSON text without spaces and with sorted keys.
func compact(text string) (string, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return "", err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return "", errors.New("there is more text after the value")
	}
	return encode(v)
}

// encode returns a value as compact JSON with sorted keys. It leaves <, > and & unescaped.
func encode(v any) (string, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return "", err
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}

var safeWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// ShellWord returns a word for a POSIX shell, in quotes if it needs them.
func ShellWord(word string) string {
	if safeWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
