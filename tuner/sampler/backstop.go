package sampler

import (
	"math/rand/v2"
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// The flags that decide how much memory a server of vLLM takes, and how much it needs for its KV cache.
const (
	utilizationFlag = "gpu-memory-utilization"
	seqsFlag        = "max-num-seqs"
	tokensFlag      = "max-num-batched-tokens"
)

// memoryNeutral are numbers that only steer the scheduler. Servers that differ in them need the same memory.
var memoryNeutral = []string{
	"long-prefill-token-threshold", "max-num-partial-prefills", "max-long-partial-prefills", "stream-interval",
}

// A backstop knows the points that cannot run, because a point that asks for no more memory did not run either.
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
		if t.Number < 0 || t.State != studies.Done || t.Result.Outcome != trial.Infeasible {
			continue
		}
		switch t.Result.Class {
		case serverctl.OOMStart, serverctl.OOMLoad, serverctl.KVTooSmall:
			b.failed = append(b.failed, failedPoint{complete(s, t), t.Result.Class == serverctl.KVTooSmall})
		}
	}
	return b
}

// forbids reports whether a failed point shows that p fails too.
func (b *backstop) forbids(p space.Point) bool {
	return slices.ContainsFunc(b.failed, func(f failedPoint) bool { return b.worse(p, f) })
}

// worse reports whether p is at least as short of memory as the failed point. More sequences and more batched tokens
// always need more. More utilization leaves less memory outside the KV cache, and less utilization a smaller cache.
// All other flags must be equal, because nobody knows which way they act.
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

// atLeast reports whether both texts are numbers, and a is not the smaller one.
func atLeast(p *space.Parameter, a, b string) bool {
	x, errX := p.Number(a)
	y, errY := p.Number(b)
	return errX == nil && errY == nil && x >= y
}

// An opening says which points a search may still try.
type opening struct {
	space    *space.Space
	tried    map[string]bool
	backstop *backstop
}

func newOpening(s *space.Space, history []studies.Trial) *opening {
	return &opening{s, tried(history), newBackstop(s, history)}
}

// has reports whether p is legal, untried, and not known to be short of memory.
func (o *opening) has(p space.Point) bool {
	return !o.tried[p.String()] && o.space.Check(p) == nil && !o.backstop.forbids(p)
}

// draw returns a random open point. If none is found, a point that is known to be short of memory is better than the
// end of the study, because the memory may have been short by chance.
func (o *opening) draw(rng *rand.Rand) (space.Point, error) {
	for range maxDraws {
		u := make([]float64, len(o.space.Parameters()))
		for i := range u {
			u[i] = rng.Float64()
		}
		if p := o.space.Sample(u); o.has(p) {
			return p, nil
		}
	}
	return draw(o.space, rng, o.tried)
}
