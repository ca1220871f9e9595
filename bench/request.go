package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"

	"vllmtuner/bench/workload"
)

// errIdle ends a request whose server has fallen silent.
var errIdle = errors.New("no byte came for too long")

// drainTime is how long a connection may take to end its stream after [DONE], so that it can be used again.
const drainTime = time.Second

// request sends one request, reads its answer and enters it into the run.
func (f *flight) request(ctx context.Context, d departure, at int) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(f.client.IdleTimeout, func() { cancel(errIdle) })
	defer idle.Stop()

	s := d.sample()
	s.Sent = f.now()
	response, err := f.post(ctx, d.body)
	if err != nil {
		f.arrive(at, f.broken(ctx, s, err))
		return
	}
	defer response.Body.Close() // only read
	if response.StatusCode != http.StatusOK {
		f.arrive(at, f.refused(s, response))
		return
	}
	a := &answer{chat: f.client.Endpoint == workload.Chat, itl: f.client.ITL}
	f.read(response.Body, a, idle, func() {
		s.First = a.first
		f.progress(at, s)
	})
	f.arrive(at, f.settle(ctx, s, a))
	if a.done {
		idle.Reset(drainTime)
		_, _ = io.Copy(io.Discard, response.Body) // a connection that cannot be drained is closed, not used again
	}
}

func (f *flight) post(ctx context.Context, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, f.target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if f.client.APIKey != "" {
		request.Header.Set("Authorization", "Bearer "+string(f.client.APIKey))
	}
	// A nil value is not sent. It lets net/http use another connection where the server has closed the idle one it had chosen
	// before answering with a single byte.
	request.Header["X-Idempotency-Key"] = nil
	return f.http.Do(request)
}

// read reads the answer until nothing that follows can change it. first is called when the first token is there.
func (f *flight) read(body io.Reader, a *answer, idle *time.Timer, first func()) {
	buffer := make([]byte, 4096)
	for !a.over() {
		waiting := a.first == 0
		n, err := body.Read(buffer)
		now := f.now()
		a.feed(buffer[:n], now)
		if err != nil {
			a.finish(err, now)
			return
		}
		if waiting && a.first > 0 {
			first()
		}
		idle.Reset(f.client.IdleTimeout)
	}
}

// settle turns an answer into the end of a sample.
func (f *flight) settle(ctx context.Context, s Sample, a *answer) Sample {
	s.First, s.Last, s.Gaps = a.first, a.last, a.gaps
	if a.usage != nil {
		s.PromptTokens, s.CachedTokens, s.OutputTokens = a.usage.PromptTokens, a.usage.Details.CachedTokens, a.usage.CompletionTokens
	}
	if a.failure == Reset && ctx.Err() != nil {
		return f.broken(ctx, s, nil)
	}
	a.judge(s.WantTokens)
	s.End, s.Failure, s.Detail = f.now(), a.failure, a.detail
	return s
}

// broken returns the sample of a request that ended without an answer: withdrawn, timed out, or for lack of a connection.
func (f *flight) broken(ctx context.Context, s Sample, err error) Sample {
	switch cause := context.Cause(ctx); {
	case cause == errIdle:
		s.Failure, s.Detail = TimedOut, fmt.Sprintf("no byte came for %s", f.client.IdleTimeout)
	case cause == errTooLong:
		s.Failure, s.Detail = NeverFinished, errTooLong.Error()
	case cause != nil:
		return s // withdrawn: it has not failed, and it has not ended
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.EADDRNOTAVAIL):
		f.end(fmt.Errorf("the load generator has no sockets left: %w: raise the limit of open files (ulimit -n) or lower the rate", err))
		return s
	default:
		s.Failure, s.Detail = Reset, firstLine(err.Error())
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			s.Failure = Refused
		}
	}
	s.End = f.now()
	return s
}

// refused returns the sample of a request that was answered with another status than 200.
func (f *flight) refused(s Sample, response *http.Response) Sample {
	const most = 4096
	body, err := io.ReadAll(io.LimitReader(response.Body, most))
	message := errorMessage(body)
	if err != nil || message == "" {
		message = http.StatusText(response.StatusCode)
	}
	s.Failure, s.Detail, s.End = Status, fmt.Sprintf("%d: %s", response.StatusCode, message), f.now()
	return s
}
