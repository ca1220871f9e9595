package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"vllmtuner/render"
)

const (
	maxHead     = 64 << 10 // limit in bytes on a response's head, and on all informational responses before it together
	maxSizeLine = 1 << 10  // limit in bytes on a line between chunks
)

// A reply parses the response of an HTTP/1.1 server from the bytes of its connection, piece by piece. A reply does not
// buffer the body: its method next returns a part of the slice that it gets.
type reply struct {
	status int // 0 until the head is complete
	header http.Header
	keep   bool // the connection may be used again after this reply
	over   bool // the whole response was read

	heads   int    // bytes of informational responses before the final one
	line    []byte // beginning of the head or of an incomplete line
	chunked bool
	left    int64 // remaining bytes of the body or of the chunk; -1 if the body lasts until the connection ends
	part    part
}

// A part is the part of a response that the next bytes belong to.
type part uint8

const (
	inHead part = iota
	inBody
	inSize    // line with the size of a chunk
	inNewline // the line end after a chunk
	inTrailer
)

// next parses the beginning of b. It returns the piece of the body found there, if any, and the bytes that it has not
// parsed.
func (r *reply) next(b []byte) (body, rest []byte, err error) {
	switch r.part {
	case inHead:
		rest, err = r.readHead(b)
		return nil, rest, err
	case inBody:
		n := int64(len(b))
		if r.left >= 0 {
			n = min(n, r.left)
			r.left -= n
		}
		if r.left == 0 {
			r.endOfBody()
		}
		return b[:n], b[n:], nil
	}
	line, rest, err := r.cutLine(b)
	if line == nil || err != nil {
		return nil, rest, err
	}
	return nil, rest, r.readLine(line)
}

// endOfBody goes to the next part after a body or a chunk.
func (r *reply) endOfBody() {
	if r.chunked {
		r.part = inNewline
	} else {
		r.over = true
	}
}

// readHead collects the head, which ends with an empty line.
func (r *reply) readHead(b []byte) (rest []byte, err error) {
	before := len(r.line)
	r.line = append(r.line, b...)
	// The empty line may have begun in the bytes of an earlier call.
	end := bytes.Index(r.line[max(0, before-3):], []byte("\r\n\r\n"))
	if end < 0 {
		if len(r.line) > maxHead {
			return nil, fmt.Errorf("the head of the response has more than %s", render.Bytes(maxHead))
		}
		return nil, nil
	}
	size := max(0, before-3) + end + 4
	head := r.line[:size]
	rest = b[size-before:]
	response, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), nil)
	r.line = r.line[:0]
	if err != nil {
		return nil, fmt.Errorf("not an HTTP response: %w", err)
	}
	if response.StatusCode >= 100 && response.StatusCode < 200 && response.StatusCode != http.StatusSwitchingProtocols {
		if r.heads += size; r.heads > maxHead {
			return nil, fmt.Errorf("the informational responses have more than %s", render.Bytes(maxHead))
		}
		return rest, nil // the final response follows
	}
	r.status, r.header, r.keep = response.StatusCode, response.Header, !response.Close
	r.chunked, r.left, r.part = slices.Contains(response.TransferEncoding, "chunked"), response.ContentLength, inBody
	switch {
	case r.chunked:
		r.part, r.left = inSize, 0
	case r.left == 0:
		r.over = true
	case r.left < 0:
		r.keep = false
	}
	return rest, nil
}

// cutLine returns the next line without its end, or nil if the line is incomplete.
func (r *reply) cutLine(b []byte) (line, rest []byte, err error) {
	before, rest, ended := bytes.Cut(b, []byte{'\n'})
	r.line = append(r.line, before...)
	if len(r.line) > maxSizeLine {
		return nil, nil, fmt.Errorf("a line between chunks has more than %s", render.Bytes(maxSizeLine))
	}
	if !ended {
		return nil, nil, nil
	}
	line = bytes.TrimSuffix(r.line, []byte{'\r'}) // never nil, because readHead has allocated r.line
	r.line = r.line[:0]
	return line, rest, nil
}

// readLine reads a line between chunks.
func (r *reply) readLine(line []byte) error {
	switch r.part {
	case inNewline:
		if len(line) > 0 {
			return fmt.Errorf("%.20q follows a chunk, want a new line", line)
		}
		r.part = inSize
	case inTrailer:
		r.over = len(line) == 0
	case inSize:
		digits, _, _ := bytes.Cut(line, []byte(";")) // ignore chunk extensions
		size, err := strconv.ParseInt(string(bytes.TrimRight(digits, " \t")), 16, 64)
		if err != nil || size < 0 {
			return fmt.Errorf("chunk size %.40q is not a number", line)
		}
		r.left, r.part = size, inBody
		if size == 0 {
			r.part = inTrailer
		}
	}
	return nil
}
