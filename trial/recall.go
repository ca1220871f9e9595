package trial

import (
	"encoding/binary"
	"hash/maphash"

	"vllmtuner/bench/workload"
)

// A recall is what of the prompts sent so far a prefix cache of a known size still holds, by the order in which they were sent: a
// prefix is found in whole blocks, and the blocks that were used least recently go first, as in vLLM (vllm/v1/core/block_pool.py).
// Beside it stands what a cache would hold that was empty when the probe began: the later uses are the same for both.
type recall struct {
	capacity float64 // tokens
	tokens   float64 // held, of prompts and answers
	held     map[uint64]int
	uses     []use // in order; one that is not a block's last is void
	oldest   int   // in uses
	tidyAt   int   // uses, when void ones are thrown away
	number   int   // of the next use
	began    int   // number of the probe's first use
	seed     maphash.Seed
	text     []byte // of the prompt at hand
	blocks   []use  // likewise

	asked, carried, empty float64 // tokens of prompts since the probe began, and how many of them either cache held
}

// A use is one block of a prompt that was asked, or a whole answer, which nobody asks for again; its block is 0.
type use struct {
	block  uint64 // the hash of everything up to its end
	number int
	tokens float64
}

func newRecall(capacity float64) *recall {
	return &recall{capacity: capacity, held: make(map[uint64]int), seed: maphash.MakeSeed(), tidyAt: fewUses}
}

// A block has 16 tokens in vLLM: so many bytes of token numbers, and about as many of an English text.
const (
	blockBytes   = 64
	bytesOfToken = 4.0 // where the length of a prompt in tokens is not known
)

// begin begins a probe.
func (c *recall) begin() {
	c.began = c.number
	c.asked, c.carried, c.empty = 0, 0, 0
}

// rates are the hit rates of the probe so far with a cache that was carried into it, and with one that was empty.
func (c *recall) rates() (carried, empty float64) {
	if c.asked == 0 {
		return 0, 0
	}
	return c.carried / c.asked, c.empty / c.asked
}

// watch makes a load tell what it asks.
func (c *recall) watch(schedule workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			c.ask(a.Request)
			if !yield(a) {
				return
			}
		}
	}
}

// ask counts what is found of a prompt and holds it from now on, with its answer.
func (c *recall) ask(r *workload.Request) {
	c.split(r)
	carried, empty := true, true
	for _, b := range c.blocks {
		last, ok := c.held[b.block]
		carried = carried && ok
		empty = empty && carried && last >= c.began
		c.asked += b.tokens
		if carried {
			c.carried += b.tokens
		}
		if empty {
			c.empty += b.tokens
		}
	}
	c.use(use{tokens: float64(r.OutputTokens)})
	for i := len(c.blocks) - 1; i >= 0; i-- { // the end of a prompt goes before its beginning
		c.use(c.blocks[i])
	}
	c.evict()
}

// split makes the blocks of a prompt.
func (c *recall) split(r *workload.Request) {
	c.text, c.blocks = c.text[:0], c.blocks[:0]
	for _, id := range r.Tokens {
		c.text = binary.LittleEndian.AppendUint32(c.text, uint32(id))
	}
	c.text = append(c.text, r.Text...)
	for _, m := range r.Messages {
		c.text = append(append(append(append(c.text, m.Role...), '\n'), m.Content...), '\n')
	}
	perByte := 1 / bytesOfToken
	if r.PromptTokens > 0 && len(c.text) > 0 {
		perByte = float64(r.PromptTokens) / float64(len(c.text))
	}
	var h maphash.Hash
	h.SetSeed(c.seed)
	for from := 0; from < len(c.text); {
		to := min(from+blockBytes, len(c.text))
		h.Write(c.text[from:to]) // which never fails
		c.blocks = append(c.blocks, use{block: h.Sum64() | 1, tokens: float64(to-from) * perByte})
		from = to
	}
}

// use notes that a block is used now.
func (c *recall) use(u use) {
	u.number = c.number
	c.number++
	if u.block == 0 {
		c.tokens += u.tokens
	} else {
		if _, ok := c.held[u.block]; !ok {
			c.tokens += u.tokens
		}
		c.held[u.block] = u.number
	}
	c.uses = append(c.uses, u)
}

// last reports whether a use is its block's last.
func (c *recall) last(u use) bool { return u.block == 0 || c.held[u.block] == u.number }

// evict forgets what the cache has no room for.
func (c *recall) evict() {
	for ; c.tokens > c.capacity && c.oldest < len(c.uses); c.oldest++ {
		if u := c.uses[c.oldest]; c.last(u) {
			c.tokens -= u.tokens
			delete(c.held, u.block)
		}
	}
	if len(c.uses) < c.tidyAt {
		return
	}
	kept := c.uses[:0]
	for _, u := range c.uses[c.oldest:] {
		if c.last(u) {
			kept = append(kept, u)
		}
	}
	c.uses, c.oldest = kept, 0
	c.tidyAt = 2*len(kept) + fewUses
}

// fewUses are not worth tidying up.
const fewUses = 4096
