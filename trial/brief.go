package trial

import (
	"sync"

	"vllmtuner/bench/workload"
)

// A brief is a source with answers of at most some tokens. It warms a server up, or fills its prefix cache, without the
// time that whole answers take: only prompts are found in a prefix cache.
type brief struct {
	workload.Source
	most int // tokens of an answer

	mu   sync.Mutex
	made map[*workload.Request]*workload.Request // of a finite source, by its own request: a Load may keep what it knows of one
}

// Request returns the source's request with a shorter answer.
func (b *brief) Request(stream workload.Stream, i int) *workload.Request {
	whole := b.Source.Request(stream, i)
	if whole.OutputTokens <= b.most {
		return whole
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if short, ok := b.made[whole]; ok {
		return short
	}
	short := *whole
	short.OutputTokens = b.most
	if b.Len() > 0 {
		if b.made == nil {
			b.made = make(map[*workload.Request]*workload.Request)
		}
		b.made[whole] = &short
	}
	return &short
}

// briefly returns the workload with answers of at most so many tokens.
func (s *session) briefly(most int) workload.Source {
	if s.briefs[most] == nil {
		if s.briefs == nil {
			s.briefs = make(map[int]*brief)
		}
		s.briefs[most] = &brief{Source: s.runner.Source, most: most}
	}
	return s.briefs[most]
}
