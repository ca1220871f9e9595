package truth

import (
	"fmt"
	"net"
	"time"
)

// A stream is one answer. Its events look like vLLM's (vllm/entrypoints/openai/serving_completion.py and
// serving_chat.py, 0.14.1). Each event is one HTTP chunk, as uvicorn sends it. Tokens are written straight to the
// connection, because net/http would copy each token through two buffers.
type stream struct {
	to     net.Conn
	record *Request      // nil with Config.Forget
	due    time.Duration // due time of the next token
	left   int           // tokens still to write
	gone   chan struct{} // closed after the last token, or when the client has gone

	role  []byte // HTTP chunk of a chat's role; nil once it was sent
	token []byte // HTTP chunk of one token
	last  []byte // HTTP chunk of the last token
	tail  []byte // usage and [DONE]; written through net/http
}

// newStream returns the answer to a request.
func newStream(to net.Conn, id string, chat bool, q *question) *stream {
	object, prefix := "text_completion", "cmpl-"
	choice, after := `"text":" word"`, `,"stop_reason":null}],"usage":null}`
	if chat {
		object, prefix = "chat.completion.chunk", "chatcmpl-"
		choice, after = `"delta":{"content":" word"}`, `,"token_ids":null}]}`
	}
	event := func(choices string) []byte {
		return fmt.Appendf(nil, `data: {"id":%q,"object":%q,"created":1767225600,"model":%q,"choices":[%s`+"\n\n", prefix+id, object, model, choices)
	}
	chunk := func(choices string) []byte {
		text := event(choices)
		return fmt.Appendf(nil, "%x\r\n%s\r\n", len(text), text)
	}
	s := &stream{
		to: to, left: q.tokens(), gone: make(chan struct{}),
		token: chunk(`{"index":0,` + choice + `,"logprobs":null,"finish_reason":null` + after),
		last:  chunk(`{"index":0,` + choice + `,"logprobs":null,"finish_reason":"length"` + after),
	}
	if chat {
		s.role = chunk(`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`)
	}
	if q.Options.IncludeUsage {
		prompt := q.promptTokens()
		s.tail = event(fmt.Sprintf(`],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}`, prompt, prompt+s.left, s.left))
	}
	s.tail = append(s.tail, "data: [DONE]\n\n"...)
	return s
}
