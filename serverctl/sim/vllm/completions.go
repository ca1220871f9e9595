package vllm

import (
	"net/http"
	"time"

	"vllmtuner/serverctl/sim"
)

// generate reads a request, gives its sequences to the engine, and answers as their tokens come.
func (a *api) generate(w http.ResponseWriter, r *http.Request) {
	c, refusal := a.readCompletion(w, r)
	if refusal != nil {
		refusal.write(w)
		return
	}
	if c.stream { // the content type is set now, because a later error of the engine becomes a chunk of the stream
		w.Header().Set("Content-Type", eventStream)
	}
	time.Sleep(sim.Seconds(a.live.engine.Profile.Latency.BeforeScheduling / 1000))
	o := a.live.engine.Options
	s := &answer{
		w: w, shapes: shapesOf(a.release), model: o.Model, chat: c.chat,
		usage: c.usage, always: c.allUsage, details: o.TokenDetails,
	}
	for _, tokens := range c.prompts {
		s.prompt += len(tokens)
		hashes, group := sim.HashBlocks(tokens), &group{n: c.n, left: c.n}
		for range c.n {
			s.id = a.lastID.Add(1)
			request := &sim.Request{Prompt: len(tokens), Output: c.output, Hashes: hashes, Salt: s.id}
			s.sequences = append(s.sequences, &sequence{request: request, group: group, arrived: c.arrived})
		}
	}
	s.sent = make([]int, len(s.sequences))
	updates := a.live.submit(s.sequences)
	defer a.live.abort(s.sequences)
	var batch []update
	begun := false
	for left := len(s.sequences); left > 0; {
		select {
		case <-r.Context().Done():
			return
		case <-updates.ready:
		}
		batch = updates.take(batch)
		for _, u := range batch {
			if c.stream && !begun && s.begin(true) != nil || c.stream && s.tokens(u) != nil {
				return
			}
			begun = true
			if u.last {
				left--
			}
		}
	}
	if !c.stream {
		s.whole()
		return
	}
	_ = s.end() // fails when the client has disconnected
}
