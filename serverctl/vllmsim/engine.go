package vllmsim

import "slices"

// A Request is one sequence as the engine sees it. Times are in seconds of the engine's clock.
type Request struct {
	Prompt int      // tokens
	Output int      // tokens to generate
	Hashes []uint64 // content of each full block of the prompt, chained as by HashBlocks
	Salt   uint64   // makes the content of the output blocks its own
	Tag    int      // for the caller

	First    float64 // end of the step that gave the first token; 0 before
	Last     float64 // end of the step that gave the last token so far
	Tokens   int     // generated so far
	Cached   int     // prompt tokens found in the cache when first admitted; -1 before
	computed int     // tokens whose KV is in blocks
	blocks   []int32
	chain    uint64 // hash of the last full block
}

// Finished reports whether the request has all its tokens.
func (r *Request) Finished() bool { return r.Tokens >= r.Output }

// length is how many tokens have to be computed before the next one can be generated.
func (r *Request) length() int { return r.Prompt + r.Tokens }

// Totals are the engine's counters since its start.
type Totals struct {
	PrefixQueries, PrefixHits      int // tokens
	PromptTokens, GenerationTokens int
	Preemptions, Finished          int
	Steps                          int

	Drafts, DraftTokens, AcceptedTokens int   // proposals of a drafter, their tokens, and those that the model took
	AcceptedPerPos                      []int // accepted tokens by their place in the proposal; nil without speculation
}

// An Engine is vLLM V1's scheduler and KV cache in virtual time: first come first served, chunked prefill, prefix caching,
// preemption by recomputing. It is deterministic and not safe for concurrent use.
type Engine struct {
	Profile *Profile
	Options Options
	Totals  Totals
	Emitted []*Request // those that got a token in the last step; valid until the next

	pool    *blockPool
	waiting []*Request
	running []*Request
	hits    bool // prefix caching is on
}

// NewEngine returns an idle engine with an empty cache, or a *StartError when vLLM would refuse to start.
func NewEngine(p *Profile, o Options) (*Engine, error) {
	tokens, err := p.KVTokens(o)
	if err != nil {
		return nil, err
	}
	return &Engine{Profile: p, Options: o, pool: newBlockPool(tokens / blockSize), hits: !o.NoPrefixCaching}, nil
}

// Submit queues a request.
func (e *Engine) Submit(r *Request) {
	r.Cached = -1
	e.waiting = append(e.waiting, r)
}

// Running returns the number of running requests.
func (e *Engine) Running() int { return len(e.running) }

// Waiting returns the number of waiting requests.
func (e *Engine) Waiting() int { return len(e.waiting) }

// Idle reports whether nothing runs or waits.
func (e *Engine) Idle() bool { return len(e.running)+len(e.waiting) == 0 }

// KVTokens returns the size of the KV cache in tokens.
func (e *Engine) KVTokens() int { return e.pool.total() * blockSize }

// KVUsage returns the part of the blocks that is held, 0 to 1.
func (e *Engine) KVUsage() float64 { return 1 - float64(e.pool.free)/float64(e.pool.total()) }

// ResetCache empties the prefix cache and reports whether it could: no block may be held.
func (e *Engine) ResetCache() bool {
	if e.pool.free != e.pool.total() {
		return false
	}
	e.pool.reset()
	return true
}

// Abort drops a request, wherever it is.
func (e *Engine) Abort(r *Request) {
	if i := slices.Index(e.waiting, r); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
	}
	if i := slices.Index(e.running, r); i >= 0 {
		e.running = slices.Delete(e.running, i, i+1)
		e.release(r)
	}
}

// AbortAll drops every request.
func (e *Engine) AbortAll() {
	for _, r := range e.running {
		e.release(r)
	}
	clear(e.running)
	clear(e.waiting)
	e.running, e.waiting = e.running[:0], e.waiting[:0]
}

// Step schedules and computes one step that begins at now, and returns when it ends. Nothing to do returns now.
func (e *Engine) Step(now float64) float64 {
	e.Emitted = e.Emitted[:0]
	budget := e.Options.MaxNumBatchedTokens
	var b batch
	preempted := e.scheduleRunning(&b, &budget)
	if !preempted {
		e.admit(&b, &budget)
	}
	if b.decodes+b.prefillTokens == 0 {
		return now
	}
	end := now + e.Profile.Step.Milliseconds(b)/1000
	e.Totals.Steps++
	e.emit(end)
	return end
}

// scheduleRunning gives every running request its tokens of this step: one for a decode, the rest of the budget for a
// prefill that is not through. It reports whether one had to be preempted.
func (e *Engine) scheduleRunning(b *batch, budget *int) (preempted bool) {
	for i := 0; i < len(e.running) && *budget > 0; i++ {
		r := e.running[i]
		n := min(r.length()-r.computed, *budget)
		for !e.reserve(r, n) {
			last := e.running[len(e.running)-1]
			e.preempt(last)
			preempted = true
			if last == r {
				return true
			}
		}
		e.compute(r, n, b)
		*budget -= n
	}
	return preempted
}

// admit takes waiting requests in while there is budget, a free place and room for their next chunk.
func (e *Engine) admit(b *batch, budget *int) {
	taken := 0
	for _, r := range e.waiting {
		if *budget == 0 || len(e.running) >= e.Options.MaxNumSeqs {
			break
		}
		e.findCached(r)
		n := min(r.length()-r.computed, *budget)
		if !e.reserve(r, n) {
			e.release(r)
			break
		}
		if r.Cached < 0 {
			r.Cached = r.computed
			e.Totals.PromptTokens += r.Prompt
		}
		e.Totals.PrefixQueries += r.length()
		e.Totals.PrefixHits += r.computed
		e.compute(r, n, b)
		*budget -= n
		e.running = append(e.running, r)
		taken++
	}
	e.waiting = slices.Delete(e.waiting, 0, taken)
}

// findCached holds the longest run of the request's full blocks that the cache has, one token less than all of them at most.
func (e *Engine) findCached(r *Request) {
	if !e.hits {
		return
	}
	for i := 0; (i+1)*blockSize < r.length(); i++ {
		hash := e.blockHash(r, i)
		block, ok := e.pool.share(hash)
		if !ok {
			return
		}
		r.blocks = append(r.blocks, block)
		r.computed += blockSize
		r.chain = hash
	}
}

// blockHash returns the content of the request's i-th block, which must be full. r.chain must be that of block i-1.
func (e *Engine) blockHash(r *Request, i int) uint64 {
	if i < len(r.Hashes) {
		return r.Hashes[i]
	}
	return mix(mix(r.chain, r.Salt), uint64(i))
}

// reserve makes sure that the request has blocks for n more tokens, or leaves everything as it is.
func (e *Engine) reserve(r *Request, n int) bool {
	need := (r.computed+n+blockSize-1)/blockSize - len(r.blocks)
	if need > e.pool.free {
		return false
	}
	for range need {
		r.blocks = append(r.blocks, e.pool.take())
	}
	return true
}

// compute puts n tokens of the request into the batch and registers the blocks they fill.
func (e *Engine) compute(r *Request, n int, b *batch) {
	if n == 1 && r.Tokens > 0 && r.computed == r.length()-1 {
		b.decodes++
		b.kvTokens += r.computed
	} else {
		b.prefillTokens += n
		b.attentionPairs += float64(n) * (float64(r.computed) + float64(n)/2)
	}
	first := r.computed / blockSize
	r.computed += n
	if !e.hits {
		return
	}
	for i := first; i < r.computed/blockSize; i++ {
		r.chain = e.blockHash(r, i)
		e.pool.register(r.blocks[i], r.chain)
	}
}

// preempt puts the last running request back to the front of the queue. What it has computed stays in the cache
// for as long as nobody takes it.
func (e *Engine) preempt(r *Request) {
	e.running = e.running[:len(e.running)-1]
	e.release(r)
	e.waiting = slices.Insert(e.waiting, 0, r)
	e.Totals.Preemptions++
}

func (e *Engine) release(r *Request) {
	e.pool.release(r.blocks)
	r.blocks, r.computed, r.chain = r.blocks[:0], 0, 0
}

// emit gives a token to every running request that is computed up to its end, and lets the finished ones go.
func (e *Engine) emit(end float64) {
	kept := e.running[:0]
	for _, r := range e.running {
		if r.computed == r.length() {
			if r.Tokens == 0 {
				r.First = end
			}
			r.Tokens++
			r.Last = end
			e.Totals.GenerationTokens++
			e.Emitted = append(e.Emitted, r)
		}
		if r.Finished() {
			e.Totals.Finished++
			e.release(r)
			continue
		}
		kept = append(kept, r)
	}
	clear(e.running[len(kept):])
	e.running = kept
}
