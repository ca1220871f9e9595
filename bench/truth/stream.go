package truth

import (
	"strconv"
)

// streamHead is the head of a stream as uvicorn writes it.
var streamHead = []byte("HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n" +
	"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")

// A stream has the prepared bytes of one answer. They are vLLM's chunks (vllm/entrypoints/openai/serving_completion.py and
// serving_chat.py, 0.14.1), each in its own HTTP chunk, as uvicorn sends them.
type stream struct {
	head  []byte // beginning of every chunk's JSON
	role  []byte // role chunk of a chat; nil once it was sent
	token []byte // chunk of one token
	last  []byte // chunk of the last token
	tail  []byte // end of the response: usage, [DONE] and the last HTTP chunk
	frame []byte // scratch
}

// begin builds the bytes of an answer.
func (s *stream) begin(model string, q *request) {
	object, prefix := "text_completion", "cmpl-"
	before, after := `"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":`, `,"stop_reason":null}],"usage":null}`
	if q.chat {
		object, prefix = "chat.completion.chunk", "chatcmpl-"
		before, after = `"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":`, `,"token_ids":null}]}`
	}
	s.head = append(append(append(s.head[:0], `data: {"id":"`...), prefix...), q.id...)
	s.head = append(append(append(s.head, `","object":"`...), object...), `","created":1767225600,"model":`...)
	s.head = append(strconv.AppendQuote(s.head, model), ',')
	s.token = s.chunk(s.token[:0], before, "null", after)
	s.last = s.chunk(s.last[:0], before, `"length"`, after)
	s.role = nil
	if q.chat {
		s.role = s.chunk(nil, `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`)
	}
	s.tail = s.tail[:0]
	if q.usage {
		s.tail = s.chunk(s.tail, `"choices":[],"usage":{"prompt_tokens":`, strconv.Itoa(q.prompt),
			`,"total_tokens":`, strconv.Itoa(q.prompt+q.tokens), `,"completion_tokens":`, strconv.Itoa(q.tokens), `}}`)
	}
	s.tail = append(s.tail, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"...)
}

// chunk appends an HTTP chunk with one event. Its JSON is s.head followed by the texts.
func (s *stream) chunk(to []byte, texts ...string) []byte {
	s.frame = append(s.frame[:0], s.head...)
	for _, text := range texts {
		s.frame = append(s.frame, text...)
	}
	s.frame = append(s.frame, "\n\n"...)
	to = append(strconv.AppendInt(to, int64(len(s.frame)), 16), "\r\n"...)
	return append(append(to, s.frame...), "\r\n"...)
}
