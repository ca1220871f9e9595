package otherengine

import (
	"container/list"

	"vllmtuner/bench/workload"
)

// chunk is the number of prompt tokens that the prefix cache holds or drops together.
const chunk = 128

// A cache holds chunks of prompts, each with all that precedes it. The least recently used is dropped first.
type cache struct {
	order *list.List // the most recently used first
	at    map[uint64]*list.Element
}

func newCache() *cache { return &cache{list.New(), map[uint64]*list.Element{}} }

// has returns how many chunks at the beginning of a prompt are cached.
func (c *cache) has(chunks []uint64) int {
	for i, hash := range chunks {
		if c.at[hash] == nil {
			return i
		}
	}
	return len(chunks)
}

// add makes chunks the most recently used; the beginning of a prompt stays longer than its end.
func (c *cache) add(chunks []uint64) {
	for i := len(chunks) - 1; i >= 0; i-- {
		hash := chunks[i]
		if c.at[hash] == nil {
			c.at[hash] = c.order.PushFront(hash)
		}
		c.order.MoveToFront(c.at[hash])
	}
}

// keep drops all but n chunks.
func (c *cache) keep(n int) {
	for c.order.Len() > n {
		last := c.order.Back()
		delete(c.at, c.order.Remove(last).(uint64))
	}
}

// chunksOf returns a hash for each full chunk of a prompt, which covers the prompt up to there. The last token is always
// computed.
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
