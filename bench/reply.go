package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

const (
	longestHead = 64 << 10 // of a response, and of the informational ones before it
	longestSize = 1 << 10  // line with the size of a chunk
)

// A reply cuts the response of an HTTP/1.1 server out of the bytes of its connection, as they come. It has no buffer for the
// body: pieces of it are given out as they lie in what was read.
type reply struct {
	status int // 0 until the head is complete
	header http.Header
	keep   bool // the connection may be used again once the reply is over
	over   bool // the whole response was read

	heads   int    // bytes of informational responses before the final one
	line    []byte // beginning of the head, or of a line whose end has not come
	chunked bool
	left    int64 // bytes of the body, or of the chunk, that are still to come; -1: until the connection ends
	part    part
}

// A part of a response is what the next bytes belong to.
type part uint8

const (
	inHead part = iota
	inBody
	inSize    // line with the size of a chunk
	inNewline // after a chunk
	inTrailer
)

// next reads some of b and returns the piece of the body in it, if any, and what is left to read.
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

// endOfBody is called when the bytes of a body or of a chunk have been read.
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
	// The empty line may have begun in what was read before.
	end := bytes.Index(r.line[max(0, before-3):], []byte("\r\n\r\n"))
	if end < 0 {
		if len(r.line) > longestHead {
			return nil, fmt.Errorf("a response head of more than %d bytes", longestHead)
		}
		return nil, nil
	}
	size := max(0, before-3) + end + 4
	head := r.line[:size]
	rest = b[size-before:]
	response, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), nil)
	r.line = r.line[:0]
	if err != nil {
		return nil, fmt.Errorf("no HTTP response: %w", err)
	}
	if response.StatusCode >= 100 && response.StatusCode < 200 && response.StatusCode != http.StatusSwitchingProtocols {
		if r.heads += size; r.heads > longestHead {
			return nil, fmt.Errorf("informational responses of more than %d bytes", longestHead)
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

// cutLine returns the next line without its end, nil when its end has not come.
func (r *reply) cutLine(b []byte) (line, rest []byte, err error) {
	before, after, ok := bytes.Cut(b, []byte{'\n'})
	if !ok {
		r.line = append(r.line, b...)
		if len(r.line) > longestSize {
			return nil, nil, fmt.Errorf("a line of more than %d bytes between chunks", longestSize)
		}
		return nil, nil, nil
	}
	line = before
	if len(r.line) > 0 {
		r.line = append(r.line, line...)
		line = r.line
		r.line = r.line[:0]
	}
	if len(line) > longestSize {
		return nil, nil, fmt.Errorf("a line of more than %d bytes between chunks", longestSize)
	}
	if len(line) > 0 && line[len(line)-1] == '\r' {
		line = line[:len(line)-1]
	}
	if line == nil {
		line = []byte{}
	}
	return line, after, nil
}

// readLine reads a line between chunks.
func (r *reply) readLine(line []byte) error {
	switch r.part {
	case inNewline:
		if len(line) > 0 {
			return fmt.Errorf("a chunk is followed by %.20q, want a new line", line)
		}
		r.part = inSize
	case inTrailer:
		r.over = len(line) == 0
	case inSize:
		digits, _, _ := bytes.Cut(line, []byte(";")) // an extension says nothing to us
		size, err := strconv.ParseInt(string(bytes.TrimRight(digits, " \t")), 16, 64)
		if err != nil || size < 0 {
			return fmt.Errorf("chunk size %.40q is no number", line)
		}
		r.left, r.part = size, inBody
		if size == 0 {
			r.part = inTrailer
		}
	}
	return nil
}
