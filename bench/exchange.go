package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
)

// drainTime is how long the response may go on after [DONE]. After this time the connection is closed and not used
// again.
const drainTime = time.Second

// maxErrorText is how many bytes of an error response are kept. They are searched for the error message.
const maxErrorText = 4096

// An exchange is one request and the part of its response that has arrived. The sender owns it until a connection
// begins to send the request. From then on the reader of that connection owns it.
type exchange struct {
	state *runState
	departure
	at     int // index of the sample in the run; -1 if the request is not counted
	sample Sample

	reply   reply
	answer  answer
	refusal []byte // body of a response whose status is not 200

	second, chunks int  // the current second of the series, and the number of chunks of this answer that the series already has
	waited         bool // the connection was idle before, so the server may just have closed it
	received       bool
	retried        bool
	recorded       bool // the end of the exchange has been recorded

	lastByte atomic.Int64 // when the last byte came, in ns since the start of the run; for runState.closeOverdue
	doneAt   atomic.Int64 // when the exchange was recorded, in ns since the start of the run; 0 before
	overdue  atomic.Int32 // why runState.closeOverdue closed the connection (silent or endless); 0 if it did not
}

// The ways in which an exchange is overdue.
const (
	silent  = 1 // no byte came for too long
	endless = 2 // the answer took too long as a whole
)

// feed reads bytes of the connection. It returns how many of them follow the end of the response. An error means that
// the connection cannot be used again.
func (x *exchange) feed(b []byte, arrived, read time.Time) (left int, err error) {
	f := x.state
	at := arrived.Sub(f.start)
	x.received = true
	before, waiting := time.Duration(x.lastByte.Load()), x.answer.first == 0
	x.lastByte.Store(int64(read.Sub(f.start)))
	x.sample.ReadLag = max(x.sample.ReadLag, read.Sub(arrived))
	x.count(at)
	for len(b) > 0 && !x.reply.over {
		var body []byte
		body, b, err = x.reply.next(b)
		if err != nil {
			x.fail(Malformed, err.Error())
			return len(b), err
		}
		if len(body) > 0 {
			x.body(body, at)
		}
	}
	if waiting && x.answer.chunks > 1 {
		x.sample.Blur = max(0, at-before)
	}
	if x.reply.over || x.answer.over() || len(x.refusal) >= maxErrorText {
		return len(b), x.end(at)
	}
	return len(b), nil
}

// body reads a piece of the response's body.
func (x *exchange) body(b []byte, at time.Duration) {
	if x.reply.status != http.StatusOK {
		x.refusal = append(x.refusal, b[:min(len(b), maxErrorText-len(x.refusal))]...)
		return
	}
	if packed := x.reply.header.Get("Content-Encoding"); packed != "" && packed != "identity" {
		x.answer.fail(Malformed, "the server compresses its answer with %s, though the request forbids it", packed)
		return
	}
	waiting := x.answer.first == 0
	x.answer.feed(b, at)
	if waiting && x.answer.first > 0 && x.state.watched {
		x.sample.First = x.answer.first
		x.state.publish(x.at, x.sample)
	}
}

// count adds the chunks of the last second to the series, once that second is over.
func (x *exchange) count(at time.Duration) {
	if second := int(at / time.Second); second != x.second {
		x.flush()
		x.second = second
	}
}

func (x *exchange) flush() {
	if n := x.answer.chunks - x.chunks; n > 0 {
		x.chunks += n
		x.state.addChunks(x.second, n)
	}
}

// end records an exchange whose answer or response is over. An error means that the connection must be closed.
func (x *exchange) end(at time.Duration) error {
	switch {
	case x.recorded:
		return nil
	case x.reply.status != http.StatusOK:
		x.refused(at)
		if !x.reply.over {
			return errAnswerOver // the rest of an error's body is not needed
		}
		return nil
	case x.reply.over:
		x.answer.finish(io.EOF, at)
	}
	x.complete(at)
	if x.answer.failure != "" && !x.reply.over {
		return errAnswerOver // nobody knows how long the rest of the response is
	}
	return nil
}

// complete fills the sample from the answer and records it.
func (x *exchange) complete(at time.Duration) {
	a, s := &x.answer, &x.sample
	s.Opened, s.First, s.Last, s.Closed, s.Gaps, s.Chunks = a.opened, a.first, a.last, a.closed, a.gaps, a.chunks
	s.Role, s.Pieces, s.Blank, s.TextBytes = a.role, a.pieces, a.blank, a.textBytes
	if a.usage != nil {
		s.PromptTokens, s.CachedTokens, s.OutputTokens = a.usage.PromptTokens, a.usage.Details.CachedTokens, a.usage.CompletionTokens
		s.TextBytes += a.usage.Hidden.Reasoning // a server need not show the text of reasoning tokens; each counts as one byte
	}
	a.judge()
	s.End, s.Failure, s.Detail = max(at, s.Sent), a.failure, x.state.client.hide(a.detail)
	x.record()
}

// refused records an exchange whose response has a status other than 200.
func (x *exchange) refused(at time.Duration) {
	message := errorMessage(x.refusal)
	if message == "" {
		message = http.StatusText(x.reply.status)
	}
	if where := x.reply.header.Get("Location"); where != "" {
		message += ", Location: " + firstLine(where)
	}
	x.sample.End, x.sample.Status = at, x.reply.status
	x.fail(Status, fmt.Sprintf("%d: %s", x.reply.status, message))
}

// fail records an exchange that has failed.
func (x *exchange) fail(kind Failure, detail string) {
	if x.recorded {
		return
	}
	s := &x.sample
	s.Opened, s.First, s.Last, s.Chunks = x.answer.opened, x.answer.first, x.answer.last, x.answer.chunks
	s.Failure, s.Detail = kind, x.state.client.hide(firstLine(detail))
	if s.End == 0 {
		s.End = x.state.now()
	}
	x.record()
}

// withdraw records an exchange that has neither ended nor failed.
func (x *exchange) withdraw() {
	if !x.recorded {
		x.sample.First, x.sample.Last, x.sample.Chunks = x.answer.first, x.answer.last, x.answer.chunks
		x.record()
	}
}

func (x *exchange) record() {
	x.recorded = true
	x.doneAt.Store(int64(x.state.now()))
	x.flush()
	x.state.record(x)
}

// broke ends an exchange whose connection has ended. If the server may have closed an idle connection just as the
// request was sent, this method sends the request once more, as browsers do.
func (x *exchange) broke(err error) {
	f := x.state
	switch {
	case x.recorded:
	case !x.received && x.waited && !x.retried && x.overdue.Load() == 0 && f.ctx.Err() == nil && broken(err):
		x.retried = true
		f.pool.work.Go(func() { f.sendAnew(x) })
	case x.overdue.Load() == silent:
		x.fail(TimedOut, fmt.Sprintf("no byte came for %s", render.Took(f.client.IdleTimeout)))
	case x.overdue.Load() == endless:
		x.fail(NeverFinished, fmt.Sprintf("the answer took more than %s", render.Took(f.client.RunLimit)))
	case f.ctx.Err() != nil:
		x.withdrawn()
	case x.reply.status == http.StatusOK:
		if err == io.EOF && x.reply.left >= 0 {
			err = io.ErrUnexpectedEOF // only a response without a length may end with its connection
		}
		now := f.now()
		x.answer.finish(err, now)
		x.complete(now)
	case x.reply.status != 0:
		x.refused(f.now())
	default:
		x.fail(Reset, fmt.Sprintf("the connection ended before the answer: %v", err))
	}
}

// withdrawn records an exchange that was pending when the run ended. It counts as a failure only if the run took too
// long.
func (x *exchange) withdrawn() {
	if context.Cause(x.state.ctx) == errTooLong {
		x.fail(NeverFinished, errTooLong.Error())
		return
	}
	x.withdraw()
}

// unsent records an exchange for which no connection could be opened.
func (x *exchange) unsent(err error) {
	f := x.state
	switch {
	case f.ctx.Err() != nil:
		x.withdrawn()
	case noSockets(err):
		f.finish(fmt.Errorf("the load generator has no sockets left: %w: raise the limit of open files (ulimit -n) or lower the rate", err))
		x.withdraw()
	default:
		x.fail(Refused, err.Error())
	}
}

// broken reports whether err means that the server closed the connection.
func broken(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed)
}

// counted reports whether the request is measured.
func (x *exchange) counted() bool { return x.Phase == workload.Window }

// text returns the text of the answer, for the next turn of a live conversation.
func (x *exchange) text() string { return strings.Join(x.answer.text, "") }
