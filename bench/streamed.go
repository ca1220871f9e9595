package bench

import (
	"fmt"
	"time"

	"vllmtuner/render"
)

const (
	// minTPOT is shorter than the time that any server needs for a token. The fastest servers generate about 3,000 tokens
	// a second for one user. A proxy that writes a whole buffered answer in a loop needs 5 to 50 µs for each chunk.
	minTPOT = 100 * time.Microsecond
	// An answer counts as buffered by a proxy if, on average, at least burstChunks chunks arrive together and bursts are
	// at least minBurst apart. With a smaller burstChunks, a busy machine alone would look like a proxy: its client may
	// read an answer of eight chunks in two pieces.
	burstChunks = 5
	minBurst    = 20 * time.Millisecond
	// maxBlank is how many chunks without text an answer may have: the last chunk and one more. If an answer has more,
	// its number of tokens is not compared with its text. A model that goes on after its end of sequence generates tokens
	// without text, so the comparison would mean nothing.
	maxBlank = 2
	// maxMarks is how many tokens of an answer may have neither text nor a chunk of their own. Such tokens are special
	// tokens, such as <think> and </think>, or the three tokens before each message of gpt-oss.
	maxMarks = 4
	// maxUnseen is the largest share of the times between tokens that may stay invisible to the client. With a larger
	// share the run is void, because a limit on these times would be judged on values that were not measured.
	maxUnseen = 0.5
	// minUnseen is the smallest number of unseen times that makes a run void. A few unseen times are normal: on a busy
	// server both tokens of a short answer may share a chunk.
	minUnseen = 8
	// manyAnswers is the number of answers from which on maxUnseen decides. With fewer answers it is maxUnseenOfFew,
	// because a busy machine may stop the client or the server during most of them.
	manyAnswers    = 10
	maxUnseenOfFew = 0.9
	// maxReadLate is a limit on the median send lag. Above it, no run is void for unseen times. A load generator that is
	// so late may read several chunks at once, although they arrived one by one.
	maxReadLate = 5 * time.Millisecond
)

// The reasons why the times between the tokens of an answer cannot be seen.
const (
	atOnce = iota
	inBursts
	overclaimed
	waysUnseen
)

// unseen reports whether the times between the tokens of a completed answer cannot be seen, and why. It tolerates several
// tokens in a chunk (speculative decoding, --stream-interval, a busy server), and chunks that sometimes arrive together.
func (s *Sample) unseen() (way int, is bool) {
	span, gaps := s.Last-s.First, s.OutputTokens-1
	switch {
	case gaps < 1:
	case span < time.Duration(gaps)*minTPOT:
		return atOnce, true
	case s.Pieces > 1 && s.Chunks >= burstChunks*s.Pieces && span >= time.Duration(s.Pieces-1)*minBurst:
		return inBursts, true
	case s.Pieces > 0 && s.Blank <= maxBlank && s.OutputTokens > s.TextBytes+s.Chunks+maxMarks+s.textless():
		return overclaimed, true // every token has at least one byte of text or its own chunk, except the marks (special tokens) and the textless tokens
	}
	return 0, false
}

// textless returns how many tokens may have no text because the model went on after its end of sequence. The end of
// sequence is in the chunk before the blank chunks. With --stream-interval that chunk may hold many later tokens too,
// so textless counts it as one more blank chunk.
func (s *Sample) textless() int {
	return (s.Blank + 1) * (s.OutputTokens - 1) / max(1, s.Chunks-1)
}

// A visibility counts the times between tokens in a run, and how many of them cannot be seen.
type visibility struct {
	answers int // answers of two or more tokens
	gaps    int
	unseen  [waysUnseen]int    // by reason
	first   [waysUnseen]Sample // one answer as an example of each reason
}

func (v *visibility) add(s *Sample) {
	gaps := s.OutputTokens - 1
	if gaps < 1 {
		return
	}
	v.answers++
	v.gaps += gaps
	if way, is := s.unseen(); is {
		if v.unseen[way] == 0 {
			v.first[way] = Sample{OutputTokens: s.OutputTokens, Chunks: s.Chunks, Pieces: s.Pieces, TextBytes: s.TextBytes}
		}
		v.unseen[way] += gaps
	}
}

// voidReason says why the latencies of a run are not the server's. It returns "" if there is no such reason.
func (v *visibility) voidReason(sendLag Stats) string {
	all, worst := 0, 0
	for way, n := range v.unseen {
		if all += n; n > v.unseen[worst] {
			worst = way
		}
	}
	most := maxUnseen
	if v.answers < manyAnswers {
		most = maxUnseenOfFew
	}
	if all < minUnseen || float64(all) <= most*float64(v.gaps) || sendLag.P50 > render.InMilliseconds(maxReadLate) {
		return ""
	}
	share, s := 100*float64(all)/float64(v.gaps), v.first[worst]
	switch worst {
	case inBursts:
		return fmt.Sprintf("the answers are not streamed token by token but arrive in bursts, so %.0f %% of the times between tokens cannot be seen "+
			"(an answer of %s came in %s): look for a proxy that buffers, such as nginx without proxy_buffering off", share, render.Count(s.OutputTokens, "token"), render.Count(s.Pieces, "piece"))
	case overclaimed:
		return fmt.Sprintf("the server counts more tokens than its answers can hold (usage says %s for an answer with %s of text in %s), "+
			"so the time per token means nothing: look for a proxy that changes usage or drops chunks", render.Count(s.OutputTokens, "token"), render.Count(s.TextBytes, "byte"), render.Count(s.Chunks, "chunk"))
	}
	return fmt.Sprintf("the answers are not streamed: all tokens of an answer come at once, so %.0f %% of the times between tokens cannot be seen "+
		"(an answer of %s came in %s): look for a proxy that buffers, such as nginx without proxy_buffering off", share, render.Count(s.OutputTokens, "token"), pieces(s))
}

func pieces(s Sample) string {
	if s.Chunks == 1 {
		return "one chunk"
	}
	return fmt.Sprintf("%d chunks without a pause", s.Chunks)
}
