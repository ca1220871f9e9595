package vllmsim

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

// A stream writes one answer in vLLM's chunks (vllm/entrypoints/openai/serving_completion.py and serving_chat.py, 0.14.1).
type stream struct {
	w              http.ResponseWriter
	id             uint64
	model          string
	chat           bool
	usage          bool // a usage chunk was asked for
	prompt, output int

	head string // what all chunks begin with
}

// eventStream is the type of a streamed answer.
const eventStream = "text/event-stream; charset=utf-8"

// begin sends the header, and for a chat the role chunk, which vLLM sends with the first token and not before.
func (s *stream) begin() {
	object, prefix := "text_completion", "cmpl"
	if s.chat {
		object, prefix = "chat.completion.chunk", "chatcmpl"
	}
	s.head = fmt.Sprintf(`data: {"id":"%s-%016x","object":"%s","created":%d,"model":%q,`, prefix, s.id, object, time.Now().Unix(), s.model)
	if s.chat {
		_ = s.send(`"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`)
	}
}

// token sends the n-th token, 0-based; after the last come usage and [DONE]. Its error means that the client has gone.
func (s *stream) token(n int, last bool) error {
	finish := "null"
	if last {
		finish = `"length"`
	}
	chunk := fmt.Sprintf(`"choices":[{"index":0,"text":" w%d","logprobs":null,"finish_reason":%s,"stop_reason":null}]}`, n, finish)
	if s.chat {
		chunk = fmt.Sprintf(`"choices":[{"index":0,"delta":{"content":" w%d"},"logprobs":null,"finish_reason":%s}]}`, n, finish)
	}
	if err := s.send(chunk); err != nil || !last {
		return err
	}
	if s.usage {
		if err := s.send(`"choices":[],` + s.usageJSON() + `}`); err != nil {
			return err
		}
	}
	_, err := s.w.Write([]byte("data: [DONE]\n\n"))
	return err
}

func (s *stream) usageJSON() string {
	return fmt.Sprintf(`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, s.prompt, s.prompt+s.output, s.output)
}

func (s *stream) send(chunk string) error {
	if _, err := s.w.Write([]byte(s.head + chunk + "\n\n")); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}

// body sends the whole answer at once.
func (s *stream) body() {
	var text strings.Builder
	for n := range s.output {
		fmt.Fprintf(&text, " w%d", n)
	}
	choice := map[string]any{"index": 0, "logprobs": nil, "finish_reason": "length"}
	object := "text_completion"
	if s.chat {
		object = "chat.completion"
		choice["message"] = map[string]string{"role": "assistant", "content": text.String()}
	} else {
		choice["text"] = text.String()
	}
	answer(s.w, http.StatusOK, map[string]any{
		"id": fmt.Sprintf("cmpl-%016x", s.id), "object": object, "created": time.Now().Unix(), "model": s.model,
		"choices": []any{choice},
		"usage":   map[string]int{"prompt_tokens": s.prompt, "total_tokens": s.prompt + s.output, "completion_tokens": s.output},
	})
}
