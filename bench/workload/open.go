package workload

import (
	"fmt"
	"slices"
	"strings"
)

// A Spec names a population of requests as a study file does. Fields that a kind does not use must be zero, so that a
// setting without effect is an error and not a surprise.
type Spec struct {
	Kind         string  // phase1, production, sharegpt, jsonl or random
	Path         string  // file, for sharegpt and jsonl
	Endpoint     string  // "completions" (also when empty) or "chat"; token ids need completions
	InputTokens  int     // mean prompt length of random; 0 means 1024, as vllm bench serve has it
	OutputTokens int     // mean answer length of random, 0 means 128; for files every answer's length, 0 means the file's own
	RangeRatio   float64 // spread of random, in [0, 1): lengths are uniform in [floor(L(1-r)), ceil(L(1+r))]
	Requests     int     // how many different requests; 0 means a whole file, or endless random ones
	VocabSize    int     // token ids stay below it; 0 means 32,000
}

// Kinds are the known populations.
var Kinds = []string{"phase1", "production", "sharegpt", "jsonl", "random"}

// The endpoints of a Spec.
const (
	Completions = "completions"
	Chat        = "chat"
)

// Open returns the population that a spec names, drawn with the seed. Errors name the file, the place in it, and what to
// do about it.
func Open(spec Spec, seed uint64) (Source, error) {
	if spec.Endpoint == "" {
		spec.Endpoint = Completions
	}
	if spec.VocabSize == 0 {
		spec.VocabSize = defaultVocabSize
	}
	if err := spec.check(); err != nil {
		return nil, err
	}
	switch spec.Kind {
	case "phase1":
		return openPhase1(spec, seed), nil
	case "production":
		return openProduction(spec, seed), nil
	case "sharegpt":
		return openShareGPT(spec, seed)
	case "jsonl":
		return openJSONL(spec, seed)
	}
	return openRandom(spec, seed)
}

func (s Spec) check() error {
	if !slices.Contains(Kinds, s.Kind) {
		return fmt.Errorf("unknown workload kind %q: did you mean %q? (known: %s)", s.Kind, nearest(s.Kind, Kinds), strings.Join(Kinds, ", "))
	}
	endpoints := []string{Completions, Chat}
	if !slices.Contains(endpoints, s.Endpoint) {
		return fmt.Errorf("unknown endpoint %q: did you mean %q?", s.Endpoint, nearest(s.Endpoint, endpoints))
	}
	file := s.Kind == "sharegpt" || s.Kind == "jsonl"
	conversations := s.Kind == "phase1" || s.Kind == "production"
	switch {
	case !file && s.Endpoint == Chat:
		return fmt.Errorf("workload %s asks with token ids, which chat cannot take: use endpoint completions", s.Kind)
	case file && s.Path == "":
		return fmt.Errorf("workload %s needs the path of its file", s.Kind)
	case !file && s.Path != "":
		return fmt.Errorf("workload %s reads no file: leave out the path %q, or use kind sharegpt or jsonl", s.Kind, s.Path)
	case conversations && (s.OutputTokens != 0 || s.Requests != 0):
		return fmt.Errorf("workload %s has its own lengths and number of requests: leave out output tokens and requests, or use kind random", s.Kind)
	case s.Kind != "random" && (s.InputTokens != 0 || s.RangeRatio != 0):
		return fmt.Errorf("workload %s has its own prompt lengths: leave out input tokens and range ratio, or use kind random", s.Kind)
	case s.InputTokens < 0 || s.OutputTokens < 0 || s.Requests < 0:
		return fmt.Errorf("workload %s: input tokens %d, output tokens %d and requests %d must not be negative", s.Kind, s.InputTokens, s.OutputTokens, s.Requests)
	case !(s.RangeRatio >= 0 && s.RangeRatio < 1):
		return fmt.Errorf("range ratio %g is outside [0, 1)", s.RangeRatio)
	case s.VocabSize <= firstToken:
		return fmt.Errorf("vocabulary of %d tokens is too small: the first %d ids are not used; see vocab_size in the model's config.json", s.VocabSize, firstToken)
	}
	return nil
}

// nearest returns the name with the fewest edits from what was written.
func nearest(written string, names []string) string {
	return slices.MinFunc(names, func(a, b string) int { return edits(written, a) - edits(written, b) })
}

// edits is the Levenshtein distance in bytes.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
