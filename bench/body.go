package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"vllmtuner/bench/workload"
)

// appendBody appends the JSON body of a request. It pins the work: the server must generate exactly OutputTokens
// tokens. The server must choose them greedily and must not stop at an end of sequence. An answer of another length is
// a failure. If Client.Natural is set, OutputTokens is only a limit. The body has no min_tokens, because ignore_eos is
// enough and vLLM 0.14.1 refuses min_tokens above 1 with speculative decoding.
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
		return nil, errors.New("endpoint completions takes no chat messages: use endpoint chat")
	}
	return appendJSON(b, r.Text)
}

func appendMessages(b []byte, r *workload.Request) ([]byte, error) {
	messages := r.Messages
	switch {
	case r.Tokens != nil:
		return nil, errors.New("endpoint chat takes no token ids: use endpoint completions")
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

// compose returns a whole HTTP request (wire). It builds the body in the memory of the parameter scratch. It also
// returns the body, so that the caller can pass that memory as scratch for the next request.
func (f *runState) compose(a workload.Arrival, scratch []byte) (wire, body []byte, err error) {
	body, err = f.client.appendBody(scratch[:0], a.Request)
	if err != nil {
		return nil, body, fmt.Errorf("request %d of the %s: %w", a.Index, a.Phase, err)
	}
	const rest = 96 // bytes for the rest of the head: the id and the length
	wire = make([]byte, 0, len(f.head)+len(body)+rest)
	wire = append(wire, f.head...)
	wire = fmt.Appendf(wire, "X-Request-Id: %s%s-%d", f.id, a.Phase, a.Index)
	if a.Request.Turn > 1 {
		wire = fmt.Appendf(wire, "-%d", a.Request.Turn)
	}
	wire = fmt.Appendf(wire, "\r\nContent-Length: %d\r\n\r\n", len(body))
	return append(wire, body...), body, nil
}

// requestHead returns the bytes with which every request begins, up to its id.
func (c *Client) requestHead(host, path string) []byte {
	header := c.header()
	for key, value := range map[string]string{"Host": host, "User-Agent": "tuner"} {
		if header.Get(key) == "" {
			header.Set(key, value)
		}
	}
	header.Set("Content-Type", "application/json")
	header.Set("Accept", "text/event-stream")
	header.Set("Accept-Encoding", "identity")
	var b bytes.Buffer
	b.WriteString("POST " + path + " HTTP/1.1\r\n")
	_ = header.Write(&b) // writing to a buffer never fails
	return b.Bytes()
}

// header returns the headers that all requests have, whatever their body.
func (c *Client) header() http.Header {
	header := make(http.Header)
	for name, values := range c.Header {
		header[http.CanonicalHeaderKey(name)] = values
	}
	if c.APIKey != "" {
		header.Set("Authorization", "Bearer "+string(c.APIKey))
	}
	return header
}
