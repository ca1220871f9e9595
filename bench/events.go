package bench

import (
	"bytes"
	"time"
)

// longestLine bounds the memory of one answer. vLLM's chunks have some hundred bytes.
const longestLine = 1 << 20

// lines are what of an event stream was read and not yet understood.
type lines struct {
	rest    []byte        // beginning of a line whose end has not come
	begun   bool          // the first line was read
	cr      bool          // the last line ended with CR: a LF that follows belongs to it
	data    []byte        // of an event whose end has not come
	pending bool          // there is such an event
	dataAt  time.Duration // when the last line of data came
}

// feed reads the next bytes, which came at the time at.
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
			if len(a.rest) > longestLine {
				a.fail(Malformed, "a line of more than %d bytes", longestLine)
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

// lineEnd returns where the first line ends, -1 where its end has not come. Lines end with LF, CR LF or CR.
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

// line reads one line without its end. last says that an empty line follows, which ends the event.
func (a *answer) line(line []byte, at time.Duration, last bool) {
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
		a.take(data, at, last)
	case isData && data[0] == ':':
		a.take(bytes.TrimPrefix(data[1:], []byte(" ")), at, last)
	default:
		a.field(line)
	}
}

// field looks at a line that carries no data: a comment, another field, or something that is no event stream at all. A field that nobody
// knows is no error, so the first one is only kept for the case that no event comes.
func (a *answer) field(line []byte) {
	const most = 80
	name, _, _ := bytes.Cut(line, []byte(":"))
	switch string(name) {
	case "", "event", "id", "retry":
		return
	}
	if a.odd == "" {
		a.odd = string(line[:min(most, len(line))])
	}
}

// take takes one line of data. Several lines of one event are joined.
func (a *answer) take(data []byte, at time.Duration, last bool) {
	if a.pending && apart(a.data, data) {
		a.dispatch()
		if a.over() {
			return
		}
	}
	if !a.pending && last {
		a.event(data, at) // without a copy
		return
	}
	if a.pending {
		a.data = append(a.data, '\n')
	}
	a.data, a.dataAt, a.pending = append(a.data, data...), at, true
	if len(a.data) > longestLine {
		a.fail(Malformed, "an event of more than %d bytes", longestLine)
	}
}

// apart reports whether two lines of data are two events, though no empty line is between them: what ends as an object and what
// begins as one, or as [DONE], are never one JSON text.
func apart(before, next []byte) bool {
	before, next = trimmed(before), trimmed(next)
	return complete(before) && len(next) > 0 && (next[0] == '{' || string(next) == doneMark)
}

// complete reports whether data looks like all of an event.
func complete(data []byte) bool {
	return string(data) == doneMark || len(data) > 1 && data[0] == '{' && data[len(data)-1] == '}'
}

// doneMark is the data of the last event.
const doneMark = "[DONE]"

// isSpace reports whether JSON takes a byte for white space.
func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

// unspaced returns data without the white space before it.
func unspaced(data []byte) []byte {
	for len(data) > 0 && isSpace(data[0]) {
		data = data[1:]
	}
	return data
}

// trimmed returns data without the white space around it.
func trimmed(data []byte) []byte {
	for len(data) > 0 && isSpace(data[len(data)-1]) {
		data = data[:len(data)-1]
	}
	return unspaced(data)
}

// dispatch reads the event whose lines have come.
func (a *answer) dispatch() {
	if !a.pending {
		return
	}
	data := a.data
	a.pending, a.data = false, a.data[:0]
	a.event(data, a.dataAt)
}
