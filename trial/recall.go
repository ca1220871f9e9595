package trial

import (
	"hash/maphash"
	"slices"

	"vllmtuner/bench/workload"
)

// A recall is what of the prompts sent so far a prefix cache of a known size still holds, by the order in which they were sent: a
// prefix is found in whole blocks, and the blocks that were used least recently go first, as in vLLM (vllm/v1/core/block_pool.py).
// Beside it stands what a cache would hold that was empty when the probe began: the later uses are the same for both.
type recall struct {
	capacity float64          // tokens
	tokens   float64          // held, of prompts and answers
	held     []held           // a ring from the least to the most recently used; held[0] is none, and stands where the two meet
	places   map[uint64]int32 // in held, by the hash of a block
	free     []int32          // places
	asks     int32            // prompts so far
	began    int32            // how many there were when the probe began
	seed     maphash.Seed
	text     []byte  // of the prompt at hand, unless it is given in tokens
	blocks   []block // likewise

	asked, carried, empty float64 // tokens of prompts since the probe began, and how many of them either cache held
}

// A held is one block of a prompt that was asked, or a whole answer, which nobody asks for again; its hash is 0.
type held struct {
	hash           uint64
	tokens         float64
	before, behind int32 // neighbours in the ring: used earlier, used later
	last           int32 // ask that used it
}

// A block is one of the prompt at hand.
type block struct {
	hash   uint64 // of everything up to its end
	tokens float64
	place  int32 // in held; 0 where it is not
}

func newRecall(capacity float64) *recall {
	return &recall{capacity: capacity, held: make([]held, 1), places: make(map[uint64]int32), seed: maphash.MakeSeed()}
}

// A block has 16 tokens in vLLM, and so many bytes of an English text.
const (
	blockTokens  = 16
	blockBytes   = 64
	bytesOfToken = 4.0 // where the length of a prompt in tokens is not known
)

// What the hash of a block is taken of.
type (
	idBlock struct {
		before uint64 // hash of all before
		ids    [blockTokens]int32
	}
	textBlock struct {
		before uint64
		text   string
	}
)

// begin begins a probe.
func (c *recall) begin() {
	c.began = c.asks
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
	for i, b := range c.blocks {
		place := c.places[b.hash]
		carried = carried && place > 0
		empty = empty && carried && c.held[place].last >= c.began
		c.asked += b.tokens
		if carried {
			c.carried += b.tokens
		}
		if empty {
			c.empty += b.tokens
		}
		c.blocks[i].place = place
	}
	c.hold(block{tokens: float64(r.OutputTokens)})
	for _, b := range slices.Backward(c.blocks) { // the end of a prompt goes before its beginning
		if b.place > 0 {
			c.again(b.place)
		} else {
			c.hold(b)
		}
	}
	c.asks++
	for c.tokens > c.capacity {
		c.forget(c.held[0].behind)
	}
}

// split makes the blocks of a prompt.
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

// hold takes a block in that was not held.
func (c *recall) hold(b block) {
	c.tokens += b.tokens
	place := int32(len(c.held))
	if n := len(c.free); n > 0 {
		place = c.free[n-1]
		c.free = c.free[:n-1]
	} else {
		c.held = append(c.held, held{})
	}
	if b.hash != 0 {
		c.places[b.hash] = place
	}
	c.held[place] = held{hash: b.hash, tokens: b.tokens}
	c.latest(place)
}

// again uses a held block once more.
func (c *recall) again(place int32) {
	c.leave(place)
	c.latest(place)
}

// latest puts a block at the end of the ring.
func (c *recall) latest(place int32) {
	h, none := &c.held[place], &c.held[0]
	h.last, h.before, h.behind = c.asks, none.before, 0
	c.held[none.before].behind = place
	none.before = place
}

// leave takes a block out of the ring.
func (c *recall) leave(place int32) {
	h := &c.held[place]
	c.held[h.before].behind, c.held[h.behind].before = h.behind, h.before
}

// forget gives a block up.
func (c *recall) forget(place int32) {
	h := &c.held[place]
	c.tokens -= h.tokens
	if h.hash != 0 {
		delete(c.places, h.hash)
	}
	c.leave(place)
	c.free = append(c.free, place)
}
