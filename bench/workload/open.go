package workload

import (
	"fmt"
	"slices"
	"strings"
)

// A Spec names a population of requests as a study file does. Fields that a kind does not use (see Settings) must be zero,
// so that a setting without effect is an error and not a surprise.
type Spec struct {
	Kind     string // one of Kinds
	Path     string // of the file
	Endpoint string // "completions" (also when empty) or "chat"; token ids need completions

	InputTokens  int // mean prompt length, without the prefix of random; 0 means 1024, as vllm bench serve has it
	OutputTokens int // mean answer length, 0 means 128; for files every answer's length, 0 means the file's own
	PrefixTokens int // that all prompts of random have in front of their own, or a group of prefix-repetition, 0 means 256
	SuffixTokens int // of prefix-repetition, after the prefix; 0 means 256
	Prefixes     int // different ones of prefix-repetition; 0 means 10

	HitPercent float64 // part of a prompt that shared-prefix shares, in (0, 100): auto_tune.sh's MIN_CACHE_HIT_PCT
	Groups     int     // groups of shared-prefix that share a prefix each; 0 means 1

	// Spread of the lengths, in [0, 1): they are uniform in [floor(L(1-r)), ceil(L(1+r))]. RangeRatio is that of prompts and
	// answers, or else the other two are.
	RangeRatio, InputRangeRatio, OutputRangeRatio float64

	Requests  int // how many different requests; 0 means a whole file, or endless random ones
	VocabSize int // token ids stay below it; 0 means 32,000

	Layout      string // of a trace, one of Layouts; "" means by the head of the file
	SkipBadRows bool   // rows that cannot be read are counted and left out; else they are errors
	Repeat      string // what a finite population does at its end: "" begins again, or Salt, or ErrorEnded
	Output      string // "" pins the length of each answer; Natural leaves its end to the model
}

// Natural answers end where the model ends them, and at the pinned length at the latest. Figures of such runs cannot be
// compared: another flag, or another day, is other work.
const Natural = "natural"

// Kinds are the known populations.
var Kinds = []string{"phase1", "production", "sharegpt", "jsonl", "random", "prefix-repetition", "shared-prefix", "trace", "capture"}

var (
	fileKinds  = []string{"sharegpt", "jsonl", "trace", "capture"}
	drawnKinds = []string{"random", "prefix-repetition", "shared-prefix"}
	countKinds = slices.Concat(fileKinds, drawnKinds)
)

// Settings says by the name in a study file which kinds have a use for a setting. Every kind has one for the others.
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

// ChatKinds are the kinds that can be asked at the endpoint Chat. The others send token ids.
var ChatKinds = []string{"sharegpt", "jsonl", "capture"}

// Open returns the population that a spec names, drawn with the seed. Errors name the file, the place in it, and what to
// do about it.
func Open(spec Spec, seed uint64) (Source, error) {
	spec, err := spec.sound()
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

// sound returns the spec with what is the same for all kinds filled in, or what is wrong with it.
func (s Spec) sound() (Spec, error) {
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

// checkWords holds words against those that are known.
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
		return fmt.Errorf("unknown %s %q: did you mean %q? (known: %s)", word.what, word.written, nearest(word.written, known), strings.Join(known, ", "))
	}
	return nil
}

// given returns the settings that are not zero, by their names in a study file.
func (s Spec) given() map[string]bool {
	return map[string]bool{
		"path": s.Path != "", "layout": s.Layout != "", "skip_bad_rows": s.SkipBadRows,
		"input_tokens": s.InputTokens != 0, "output_tokens": s.OutputTokens != 0,
		"range_ratio":   s.RangeRatio != 0 || s.InputRangeRatio != 0 || s.OutputRangeRatio != 0,
		"prefix_tokens": s.PrefixTokens != 0, "suffix_tokens": s.SuffixTokens != 0, "prefixes": s.Prefixes != 0,
		"hit_percent": s.HitPercent != 0, "groups": s.Groups != 0, "requests": s.Requests != 0, "repeat": s.Repeat != "",
	}
}

// checkUse finds settings without effect, and those that are missing.
func (s Spec) checkUse() error {
	given := s.given()
	for _, name := range sorted(Settings) {
		if kinds := Settings[name]; given[name] && !slices.Contains(kinds, s.Kind) {
			return fmt.Errorf("workload %s has no use for %s: leave it out, or use kind %s", s.Kind, strings.ReplaceAll(name, "_", " "), Or(kinds))
		}
	}
	switch {
	case slices.Contains(fileKinds, s.Kind) && s.Path == "":
		return fmt.Errorf("workload %s needs the path of its file", s.Kind)
	case s.Endpoint == Chat && !slices.Contains(ChatKinds, s.Kind):
		return fmt.Errorf("workload %s asks with token ids, which chat cannot take: use endpoint completions", s.Kind)
	case s.Kind == "shared-prefix" && s.HitPercent == 0:
		return fmt.Errorf("workload shared-prefix needs the hit percent: the part of each prompt that others have too")
	case s.Repeat != "" && slices.Contains(drawnKinds, s.Kind) && s.Requests == 0:
		return fmt.Errorf("workload %s is endless and never repeats: leave out repeat, or give requests", s.Kind)
	}
	return nil
}

// MaxLength is the most tokens of a prompt or an answer, and the most requests or prefixes, that a Spec may ask for: more than
// any server is meant to take.
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
			return fmt.Errorf("workload %s: %s %d must not be negative, nor above %d", s.Kind, number.name, number.value, MaxLength)
		}
	}
	for _, ratio := range []float64{s.RangeRatio, s.InputRangeRatio, s.OutputRangeRatio} {
		if !(ratio >= 0 && ratio < 1) {
			return fmt.Errorf("range ratio %g is outside [0, 1)", ratio)
		}
	}
	switch {
	case s.RangeRatio != 0 && (s.InputRangeRatio != 0 || s.OutputRangeRatio != 0):
		return fmt.Errorf("range ratio %g is given for prompts and answers, and again for one of them: leave one out", s.RangeRatio)
	case !(s.HitPercent >= 0 && s.HitPercent < 100):
		return fmt.Errorf("hit percent %g is outside (0, 100)", s.HitPercent)
	case s.VocabSize <= firstToken:
		return fmt.Errorf("vocabulary of %d tokens is too small: the first %d ids are not used; see vocab_size in the model's config.json", s.VocabSize, firstToken)
	}
	return nil
}

// title names a source for reports: what it is, and notes on it in brackets.
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
