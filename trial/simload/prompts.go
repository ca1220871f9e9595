package simload

import (
	"strings"
	"sync"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
)

// A prompt is all that the engine needs to know about a request's content.
type prompt struct {
	tokens int
	blocks []uint64 // hashes
}

// prompts caches the hashes of prompts that are sent many times, because hashing 6,000 tokens costs more than simulating the
// request. Its zero value is empty.
type prompts struct {
	mu     sync.Mutex
	hashed map[*workload.Request]prompt
}

// maxPrompts limits the cache, because some sources make new requests for ever.
const maxPrompts = 4096

func (p *prompts) of(q *workload.Request) prompt {
	p.mu.Lock()
	defer p.mu.Unlock()
	if hashed, ok := p.hashed[q]; ok {
		return hashed
	}
	ids := q.Tokens
	if ids == nil {
		ids = sim.Tokenize(text(q))
	}
	hashed := prompt{tokens: len(ids), blocks: sim.HashBlocks(ids)}
	if p.hashed == nil || len(p.hashed) >= maxPrompts {
		p.hashed = make(map[*workload.Request]prompt)
	}
	p.hashed[q] = hashed
	return hashed
}

// text joins the messages of a chat as a chat template would.
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
