package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"vllmtuner/render"
)

// An answer reads the event stream of one request (server-sent events, html.spec.whatwg.org, 9.2). The bytes may come
// in pieces of any size. An answer does not decode chunks that carry tokens. It only searches them for keys. That is
// safe: JSON escapes a quote within a string, so `"key"` before a colon can only be a key.
type answer struct {
	chat    bool // chat endpoint: chunks carry a delta
	itl     bool // record the times between tokens (gaps)
	natural bool // an answer of any length is right
	keep    bool // keep the text
	want    int  // tokens asked for

	lines
	heard bool   // at least one event has come
	odd   string // first line that is no known field of an event

	opened      time.Duration // when the first chunk with choices came
	role        bool          // the first chunk with choices carried only the role, no output
	first, last time.Duration // when chunks with output came
	closed      time.Duration // when the last chunk of any kind came
	chunks      int           // chunks with output
	pieces      int           // distinct arrival times of chunks with output
	blank       int           // chunks with output but without text
	textBytes   int           // bytes of text in all chunks
	gaps        []time.Duration
	text        []string
	usage       *usage
	done        bool // [DONE] was read
	failure     Failure
	detail      string
}

// usage holds the server's counts of tokens. Counting chunks would be wrong: with speculative decoding, or on a busy
// server, a chunk may hold several tokens.
type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"` // only with --enable-prompt-tokens-details
	} `json:"prompt_tokens_details"`
	Hidden struct {
		Reasoning int `json:"reasoning_tokens"`
	} `json:"completion_tokens_details"`
}

// over reports whether the answer is final. Later bytes do not change it.
func (a *answer) over() bool { return a.done || a.failure != "" }

func (a *answer) fail(kind Failure, format string, args ...any) {
	if a.failure == "" {
		a.failure, a.detail = kind, firstLine(fmt.Sprintf(format, args...))
	}
}

// finish ends the answer. The parameter err is io.EOF, or the error that ended the connection. By the specification, an
// event without an empty line after it does not count. Some servers leave out the last empty line, so this method
// accepts a last event that is complete.
func (a *answer) finish(err error, at time.Duration) {
	if err == io.EOF && !a.over() {
		if len(a.rest) > 0 {
			a.line(a.rest, at, false)
		}
		if complete(trimmed(a.data)) {
			a.dispatch()
		}
	}
	switch {
	case a.over():
	case err != io.EOF:
		a.fail(Reset, "the connection broke during the answer: %v", err)
	case a.odd == "":
		a.fail(Truncated, "the stream ended without [DONE]")
	case a.heard:
		a.fail(Truncated, "the stream ended without [DONE]; it has a line that does not belong in an event stream: %q", a.odd)
	case a.odd[0] == '{':
		a.fail(Malformed, "the answer is JSON, not an event stream, so the server does not stream: %q", a.odd)
	case a.odd[0] == '<':
		a.fail(Malformed, "the answer is a web page, so this is not an OpenAI-compatible server: %q", a.odd)
	default:
		a.fail(Malformed, "the answer is not an event stream: %q", a.odd)
	}
}

// judge marks an answer as failed if it arrived whole but is not what the request asked for.
func (a *answer) judge() {
	switch {
	case a.failure != "":
	case a.first == 0 && (a.usage == nil || a.usage.CompletionTokens == 0):
		a.fail(NoTokens, "the server generated no token")
	case a.usage == nil:
		a.fail(NoUsage, "the stream had no usage chunk: the server ignores stream_options.include_usage")
	case a.first == 0:
		a.fail(NoTokens, "the server counted %s, but no chunk carried any", render.Count(a.usage.CompletionTokens, "token"))
	case a.usage.CompletionTokens != a.want && !a.natural:
		a.fail(WrongLength, "the server generated %s instead of %d", render.Count(a.usage.CompletionTokens, "token"), a.want)
	}
}

// event reads the data of one event.
func (a *answer) event(data []byte, at time.Duration) {
	if data = trimmed(data); len(data) == 0 {
		return
	}
	a.heard = true
	if string(data) == doneMark {
		a.done = true
		return
	}
	if !complete(data) {
		a.fail(Malformed, "the data of an event is not a JSON object: %.80q", data)
		return
	}
	a.closed = at
	if choices := value(data, `"choices"`); filled(choices) {
		generated := a.generated(choices)
		if a.opened == 0 {
			a.opened, a.role = at, !generated
		}
		if generated {
			a.token(at)
			a.countText(choices)
		}
		if a.keep {
			a.keepText(data)
		}
	}
	if reason := value(data, `"finish_reason"`); hasPrefix(reason, `"abort"`) || hasPrefix(reason, `"error"`) {
		a.fail(StreamError, "the server ended the answer with finish_reason %s", reason[:7])
	}
	if hasPrefix(value(data, `"usage"`), "{") || value(data, `"error"`) != nil {
		a.decode(data)
	}
}

// token records the arrival of a chunk that carries output.
func (a *answer) token(at time.Duration) {
	a.chunks++
	if a.first == 0 {
		a.first, a.last, a.pieces = at, at, 1
		return
	}
	if at != a.last {
		a.pieces++
	}
	if a.chunks > a.want+spareChunks {
		a.fail(WrongLength, "the stream goes on after %s, though the request asked for %s", render.Count(a.chunks, "chunk"), render.Count(a.want, "token"))
	}
	if a.itl {
		a.gaps = append(a.gaps, at-a.last)
	}
	a.last = at
}

// decode reads a chunk that holds usage or an error.
func (a *answer) decode(data []byte) {
	var chunk struct {
		Usage *usage          `json:"usage"`
		Error json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(data, &chunk); err != nil {
		a.fail(Malformed, "chunk: %v", err)
		return
	}
	if len(chunk.Error) > 0 && string(chunk.Error) != "null" {
		a.fail(StreamError, "%s", errorMessage(data))
		return
	}
	if chunk.Usage != nil {
		a.usage = chunk.Usage
	}
}

// spareChunks is how many more chunks than pinned tokens an answer may have. For example, an extra chunk may carry only
// the finish reason.
const spareChunks = 16

// generated reports whether a chunk with these choices carries output. For the completions endpoint, every chunk is
// output, even one with empty text. For chat, content, reasoning or a tool call is output, and so is empty content
// without a role. This follows vllm bench serve 0.33 (vllm/benchmarks/lib/endpoint_request_func.py). The first chunk of
// a chat only names the role, so it is no output. vLLM 0.14.1 counts this chunk as the first token, and so does
// Rules0141. The chunk comes microseconds before the first chunk with output.
func (a *answer) generated(choices []byte) bool {
	if !a.chat {
		return true
	}
	delta := value(choices, `"delta"`)
	content := value(delta, `"content"`)
	if filled(content) {
		return true
	}
	for _, key := range []string{`"reasoning"`, `"reasoning_content"`, `"tool_calls"`, `"function_call"`} {
		if filled(value(delta, key)) {
			return true
		}
	}
	return hasPrefix(content, `""`) && value(delta, `"role"`) == nil
}

// keepText keeps the text of a chunk, for the next turn of a live conversation.
func (a *answer) keepText(data []byte) {
	var chunk struct {
		Choices []struct {
			Text  string `json:"text"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(data, &chunk); err != nil {
		a.fail(Malformed, "chunk: %v", err)
		return
	}
	for _, choice := range chunk.Choices {
		a.text = append(a.text, choice.Text+choice.Delta.Content)
	}
}

// countText counts the bytes of text in a chunk with output. If the chunk has no text field, as for a tool call,
// countText counts all its bytes from the choices on.
func (a *answer) countText(choices []byte) {
	text := value(choices, `"text"`)
	if a.chat {
		if text = value(choices, `"content"`); !filled(text) {
			if text = value(choices, `"reasoning"`); text == nil {
				text = value(choices, `"reasoning_content"`)
			}
		}
	}
	n := 0
	switch {
	case hasPrefix(text, `"`):
		n = stringLength(text[1:])
	default:
		n = len(choices)
	}
	if n == 0 {
		a.blank++
	}
	a.textBytes += n
}

// stringLength returns the number of bytes before the quote that ends a JSON string.
func stringLength(text []byte) int {
	for at := 0; ; {
		n := bytes.IndexByte(text[at:], '"')
		if n < 0 {
			return len(text)
		}
		at += n
		escapes := 0
		for at-escapes > 0 && text[at-escapes-1] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return at
		}
		at++
	}
}

// value returns the part of data that begins with the value of a key, or nil if there is no such key. The parameter key
// includes the quotes.
func value(data []byte, key string) []byte {
	for {
		at := bytes.Index(data, []byte(key))
		if at < 0 {
			return nil
		}
		data = unspaced(data[at+len(key):])
		if len(data) > 0 && data[0] == ':' {
			return unspaced(data[1:])
		}
	}
}

func hasPrefix(value []byte, prefix string) bool {
	return len(value) >= len(prefix) && string(value[:len(prefix)]) == prefix
}

// filled reports whether a JSON text begins with a non-empty string, list or object.
func filled(value []byte) bool {
	if len(value) < 2 {
		return false
	}
	switch value[0] {
	case '"':
		return value[1] != '"'
	case '[', '{':
		next := unspaced(value[1:])
		return len(next) > 0 && next[0] != value[0]+2 // in ASCII, ']' is '[' + 2 and '}' is '{' + 2
	}
	return false
}

// errorMessage returns the message of an OpenAI-style error, which is under error.message or under message. For any
// other body it returns the first line.
func errorMessage(body []byte) string {
	var wrapped struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	if err := json.Unmarshal(body, &wrapped); err != nil {
		return firstLine(string(body))
	}
	var inner struct {
		Message string `json:"message"`
	}
	switch {
	case json.Unmarshal(wrapped.Error, &inner) == nil && inner.Message != "":
		return firstLine(inner.Message)
	case wrapped.Message != "":
		return firstLine(wrapped.Message)
	}
	return firstLine(string(body))
}

// firstLine returns the first line of a text, cut to 300 bytes for a report.
func firstLine(text string) string {
	const maxBytes = 300
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if len(line) > maxBytes {
		line = strings.ToValidUTF8(line[:maxBytes], "") + "…"
	}
	return line
}
