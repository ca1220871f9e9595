package bench

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// readReply reads a response in pieces of n bytes. It returns the body and the bytes after the response.
func readReply(text string, n int) (r *reply, body, left string, err error) {
	r = new(reply)
	for piece := range slices.Chunk([]byte(text), n) {
		for len(piece) > 0 && !r.over && err == nil {
			var some []byte
			some, piece, err = r.next(piece)
			body += string(some)
		}
		left += string(piece)
	}
	return r, body, left, err
}

func TestAReplyEndsWhereTheResponseEnds(t *testing.T) {
	tests := []struct {
		name, text string
		status     int
		body, left string
		over, keep bool
	}{
		{"chunks are joined", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\nnext", 200, "abcde", "next", true, true},
		{"a trailer is skipped", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n", 200, "a", "", true, true},
		{"a length is kept to", "HTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\nabcd", 404, "abc", "d", true, true},
		{"an empty body is the end", "HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", 503, "", "", true, true},
		{"without a length the connection's end is the end", "HTTP/1.1 200 OK\r\n\r\nabc", 200, "abc", "", false, false},
		{"HTTP/1.0 closes", "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", 200, "a", "", true, false},
		{"Connection: close closes", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", 200, "a", "", true, false},
		{"informational responses are skipped", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", 200, "a", "", true, true},
		{"a response may be incomplete", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", 200, "ab", "", false, true},
	}
	for _, test := range tests {
		for _, n := range []int{1, 2, 3, 7, 1 << 10} {
			r, body, left, err := readReply(test.text, n)
			if err != nil || r.status != test.status || body != test.body || left != test.left || r.over != test.over || r.keep != test.keep {
				t.Errorf("%s, in pieces of %d: status %d, body %q, left %q, over %t, keep %t, error %v, want %d, %q, %q, %t, %t",
					test.name, n, r.status, body, left, r.over, r.keep, err, test.status, test.body, test.left, test.over, test.keep)
			}
		}
	}
}

// A reply reads a response as net/http does, in pieces of any size.
func FuzzReply(f *testing.F) {
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 1\r\n\r\na",
		"HTTP/1.0 200 OK\r\n\r\nabc",
		"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n1\na\n0\n\n",
	} {
		f.Add(text, 1)
		f.Add(text, 5)
	}
	f.Fuzz(func(t *testing.T, text string, n int) {
		if n < 1 || len(text) > 1<<16 {
			t.Skip("pieces have at least a byte")
		}
		r, body, _, err := readReply(text, n)
		whole, wholeBody, _, wholeErr := readReply(text, len(text)+1)
		if r.status != whole.status || body != wholeBody || r.over != whole.over || (err == nil) != (wholeErr == nil) {
			t.Fatalf("in pieces of %d: %d %q %t %v, whole: %d %q %t %v", n, r.status, body, r.over, err, whole.status, wholeBody, whole.over, wholeErr)
		}
		if err != nil || !r.over || strings.HasPrefix(text, "HTTP/1.1 1") || strings.HasPrefix(text, "HTTP/1.0 1") {
			return
		}
		response, err := http.ReadResponse(bufio.NewReader(bytes.NewReader([]byte(text))), nil)
		if err != nil {
			t.Fatalf("net/http refuses a response that a reply accepts: %v", err)
		}
		want, err := io.ReadAll(response.Body)
		if err == nil && string(want) != body {
			t.Fatalf("body %q, net/http reads %q", body, want)
		}
	})
}
