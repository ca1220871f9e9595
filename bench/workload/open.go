package workload

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/tuner/space"
)

// A Spec names a population of requests as a study file does. Settings says which kinds use which fields. The other
// fields must be zero. So a setting without effect is an error and not a surprise.
type Spec struct {
	Kind     string // one of Kinds
	Path     string // path of the file
	Endpoint string // "completions" (also when empty) or "chat"; kinds with token ids need completions

	InputTokens  int // mean prompt length, without the prefix of kind random; 0 means 1024, as in vllm bench serve
	OutputTokens int // mean answer length; 0 means 128. For a file, the length of every answer; 0 means the lengths in the file
	PrefixTokens int // tokens of a shared prefix; in random all prompts share one prefix, and 0 means none; in prefix-repetition each group shares one, and 0 means 256
	SuffixTokens int // tokens after the prefix in prefix-repetition; 0 means 256
	Prefixes     int // number of different prefixes in prefix-repetition; 0 means 10

	HitPercent float64 // in kind shared-prefix: percentage of a prompt that is shared, in (0, 100); auto_tune.sh's MIN_CACHE_HIT_PCT
	Groups     int     // number of groups in shared-prefix, each with its own prefix; 0 means 1

	// A range ratio r spreads lengths uniformly over [floor(L(1-r)), ceil(L(1+r))], where L is the mean and r is in [0,
	// 1). RangeRatio applies to prompts and answers, and the other two ratios apply to one of them. RangeRatio cannot be
	// combined with the other two.
	RangeRatio, InputRangeRatio, OutputRangeRatio float64

	Requests  int // number of different requests; 0 means a whole file, or endless random requests
	VocabSize int // all token ids are below this number; 0 means 32,000

	Layout      string // layout of a trace, one of Layouts; "" means that the first line of the file shows it
	SkipBadRows bool   // count and leave out unreadable rows instead of returning an error
	Repeat      string // what happens when a finite population ends: "" starts again; or Salt, or ErrorEnded
	Output      string // "" pins the length of each answer; Natural lets the model end it
}

// Natural lets the model end each answer, with OutputTokens as a limit. Figures of such runs cannot be compared: with
// another flag, or on another day, the work is different.
const Natural = "natural"

// Kinds are the kinds of population that Open knows.
var Kinds = []string{"phase1", "production", "sharegpt", "jsonl", "random", "prefix-repetition", "shared-prefix", "trace", "capture"}

var (
	fileKinds  = []string{"sharegpt", "jsonl", "trace", "capture"}
	drawnKinds = []string{"random", "prefix-repetition", "shared-prefix"}
	countKinds = slices.Concat(fileKinds, drawnKinds)
)

// Settings maps the name of a setting in a study file to the kinds that use it. All kinds use the settings that are not
// listed.
var Settings = map[string][]string{
	"path": fileKinds, "layout": {"trace"}, "skip_bad_rows": fileKinds,
	"input_tokens": {"random", "shared-prefix"}, "output_tokens": countKinds, "range_ratio": {"random", "shared-prefix"},
	"prefix_tokens": {"random", "prefix-repetition"}, "suffix_tokens": {"prefix-repetition"}, "prefixes": {"prefix-repetition"},
	"hit_percent": {"shared-prefix"}, "groups": {"shared-prefix"},
	"requests": countKinds, "repeat": slices.Concat([]string{"phase1"}, countKinds),
}

// The endpoints of a Spec.
const (
	Completions = "completions"
	Chat        = "chat"
)

// ChatKinds are the kinds that work with the endpoint Chat. The others send token ids.
var ChatKinds = []string{"sharegpt", "jsonl", "capture"}

// Open returns the population that a spec names, drawn with the seed. Its errors name the file and the line, and say
// what to do.
func Open(spec Spec, seed uint64) (Source, error) {
	spec, err := spec.checked()
	if err != nil {
		return nil, err
	}
	switch spec.Kind {
	case "phase1":
		return openPhase1(spec, seed), nil
	case "production":
		return openProduction(spec, seed), nil
	case "sharegpt":
		return openFile(spec, seed, readShareGPT)
	case "jsonl":
		return openFile(spec, seed, readJSONL)
	case "trace", "capture":
		trace, err := openRecorded(spec, seed, false)
		if err != nil {
			return nil, err
		}
		return trace.source, nil
	}
	return openDrawn(spec, seed), nil
}

// checked checks the spec and fills in the defaults that all kinds share.
func (s Spec) checked() (Spec, error) {
	if s.Endpoint == "" {
		s.Endpoint = Completions
	}
	if s.VocabSize == 0 {
		s.VocabSize = defaultVocabSize
	}
	for _, check := range []func() error{s.checkWords, s.checkUse, s.checkNumbers} {
		if err := check(); err != nil {
			return s, err
		}
	}
	return s, nil
}

// checkWords returns an error if a setting has an unknown word.
func (s Spec) checkWords() error {
	for _, word := range []struct {
		what, written string
		known         []string
	}{
		{"workload kind", s.Kind, Kinds}, {"endpoint", s.Endpoint, []string{Completions, Chat}},
		{"trace layout", s.Layout, append([]string{""}, Layouts...)}, {"repeat", s.Repeat, []string{"", Salt, ErrorEnded}},
		{"output", s.Output, []string{"", Natural}},
	} {
		if slices.Contains(word.known, word.written) {
			continue
		}
		known := slices.DeleteFunc(slices.Clone(word.known), func(w string) bool { return w == "" })
		return fmt.Errorf("unknown %s %q: %s", word.what, word.written, space.DidYouMean(word.written, known))
	}
	return nil
}

// given says which settings are set (not zero). The keys are the names of the settings in a study file.
func (s Spec) given() map[string]bool {
	return map[string]bool{
		"path": s.Path != "", "layout": s.Layout != "", "skip_bad_rows": s.SkipBadRows,
		"input_tokens": s.InputTokens != 0, "output_tokens": s.OutputTokens != 0,
		"range_ratio":   s.RangeRatio != 0 || s.InputRangeRatio != 0 || s.OutputRangeRatio != 0,
		"prefix_tokens": s.PrefixTokens != 0, "suffix_tokens": s.SuffixTokens != 0, "prefixes": s.Prefixes != 0,
		"hit_percent": s.HitPercent != 0, "groups": s.Groups != 0, "requests": s.Requests != 0, "repeat": s.Repeat != "",
	}
}

// checkUse returns an error if a setting has no effect or a necessary setting is missing.
func (s Spec) checkUse() error {
	given := s.given()
	for _, name := range slices.Sorted(maps.Keys(Settings)) {
		if kinds := Settings[name]; given[name] && !slices.Contains(kinds, s.Kind) {
			return fmt.Errorf("workload %s does not use %s: leave it out, or use kind %s", s.Kind, strings.ReplaceAll(name, "_", " "), Or(kinds))
		}
	}
	switch {
	case slices.Contains(fileKinds, s.Kind) && s.Path == "":
		return fmt.Errorf("workload %s needs the path of its file", s.Kind)
	case s.Endpoint == Chat && !slices.Contains(ChatKinds, s.Kind):
		return fmt.Errorf("workload %s sends token ids, which endpoint chat does not take: use endpoint completions", s.Kind)
	case s.Kind == "shared-prefix" && s.HitPercent == 0:
		return fmt.Errorf("workload shared-prefix needs the hit percent: the percentage of each prompt that others share")
	case s.Repeat != "" && slices.Contains(drawnKinds, s.Kind) && s.Requests == 0:
		return fmt.Errorf("workload %s is endless, so repeat has no effect: leave repeat out, or set requests", s.Kind)
	}
	return nil
}

// MaxLength is the limit on the tokens of a prompt or an answer, and on the numbers of requests and prefixes. No server
// is made for more.
const MaxLength = 10_000_000

func (s Spec) checkNumbers() error {
	for _, number := range []struct {
		name  string
		value int
	}{
		{"input tokens", s.InputTokens}, {"output tokens", s.OutputTokens}, {"prefix tokens", s.PrefixTokens},
		{"suffix tokens", s.SuffixTokens}, {"prefixes", s.Prefixes}, {"groups", s.Groups}, {"requests", s.Requests},
	} {
		if number.value < 0 || number.value > MaxLength {
			return fmt.Errorf("workload %s: %s %d must be from 0 to %d", s.Kind, number.name, number.value, MaxLength)
		}
	}
	for _, ratio := range []float64{s.RangeRatio, s.InputRangeRatio, s.OutputRangeRatio} {
		if !(ratio >= 0 && ratio < 1) {
			return fmt.Errorf("range ratio %g must be at least 0 and below 1", ratio)
		}
	}
	switch {
	case s.RangeRatio != 0 && (s.InputRangeRatio != 0 || s.OutputRangeRatio != 0):
		return fmt.Errorf("range ratio %g applies to prompts and answers, but one of them also has its own ratio: give only one", s.RangeRatio)
	case !(s.HitPercent >= 0 && s.HitPercent < 100):
		return fmt.Errorf("hit percent %g must be above 0 and below 100", s.HitPercent)
	case s.VocabSize <= firstToken:
		return fmt.Errorf("a vocabulary of %s is too small, because the first %d ids are not used: see vocab_size in the model's config.json", render.Count(s.VocabSize, "token"), firstToken)
	}
	return nil
}

// title returns the name of a source for reports, with notes in brackets.
func (s Spec) title(what string, notes ...string) string {
	if s.Repeat == Salt {
		notes = append(notes, "repeated with salt")
	}
	if s.Output == Natural {
		notes = append(notes, "natural output")
	}
	notes = slices.DeleteFunc(notes, func(note string) bool { return note == "" })
	return what + " (" + strings.Join(notes, ", ") + ")"
}
