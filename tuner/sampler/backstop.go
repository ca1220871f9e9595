package sampler

import (
	"math/rand/v2"
	"slices"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// These flags decide how much memory a server of vLLM takes, and how much it needs for its KV cache.
const (
	utilizationFlag = "gpu-memory-utilization"
	seqsFlag        = "max-num-seqs"
	tokensFlag      = "max-num-batched-tokens"
)

// memoryNeutral are the names of numeric flags that only steer the scheduler. Servers that differ in these flags need
// the same memory.
var memoryNeutral = []string{
	"long-prefill-token-threshold", "max-num-partial-prefills", "max-long-partial-prefills", "stream-interval",
}

// A backstop forbids points that are at least as short of memory as a point that failed.
type backstop struct {
	space  *space.Space
	failed []failedPoint
}

type failedPoint struct {
	point space.Point
	short bool // the KV cache was too small; otherwise memory ran out
}

// newBackstop reads the trials of the study itself. Priors do not count, because they may come from a larger GPU.
func newBackstop(s *space.Space, history []studies.Trial) *backstop {
	b := &backstop{space: s}
	if s.Parameter(utilizationFlag) == nil && s.Parameter(seqsFlag) == nil && s.Parameter(tokensFlag) == nil {
		return b
	}
	for _, t := range history {
		if t.Number < 0 || t.State != studies.Done {
			continue
		}
		if lacked := wantOf(&t); lacked == memory || lacked == kvMemory {
			b.failed = append(b.failed, failedPoint{complete(s, t), lacked == kvMemory})
		}
	}
	return b
}

// forbids reports whether a failed point shows that p fails too.
func (b *backstop) forbids(p space.Point) bool {
	return slices.ContainsFunc(b.failed, func(f failedPoint) bool { return b.worse(p, f) })
}

// worse reports whether p is at least as short of memory as the failed point. More sequences and more batched tokens
// always need more memory. More utilization leaves less memory outside the KV cache, and less utilization leaves a
// smaller cache. All other flags must be equal, because nobody knows which way they act.
func (b *backstop) worse(p space.Point, failed failedPoint) bool {
	parameters := b.space.Parameters()
	for i := range parameters {
		name := parameters[i].Name
		is, was := p[name], failed.point[name]
		switch {
		case is == was || slices.Contains(memoryNeutral, name):
		case name == utilizationFlag && failed.short:
			if !atLeast(&parameters[i], was, is) {
				return false
			}
		case name == utilizationFlag || name == seqsFlag || name == tokensFlag:
			if !atLeast(&parameters[i], is, was) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// atLeast reports whether the texts a and b are both numbers, and a is not the smaller one.
func atLeast(p *space.Parameter, a, b string) bool {
	x, errX := p.Number(a)
	y, errY := p.Number(b)
	return errX == nil && errY == nil && x >= y
}

// A pointFilter says which points a search may still try.
type pointFilter struct {
	space    *space.Space
	tried    map[string]bool
	backstop *backstop
}

func newPointFilter(s *space.Space, history []studies.Trial) *pointFilter {
	return &pointFilter{s, Tried(history), newBackstop(s, history)}
}

// allows reports whether p is legal, untried, and not known to be short of memory.
func (f *pointFilter) allows(p space.Point) bool {
	return !f.tried[p.String()] && f.space.Check(p) == nil && !f.backstop.forbids(p)
}

// draw returns a random allowed point. If it finds none, it also takes points that are known to be short of memory.
// Going on is better than ending the study, because the memory may have been short by chance.
func (f *pointFilter) draw(rng *rand.Rand) (space.Point, error) {
	for range maxDraws {
		u := make([]float64, len(f.space.Parameters()))
		for i := range u {
			u[i] = rng.Float64()
		}
		if p := f.space.Sample(u); f.allows(p) {
			return p, nil
		}
	}
	return draw(f.space, rng, f.tried)
}
