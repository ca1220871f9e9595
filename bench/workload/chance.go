package workload

import (
	"math"
	"math/rand/v2"
)

// A purpose is what random numbers are drawn for. Each purpose has its own random sequence, even if several purposes
// share a seed. So more draws for one purpose do not change the draws for another.
type purpose uint64

const (
	starterDraws purpose = iota + 1
	conversationDraws
	shuffleDraws
	randomDraws
	gapDraws
	passDraws
	prefixDraws
	saltDraws
	traceDraws
	blockDraws
	thinkDraws
)

// chance returns the random generator for a purpose, a stream and a number n, for example the number of an epoch. The
// number stays far below 2^48.
func chance(seed uint64, what purpose, stream Stream, n int) *rand.Rand {
	const golden = 0x9e3779b97f4a7c15 // 2^64 / golden ratio; gives each draw number a very different seed
	seed ^= uint64(stream>>drawBits) * golden
	stream &= 1<<drawBits - 1
	return rand.New(rand.NewPCG(seed, uint64(what)<<56|uint64(stream)<<48|uint64(n)))
}

// lognormal draws from a lognormal distribution with mean 1 and the coefficient of variation cv.
func lognormal(r *rand.Rand, cv float64) float64 {
	variance := math.Log(1 + cv*cv)
	return math.Exp(math.Sqrt(variance)*r.NormFloat64() - variance/2)
}

// defaultVocabSize is the vocabulary size of the Llama 2 tokenizer. No large model in wide use has a smaller one, so
// ids below it are valid for nearly every model.
const defaultVocabSize = 32000

// firstToken is the smallest id that is drawn. In many vocabularies the three ids below it are special: unknown, begin
// and end of sequence.
const firstToken = 3

// fill draws token ids in [firstToken, vocabSize).
func fill(r *rand.Rand, ids []int32, vocabSize int) {
	n := int32(vocabSize - firstToken)
	for i := range ids {
		ids[i] = firstToken + r.Int32N(n)
	}
}
