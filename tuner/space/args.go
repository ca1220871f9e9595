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

// Flag and key under which vLLM takes speculation (vLLM 0.14.1 and 0.33, vllm/config/speculative.py).
const (
	speculativeFlag = "speculative-config"
	speculativeKey  = "num_speculative_tokens"
)

// Args returns the point as args of `vllm serve`, in the order of the parameters. Names that are no parameters are left
// out; Check finds them.
func (s *Space) Args(p Point) []string {
	var args []string
	for i := range s.parameters {
		name := s.parameters[i].Name
		text, ok := p[name]
		switch {
		case !ok:
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

// speculativeArgs returns the args for so many speculative tokens, none for 0.
func (s *Space) speculativeArgs(tokens string) []string {
	k, err := strconv.Atoi(tokens)
	if err != nil || k <= 0 {
		return nil
	}
	config := maps.Clone(s.speculative)
	if config == nil {
		config = map[string]any{}
	}
	config[speculativeKey] = k
	text, err := encode(config)
	if err != nil {
		return nil // cannot be: New has encoded it
	}
	return []string{"--" + speculativeFlag, text}
}

// A Flag is one flag of a command line.
type Flag struct {
	Name   string   // without its dashes, and with dashes for underscores as vLLM reads them
	Values []string // the words that belong to it
	Index  int      // 0-based place of its word in the args
}

// Base is the flag that a word of a command line is about: --compilation-config.mode sets part of --compilation-config, and --no-x
// sets x.
func (f Flag) Base() string {
	name, _, _ := strings.Cut(f.Name, ".")
	return strings.TrimPrefix(name, "no-")
}

// The words after a flag are its values unless they look like flags; -1 does not.
var flagWord = regexp.MustCompile(`^--?[A-Za-z]`)

// Flags splits args into flags. It takes --name value, --name=value, --name and --name a b c. A word that belongs to no
// flag is an error.
func Flags(args []string) ([]Flag, error) {
	var flags []Flag
	for i, word := range args {
		switch {
		case flagWord.MatchString(word):
			name, value, hasValue := strings.Cut(strings.TrimLeft(word, "-"), "=")
			f := Flag{Name: flagNameOf(name), Index: i}
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

// flagNameOf writes a flag's name with dashes. In --compilation-config.cudagraph_mode only the flag itself is a name.
func flagNameOf(name string) string {
	flag, key, dotted := strings.Cut(name, ".")
	flag = strings.ReplaceAll(flag, "_", "-")
	if dotted {
		return flag + "." + key
	}
	return flag
}

// ParseArgs reads args of a server into a point, as far as they are searched parameters. Values may be out of range, for
// they are what someone runs today. A flag that is no parameter is an error which names it. Of a flag that is given twice
// the last one counts, as for vLLM.
func (s *Space) ParseArgs(args []string) (Point, error) {
	flags, err := Flags(args)
	if err != nil {
		return nil, err
	}
	p := Point{}
	var errs []error
	for _, f := range flags {
		name, value, err := s.parse(f)
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

// parse returns the parameter that a flag sets, and the value.
func (s *Space) parse(f Flag) (name, value string, err error) {
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
	case p == nil || p.Name == SpeculativeTokens:
		return "", "", s.notSearched(f)
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

func (s *Space) notSearched(f Flag) error {
	remedy := "move it to server.args, or search it under parameters"
	if best := Nearest(f.Name, sortedNames(s.index)); best != "" && best != SpeculativeTokens {
		remedy += fmt.Sprintf(", or did you mean --%s?", best)
	}
	return fmt.Errorf("--%s is no searched parameter; %s", f.Name, remedy)
}

// parseSpeculation reads --speculative-config, whose keys must be the study's but for the number of tokens.
func (s *Space) parseSpeculation(f Flag) (string, error) {
	var config map[string]any
	if len(f.Values) != 1 || json.Unmarshal([]byte(f.Values[0]), &config) != nil {
		return "", fmt.Errorf("--%s needs one JSON object, such as '{\"method\":\"ngram\",\"num_speculative_tokens\":3}'", speculativeFlag)
	}
	k, ok := config[speculativeKey].(float64)
	if !ok || k < 1 || k != math.Trunc(k) || k > mostInt {
		return "", fmt.Errorf("--%s has no whole %s above 0; add it, or leave the flag out", speculativeFlag, speculativeKey)
	}
	delete(config, speculativeKey)
	theirs, err := encode(config)
	if err != nil {
		return "", fmt.Errorf("--%s: %w", speculativeFlag, err)
	}
	ours, err := encode(s.speculative)
	if err != nil {
		return "", fmt.Errorf("speculative_config: %w", err)
	}
	if theirs != ours {
		return "", fmt.Errorf("--%s is %s, but the study searches with %s; make them equal", speculativeFlag, theirs, ours)
	}
	return shortest(k), nil
}

// Read returns a value as the parameter writes it. It may be out of range.
func (p *Parameter) Read(text string) (string, error) {
	if p.Kind == Int {
		text = plainInt(text)
	}
	if p.Kind == Int || p.Kind == Float {
		v, err := p.Number(text)
		if err != nil {
			return "", fmt.Errorf("--%s %s is no number; write one such as %g", p.Name, text, p.Min)
		}
		return shortest(v), nil
	}
	return p.canonical(text), nil
}

var humanInt = regexp.MustCompile(`^([0-9]{1,6}(?:\.[0-9]{1,3})?)([kKmM])$`)

// plainInt writes 1k as 1000 and 1K as 1024, as vLLM reads max-model-len and max-num-batched-tokens (vLLM 0.14.1,
// vllm/engine/arg_utils.py, human_readable_int).
func plainInt(text string) string {
	match := humanInt.FindStringSubmatch(text)
	if match == nil {
		return text
	}
	factor := map[string]float64{"k": 1e3, "K": 1 << 10, "m": 1e6, "M": 1 << 20}[match[2]]
	v, err := strconv.ParseFloat(match[1], 64)
	if err != nil {
		return text
	}
	return shortest(math.Trunc(v * factor))
}

// canonical returns the choice that is the same as the text, or else the text itself.
func (p *Parameter) canonical(text string) string {
	if i := slices.IndexFunc(p.choices(), func(c string) bool { return p.same(c, text) }); i >= 0 {
		return p.choices()[i]
	}
	return text
}

// same reports whether two choices are equal as texts, as numbers or as JSON.
func (p *Parameter) same(a, b string) bool {
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

// compact returns a JSON text without blanks and with its keys sorted.
func compact(text string) (string, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return "", err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return "", errors.New("something follows the value")
	}
	return encode(v)
}

// encode writes a value as compact JSON with sorted keys and with <, > and & as they are.
func encode(v any) (string, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return "", err
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}
