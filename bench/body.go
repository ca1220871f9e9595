package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"vllmtuner/bench/workload"
)

// appendBody appends the JSON body of a request. It pins the work: the server must generate exactly OutputTokens tokens,
// greedily and past any end of sequence. There is no min_tokens: ignore_eos says the same, and vLLM 0.14.1 refuses min_tokens
// above 1 while it speculates. An answer of another length is a failure. Natural answers have the length as their limit.
func (c *Client) appendBody(b []byte, r *workload.Request) ([]byte, error) {
	b = append(b, `{"model":`...)
	b, err := appendJSON(b, c.Model)
	if err != nil {
		return nil, err
	}
	n := strconv.Itoa(r.OutputTokens)
	if c.Endpoint == workload.Chat {
		b, err = appendMessages(b, r)
		b = append(b, `,"max_completion_tokens":`+n...)
	} else {
		b, err = appendPrompt(b, r)
		b = append(b, `,"max_tokens":`+n...)
	}
	if err != nil {
		return nil, err
	}
	if !c.Natural {
		b = append(b, `,"ignore_eos":true`...)
	}
	return append(b, `,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`...), nil
}

func appendPrompt(b []byte, r *workload.Request) ([]byte, error) {
	b = append(b, `,"prompt":`...)
	switch {
	case r.Tokens != nil:
		b = append(b, '[')
		for i, id := range r.Tokens {
			if i > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(id), 10)
		}
		return append(b, ']'), nil
	case r.Messages != nil:
		return nil, errors.New("a chat cannot be asked at endpoint completions: use endpoint chat")
	}
	return appendJSON(b, r.Text)
}

func appendMessages(b []byte, r *workload.Request) ([]byte, error) {
	messages := r.Messages
	switch {
	case r.Tokens != nil:
		return nil, errors.New("token ids cannot be asked at endpoint chat: use endpoint completions")
	case messages == nil:
		messages = []workload.Message{{Role: "user", Content: r.Text}}
	}
	return appendJSON(append(b, `,"messages":`...), messages)
}

func appendJSON(b []byte, v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("write request body: %w", err)
	}
	return append(b, text...), nil
}
