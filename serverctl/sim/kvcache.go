package sim

import "slices"

// A kvCache gives blocks of the pool to requests. With prefix caching, requests with equal prefixes share blocks
// (vllm/v1/core/kv_cache_manager.py, 0.14.1).
type kvCache struct {
	pool    *blockPool
	caching bool // prefix caching is on
}

// usage returns the fraction of the blocks that requests hold, from 0 to 1.
func (c *kvCache) usage() float64 { return 1 - float64(c.pool.free)/float64(c.pool.total()) }

// reset forgets the content of all blocks. It does nothing and returns false while a request holds a block.
func (c *kvCache) reset() bool {
	if c.pool.free != c.pool.total() {
		return false
	}
	c.pool.reset()
	return true
}

// find gives the request its longest run of full blocks that are in the cache. The result unheld is the number of these
// blocks that no request holds. The request does not hold the blocks yet. find leaves at least one token to compute.
func (c *kvCache) find(r *Request) (unheld int) {
	r.blocks = slices.Grow(r.blocks, (r.length()+r.Output-r.Tokens)/BlockSize+1) // one allocation for all blocks that the request will ever need
	block := int32(-1)
	for i := 0; (i+1)*BlockSize < r.length(); i++ {
		hash, ok := r.blockHash(i), false
		if block, ok = c.pool.find(hash, block); !ok {
			return unheld
		}
		if c.pool.refs[block] == 0 {
			unheld++
		}
		r.blocks = append(r.blocks, block)
		r.computed += BlockSize
		r.chain = hash
	}
	return unheld
}

// reserve gives the request blocks for n more tokens. If too few blocks are free, it changes nothing and returns false.
func (c *kvCache) reserve(r *Request, n int) bool {
	need := r.missingBlocks(n)
	if need > c.pool.free {
		return false
	}
	for range need {
		r.blocks = append(r.blocks, c.pool.take())
	}
	return true
}

// advance counts n tokens of the request as computed, and registers the blocks that they fill.
func (c *kvCache) advance(r *Request, n int) {
	first := r.computed / BlockSize
	r.computed += n
	for i := first; i < r.computed/BlockSize; i++ {
		c.register(r, i)
	}
}

// register makes the request's i-th block, which is full now, available to other requests.
func (c *kvCache) register(r *Request, i int) {
	if !c.caching {
		return
	}
	r.chain = r.blockHash(i)
	c.pool.register(r.blocks[i], r.chain)
}

// release takes all blocks from the request. Their content stays in the cache until the pool's method take reuses the
// blocks.
func (c *kvCache) release(r *Request) {
	c.pool.release(r.blocks)
	r.reset()
}
