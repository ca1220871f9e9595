package trial

import (
	"hash/maphash"
	"slices"

	"vllmtuner/bench/workload"
)

// A recall simulates a prefix cache of a known size from the prompts that were sent, in their order. It finds a prefix
// in whole blocks, and evicts the least recently used blocks first, as vLLM does (vllm/v1/core/block_pool.py). The
// recall also simulates a cache that was empty when the probe began.
type recall struct {
	capacity float64          // tokens
	tokens   float64          // tokens in the cache, of prompts and answers
	held     []heldBlock      // the cached blocks, a ring from the least to the most recently used; held[0] marks where the ring begins and ends
	slots    map[uint64]int32 // index in held, by the hash of a block
	free     []int32          // unused slots
	asks     int32            // number of prompts so far
	began    int32            // number of prompts before the probe
	seed     maphash.Seed
	text     []byte  // text of the current prompt; empty if the prompt is given in tokens
	blocks   []block // blocks of the current prompt

	asked, carried, empty float64 // prompt tokens since the probe began: all, those found in the carried cache, and those found in a cache that began the probe empty
}

// A heldBlock is a cached block of an earlier prompt, or a whole cached answer. No prompt is expected to repeat an
// answer, so an answer's hash is 0.
type heldBlock struct {
	hash           uint64
	tokens         float64
	before, behind int32 // neighbours in the ring: the block used earlier and the block used later
	last           int32 // number of the last prompt that used this block
}

// A block is one block of the current prompt.
type block struct {
	hash   uint64 // hash of the prompt up to the end of the block
	tokens float64
	slot   int32 // index in held; 0 if the block is not held
}

func newRecall(capacity float64) *recall {
	return &recall{capacity: capacity, held: make([]heldBlock, 1), slots: make(map[uint64]int32), seed: maphash.MakeSeed()}
}

// A block has 16 tokens in vLLM, which are about 64 bytes of English text.
const (
	blockTokens  = 16
	blockBytes   = 64
	bytesOfToken = 4.0 // assumed if the length of a prompt in tokens is not known
)

// The hash of a block is computed from an idBlock (token ids) or from a textBlock.
type (
	idBlock struct {
		before uint64 // hash of all earlier blocks of the prompt
		ids    [blockTokens]int32
	}
	textBlock struct {
		before uint64
		text   string
	}
)

func (c *recall) begin() {
	c.began = c.asks
	c.asked, c.carried, c.empty = 0, 0, 0
}

// rates returns two hit rates of the probe so far. One is for the cache that was carried into the probe, the other is
// for a cache that was empty at the probe's start.
func (c *recall) rates() (carried, empty float64) {
	if c.asked == 0 {
		return 0, 0
	}
	return c.carried / c.asked, c.empty / c.asked
}

// watch returns the schedule unchanged, and passes each of its requests to the method ask. watch also works on a nil
// recall.
func (c *recall) watch(schedule workload.Schedule) workload.Schedule {
	if c == nil {
		return schedule
	}
	return func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			c.ask(a.Request)
			if !yield(a) {
				return
			}
		}
	}
}

// ask counts how much of a prompt is in the cache. Then it adds the prompt and the answer to the cache.
func (c *recall) ask(r *workload.Request) {
	c.split(r)
	carried, empty := true, true
	for i, b := range c.blocks {
		slot := c.slots[b.hash]
		carried = carried && slot > 0
		empty = empty && carried && c.held[slot].last >= c.began
		c.asked += b.tokens
		if carried {
			c.carried += b.tokens
		}
		if empty {
			c.empty += b.tokens
		}
		c.blocks[i].slot = slot
	}
	c.hold(block{tokens: float64(r.OutputTokens)})
	for _, b := range slices.Backward(c.blocks) { // backward, so that the end of a prompt is evicted before its beginning
		if b.slot > 0 {
			c.again(b.slot)
		} else {
			c.hold(b)
		}
	}
	c.asks++
	for c.tokens > c.capacity {
		c.forget(c.held[0].behind)
	}
}

// split cuts a prompt into blocks.
func (c *recall) split(r *workload.Request) {
	c.blocks = c.blocks[:0]
	before := uint64(0)
	for ids := range slices.Chunk(r.Tokens, blockTokens) {
		b := idBlock{before: before}
		copy(b.ids[:], ids)
		before = maphash.Comparable(c.seed, b) | 1
		c.blocks = append(c.blocks, block{hash: before, tokens: float64(len(ids))})
	}
	c.text = append(c.text[:0], r.Text...)
	for _, m := range r.Messages {
		c.text = append(append(append(append(c.text, m.Role...), '\n'), m.Content...), '\n')
	}
	perByte := 1 / bytesOfToken
	if r.PromptTokens > 0 {
		perByte = float64(r.PromptTokens) / float64(len(c.text))
	}
	for text := range slices.Chunk(c.text, blockBytes) {
		before = maphash.Comparable(c.seed, textBlock{before, string(text)}) | 1
		c.blocks = append(c.blocks, block{hash: before, tokens: float64(len(text)) * perByte})
	}
}

// hold adds a block as the most recently used one.
func (c *recall) hold(b block) {
	c.tokens += b.tokens
	slot := int32(len(c.held))
	if n := len(c.free); n > 0 {
		slot = c.free[n-1]
		c.free = c.free[:n-1]
	} else {
		c.held = append(c.held, heldBlock{})
	}
	if b.hash != 0 {
		c.slots[b.hash] = slot
	}
	c.held[slot] = heldBlock{hash: b.hash, tokens: b.tokens}
	c.makeLatest(slot)
}

func (c *recall) again(slot int32) {
	c.unlink(slot)
	c.makeLatest(slot)
}

// makeLatest makes a block the most recently used one, at the end of the ring.
func (c *recall) makeLatest(slot int32) {
	h, none := &c.held[slot], &c.held[0]
	h.last, h.before, h.behind = c.asks, none.before, 0
	c.held[none.before].behind = slot
	none.before = slot
}

// unlink removes a block from the ring.
func (c *recall) unlink(slot int32) {
	h := &c.held[slot]
	c.held[h.before].behind, c.held[h.behind].before = h.behind, h.before
}

// forget evicts a block.
func (c *recall) forget(slot int32) {
	h := &c.held[slot]
	c.tokens -= h.tokens
	if h.hash != 0 {
		delete(c.slots, h.hash)
	}
	c.unlink(slot)
	c.free = append(c.free, slot)
}

// Cached returns the fraction of a window's prompt tokens, 0 to 1, that a server finds in its prefix cache under the
// given protocol. It assumes that the cache is large enough for all prompts and answers.
func Cached(plan workload.Plan, cache Protocol) float64 {
	c := newRecall(defaultKVTokens)
	schedule := plan.Schedule()
	switch n := plan.Source.Len(); {
	case cache == Reset:
		schedule = workload.WithColdLeadIn(schedule, plan.Source)
	case cache == Primed && n > 0:
		for i := range n {
			c.ask(plan.Source.Request(workload.PrimeStream, i))
		}
	default:
		for i := 0; c.tokens < defaultKVTokens/2 && i < maxPrimed; i++ {
			c.ask(plan.Source.Request(workload.PrimeStream, i))
		}
	}
	begun := false
	for a := range schedule {
		if a.Phase == workload.RunOut {
			break
		}
		if a.Phase == workload.Window && !begun {
			begun = true
			c.begin()
		}
		c.ask(a.Request)
	}
	carried, _ := c.rates()
	return carried
}

// maxPrimed limits how many requests of an endless workload Cached reads to fill the cache. If all requests shared the
// same prompt, they would never fill the cache.
const maxPrimed = 2000
