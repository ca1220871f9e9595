package bench

import (
	"fmt"
	"time"
)

const (
	// leastTPOT is less than any server takes for a token: the quickest make some 3,000 a second for one user. A loop that writes the
	// chunks of a whole answer one after the other takes 5 to 50 µs for each.
	leastTPOT = 100 * time.Microsecond
	// Something holds an answer back where so many chunks come together in the mean, and so long after those before.
	burstChunks = 4
	leastBurst  = 20 * time.Millisecond
	// mostBlank is how many chunks without a text an answer may have whose tokens are held against its text: the last one, and one more. A
	// model that goes on after its end makes tokens without a text, and then nothing is known.
	mostBlank = 2
	// mostMarks is how many tokens of an answer may come without a chunk: marks of the model's own, such as <think> and </think>, or the
	// three before each message of gpt-oss.
	mostMarks = 4
	// A run is void when more of its times between tokens cannot be seen: a limit on them would be kept by what was not measured.
	mostUnseen = 0.5
	// So few say nothing: on a busy server both tokens of a short answer may share a chunk.
	leastUnseen = 8
	// mostReadLate is how late the load generator may be in the median: one that is later gets chunks together that came apart.
	mostReadLate = 5 * time.Millisecond
)

// The ways in which the times between the tokens of an answer cannot be seen.
const (
	atOnce = iota
	inBursts
	overclaimed
	waysUnseen
)

// unseen says why the times between the tokens of a completed answer cannot be seen, and whether that is so. Several tokens may share a
// chunk, as with speculative decoding, --stream-interval and a busy server, and chunks may come together now and then.
func (s *Sample) unseen() (way int, is bool) {
	span, gaps := s.Last-s.First, s.OutputTokens-1
	switch {
	case gaps < 1:
	case span < time.Duration(gaps)*leastTPOT:
		return atOnce, true
	case s.Pieces > 1 && s.Chunks >= burstChunks*s.Pieces && span >= time.Duration(s.Pieces-1)*leastBurst:
		return inBursts, true
	case s.Pieces > 0 && s.Blank <= mostBlank && s.OutputTokens > s.TextBytes+s.Chunks+mostMarks+s.textless(): // a token has a byte of text at least, or a chunk
		return overclaimed, true
	}
	return 0, false
}

// textless is how many tokens may have no text since the model went on after its end: with --stream-interval a chunk holds many, and the
// end lies in the one before the blank ones.
func (s *Sample) textless() int {
	return (s.Blank + 1) * (s.OutputTokens - 1) / max(1, s.Chunks-1)
}

// A visibility is how many times between tokens a run has, and how many of them cannot be seen.
type visibility struct {
	gaps   int
	unseen [waysUnseen]int
	first  [waysUnseen]Sample // of each way
}

func (v *visibility) add(s *Sample) {
	gaps := max(0, s.OutputTokens-1)
	v.gaps += gaps
	if way, is := s.unseen(); is {
		if v.unseen[way] == 0 {
			v.first[way] = Sample{OutputTokens: s.OutputTokens, Chunks: s.Chunks, Pieces: s.Pieces, TextBytes: s.TextBytes}
		}
		v.unseen[way] += gaps
	}
}

func (v *visibility) merge(o *visibility) {
	v.gaps += o.gaps
	for way, n := range o.unseen {
		if v.unseen[way] == 0 {
			v.first[way] = o.first[way]
		}
		v.unseen[way] += n
	}
}

// void says why the latencies of a run are not the server's; "" when they may be.
func (v *visibility) void(sendLag Stats) string {
	all, worst := 0, 0
	for way, n := range v.unseen {
		if all += n; n > v.unseen[worst] {
			worst = way
		}
	}
	if all < leastUnseen || float64(all) <= mostUnseen*float64(v.gaps) || sendLag.P50 > milliseconds(mostReadLate) {
		return ""
	}
	share, s := 100*float64(all)/float64(v.gaps), v.first[worst]
	switch worst {
	case inBursts:
		return fmt.Sprintf("the answers are not streamed token by token but held back and passed on in bursts, so %.0f %% of the times between tokens cannot be seen "+
			"(an answer of %d tokens came in %d pieces): look for a proxy that buffers, such as nginx without proxy_buffering off", share, s.OutputTokens, s.Pieces)
	case overclaimed:
		return fmt.Sprintf("the server counts more tokens than its answers can hold (usage says %d tokens of an answer with %d bytes of text in %d chunks), "+
			"so the time per token means nothing: look for a proxy that changes usage or drops chunks", s.OutputTokens, s.TextBytes, s.Chunks)
	}
	return fmt.Sprintf("the answers are not streamed: all tokens of an answer come at once, so %.0f %% of the times between tokens cannot be seen "+
		"(an answer of %d tokens came in %s): look for a proxy that buffers, such as nginx without proxy_buffering off", share, s.OutputTokens, pieces(s))
}

func pieces(s Sample) string {
	if s.Chunks == 1 {
		return "one chunk"
	}
	return fmt.Sprintf("%d chunks without a pause", s.Chunks)
}
