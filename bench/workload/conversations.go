package workload

import (
	"math"
	"math/rand/v2"

	"vllmtuner/render"
)

// These constants give the shape of the multi-turn conversations in the benchmarks and in production. An epoch has 60
// conversations of 5 turns. Each conversation begins with one of 10 long excerpts (starters). The prompt of each turn
// includes the earlier turns.
const (
	conversations = 60
	turns         = 5
	starters      = 10
)

// phase1 is the population of the manual sweeps on the H200. The constants come from the calibrated simulator's trace.
// Lengths have normal distributions: starters with mean 3,500 and standard deviation 150 tokens, answers with mean 515
// and standard deviation 0.69 · 515. The mean prompt comes from the same trace.
const (
	phase1StarterMean = 3500.0
	phase1StarterSD   = 150.0
	phase1StarterMin  = 3200.0
	phase1MeanPrompt  = 5806
	phase1OutputMean  = 515.0
	phase1OutputCV    = 0.6914
	phase1OutputMin   = 114.0
	phase1OutputMax   = 1280.0

	// deltaCV is the coefficient of variation of the tokens that one turn adds. In phase1 each conversation also has a
	// random factor that multiplies its added tokens. The coefficient of variation of this factor is half as large.
	deltaCV = 0.4063
)

// production is the population on the production dashboard: prompts with p50 5,900 and p95 12,700 tokens, answers with
// p50 978 and p95 1,720. The description of this load gives 3,500 to 4,000 tokens for the excerpts. The growth per turn
// and the spread between conversations are fitted to the two quantiles of the prompts. The maxima keep requests within
// 16,384 tokens, the max-model-len in production.
const (
	productionStarterMean = 3750.0
	productionStarterSD   = 150.0
	productionStarterMin  = 3500.0
	productionStarterMax  = 4000.0
	productionDelta       = 1690.0 // mean tokens that a turn adds, before the cap
	productionTalkerCV    = 0.78   // variation between conversations
	productionPromptMax   = 14336.0
	productionOutputP50   = 978.0
	productionOutputSigma = 0.3432 // ln(1720/978) / 1.6449
	productionOutputMin   = 64.0
	productionOutputMax   = 2048.0
)

// A talk holds the lengths of one conversation, in tokens.
type talk struct {
	starter int                // index of its starter
	added   [turns - 1]float64 // tokens that each turn after the first adds
	outputs [turns]int
}

// openPhase1 draws the 300 requests of kind phase1. Their mean prompt is exactly 5,806 tokens.
func openPhase1(spec Spec, seed uint64) Source {
	r := chance(seed, starterDraws, 0, 0)
	begin := drawStarters(r, spec.VocabSize, func() float64 {
		return max(phase1StarterMin, phase1StarterMean+phase1StarterSD*r.NormFloat64())
	})
	r = chance(seed, conversationDraws, 0, 0)
	talks := make([]talk, conversations)
	outputs := phase1Outputs(r, conversations*turns)
	for c := range talks {
		talks[c].starter = c % starters
		factor := lognormal(r, deltaCV/2)
		for t := range talks[c].added {
			talks[c].added[t] = factor * lognormal(r, deltaCV)
		}
		copy(talks[c].outputs[:], outputs[c*turns:])
	}
	scaleToMean(talks, begin, phase1MeanPrompt)
	requests := requestsOf(r, talks, begin, spec.VocabSize)
	return newFinite(spec.title("phase1", render.Count(len(requests), "request")), spec, seed, requests)
}

// phase1Outputs draws n answer lengths from a normal distribution, clips them, and scales them to the mean.
func phase1Outputs(r *rand.Rand, n int) []int {
	draws, sum := make([]float64, n), 0.0
	for i := range draws {
		x := phase1OutputMean * (1 + phase1OutputCV*r.NormFloat64())
		draws[i] = min(max(x, phase1OutputMin), phase1OutputMax)
		sum += draws[i]
	}
	lengths, carry := make([]int, n), 0.0
	for i, x := range draws {
		// The rounding error is carried over to the next length, so the mean stays exact.
		carry += x * phase1OutputMean * float64(n) / sum
		lengths[i] = int(math.Round(carry))
		carry -= float64(lengths[i])
	}
	return lengths
}

// scaleToMean makes the prompts of all turns exactly meanPrompt tokens long on average. It scales and rounds the tokens
// that turns add. Then it spreads the rounding error over the last turns of conversations, because a last turn changes
// only one prompt.
func scaleToMean(talks []talk, begin [][]int32, meanPrompt int) {
	rest, added := meanPrompt*turns*len(talks), 0.0
	for i := range talks {
		rest -= turns * len(begin[talks[i].starter])
		for t, x := range talks[i].added {
			added += float64(turns-1-t) * x
		}
	}
	scale := float64(rest) / added
	for i := range talks {
		for t := range talks[i].added {
			x := math.Round(max(1, scale*talks[i].added[t]))
			talks[i].added[t] = x
			rest -= (turns - 1 - t) * int(x)
		}
	}
	for i := 0; rest != 0; i = (i + 1) % len(talks) {
		last := &talks[i].added[turns-2]
		switch {
		case rest > 0:
			*last++
			rest--
		case *last > 1:
			*last--
			rest++
		}
	}
}

// openProduction returns the endless stream of conversations of kind production. All epochs share ten starters.
func openProduction(spec Spec, seed uint64) Source {
	r := chance(seed, starterDraws, 1, 0)
	begin := drawStarters(r, spec.VocabSize, func() float64 {
		x := productionStarterMean + productionStarterSD*r.NormFloat64()
		return min(max(x, productionStarterMin), productionStarterMax)
	})
	return &endless{
		name: spec.title("production", "endless"), size: conversations * turns, longest: productionPromptMax + productionOutputMax,
		draw: func(stream Stream, epoch int) []Request {
			r := chance(seed, conversationDraws, stream, epoch+1)
			talks := make([]talk, conversations)
			for c := range talks {
				talks[c] = productionTalk(r, c%starters, len(begin[c%starters]))
			}
			requests := requestsOf(r, talks, begin, spec.VocabSize)
			for i := range requests {
				requests[i].Conversation += epoch * conversations
			}
			r.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
			return requests
		},
	}
}

func productionTalk(r *rand.Rand, starter, starterTokens int) talk {
	t := talk{starter: starter}
	scale, sum := productionDelta*lognormal(r, productionTalkerCV), 0.0
	for i := range t.added {
		t.added[i] = scale * lognormal(r, deltaCV)
		sum += t.added[i]
	}
	shrink := min(1, (productionPromptMax-float64(starterTokens))/sum)
	for i := range t.added {
		t.added[i] = max(1, math.Floor(shrink*t.added[i]))
	}
	for i := range t.outputs {
		x := productionOutputP50 * math.Exp(productionOutputSigma*r.NormFloat64())
		t.outputs[i] = int(math.Round(min(max(x, productionOutputMin), productionOutputMax)))
	}
	return t
}

// drawStarters draws the token ids of the starters. Each call of drawLength returns the number of tokens of one
// starter.
func drawStarters(r *rand.Rand, vocabSize int, drawLength func() float64) [][]int32 {
	begin := make([][]int32, starters)
	for i := range begin {
		begin[i] = make([]int32, int(math.Round(drawLength())))
		fill(r, begin[i], vocabSize)
	}
	return begin
}

// requestsOf makes requests from the lengths, conversation by conversation. All turns of a conversation share one array
// of ids. So the prompt of turn t is exactly a prefix of the prompt of turn t+1.
func requestsOf(r *rand.Rand, talks []talk, begin [][]int32, vocabSize int) []Request {
	requests := make([]Request, 0, len(talks)*turns)
	for c, t := range talks {
		ends := [turns]int{len(begin[t.starter])}
		for i, x := range t.added {
			ends[i+1] = ends[i] + int(x)
		}
		ids := make([]int32, ends[turns-1])
		copy(ids, begin[t.starter])
		fill(r, ids[ends[0]:], vocabSize)
		for turn, end := range ends {
			requests = append(requests, Request{
				Tokens: ids[:end:end], PromptTokens: end, OutputTokens: t.outputs[turn], Conversation: c, Turn: turn + 1,
			})
		}
	}
	return requests
}
