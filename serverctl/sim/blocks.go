package sim

// A blockPool is the KV cache in blocks of 16 tokens. Its free list begins with the least recently used block. A freed
// block keeps its content. The block can be found by the content's hash until another request takes the block
// (vllm/v1/core/block_pool.py, 0.14.1).
type blockPool struct {
	next, prev []int32 // free list, linked in both directions; an extra entry after the last block marks the list's begin and end
	refs       []int32 // how many sequences hold the block
	hash       []uint64
	byHash     map[uint64]int32
	successor  []int32 // successor[b] is the block that the method find returned latest for the place after block b; this guess saves lookups in byHash
	free       int
}

func newBlockPool(n int) *blockPool {
	p := &blockPool{
		next: make([]int32, n+1), prev: make([]int32, n+1),
		refs: make([]int32, n), hash: make([]uint64, n), byHash: make(map[uint64]int32, n), successor: make([]int32, n), free: n,
	}
	for i := range int32(n + 1) {
		p.next[i], p.prev[i] = (i+1)%int32(n+1), (i+int32(n))%int32(n+1)
	}
	return p
}

// total returns the number of blocks.
func (p *blockPool) total() int { return len(p.refs) }

func (p *blockPool) unlink(b int32) {
	p.next[p.prev[b]], p.prev[p.next[b]] = p.next[b], p.prev[b]
	p.free--
}

// take removes the least recently used free block from the list and returns it. At least one block must be free.
func (p *blockPool) take() int32 {
	b := p.next[len(p.refs)]
	p.unlink(b)
	p.forget(b)
	p.refs[b] = 1
	return b
}

func (p *blockPool) forget(b int32) {
	if h := p.hash[b]; h != 0 {
		delete(p.byHash, h)
		p.hash[b] = 0
	}
}

// find returns the block with the given hash, if that block is cached. The parameter previous is the block before it in
// the sequence; -1 means that there is none.
func (p *blockPool) find(hash uint64, previous int32) (int32, bool) {
	b, ok := int32(0), false
	if previous >= 0 {
		b = p.successor[previous]
		ok = p.hash[b] == hash
	}
	if !ok {
		if b, ok = p.byHash[hash]; !ok {
			return 0, false
		}
		if previous >= 0 {
			p.successor[previous] = b
		}
	}
	return b, true
}

// hold adds one to the number of sequences that hold each of the blocks. The blocks must come from the method find.
func (p *blockPool) hold(blocks []int32) {
	for _, b := range blocks {
		if p.refs[b] == 0 {
			p.unlink(b)
		}
		p.refs[b]++
	}
}

// register stores the hash of a block's content. If several blocks have the same content, the method find returns the
// first.
func (p *blockPool) register(b int32, hash uint64) {
	if _, ok := p.byHash[hash]; ok || p.hash[b] != 0 {
		return
	}
	p.hash[b] = hash
	p.byHash[hash] = b
}

// release frees the blocks of one sequence, unless other sequences hold them. It goes from the last block to the first,
// so that the method take reuses the ends of sequences before their beginnings.
func (p *blockPool) release(blocks []int32) {
	anchor := int32(len(p.refs))
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if p.refs[b]--; p.refs[b] > 0 {
			continue
		}
		last := p.prev[anchor]
		p.next[last], p.prev[b], p.next[b], p.prev[anchor] = b, last, anchor, b
		p.free++
	}
}

// reset forgets the content of all blocks. Every block must be free.
func (p *blockPool) reset() {
	clear(p.byHash)
	clear(p.hash)
}
