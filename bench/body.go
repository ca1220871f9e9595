package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"vllmtuner/bench/workload"
)

// appendBody appends the JSON body of a request. It pins the work: the server must generate exactly OutputTokens tokens,
// greedily and past any end of sequence. An answer of another length is a failure. For natural answers OutputTokens is
// only a limit. The body has no min_tokens, because ignore_eos is enough and vLLM 0.14.1 refuses min_tokens above 1 with
// speculative decoding.
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

// compose returns a whole HTTP request. It builds the body in scratch, and also returns the body, so that the caller
// can use its memory as the next scratch.
func (f *runState) compose(a workload.Arrival, scratch []byte) (wire, body []byte, err error) {
	body, err = f.client.appendBody(scratch[:0], a.Request)
	if err != nil {
		return nil, body, fmt.Errorf("request %d of the %s: %w", a.Index, a.Phase, err)
	}
	const rest = 96 // bytes for the id and the length
	wire = make([]byte, 0, len(f.head)+len(body)+rest)
	wire = append(wire, f.head...)
	wire = append(wire, "X-Request-Id: "...)
	wire = append(wire, f.id...)
	wire = append(wire, a.Phase.String()...)
	wire = append(wire, '-')
	wire = strconv.AppendInt(wire, int64(a.Index), 10)
	if a.Request.Turn > 1 {
		wire = append(wire, '-')
		wire = strconv.AppendInt(wire, int64(a.Request.Turn), 10)
	}
	wire = append(wire, "\r\nContent-Length: "...)
	wire = strconv.AppendInt(wire, int64(len(body)), 10)
	wire = append(wire, "\r\n\r\n"...)
	return append(wire, body...), body, nil
}

// requestHead returns the beginning of every request, up to its id.
func (c *Client) requestHead(host, path string) []byte {
	header := c.Header.Clone()
	if header == nil {
		header = make(http.Header)
	}
	if header.Get("Host") == "" {
		header.Set("Host", host)
	}
	for key, value := range map[string]string{
		"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity",
	} {
		header.Set(key, value)
	}
	if header.Get("User-Agent") == "" {
		header.Set("User-Agent", "tuner")
	}
	if c.APIKey != "" {
		header.Set("Authorization", "Bearer "+string(c.APIKey))
	}
	var b writer
	b = append(b, "POST "+path+" HTTP/1.1\r\n"...)
	_ = header.Write(&b) // a writer never fails
	return b
}

// A writer appends to a slice.
type writer []byte

func (w *writer) Write(b []byte) (int, error) {
	*w = append(*w, b...)
	return len(b), nil
}
