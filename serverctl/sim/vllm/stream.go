package vllm

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// An answer is the answer to one request: one or several sequences, as one body or as a stream of chunks.
type answer struct {
	w       http.ResponseWriter
	release *release
	id      uint64
	model   string
	chat    bool
	usage   bool // a stream ends with a usage chunk
	always  bool // and every chunk has its usage
	details bool // usage tells the cached tokens

	sequences []*sequence
	prompt    int   // tokens of all prompts
	sent      []int // tokens of each sequence so far

	chunk, role template
	buf         []byte
}

// eventStream is the type of a streamed answer.
const eventStream = "text/event-stream; charset=utf-8"

// fixed returns the replacer of the fields that are the same in all chunks of an answer.
func (s *answer) fixed(stream bool) *strings.Replacer {
	object, prefix := "text_completion", "cmpl"
	if s.chat {
		object, prefix = "chat.completion", "chatcmpl"
		if stream {
			object += ".chunk"
		}
	}
	return strings.NewReplacer("{id}", fmt.Sprintf("%s-%016x", prefix, s.id), "{object}", object, "{created}", strconv.FormatInt(time.Now().Unix(), 10))
}

// begin prepares the chunks of a stream. It sends the role chunks of a chat, which vLLM sends with the first token and not before.
func (s *answer) begin() error {
	a, fixed := &s.release.answers, s.fixed(true)
	if !s.chat {
		s.chunk = newTemplate(a.completionChunk, fixed)
		return nil
	}
	s.chunk, s.role = newTemplate(a.chatChunk, fixed), newTemplate(a.roleChunk, fixed)
	for i := range s.sequences {
		if err := s.send(s.role, chunk{index: i, usage: a.roleUsage}); err != nil {
			return err
		}
	}
	return s.flush()
}

// A chunk has the fields that differ between the chunks of a stream.
type chunk struct {
	index int // of the sequence
	from  int // first token
	progress
	usage string // template of the usage, with continuous usage
}

// tokens sends the progress of one sequence.
func (s *answer) tokens(index int, p progress) error {
	a := &s.release.answers
	c := chunk{index: index, from: s.sent[index], progress: p, usage: a.chunkUsage}
	if s.chat {
		c.usage = a.chatUsage
	}
	s.sent[index] += p.tokens
	if err := s.send(s.chunk, c); err != nil {
		return err
	}
	return s.flush()
}

// end sends the usage, if the request wants it, and the last chunk.
func (s *answer) end() error {
	if s.usage {
		usage := newTemplate(s.release.answers.usageChunk, s.fixed(true))
		total := 0
		for _, n := range s.sent {
			total += n
		}
		s.buf = append(s.buf[:0], "data: "...)
		s.buf = usage.fill(s.buf, func(to []byte, name string) []byte {
			switch name {
			case "details":
				if s.details && s.cached() > 0 {
					return append(append(to, `,"prompt_tokens_details":`...), s.cachedDetails()...)
				}
				return to
			case "end":
				return s.closing(to)
			}
			return s.common(to, name, s.prompt, total)
		})
		if _, err := s.w.Write(append(s.buf, "\n\n"...)); err != nil {
			return err
		}
	}
	_, err := s.w.Write([]byte("data: [DONE]\n\n"))
	return err
}

// send writes one chunk. It fails when the client has gone.
func (s *answer) send(t template, c chunk) error {
	s.buf = append(s.buf[:0], "data: "...)
	s.buf = t.fill(s.buf, func(to []byte, name string) []byte { return s.field(to, name, c) })
	s.buf = append(s.buf, "\n\n"...)
	_, err := s.w.Write(s.buf)
	return err
}

func (s *answer) flush() error { return http.NewResponseController(s.w).Flush() }

// field appends one field of a chunk.
func (s *answer) field(to []byte, name string, c chunk) []byte {
	switch name {
	case "index":
		return strconv.AppendInt(to, int64(c.index), 10)
	case "text":
		to = append(to, '"')
		to = appendWords(to, c.from, c.tokens)
		return append(to, '"')
	case "finish":
		if c.last {
			return append(to, `"length"`...)
		}
		return append(to, "null"...)
	case "stop":
		if c.last {
			return append(to, `,"stop_reason":null`...)
		}
		return to
	case "weights":
		if c.last {
			return append(to, `,"weight_versions":null`...)
		}
		return to
	case "usage":
		if !s.always {
			if s.chat {
				return to
			}
			return append(to, s.release.answers.noUsage...)
		}
		return newTemplate(c.usage, noReplacer).fill(to, func(to []byte, name string) []byte {
			return s.common(to, name, s.sequences[c.index].request.Prompt, c.from+c.tokens)
		})
	case "end":
		if c.last && !s.usage {
			return s.closing(to)
		}
		return to
	}
	return s.common(to, name, 0, 0)
}

var noReplacer = strings.NewReplacer()

// common appends a field of usage, or one that is the same in all bodies.
func (s *answer) common(to []byte, name string, prompt, output int) []byte {
	switch name {
	case "model":
		return append(to, quoteJSON(s.model)...)
	case "prompt":
		return strconv.AppendInt(to, int64(prompt), 10)
	case "total":
		return strconv.AppendInt(to, int64(prompt+output), 10)
	case "output":
		return strconv.AppendInt(to, int64(output), 10)
	case "fingerprint":
		return append(to, quoteJSON(s.release.fingerprint())...)
	}
	return to
}

// closing appends the fields that only the last chunk has.
func (s *answer) closing(to []byte) []byte {
	return newTemplate(s.release.answers.end, noReplacer).fill(to, func(to []byte, name string) []byte { return s.common(to, name, 0, 0) })
}

// cached returns how many prompt tokens were in the cache.
func (s *answer) cached() (n int) {
	for _, a := range s.sequences {
		n += max(0, a.request.Cached)
	}
	return n
}

func (s *answer) cachedDetails() string {
	return strings.Replace(s.release.answers.details, "{cached}", strconv.Itoa(s.cached()), 1)
}

// whole sends the answer as one body.
func (s *answer) whole() {
	a := &s.release.answers
	body, choice := a.completion, newTemplate(a.completionChoice, noReplacer)
	if s.chat {
		body, choice = a.chat, newTemplate(a.chatChoice, noReplacer)
	}
	total := 0
	var choices []byte
	for i, k := range s.sequences {
		total += k.request.Output
		if i > 0 {
			choices = append(choices, ',')
		}
		choices = choice.fill(choices, func(to []byte, name string) []byte {
			return s.field(to, name, chunk{index: i, progress: progress{tokens: k.request.Output}})
		})
	}
	text := newTemplate(body, s.fixed(false)).fill(nil, func(to []byte, name string) []byte {
		switch name {
		case "choices":
			return append(to, choices...)
		case "usage":
			return newTemplate(a.wholeUsage, noReplacer).fill(to, func(to []byte, name string) []byte {
				if name != "details" {
					return s.common(to, name, s.prompt, total)
				}
				if s.details && s.cached() > 0 {
					return append(to, s.cachedDetails()...)
				}
				return append(to, "null"...)
			})
		}
		return s.common(to, name, 0, 0)
	})
	s.w.Header().Set("Content-Type", "application/json")
	_, _ = s.w.Write(text) // fails when the client has gone
}

// appendWords appends n tokens of an answer, each as a word with its number.
func appendWords(to []byte, from, n int) []byte {
	for i := from; i < from+n; i++ {
		to = append(to, " w"...)
		to = strconv.AppendInt(to, int64(i), 10)
	}
	return to
}
