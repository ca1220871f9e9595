package workload

import "fmt"

// What a Spec may say about a run that needs more requests than there are different ones. By default they are asked again,
// which turns misses of the server's prefix cache into hits.
const (
	Salt       = "salt"  // each repetition begins with other tokens, so that the cache does not know its prompts
	ErrorEnded = "error" // Enough refuses the run
)

// A policy is what a finite source does when it is passed through again.
type policy struct {
	repeat string
	seed   uint64
	vocab  int
}

func (s Spec) policy(seed uint64) policy { return policy{s.Repeat, seed, s.VocabSize} }

// saltTokens are enough for a first block of the prefix cache that is like no other: 10^18 possibilities.
const saltTokens = 4

// salted returns the request with the beginning that all requests of one repetition share, so that they share with each
// other what they shared before. Token ids are replaced, so that no length changes; texts become some tokens longer.
func (p policy) salted(r *Request, stream Stream, repetition int) *Request {
	draw := chance(p.seed, saltDraws, stream, repetition)
	b := beginning{text: saltText(draw)}
	if r.Tokens != nil {
		b.tokens = make([]int32, saltTokens)
		fill(draw, b.tokens, p.vocab)
	}
	return b.of(r)
}

// policyOf returns the policy of a finite source.
func policyOf(source Source) policy {
	switch s := source.(type) {
	case *finite:
		return s.policy
	case *live:
		return s.policy
	}
	return policy{}
}

// Repeats returns how many of the first n requests of a stream have been in it before, word for word: the prefix cache of
// the server knows them. It is 0 for endless sources, and for those that are salted.
func Repeats(source Source, n int) int {
	if source.Len() == 0 || policyOf(source).repeat == Salt {
		return 0
	}
	return max(0, n-source.Len())
}

// Enough returns an error when the source is one that must not repeat and has fewer than n requests.
func Enough(source Source, n int) error {
	if policyOf(source).repeat != ErrorEnded || n <= source.Len() {
		return nil
	}
	return fmt.Errorf("%s: %d requests are needed and would repeat, which repeat: error forbids: take a shorter window, a larger file, or repeat: salt", source.Name(), n)
}
