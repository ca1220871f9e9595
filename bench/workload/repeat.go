package workload

import "fmt"

// The values of Spec.Repeat. They matter only if a run needs more requests than the source has. By default the requests
// repeat, which turns misses of the server's prefix cache into hits.
const (
	Salt       = "salt"  // prompts of each repetition begin with other tokens, so the cache does not have them
	ErrorEnded = "error" // Enough returns an error
)

// saltTokens is how many tokens at the start of a prompt the salt replaces. Four give 10^18 possibilities, so no first
// block occurs twice in the cache.
const saltTokens = 4

// salted returns the request r, which is the i-th of a stream. If repetitions are salted, each repetition gives its
// requests a new salt. All requests of one repetition get the same salt, so they still share as much with each other as
// before.
func (p *population) salted(r *Request, stream Stream, i int) *Request {
	if i < p.n || p.repeat != Salt {
		return r
	}
	draw := chance(p.seed, saltDraws, stream, i/p.n)
	start := salt{text: saltText(draw)}
	if r.Tokens != nil {
		start.tokens = make([]int32, saltTokens)
		fill(draw, start.tokens, p.vocab)
	}
	return start.salted(r)
}

// Repeats returns how many of the first n requests of a stream are exact copies of earlier ones. Copies may be in the
// server's prefix cache. Repeats returns 0 for endless and for salted sources.
func Repeats(source Source, n int) int {
	if source.Len() == 0 || populationOf(source).repeat == Salt {
		return 0
	}
	return max(0, n-source.Len())
}

// Enough returns an error if the source has fewer than n requests and Spec.Repeat is ErrorEnded.
func Enough(source Source, n int) error {
	if populationOf(source).repeat != ErrorEnded || n <= source.Len() {
		return nil
	}
	return fmt.Errorf("%s: the run needs %d requests, more than the file has, and `repeat: error` forbids reuse: use a shorter window, a larger file or `repeat: salt`", source.Name(), n)
}
