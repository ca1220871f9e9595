package sim

import "slices"

// A Request is one sequence as the engine sees it. Times are in seconds of the engine's clock.
type Request struct {
	Prompt int      // tokens
	Output int      // tokens to generate
	Hashes []uint64 // one hash for each full block of the prompt, from HashBlocks
	Salt   uint64   // makes the output blocks of this request differ from those of other requests
	Tag    int      // for the caller to use

	First     float64 // end of the step that gave the first token; 0 before that step
	Last      float64 // end of the step that gave the latest token
	Tokens    int     // generated so far
	Chunks    int     // steps that gave tokens; fewer than Tokens with speculation
	Cached    int     // prompt tokens that were in the cache when the request was first admitted; -1 before its admission
	Preempted int     // how often the engine preempted the request and took its blocks away

	computed int // tokens whose KV is in blocks
	drafted  int // tokens that a drafter proposed for the current step
	blocks   []int32
	chain    uint64 // hash of the last full block
}

// Finished reports whether the request has all its tokens.
func (r *Request) Finished() bool { return r.Tokens >= r.Output }

// decodes reports whether the request's next step is a decode. It is a decode when only the last token is not computed
// yet.
func (r *Request) decodes() bool { return r.Tokens > 0 && r.computed == r.length()-1 }

// reset forgets the blocks and the computed tokens. The request must not hold the blocks any more.
func (r *Request) reset() { r.blocks, r.computed, r.chain, r.drafted = r.blocks[:0], 0, 0, 0 }

// blockHash returns the hash of the request's i-th block, which must be full. r.chain must be the hash of block i-1.
func (r *Request) blockHash(i int) uint64 {
	if i < len(r.Hashes) {
		return r.Hashes[i]
	}
	return mix(mix(r.chain, r.Salt), uint64(i))
}

// missingBlocks returns how many more blocks the request needs to compute n more tokens.
func (r *Request) missingBlocks(n int) int {
	return (r.computed+n+BlockSize-1)/BlockSize - len(r.blocks)
}

// length returns how many tokens must be computed before the next token can be generated.
func (r *Request) length() int { return r.Prompt + r.Tokens }

// Totals are the engine's counters since its start.
type Totals struct {
	PrefixQueries, PrefixHits      int // tokens
	PromptTokens, GenerationTokens int
	Preemptions, Finished          int
	Steps                          int

	Drafts, DraftTokens, AcceptedTokens int   // number of drafts, of tokens in them, and of draft tokens that the model accepted
	AcceptedPerPos                      []int // accepted tokens by their position in the draft; nil without speculation
}

// An Engine is vLLM V1's scheduler and KV cache in virtual time. It schedules first come first served, with chunked
// prefill, prefix caching, preemption by recomputing, and speculative decoding. It is deterministic and not safe for
// concurrent use.
type Engine struct {
	Profile *Profile
	Options Options
	Seed    uint64 // decides the noise in the step times and the acceptance of drafts
	Totals  Totals
	Served  int        // requests that got tokens in the last step
	Emitted []*Request // requests that got their first or last token in the last step; if Each is set, all served requests; valid until the next step

	// NoAcceptance makes the model reject every draft token.
	NoAcceptance bool

	// Each, when set, makes every step put all served requests into Emitted and update their fields. The cost is in
	// proportion to the number of running requests.
	Each bool

	kv      kvCache
	waiting []*Request
	running []*Request
	span    span
	steps   *stepTimer
}

// NewEngine returns an idle engine with an empty cache. Its error is a *StartError if vLLM would not start, and a
// *ConfigError if the options cannot be simulated.
func NewEngine(p *Profile, o Options) (*Engine, error) {
	if err := p.checkSimulated(o); err != nil {
		return nil, err
	}
	tokens, err := p.KVTokens(o)
	if err != nil {
		return nil, err
	}
	kv := kvCache{pool: newBlockPool(tokens / BlockSize), caching: !o.NoPrefixCaching}
	e := &Engine{Profile: p, Options: o, kv: kv, steps: newStepTimer(p, o)}
	if o.SpeculativeTokens > 0 {
		e.Totals.AcceptedPerPos = make([]int, o.SpeculativeTokens)
	}
	return e, nil
}

// Submit appends a request to the queue.
func (e *Engine) Submit(r *Request) {
	r.Cached = -1
	e.waiting = append(e.waiting, r)
}

// Running returns the number of running requests.
func (e *Engine) Running() int { return len(e.running) }

// Waiting returns the number of waiting requests.
func (e *Engine) Waiting() int { return len(e.waiting) }

// InFlight returns the running requests with up-to-date fields.
func (e *Engine) InFlight() []*Request {
	e.span.end(e.running)
	return e.running
}

// Idle reports whether nothing runs or waits.
func (e *Engine) Idle() bool { return len(e.running)+len(e.waiting) == 0 }

// KVTokens returns the size of the KV cache in tokens.
func (e *Engine) KVTokens() int { return e.kv.pool.total() * BlockSize }

// KVUsage returns the fraction of the blocks that requests hold, from 0 to 1.
func (e *Engine) KVUsage() float64 { return e.kv.usage() }

// ResetCache empties the prefix cache. It fails, and returns false, while a request holds a block.
func (e *Engine) ResetCache() bool { return e.kv.reset() }

// Abort drops a request that waits or runs.
func (e *Engine) Abort(r *Request) {
	e.span.end(e.running)
	if i := slices.Index(e.waiting, r); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
	}
	if i := slices.Index(e.running, r); i >= 0 {
		e.running = slices.Delete(e.running, i, i+1)
		e.kv.release(r)
	}
}

// AbortAll drops every request.
func (e *Engine) AbortAll() {
	e.span.end(e.running)
	for _, r := range e.running {
		e.kv.release(r)
	}
	clear(e.running)
	clear(e.waiting)
	e.running, e.waiting = e.running[:0], e.waiting[:0]
}

// Step schedules and computes one step, which begins at the engine's time now. It returns the time when the step ends.
// If there is nothing to do, it returns its argument.
func (e *Engine) Step(now float64) float64 {
	e.Served, e.Emitted = 0, e.Emitted[:0]
	if e.inSpan() && e.stepSpan(&now) {
		return now
	}
	e.span.end(e.running)
	return e.step(now)
}

// step computes one step without a span (see the type span): it visits every running and waiting request.
func (e *Engine) step(now float64) float64 {
	budget := e.Options.MaxNumBatchedTokens
	var b batch
	preempted := e.scheduleRunning(&b, &budget)
	if !preempted {
		e.admit(&b, &budget)
	}
	if b.decodes+b.prefillTokens == 0 {
		return now
	}
	end := now + e.duration(b)
	e.emit(end)
	return end
}

// duration returns how long the next step takes, in seconds, and counts the step.
func (e *Engine) duration(b batch) float64 {
	ms := e.steps.milliseconds(b)
	e.Totals.Steps++
	return e.Profile.Noise.add(ms, e.Seed, e.Totals.Steps) / 1000
}

// scheduleRunning gives every running request its tokens for this step. A decode gets one token and its draft. A
// prefill gets all its missing tokens, or what is left of the budget (the tokens that the step may still compute).
// scheduleRunning reports whether it preempted a request.
func (e *Engine) scheduleRunning(b *batch, budget *int) (preempted bool) {
	for i := 0; i < len(e.running) && *budget > 0; i++ {
		r := e.running[i]
		n := min(r.length()-r.computed, *budget)
		if r.decodes() {
			n = min(1+e.Options.SpeculativeTokens, *budget, e.Options.MaxModelLen-r.computed)
		}
		for !e.kv.reserve(r, n) {
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

// admit moves waiting requests to the running ones while the step has budget, a free slot, and room for their next
// chunk.
func (e *Engine) admit(b *batch, budget *int) {
	taken := 0
	for _, r := range e.waiting {
		if *budget == 0 || len(e.running) >= e.Options.MaxNumSeqs {
			break
		}
		unheld := e.lookUp(r)
		n := min(r.length()-r.computed, *budget)
		if r.missingBlocks(n)+unheld > e.kv.pool.free {
			r.reset()
			break
		}
		e.kv.pool.hold(r.blocks)
		e.kv.reserve(r, n)
		if r.Cached < 0 {
			r.Cached = r.computed
			e.Totals.PromptTokens += r.Prompt
		}
		e.compute(r, n, b)
		*budget -= n
		e.running = append(e.running, r)
		taken++
	}
	e.waiting = slices.Delete(e.waiting, 0, taken)
}

// lookUp finds the request's cached blocks (kvCache.find) and counts the lookup. The result unheld is the number of
// these blocks that no request holds. As in vLLM, a lookup counts even if the request then does not fit. Only the
// lookups of preempted requests are not counted (get_computed_blocks in vllm/v1/core/kv_cache_manager.py, 0.14.1).
func (e *Engine) lookUp(r *Request) (unheld int) {
	if !e.kv.caching {
		return 0
	}
	unheld = e.kv.find(r)
	if r.Preempted == 0 {
		e.Totals.PrefixQueries += r.length()
		e.Totals.PrefixHits += r.computed
	}
	return unheld
}

// compute puts n tokens of the request into the batch. Draft tokens enter the cache only when they are accepted.
func (e *Engine) compute(r *Request, n int, b *batch) {
	if r.decodes() {
		b.decodes++
		b.kvTokens += r.computed
		b.draftTokens += n - 1
		r.drafted = n - 1
		n = 1
	} else {
		b.prefillTokens += n
		b.attentionPairs += float64(n) * (float64(r.computed) + float64(n)/2)
	}
	e.kv.advance(r, n)
}

// preempt moves the last running request back to the front of the queue. Its blocks stay in the cache until another
// request takes them.
func (e *Engine) preempt(r *Request) {
	e.running = e.running[:len(e.running)-1]
	e.kv.release(r)
	r.Preempted++
	e.waiting = slices.Insert(e.waiting, 0, r)
	e.Totals.Preemptions++
}

// emit gives new tokens to every running request whose tokens are all computed, and releases the finished requests.
func (e *Engine) emit(end float64) {
	kept := e.running[:0]
	for _, r := range e.running {
		if r.computed == r.length() {
			e.give(r, end)
		}
		if r.Finished() {
			e.Totals.Finished++
			e.kv.release(r)
			continue
		}
		kept = append(kept, r)
	}
	clear(e.running[len(kept):])
	e.running = kept
}

// give gives a request the tokens of a step: one token, plus the accepted draft tokens.
func (e *Engine) give(r *Request, end float64) {
	first := r.Tokens == 0
	if first {
		r.First = end
	}
	n := min(1+e.accept(r), r.Output-r.Tokens)
	e.kv.advance(r, n-1)
	r.Tokens += n
	r.Chunks++
	r.Last = end
	e.Totals.GenerationTokens += n
	e.Served++
	if first || r.Finished() || e.Each {
		e.Emitted = append(e.Emitted, r)
	}
}
