package trial

import (
	"sync"

	"vllmtuner/bench/workload"
)

// A shortSource is a workload source whose answers are cut to a maximum length. It warms a server up, or fills its
// prefix cache, in less time than whole answers take. A cache filled with short answers serves as well, because later
// requests reuse only the prompts in it.
type shortSource struct {
	workload.Source
	maxAnswer int // maximum length of an answer in tokens

	mu   sync.Mutex
	made map[*workload.Request]*workload.Request // shortened requests of a finite source, by the original request. A Load may keep facts about a request, so each shortened request is made once.
}

// Request returns the source's request with a shorter answer.
func (b *shortSource) Request(stream workload.Stream, i int) *workload.Request {
	whole := b.Source.Request(stream, i)
	if whole.OutputTokens <= b.maxAnswer {
		return whole
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if short, ok := b.made[whole]; ok {
		return short
	}
	short := *whole
	short.OutputTokens = b.maxAnswer
	if b.Len() > 0 {
		if b.made == nil {
			b.made = make(map[*workload.Request]*workload.Request)
		}
		b.made[whole] = &short
	}
	return &short
}

// shortened returns the workload with answers of at most maxAnswer tokens.
func (s *session) shortened(maxAnswer int) workload.Source {
	if s.shortSources[maxAnswer] == nil {
		if s.shortSources == nil {
			s.shortSources = make(map[int]*shortSource)
		}
		s.shortSources[maxAnswer] = &shortSource{Source: s.runner.Source, maxAnswer: maxAnswer}
	}
	return s.shortSources[maxAnswer]
}
