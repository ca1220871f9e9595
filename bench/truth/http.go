package truth

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// maxRequest is the limit on a request in bytes. A prompt of a million token ids has about 6 MB.
const maxRequest = 16 << 20

// A request is one parsed request. Its slices belong to the connection's buffer.
type request struct {
	method, path string
	id           []byte // X-Request-Id
	body         []byte
	close        bool

	chat, usage    bool
	prompt, tokens int
}

// parse reads one HTTP/1.1 request and returns its size, or 0 if it is incomplete. It supports only what the clients in
// tests send: a body has a Content-Length, and no header is folded.
func parse(in []byte) (q request, size int, err error) {
	end := bytes.Index(in, []byte("\r\n\r\n"))
	if end < 0 {
		return q, 0, nil
	}
	head := in[:end]
	first, head, _ := bytes.Cut(head, []byte("\r\n"))
	words := bytes.Fields(first)
	if len(words) != 3 || string(words[2]) != "HTTP/1.1" {
		return q, 0, fmt.Errorf("request line %.80q is not HTTP/1.1", first)
	}
	q.method, q.path = string(words[0]), string(words[1])
	length := 0
	for len(head) > 0 {
		var line []byte
		line, head, _ = bytes.Cut(head, []byte("\r\n"))
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case is(name, "Content-Length"):
			if length, err = strconv.Atoi(string(value)); err != nil || length < 0 || length > maxRequest {
				return q, 0, fmt.Errorf("Content-Length %.40q is not a length up to %d", value, maxRequest)
			}
		case is(name, "Transfer-Encoding"), is(name, "Expect"):
			return q, 0, fmt.Errorf("header %s is not supported", name)
		case is(name, "X-Request-Id"):
			q.id = value
		case is(name, "Connection"):
			q.close = is(value, "close")
		}
	}
	size = end + len("\r\n\r\n") + length
	if len(in) < size {
		return q, 0, nil
	}
	q.body = in[end+len("\r\n\r\n") : size]
	return q, size, nil
}

// is reports whether a header's name or value is the given one.
func is(b []byte, name string) bool { return len(b) == len(name) && bytes.EqualFold(b, []byte(name)) }

var errNoStream = errors.New("the request needs stream: true and max_tokens of at least 1")

// readBody finds the needed fields in the JSON of a request. JSON escapes quotes in a prompt, so a prompt contains no key.
func (q *request) readBody() error {
	q.chat = q.path == "/v1/chat/completions"
	q.usage = bytes.HasPrefix(value(q.body, `"include_usage":`), []byte("true"))
	for _, key := range []string{`"max_tokens":`, `"max_completion_tokens":`} {
		if n := leadingInt(value(q.body, key)); n > 0 {
			q.tokens = n
		}
	}
	if q.tokens < 1 || !bytes.HasPrefix(value(q.body, `"stream":`), []byte("true")) {
		return errNoStream
	}
	q.prompt = words(value(q.body, `"prompt":`)) + words(value(q.body, `"messages":`))
	return nil
}

// value returns the JSON text after a key.
func value(body []byte, key string) []byte {
	at := bytes.Index(body, []byte(key))
	if at < 0 {
		return nil
	}
	return bytes.TrimLeft(body[at+len(key):], " ")
}

// leadingInt returns the whole number at the start of b.
func leadingInt(b []byte) (n int) {
	for _, digit := range b {
		if digit < '0' || digit > '9' || n > 1<<40 {
			return n
		}
		n = 10*n + int(digit-'0')
	}
	return n
}

// words counts the token ids of a list, or roughly the words of a text.
func words(prompt []byte) int {
	if len(prompt) < 2 {
		return 0
	}
	between, end := byte(' '), byte('"')
	if prompt[0] == '[' {
		end = ']'
		if prompt[1] >= '0' && prompt[1] <= '9' {
			between = ','
		}
	}
	rest := prompt[1:]
	if at := bytes.IndexByte(rest, end); at >= 0 {
		rest = rest[:at]
	}
	return bytes.Count(rest, []byte{between}) + 1
}

// reply returns a whole HTTP response.
func reply(status int, body []byte) []byte {
	head := fmt.Sprintf("HTTP/1.1 %d %s\r\nserver: truth\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n",
		status, http.StatusText(status), len(body))
	return append([]byte(head), body...)
}
