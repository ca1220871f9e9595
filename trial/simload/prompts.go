package simload

import (
	"strings"
	"sync"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
)

// A prompt is what the engine needs of a request's content.
type prompt struct {
	tokens int
	blocks []uint64
}

// prompts remembers the content of prompts that are sent again and again: hashing 6,000 tokens costs more than simulating
// the request. Its zero value is empty.
type prompts struct {
	mu    sync.Mutex
	known map[*workload.Request]prompt
}

// Endless sources make new requests for ever, so the memory is bounded.
const mostPrompts = 4096

func (p *prompts) of(q *workload.Request) prompt {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known, ok := p.known[q]; ok {
		return known
	}
	ids := q.Tokens
	if ids == nil {
		ids = sim.Tokenize(text(q))
	}
	made := prompt{tokens: len(ids), blocks: sim.HashBlocks(ids)}
	if p.known == nil || len(p.known) >= mostPrompts {
		p.known = make(map[*workload.Request]prompt)
	}
	p.known[q] = made
	return made
}

// text joins a chat as a template would.
func text(q *workload.Request) string {
	if q.Messages == nil {
		return q.Text
	}
	var b strings.Builder
	for _, m := range q.Messages {
		b.WriteString(m.Role + "\n" + m.Content + "\n")
	}
	return b.String()
}
