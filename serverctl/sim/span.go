package sim

// A span is a run of steps in which every running request decodes one token, and no request is admitted, preempted or
// finished. A step of a span costs a few operations, however many requests run. It visits only the requests whose last
// block is full, or becomes full in this step. endSpan then updates the fields of all requests at once.
type span struct {
	left   int                // steps that the span may still have
	steps  int                // steps computed so far
	end    float64            // end of the last step
	tokens int                // tokens of all requests in the KV cache before the next step
	phase  [BlockSize][]int32 // indexes into running, grouped by computed tokens modulo the block size at the beginning of the span
}

// minSpan is the smallest number of steps for which it is worth setting up a span.
const minSpan = 3

// inSpan reports whether the next step belongs to a span. If possible, it begins a span.
func (e *Engine) inSpan() bool {
	if e.Each || e.Options.SpeculativeTokens > 0 || len(e.waiting) > 0 && len(e.running) < e.Options.MaxNumSeqs {
		return false
	}
	if e.span.left > 0 {
		return true
	}
	e.endSpan()
	return e.beginSpan()
}

// beginSpan begins a span when every running request decodes. The span ends before the first request gets its last
// token.
func (e *Engine) beginSpan() bool {
	s := &e.span
	left := 0
	for i, r := range e.running {
		if !r.decodes() || r.Output-r.Tokens <= minSpan {
			return false
		}
		if i == 0 || r.Output-r.Tokens <= left {
			left = r.Output - r.Tokens - 1
		}
	}
	if left == 0 || len(e.running) > e.Options.MaxNumBatchedTokens {
		return false
	}
	s.left = left
	for i, r := range e.running {
		s.tokens += r.computed
		s.phase[r.computed%BlockSize] = append(s.phase[r.computed%BlockSize], int32(i))
	}
	return true
}

// stepSpan computes a step of a span. If too few blocks are free, it does nothing and returns false.
func (e *Engine) stepSpan(now *float64) bool {
	s := &e.span
	at := s.steps % BlockSize
	full, filled := s.phase[(BlockSize-at)%BlockSize], s.phase[BlockSize-1-at]
	if len(full) > e.pool.free {
		return false
	}
	e.updateBlocks(full, filled)
	n := len(e.running)
	*now += e.duration(batch{decodes: n, kvTokens: s.tokens})
	s.left--
	s.steps++
	s.end = *now
	s.tokens += n
	e.Served = n
	e.Totals.GenerationTokens += n
	return true
}

// updateBlocks gives a block to each request whose last block is full, and registers the blocks that this step fills.
// It goes through the requests in the order of running, as the method step does.
func (e *Engine) updateBlocks(full, filled []int32) {
	for len(full)+len(filled) > 0 {
		if len(filled) == 0 || len(full) > 0 && full[0] < filled[0] {
			r := e.running[full[0]]
			r.blocks = append(r.blocks, e.pool.take())
			full = full[1:]
			continue
		}
		r := e.running[filled[0]]
		filled = filled[1:]
		if e.caching {
			i := (r.computed + e.span.steps) / BlockSize
			r.chain = e.blockHash(r, i)
			e.pool.register(r.blocks[i], r.chain)
		}
	}
}

// endSpan ends the span, if there is one, and updates the fields of the running requests.
func (e *Engine) endSpan() {
	s := &e.span
	if s.left+s.steps == 0 {
		return
	}
	if s.steps > 0 {
		for _, r := range e.running {
			r.Tokens += s.steps
			r.Chunks += s.steps
			r.computed += s.steps
			r.Last = s.end
		}
	}
	for i := range s.phase {
		s.phase[i] = s.phase[i][:0]
	}
	s.left, s.steps, s.tokens = 0, 0, 0
}
