package vllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// An answer is the answer to one request: one or several sequences, as one body or as a stream of chunks.
type answer struct {
	w       http.ResponseWriter
	id      uint64
	model   string
	chat    bool
	usage   bool // a stream ends with a usage chunk
	always  bool // every chunk has its usage
	details bool // usage reports the cached tokens

	sequences []*sequence
	prompt    int   // tokens of all prompts
	sent      []int // tokens of each sequence so far

	head body // the fields that all chunks share
}

// A body is a whole answer or one chunk of a stream. vLLM has more fields, which are null in simulated answers and
// which no client needs.
type body struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

// A choice is one sequence of a body.
type choice struct {
	Index        int      `json:"index"`
	Text         *string  `json:"text,omitempty"`    // set for completions
	Message      *message `json:"message,omitempty"` // set for chats in one body
	Delta        *message `json:"delta,omitempty"`   // set for chunks of a chat
	FinishReason *string  `json:"finish_reason"`     // null until the last token
}

type message struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type usage struct {
	Prompt  int           `json:"prompt_tokens"`
	Total   int           `json:"total_tokens"`
	Output  int           `json:"completion_tokens"`
	Details *usageDetails `json:"prompt_tokens_details,omitempty"`
}

type usageDetails struct {
	Cached int `json:"cached_tokens"`
}

// eventStream is the type of a streamed answer.
const eventStream = "text/event-stream; charset=utf-8"

// begin prepares the head. It sends the role chunks of a streamed chat, which vLLM sends with the first token and not
// before.
func (s *answer) begin(stream bool) error {
	object, prefix := "text_completion", "cmpl"
	switch {
	case s.chat && stream:
		object, prefix = "chat.completion.chunk", "chatcmpl"
	case s.chat:
		object, prefix = "chat.completion", "chatcmpl"
	}
	s.head = body{ID: fmt.Sprintf("%s-%016x", prefix, s.id), Object: object, Created: time.Now().Unix(), Model: s.model}
	if !s.chat || !stream {
		return nil
	}
	for i := range s.sequences {
		if err := s.send(choice{Index: i, Delta: &message{Role: "assistant"}}); err != nil {
			return err
		}
	}
	return s.flush()
}

// tokens sends the progress of one sequence as one chunk.
func (s *answer) tokens(index int, p progress) error {
	text := string(appendWords(nil, s.sent[index], p.tokens))
	s.sent[index] += p.tokens
	c := choice{Index: index}
	if s.chat {
		c.Delta = &message{Content: text}
	} else {
		c.Text = &text
	}
	if p.last {
		c.FinishReason = &lengthReason
	}
	if err := s.send(c); err != nil {
		return err
	}
	return s.flush()
}

// lengthReason is the reason of every end: the simulated model never ends an answer by itself.
var lengthReason = "length"

// end sends the usage, if the request wants it, and the last chunk.
func (s *answer) end() error {
	if s.usage {
		chunk := s.head
		chunk.Choices, chunk.Usage = []choice{}, s.total()
		if err := s.write(chunk); err != nil {
			return err
		}
	}
	_, err := s.w.Write([]byte("data: [DONE]\n\n"))
	return err
}

// send writes a chunk with one choice.
func (s *answer) send(c choice) error {
	chunk := s.head
	chunk.Choices = []choice{c}
	if s.always {
		prompt := s.sequences[c.Index].request.Prompt
		chunk.Usage = &usage{Prompt: prompt, Total: prompt + s.sent[c.Index], Output: s.sent[c.Index]}
	}
	return s.write(chunk)
}

// write writes a chunk. It fails when the client has disconnected.
func (s *answer) write(chunk body) error {
	text, err := json.Marshal(chunk)
	if err == nil {
		_, err = s.w.Write(append(append([]byte("data: "), text...), "\n\n"...))
	}
	return err
}

func (s *answer) flush() error { return http.NewResponseController(s.w).Flush() }

// total returns the usage of all sequences so far.
func (s *answer) total() *usage {
	u := &usage{Prompt: s.prompt}
	cached := 0
	for i, q := range s.sequences {
		u.Output += s.sent[i]
		cached += max(0, q.request.Cached)
	}
	u.Total = u.Prompt + u.Output
	if s.details && cached > 0 {
		u.Details = &usageDetails{cached}
	}
	return u
}

// whole sends the answer as one body.
func (s *answer) whole() {
	_ = s.begin(false) // it sends nothing and cannot fail
	all := s.head
	for i, q := range s.sequences {
		s.sent[i] = q.request.Output
		text := string(appendWords(nil, 0, q.request.Output))
		c := choice{Index: i, FinishReason: &lengthReason}
		if s.chat {
			c.Message = &message{Role: "assistant", Content: text}
		} else {
			c.Text = &text
		}
		all.Choices = append(all.Choices, c)
	}
	all.Usage = s.total()
	text, err := json.Marshal(all)
	if err != nil {
		panic("vllm: an answer that is not JSON: " + err.Error()) // a body has only texts and integers
	}
	s.w.Header().Set("Content-Type", "application/json")
	_, _ = s.w.Write(text) // fails when the client has disconnected
}

// appendWords appends n tokens of an answer, each as a word with its number.
func appendWords(to []byte, from, n int) []byte {
	for i := from; i < from+n; i++ {
		to = append(to, " w"...)
		to = strconv.AppendInt(to, int64(i), 10)
	}
	return to
}
