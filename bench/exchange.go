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
)

// drainTime is how long a connection may take to end its response after [DONE], so that it can be used again.
const drainTime = time.Second

// mostErrorText of a refusal is kept to find the message in.
const mostErrorText = 4096

// An exchange is one request on its way, and what has come back. It belongs to the sender until its request is written, and
// to the reader of its connection from then on.
type exchange struct {
	flight *flight
	departure
	at     int // place of the sample; -1 when it is not counted
	sample Sample

	reply   reply
	answer  answer
	refusal []byte // body of another status than 200

	second, chunks int  // chunks of which second are not yet in the series
	waited         bool // its connection had been idle, and the server may just have closed it
	received       bool
	retried        bool
	settled        bool

	lastByte atomic.Int64 // time of the flight, for those who watch over silence
	doneAt   atomic.Int64 // when it was settled; 0 while it is not
	overdue  atomic.Int32 // why the connection was closed on it: see flight.patrol
}

// The ways in which an exchange is overdue.
const (
	silent  = 1 // no byte came for too long
	endless = 2 // the answer took too long as a whole
)

// feed reads bytes of the connection, and returns how many were left when the response was over. Its error says that the
// connection is of no more use.
func (x *exchange) feed(b []byte, arrived, read time.Time) (left int, err error) {
	f := x.flight
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
	if x.reply.over || x.answer.over() || len(x.refusal) >= mostErrorText {
		return len(b), x.end(at)
	}
	return len(b), nil
}

// body takes a piece of the response's body.
func (x *exchange) body(b []byte, at time.Duration) {
	if x.reply.status != http.StatusOK {
		x.refusal = append(x.refusal, b[:min(len(b), mostErrorText-len(x.refusal))]...)
		return
	}
	if packed := x.reply.header.Get("Content-Encoding"); packed != "" && packed != "identity" {
		x.answer.fail(Malformed, "the server packs its answer with %s though it was asked not to", packed)
		return
	}
	waiting := x.answer.first == 0
	x.answer.feed(b, at)
	if waiting && x.answer.first > 0 && x.flight.watched {
		x.sample.First = x.answer.first
		x.flight.publish(x.at, x.sample)
	}
}

// count puts the chunks of the second that is over into the series.
func (x *exchange) count(at time.Duration) {
	if second := int(at / time.Second); second != x.second {
		x.flush()
		x.second = second
	}
}

func (x *exchange) flush() {
	if n := x.answer.chunks - x.chunks; n > 0 {
		x.chunks += n
		x.flight.addChunks(x.second, n)
	}
}

// end settles an exchange whose answer, or whose response, is over. Its error ends the connection.
func (x *exchange) end(at time.Duration) error {
	switch {
	case x.settled:
		return nil
	case x.reply.status != http.StatusOK:
		x.refused(at)
		if !x.reply.over {
			return errSettled // the rest of a refusal is of no interest
		}
		return nil
	case x.reply.over:
		x.answer.finish(io.EOF, at)
	}
	x.settle(at)
	if x.answer.failure != "" && !x.reply.over {
		return errSettled // who knows what follows
	}
	return nil
}

// settle turns the answer into the end of the sample.
func (x *exchange) settle(at time.Duration) {
	a, s := &x.answer, &x.sample
	s.Opened, s.First, s.Last, s.Closed, s.Gaps, s.Chunks = a.opened, a.first, a.last, a.closed, a.gaps, a.chunks
	s.Role, s.Pieces, s.Blank, s.TextBytes = a.role, a.pieces, a.blank, a.textBytes
	if a.usage != nil {
		s.PromptTokens, s.CachedTokens, s.OutputTokens = a.usage.PromptTokens, a.usage.Details.CachedTokens, a.usage.CompletionTokens
		s.TextBytes += a.usage.Hidden.Reasoning // of which no text need be shown
	}
	a.judge()
	s.End, s.Failure, s.Detail = max(at, s.Sent), a.failure, x.flight.client.hide(a.detail)
	x.arrive()
}

// refused settles an exchange that was answered with another status than 200.
func (x *exchange) refused(at time.Duration) {
	message := errorMessage(x.refusal)
	if message == "" {
		message = http.StatusText(x.reply.status)
	}
	if where := x.reply.header.Get("Location"); where != "" {
		message += ", Location: " + firstLine(where)
	}
	x.sample.End = at
	x.fail(Status, fmt.Sprintf("%d: %s", x.reply.status, message))
}

// fail settles an exchange that has failed.
func (x *exchange) fail(kind Failure, detail string) {
	if x.settled {
		return
	}
	s := &x.sample
	s.Opened, s.First, s.Last, s.Chunks = x.answer.opened, x.answer.first, x.answer.last, x.answer.chunks
	s.Failure, s.Detail = kind, x.flight.client.hide(firstLine(detail))
	if s.End == 0 {
		s.End = x.flight.now()
	}
	x.arrive()
}

// withdraw settles an exchange that has neither ended nor failed.
func (x *exchange) withdraw() {
	if !x.settled {
		x.sample.First, x.sample.Last, x.sample.Chunks = x.answer.first, x.answer.last, x.answer.chunks
		x.arrive()
	}
}

func (x *exchange) arrive() {
	x.settled = true
	x.doneAt.Store(int64(x.flight.now()))
	x.flush()
	x.flight.arrive(x)
}

// broke settles an exchange whose connection has ended. A request that met a connection which the server was just closing is
// sent once more, as browsers do.
func (x *exchange) broke(err error) {
	f := x.flight
	switch {
	case x.settled:
	case !x.received && x.waited && !x.retried && x.overdue.Load() == 0 && f.ctx.Err() == nil && broken(err):
		x.retried = true
		f.pool.work.Go(func() { f.sendAnew(x) })
	case x.overdue.Load() == silent:
		x.fail(TimedOut, fmt.Sprintf("no byte came for %s", f.client.IdleTimeout))
	case x.overdue.Load() == endless:
		x.fail(NeverFinished, fmt.Sprintf("the answer took more than %s", f.client.RunLimit))
	case f.ctx.Err() != nil:
		x.withdrawn()
	case x.reply.status == http.StatusOK:
		if err == io.EOF && x.reply.left >= 0 {
			err = io.ErrUnexpectedEOF // only a response without a length ends with its connection
		}
		now := f.now()
		x.answer.finish(err, now)
		x.settle(now)
	case x.reply.status != 0:
		x.refused(f.now())
	default:
		x.fail(Reset, fmt.Sprintf("the connection ended before an answer: %v", err))
	}
}

// withdrawn settles an exchange when the run has ended: it is late if the run took too long, and no failure otherwise.
func (x *exchange) withdrawn() {
	if context.Cause(x.flight.ctx) == errTooLong {
		x.fail(NeverFinished, errTooLong.Error())
		return
	}
	x.withdraw()
}

// unsent settles an exchange for which no connection could be opened.
func (x *exchange) unsent(err error) {
	f := x.flight
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

// broken reports whether an error is that of a connection which the other side has closed.
func broken(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed)
}

// counted reports whether the request is measured.
func (x *exchange) counted() bool { return x.Phase == workload.Window }

// text of the answer, for the next turn of a live conversation.
func (x *exchange) text() string { return strings.Join(x.answer.text, "") }
