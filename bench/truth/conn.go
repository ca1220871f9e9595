package truth

import (
	"container/heap"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sys/unix"
)

// A conn is one connection.
type conn struct {
	fd       int
	in       []byte        // bytes read but not answered
	out      []byte        // bytes that the kernel has not taken yet
	received time.Duration // when the bytes of the last read reached the kernel
	seen     time.Duration // when the server read them
	last     bool          // the connection closes after this answer

	streaming bool
	due       time.Duration // due time of the next token
	index     int           // position in loop.due
	left      int           // tokens still to write
	stream    stream
	record    *Request // nil with Config.Forget
}

// read reads all that has arrived. It returns false if the connection has ended.
func (l *loop) read(c *conn) bool {
	for {
		n, controls, _, _, err := unix.Recvmsg(c.fd, l.buffer[:], l.control[:], 0)
		switch {
		case err == unix.EAGAIN:
			return true
		case err == unix.EINTR:
			continue
		case err != nil || n <= 0 || len(c.in)+n > maxRequest:
			return false
		}
		wall := time.Now()
		c.seen = wall.Sub(l.start)
		c.received = c.seen - age(l.control[:controls], wall)
		c.in = append(c.in, l.buffer[:n]...)
	}
}

// age returns how long the bytes had been in the kernel when they were read, by their time stamp; 0 without a stamp.
func age(control []byte, now time.Time) time.Duration {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= 16 {
			seconds, nanos := binary.NativeEndian.Uint64(m.Data), binary.NativeEndian.Uint64(m.Data[8:])
			return max(0, now.Sub(time.Unix(int64(seconds), int64(nanos))))
		}
	}
	return 0
}

// write writes b and keeps the bytes that the kernel does not take. It returns false if the connection has ended.
func (l *loop) write(c *conn, b []byte) bool {
	if len(c.out) == 0 {
		n, err := unix.Write(c.fd, b)
		if err != nil && err != unix.EAGAIN && err != unix.EINTR {
			return false
		}
		b = b[max(0, n):]
	}
	if len(b) > 0 {
		l.report.Blocked++
		c.out = append(c.out, b...)
	}
	return true
}

// flush writes the bytes that write kept.
func (l *loop) flush(c *conn) bool {
	for len(c.out) > 0 {
		n, err := unix.Write(c.fd, c.out)
		switch {
		case err == unix.EAGAIN:
			return true
		case err == unix.EINTR:
			continue
		case err != nil:
			return false
		}
		c.out = c.out[n:]
	}
	c.out = nil
	return !c.last || c.streaming
}

// answer answers the requests in c.in, up to the first one that streams.
func (l *loop) answer(c *conn) bool {
	for !c.streaming {
		q, size, err := parse(c.in)
		if err != nil {
			c.last = true
			return l.write(c, reply(http.StatusBadRequest, fmt.Appendf(nil, `{"error":{"message":%q}}`, err))) && l.flush(c)
		}
		if size == 0 {
			return true
		}
		c.last = q.close
		if !l.route(c, &q) {
			return false
		}
		c.in = append(c.in[:0], c.in[size:]...)
	}
	return true
}

// reportPath is the path of the report.
const reportPath = "/truth"

// route answers one request or begins a stream.
func (l *loop) route(c *conn, q *request) bool {
	switch q.method + " " + q.path {
	case "POST /v1/completions", "POST /v1/chat/completions":
		if err := q.readBody(); err != nil {
			return l.reply(c, http.StatusBadRequest, map[string]any{"error": map[string]string{"message": err.Error()}})
		}
		return l.begin(c, q)
	case "GET /health":
		return l.write(c, reply(http.StatusOK, nil))
	case "GET /v1/models":
		model := map[string]any{"id": l.config.Model, "object": "model", "owned_by": "vllm", "max_model_len": 1 << 20}
		return l.reply(c, http.StatusOK, map[string]any{"object": "list", "data": []any{model}})
	case "GET " + reportPath:
		return l.reply(c, http.StatusOK, l.snapshot())
	}
	return l.reply(c, http.StatusNotFound, map[string]string{"detail": "Not Found"})
}

func (l *loop) reply(c *conn, status int, body any) bool {
	text, err := json.Marshal(body)
	if err != nil {
		return false
	}
	return l.write(c, reply(status, text)) && (!c.last || l.flush(c))
}

// snapshot returns the report so far.
func (l *loop) snapshot() *Report {
	report := l.report
	report.CPU = cpuTime() - l.cpu
	for _, record := range l.records {
		report.Requests = append(report.Requests, *record)
	}
	return &report
}

// begin sends the head of a stream and schedules its first token. uvicorn also sends the head before the first token.
func (l *loop) begin(c *conn, q *request) bool {
	c.stream.begin(l.config.Model, q)
	c.left, c.due, c.streaming = q.tokens, l.step(c.received+l.config.TTFT), true
	c.record = nil
	if !l.config.Forget {
		c.record = &Request{
			ID: string(q.id), Received: c.received.Microseconds(), Seen: c.seen.Microseconds(),
			Due: make([]int64, 0, q.tokens), Writes: make([]int64, 0, q.tokens),
		}
		l.records = append(l.records, c.record)
	}
	heap.Push(&l.due, c)
	return l.write(c, streamHead)
}

// step returns the time at which the server writes a token that is ready at the given time.
func (l *loop) step(ready time.Duration) time.Duration {
	if !l.config.Step {
		return ready
	}
	return (ready + l.config.TPOT - 1).Truncate(l.config.TPOT)
}

// writeToken writes the next token of a stream, and after the last one the stream's end.
func (l *loop) writeToken(c *conn) bool {
	chunk := c.stream.token
	if c.left == 1 {
		chunk = c.stream.last
	}
	if c.stream.role != nil {
		if !l.write(c, c.stream.role) {
			return false
		}
		c.stream.role = nil
	}
	at := l.now()
	if !l.write(c, chunk) {
		return false
	}
	if c.record != nil {
		c.record.Due = append(c.record.Due, c.due.Microseconds())
		c.record.Writes = append(c.record.Writes, at.Microseconds())
	}
	l.report.Tokens++
	if c.left--; c.left > 0 {
		c.due += l.config.TPOT
		heap.Fix(&l.due, c.index)
		return true
	}
	heap.Remove(&l.due, c.index)
	c.streaming = false
	l.report.Answered++
	return l.write(c, c.stream.tail) && (!c.last || l.flush(c)) && l.answer(c)
}
