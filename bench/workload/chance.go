package workload

import (
	"math"
	"math/rand/v2"
)

// A purpose keeps draws apart that share a seed, so that one never shifts another.
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

// chance returns the generator of one purpose, stream and number, such as an epoch. Numbers stay far below 2^48.
func chance(seed uint64, what purpose, stream Stream, n int) *rand.Rand {
	const golden = 0x9e3779b97f4a7c15 // spreads the numbers of draws over all seeds
	seed ^= uint64(stream>>drawBits) * golden
	stream &= 1<<drawBits - 1
	return rand.New(rand.NewPCG(seed, uint64(what)<<56|uint64(stream)<<48|uint64(n)))
}

// lognormal draws from a lognormal distribution with mean 1 and the coefficient of variation cv.
func lognormal(r *rand.Rand, cv float64) float64 {
	variance := math.Log(1 + cv*cv)
	return math.Exp(math.Sqrt(variance)*r.NormFloat64() - variance/2)
}

// defaultVocabSize is that of the Llama 2 tokenizer, the smallest of the large models' in wide use, so that the ids are
// legal for nearly every model.
const defaultVocabSize = 32000

// firstToken leaves out the first three ids, which many vocabularies give to unknown, begin and end of sequence.
const firstToken = 3

// fill draws token ids in [firstToken, vocabSize).
func fill(r *rand.Rand, ids []int32, vocabSize int) {
	n := int32(vocabSize - firstToken)
	for i := range ids {
		ids[i] = firstToken + r.Int32N(n)
	}
}
