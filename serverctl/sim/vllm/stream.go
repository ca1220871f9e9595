package vllm

import (
	"fmt"
	"net/http"
	"strconv"
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
	always  bool // every chunk has its usage
	details bool // usage reports the cached tokens

	sequences []*sequence
	prompt    int   // tokens of all prompts
	sent      []int // tokens of each sequence so far

	head head
}

// A head has the first fields of each body and of each chunk.
type head struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
}

// The structs below have the fields of all versions, in vLLM's order. A field with omitempty is missing where it is
// nil, and null where its value is null. All other nil fields are null.

// null is the value of a field that is sent as null.
var null any = (*struct{})(nil)

// nullIf returns null for a field that is sent, and nil for a missing field.
func nullIf(sent bool) any {
	if sent {
		return null
	}
	return nil
}

// A body is a whole answer.
type body struct {
	head
	Choices           []choice `json:"choices"`
	ServiceTier       any      `json:"service_tier"`
	SystemFingerprint *string  `json:"system_fingerprint"`
	Usage             *usage   `json:"usage"`
	PromptLogprobs    any      `json:"prompt_logprobs,omitempty"`  // null in chats
	PromptTokenIDs    any      `json:"prompt_token_ids,omitempty"` // null in chats
	PromptText        any      `json:"prompt_text,omitempty"`      // null in chats since 0.32.0
	KVTransferParams  any      `json:"kv_transfer_params"`
	ECTransferParams  any      `json:"ec_transfer_params,omitempty"` // null since 0.32.0
	Metrics           any      `json:"metrics,omitempty"`            // null since 0.32.0
}

// A choice is one sequence of a body.
type choice struct {
	Index          int      `json:"index"`
	Text           *string  `json:"text,omitempty"`    // set for completions
	Message        *message `json:"message,omitempty"` // set for chats
	Logprobs       any      `json:"logprobs"`
	FinishReason   *string  `json:"finish_reason"`
	StopReason     any      `json:"stop_reason"`
	TokenIDs       any      `json:"token_ids"`
	PromptLogprobs any      `json:"prompt_logprobs,omitempty"`  // null in completions
	PromptTokenIDs any      `json:"prompt_token_ids,omitempty"` // null in completions
	RoutedExperts  any      `json:"routed_experts,omitempty"`   // null since 0.32.0
	WeightVersions any      `json:"weight_versions,omitempty"`  // null since 0.33.0
}

// A message is the answer to a chat.
type message struct {
	Role             string `json:"role"`
	Content          string `json:"content"`
	Refusal          any    `json:"refusal"`
	Annotations      any    `json:"annotations"`
	Audio            any    `json:"audio"`
	FunctionCall     any    `json:"function_call"`
	ToolCalls        any    `json:"tool_calls,omitempty"` // an empty list in 0.14.1
	Reasoning        any    `json:"reasoning"`
	ReasoningContent any    `json:"reasoning_content,omitempty"` // null in 0.14.1
}

// A chunk is one event of a stream.
type chunk struct {
	head
	Choices           []chunkChoice `json:"choices"`
	Usage             any           `json:"usage,omitempty"`              // null in completions of 0.14.1 without continuous usage
	SystemFingerprint *string       `json:"system_fingerprint,omitempty"` // set in the last chunk since 0.32.0
	KVTransferParams  any           `json:"kv_transfer_params,omitempty"` // null since 0.33.0 in chunks with tokens
	PromptTokenIDs    any           `json:"prompt_token_ids,omitempty"`   // null in role chunks
	PromptText        any           `json:"prompt_text,omitempty"`        // null in role chunks since 0.32.0
}

// A chunkChoice is the progress of one sequence.
type chunkChoice struct {
	Index          int     `json:"index"`
	Text           *string `json:"text,omitempty"`  // set for completions
	Delta          *delta  `json:"delta,omitempty"` // set for chats
	Logprobs       any     `json:"logprobs"`
	FinishReason   *string `json:"finish_reason"`              // null until the last token
	StopReason     any     `json:"stop_reason,omitempty"`      // null in completions and with the last token of a chat
	PromptTokenIDs any     `json:"prompt_token_ids,omitempty"` // null in completions
	TokenIDs       any     `json:"token_ids,omitempty"`        // null except in role chunks
	WeightVersions any     `json:"weight_versions,omitempty"`  // null since 0.33.0 in completions and with the last token of a chat
}

// A delta is a part of the answer to a chat.
type delta struct {
	Role             string `json:"role,omitempty"` // set in role chunks
	Content          string `json:"content"`
	ReasoningContent any    `json:"reasoning_content,omitempty"` // null in 0.14.1
}

// A usage has the token counts of a body, of a chunk or of a stream.
type usage struct {
	Prompt        int `json:"prompt_tokens"`
	Total         int `json:"total_tokens"`
	Output        int `json:"completion_tokens"`
	PromptDetails any `json:"prompt_tokens_details,omitempty"`     // null, or a promptDetails
	OutputDetails any `json:"completion_tokens_details,omitempty"` // null since 0.32.0, except in chunks of completions and in usage chunks
}

type promptDetails struct {
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
	s.head = head{ID: fmt.Sprintf("%s-%016x", prefix, s.id), Object: object, Created: time.Now().Unix(), Model: s.model}
	if !s.chat || !stream {
		return nil
	}
	for i := range s.sequences {
		d := s.delta("")
		d.Role = "assistant"
		c := chunk{PromptTokenIDs: null, PromptText: nullIf(s.release.since032)}
		if err := s.send(c, chunkChoice{Index: i, Delta: d}); err != nil {
			return err
		}
	}
	return s.flush()
}

func (s *answer) delta(text string) *delta {
	return &delta{Content: text, ReasoningContent: nullIf(!s.release.since032)}
}

// tokens sends the progress of one sequence as one chunk.
func (s *answer) tokens(index int, p progress) error {
	text := string(appendWords(nil, s.sent[index], p.tokens))
	s.sent[index] += p.tokens
	c := chunk{KVTransferParams: nullIf(s.release.since033)}
	one := chunkChoice{Index: index, TokenIDs: null}
	if s.chat {
		one.Delta = s.delta(text)
	} else {
		one.Text, one.PromptTokenIDs = &text, null
	}
	if p.last {
		one.FinishReason = &lengthReason
		if !s.usage {
			c.SystemFingerprint = s.release.fingerprint()
		}
	}
	if p.last || !s.chat {
		one.StopReason, one.WeightVersions = null, nullIf(s.release.since033)
	}
	if err := s.send(c, one); err != nil {
		return err
	}
	return s.flush()
}

// lengthReason is the reason of every end: the simulated model never ends an answer by itself.
var lengthReason = "length"

// end sends the usage, if the request wants it, and the last chunk.
func (s *answer) end() error {
	if s.usage {
		u := s.total()
		if cached := s.cached(); cached != nil {
			u.PromptDetails = cached
		}
		err := s.write(chunk{Choices: []chunkChoice{}, Usage: u, SystemFingerprint: s.release.fingerprint()})
		if err != nil {
			return err
		}
	}
	_, err := s.w.Write([]byte("data: [DONE]\n\n"))
	return err
}

// send writes a chunk with one choice.
func (s *answer) send(c chunk, one chunkChoice) error {
	c.Choices = []chunkChoice{one}
	switch {
	case s.always:
		prompt, output := s.sequences[one.Index].request.Prompt, s.sent[one.Index]
		u := &usage{Prompt: prompt, Total: prompt + output, Output: output}
		if s.chat {
			u.OutputDetails = nullIf(s.release.since032)
		} else {
			u.PromptDetails = nullIf(!s.release.since032)
		}
		c.Usage = u
	case !s.chat:
		c.Usage = nullIf(!s.release.since032)
	}
	return s.write(c)
}

// write writes a chunk with the head. It fails when the client has disconnected.
func (s *answer) write(c chunk) error {
	c.head = s.head
	_, err := s.w.Write([]byte("data: " + toJSON(c) + "\n\n"))
	return err
}

func (s *answer) flush() error { return http.NewResponseController(s.w).Flush() }

// total returns the usage of all sequences so far, without details.
func (s *answer) total() *usage {
	u := &usage{Prompt: s.prompt}
	for _, n := range s.sent {
		u.Output += n
	}
	u.Total = u.Prompt + u.Output
	return u
}

// cached returns the details with the cached tokens, or nil if usage does not report them.
func (s *answer) cached() *promptDetails {
	d := &promptDetails{}
	for _, q := range s.sequences {
		d.Cached += max(0, q.request.Cached)
	}
	if !s.details || d.Cached == 0 {
		return nil
	}
	return d
}

// whole sends the answer as one body.
func (s *answer) whole() {
	_ = s.begin(false) // it sends nothing and cannot fail
	since032 := nullIf(s.release.since032)
	all := body{head: s.head, SystemFingerprint: s.release.fingerprint(), ECTransferParams: since032, Metrics: since032}
	if s.chat {
		all.PromptLogprobs, all.PromptTokenIDs, all.PromptText = null, null, since032
	}
	for i, q := range s.sequences {
		s.sent[i] = q.request.Output
		text := string(appendWords(nil, 0, q.request.Output))
		c := choice{Index: i, FinishReason: &lengthReason, RoutedExperts: since032, WeightVersions: nullIf(s.release.since033)}
		if s.chat {
			c.Message = &message{Role: "assistant", Content: text}
			if !s.release.since032 {
				c.Message.ToolCalls, c.Message.ReasoningContent = []string{}, null
			}
		} else {
			c.Text, c.PromptLogprobs, c.PromptTokenIDs = &text, null, null
		}
		all.Choices = append(all.Choices, c)
	}
	all.Usage = s.total()
	all.Usage.PromptDetails, all.Usage.OutputDetails = s.cached(), since032 // a nil *promptDetails is null
	s.w.Header().Set("Content-Type", "application/json")
	_, _ = s.w.Write([]byte(toJSON(all))) // fails when the client has disconnected
}

// appendWords appends n tokens of an answer, each as a word with its number.
func appendWords(to []byte, from, n int) []byte {
	for i := from; i < from+n; i++ {
		to = append(to, " w"...)
		to = strconv.AppendInt(to, int64(i), 10)
	}
	return to
}
