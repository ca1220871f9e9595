package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// The shape of the multi-turn conversations that were benchmarked and seen in production: 60 conversations of 5 turns in
// an epoch, each begun by one of 10 long excerpts, its prompt growing by the history.
const (
	conversations = 60
	turns         = 5
	starters      = 10
)

// phase1 is the population of the manual sweeps on the H200 (constants of the calibrated simulator's trace: starters
// N(3500, 150), answers N(515, 0.69 · 515); the mean prompt is given).
const (
	phase1StarterMean = 3500.0
	phase1StarterSD   = 150.0
	phase1StarterMin  = 3200.0
	phase1MeanPrompt  = 5806
	phase1OutputMean  = 515.0
	phase1OutputCV    = 0.6914
	phase1OutputMin   = 114.0
	phase1OutputMax   = 1280.0

	// deltaCV is the spread of what one turn adds; a conversation as a whole has a factor of half that spread in phase1.
	deltaCV = 0.4063
)

// production is the population that the dashboard saw: prompts with p50 5,900 and p95 12,700, answers with p50 978 and
// p95 1,720 tokens. The excerpts are 3,500 to 4,000 tokens by the description of the load. What a turn adds and how much
// conversations differ were fitted to the two quantiles of the prompts. The caps make the longest request 16,384, the
// max-model-len that production was tuned for.
const (
	productionStarterMean = 3750.0
	productionStarterSD   = 150.0
	productionStarterMin  = 3500.0
	productionStarterMax  = 4000.0
	productionDelta       = 1690.0 // mean tokens that a turn adds, before the cap
	productionTalkerCV    = 0.78   // between conversations
	productionPromptMax   = 14336.0
	productionOutputP50   = 978.0
	productionOutputSigma = 0.3432 // ln(1720/978) / 1.6449
	productionOutputMin   = 64.0
	productionOutputMax   = 2048.0
)

// A talk is one conversation's lengths in tokens.
type talk struct {
	starter int
	added   [turns - 1]float64 // by each turn after the first
	outputs [turns]int
}

// openPhase1 draws the 300 requests. Their mean prompt is exactly 5,806 tokens.
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
	requests := say(r, talks, begin, spec.VocabSize)
	return newFinite(spec.title("phase1", fmt.Sprintf("%d requests", len(requests))), spec, seed, requests)
}

// phase1Outputs draws n answer lengths: normal, clipped, then rescaled to the mean.
func phase1Outputs(r *rand.Rand, n int) []int {
	draws, sum := make([]float64, n), 0.0
	for i := range draws {
		x := phase1OutputMean * (1 + phase1OutputCV*r.NormFloat64())
		draws[i] = min(max(x, phase1OutputMin), phase1OutputMax)
		sum += draws[i]
	}
	lengths, carry := make([]int, n), 0.0
	for i, x := range draws {
		// The rounding error is carried on, so that the mean is kept.
		carry += x * phase1OutputMean * float64(n) / sum
		lengths[i] = int(math.Round(carry))
		carry -= float64(lengths[i])
	}
	return lengths
}

// scaleToMean makes the mean prompt over all turns exactly mean tokens: it scales what the turns add, rounds it, and
// spreads the rest of the rounding over last turns, each of which lengthens one prompt only.
func scaleToMean(talks []talk, begin [][]int32, mean int) {
	rest, added := mean*turns*len(talks), 0.0
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

// openProduction returns the endless stream of conversations over ten starters that stay for ever.
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
			requests := say(r, talks, begin, spec.VocabSize)
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

// drawStarters draws the token ids of the shared starters, each as long as length says.
func drawStarters(r *rand.Rand, vocabSize int, length func() float64) [][]int32 {
	begin := make([][]int32, starters)
	for i := range begin {
		begin[i] = make([]int32, int(math.Round(length())))
		fill(r, begin[i], vocabSize)
	}
	return begin
}

// say turns lengths into requests, conversation by conversation. All turns of a conversation share the ids of the last,
// so that turn t is exactly a prefix of turn t+1.
func say(r *rand.Rand, talks []talk, begin [][]int32, vocabSize int) []Request {
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
