package otherengine

import (
	"container/list"

	"vllmtuner/bench/workload"
)

// chunk is the number of prompt tokens that the prefix cache holds or drops together.
const chunk = 128

// A cache holds chunks of prompts. The hash of a chunk covers all tokens before it too, so a chunk is found only in
// prompts with the same beginning. The least recently used chunk is dropped first.
type cache struct {
	order *list.List // hashes of the chunks, the most recently used first
	at    map[uint64]*list.Element
}

func newCache() *cache { return &cache{list.New(), map[uint64]*list.Element{}} }

// has counts the cached chunks at the beginning of a prompt, up to the first chunk that is not cached.
func (c *cache) has(chunks []uint64) int {
	for i, hash := range chunks {
		if c.at[hash] == nil {
			return i
		}
	}
	return len(chunks)
}

// add makes the chunks of a prompt the most recently used. The chunks at the end of the prompt will be dropped before
// the chunks at its beginning.
func (c *cache) add(chunks []uint64) {
	for i := len(chunks) - 1; i >= 0; i-- {
		hash := chunks[i]
		if c.at[hash] == nil {
			c.at[hash] = c.order.PushFront(hash)
		}
		c.order.MoveToFront(c.at[hash])
	}
}

// keep drops chunks until at most n are left.
func (c *cache) keep(n int) {
	for c.order.Len() > n {
		last := c.order.Back()
		delete(c.at, c.order.Remove(last).(uint64))
	}
}

// chunksOf returns a hash for each full chunk of a prompt. A hash covers the prompt from its beginning to the end of
// the chunk. A chunk that holds the last token is left out, so that at least one token is computed.
func chunksOf(q *workload.Request) []uint64 {
	var chunks []uint64
	hash := uint64(14695981039346656037)
	for i, id := range q.Tokens {
		hash = (hash ^ uint64(id)) * 1099511628211
		hash ^= hash >> 29
		if (i+1)%chunk == 0 && i+1 < len(q.Tokens) {
			chunks = append(chunks, hash)
		}
	}
	return chunks
}
