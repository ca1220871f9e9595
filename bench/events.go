package bench

import (
	"bytes"
	"time"

	"vllmtuner/render"
)

// maxLine is the limit on a line or an event, in bytes. It bounds the memory of one answer. vLLM's chunks have a few
// hundred bytes.
const maxLine = 1 << 20

// lines holds the part of an event stream that has arrived but is not parsed yet.
type lines struct {
	rest    []byte        // beginning of an incomplete line
	begun   bool          // the first line has been read
	cr      bool          // the last line ended with CR; if LF follows, it belongs to the same line end
	data    []byte        // data of an incomplete event
	pending bool          // there is an incomplete event
	dataAt  time.Duration // when the last line of data came
}

// feed reads the next bytes, which arrived at the given time.
func (a *answer) feed(b []byte, at time.Duration) {
	for len(b) > 0 && !a.over() {
		if a.cr {
			if a.cr = false; b[0] == '\n' {
				b = b[1:]
				continue
			}
		}
		end := lineEnd(b)
		if end < 0 {
			a.rest = append(a.rest, b...)
			if len(a.rest) > maxLine {
				a.fail(Malformed, "a line of the stream has more than %s", render.Bytes(maxLine))
			}
			return
		}
		line := b[:end]
		if len(a.rest) > 0 {
			a.rest = append(a.rest, line...)
			line = a.rest
		}
		a.cr = b[end] == '\r'
		if b = b[end+1:]; a.cr && len(b) > 0 && b[0] == '\n' {
			a.cr, b = false, b[1:]
		}
		a.line(line, at, len(b) > 0 && (b[0] == '\n' || b[0] == '\r'))
		a.rest = a.rest[:0]
	}
}

// lineEnd returns the index at which the first line ends, or -1 if it does not end in b. Lines end with LF, CR LF or
// CR.
func lineEnd(b []byte) int {
	end := bytes.IndexByte(b, '\n')
	if end >= 0 {
		b = b[:end]
	}
	if cr := bytes.IndexByte(b, '\r'); cr >= 0 {
		return cr
	}
	return end
}

const byteOrderMark = "\ufeff"

// line reads one line without its end. If eventEnds is true, the next line is empty and so ends the event.
func (a *answer) line(line []byte, at time.Duration, eventEnds bool) {
	if !a.begun {
		a.begun = true
		line = bytes.TrimPrefix(line, []byte(byteOrderMark))
	}
	if len(line) == 0 {
		a.dispatch()
		return
	}
	data, isData := bytes.CutPrefix(line, []byte("data"))
	switch {
	case isData && len(data) == 0:
		a.take(data, at, eventEnds)
	case isData && data[0] == ':':
		a.take(bytes.TrimPrefix(data[1:], []byte(" ")), at, eventEnds)
	default:
		a.field(line)
	}
}

// field reads a line without data: a comment, another field, or text that does not belong in an event stream. The
// specification allows unknown fields, so they are no error. This method keeps only the first unknown line, to explain
// a stream without events.
func (a *answer) field(line []byte) {
	const maxBytes = 80
	name, _, _ := bytes.Cut(line, []byte(":"))
	switch string(name) {
	case "", "event", "id", "retry":
		return
	}
	if a.odd == "" {
		a.odd = string(line[:min(maxBytes, len(line))])
	}
}

// take reads one line of data. If eventEnds is true, this line completes the event. If an event has several lines of
// data, take joins them.
func (a *answer) take(data []byte, at time.Duration, eventEnds bool) {
	if a.pending && startsEvent(a.data, data) {
		a.dispatch()
		if a.over() {
			return
		}
	}
	if !a.pending && eventEnds {
		a.event(data, at) // the event is complete, so its data need not be copied
		return
	}
	if a.pending {
		a.data = append(a.data, '\n')
	}
	a.data, a.dataAt, a.pending = append(a.data, data...), at, true
	if len(a.data) > maxLine {
		a.fail(Malformed, "an event of the stream has more than %s", render.Bytes(maxLine))
	}
}

// startsEvent reports whether the second of two lines of data belongs to a new event, although no empty line separates
// the two. That is so if the first line is a whole object and the second line begins an object or is [DONE]. No single
// JSON text looks like that.
func startsEvent(before, next []byte) bool {
	before, next = trimmed(before), trimmed(next)
	return complete(before) && len(next) > 0 && (next[0] == '{' || string(next) == doneMark)
}

// complete reports whether data looks like a whole event.
func complete(data []byte) bool {
	return string(data) == doneMark || len(data) > 1 && data[0] == '{' && data[len(data)-1] == '}'
}

// doneMark is the data of the last event.
const doneMark = "[DONE]"

// isSpace reports whether a byte is white space in JSON.
func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

// unspaced returns data without leading white space.
func unspaced(data []byte) []byte {
	for len(data) > 0 && isSpace(data[0]) {
		data = data[1:]
	}
	return data
}

// trimmed returns data without leading and trailing white space.
func trimmed(data []byte) []byte {
	for len(data) > 0 && isSpace(data[len(data)-1]) {
		data = data[:len(data)-1]
	}
	return unspaced(data)
}

// dispatch reads the pending event.
func (a *answer) dispatch() {
	if !a.pending {
		return
	}
	data := a.data
	a.pending, a.data = false, a.data[:0]
	a.event(data, a.dataAt)
}
