package sim

// A span is a run of steps in which every running request decodes one token, and no request is admitted, preempted or
// finished. A step of a span costs a few operations, however many requests run. It visits only the requests whose last
// block is full, or becomes full in this step. When the span ends, the method end updates the fields of all requests at
// once. While there is no span, stepsLeft and stepsDone are 0.
type span struct {
	stepsLeft int                // steps that the span may still have
	stepsDone int                // steps computed so far
	lastStep  float64            // end of the last step
	tokens    int                // tokens of all requests in the KV cache before the next step
	phase     [BlockSize][]int32 // indexes into running, grouped by computed tokens modulo the block size at the beginning of the span
}

// minSpan is the smallest number of steps for which it is worth setting up a span.
const minSpan = 3

// inSpan reports whether the next step belongs to a span. If possible, it begins a span.
func (e *Engine) inSpan() bool {
	if e.Each || e.Options.SpeculativeTokens > 0 || len(e.waiting) > 0 && len(e.running) < e.Options.MaxNumSeqs {
		return false
	}
	if e.span.stepsLeft > 0 {
		return true
	}
	e.span.end(e.running)
	return len(e.running) <= e.Options.MaxNumBatchedTokens && e.span.begin(e.running)
}

// begin begins a span if every running request decodes. The span ends before the first request gets its last token.
func (s *span) begin(running []*Request) bool {
	left := 0
	for i, r := range running {
		if !r.decodes() || r.Output-r.Tokens <= minSpan {
			return false
		}
		if i == 0 || r.Output-r.Tokens <= left {
			left = r.Output - r.Tokens - 1
		}
	}
	if left == 0 {
		return false
	}
	s.stepsLeft = left
	for i, r := range running {
		s.tokens += r.computed
		s.phase[r.computed%BlockSize] = append(s.phase[r.computed%BlockSize], int32(i))
	}
	return true
}

// stepSpan computes a step of a span. If too few blocks are free, it does nothing and returns false.
func (e *Engine) stepSpan(now *float64) bool {
	s := &e.span
	at := s.stepsDone % BlockSize
	full, filled := s.phase[(BlockSize-at)%BlockSize], s.phase[BlockSize-1-at]
	if len(full) > e.kv.pool.free {
		return false
	}
	e.updateBlocks(full, filled)
	n := len(e.running)
	*now += e.duration(batch{decodes: n, kvTokens: s.tokens})
	s.stepsLeft--
	s.stepsDone++
	s.lastStep = *now
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
			r.blocks = append(r.blocks, e.kv.pool.take())
			full = full[1:]
			continue
		}
		r := e.running[filled[0]]
		filled = filled[1:]
		e.kv.register(r, (r.computed+e.span.stepsDone)/BlockSize)
	}
}

// end ends the span, if there is one, and updates the fields of the running requests.
func (s *span) end(running []*Request) {
	if s.stepsLeft+s.stepsDone == 0 {
		return
	}
	if s.stepsDone > 0 {
		for _, r := range running {
			r.Tokens += s.stepsDone
			r.Chunks += s.stepsDone
			r.computed += s.stepsDone
			r.Last = s.lastStep
		}
	}
	for i := range s.phase {
		s.phase[i] = s.phase[i][:0]
	}
	s.stepsLeft, s.stepsDone, s.tokens = 0, 0, 0
}
