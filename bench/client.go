package bench

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"vllmtuner/bench/workload"
)

// A Client sends schedules to one server. Its load is open loop: it sends each request at its due time, however many
// are in flight. If MaxInFlight is set, the load is closed loop. The fields of a Client may be changed until the first
// call of Run.
type Client struct {
	URL         string         // base URL, such as http://127.0.0.1:8000
	Model       string         // name under which the server serves the model
	Endpoint    string         // workload.Completions (also when empty) or workload.Chat
	APIKey      Secret         // sent as a bearer token; "" sends none
	Header      http.Header    // further headers of each request, besides Content-Type and the API key
	TLS         *tls.Config    `json:"-"` // for https; nil means the system's certificates
	Proxy       *url.URL       // HTTP proxy to tunnel through; nil means none, whatever the environment says
	ITL         bool           // record the times between tokens
	Natural     bool           // let the model end its answers: lengths are not pinned, and any length is accepted
	MaxInFlight int            // limit on requests in flight, for a closed loop; 0 means open loop
	Rules       Rules          // the definitions that the Tally follows; "" means Rules033
	Limits      []Limit        // for each limit, the Tally counts the requests over it
	Progress    func(Progress) `json:"-"` // called once a second during a run; nil means silent
	MaxSamples  int            // largest number of samples that a run keeps; a run with more counted requests keeps only a Tally, whose size does not depend on their number; 0 means 100,000
	IdleTimeout time.Duration  // a request fails when no byte of its answer comes for this long; 0 means 60 s
	RunLimit    time.Duration  // limit on the time of one answer, and on the wait for the last answers after all counted requests are due; 0 means 10 min

	dial func(ctx context.Context, network, address string) (net.Conn, error) // nil means TCP; tests use a network in memory
}

// A Secret is a text that never appears in a log, a store or an error.
type Secret string

const hidden = "[secret]"

// Format writes a placeholder, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, hidden) }

// hide removes the client's secrets from a text that the server sent. Such a text may quote the request.
func (c *Client) hide(text string) string {
	if c.APIKey != "" {
		text = strings.ReplaceAll(text, string(c.APIKey), hidden)
	}
	for _, values := range c.Header {
		for _, value := range values {
			_, credentials, _ := strings.Cut(value, " ") // after a scheme such as Bearer
			for _, secret := range []string{value, credentials} {
				if len(secret) >= minSecret {
					text = strings.ReplaceAll(text, secret, hidden)
				}
			}
		}
	}
	return text
}

// minSecret is the smallest length of a header's value that hide treats as a secret. Shorter values may be ordinary
// words.
const minSecret = 8

// MarshalText returns a placeholder, for JSON, YAML and structured logs.
func (s Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

const (
	defaultIdleTimeout = time.Minute
	defaultRunLimit    = 10 * time.Minute
	defaultMaxSamples  = 100_000 // some 25 MB
	maxInitialConns    = 4096    // limit on the connections opened before the first request

	// composeAhead is how many requests are composed before they are due. Sixteen are enough for a burst and take
	// little memory: a prompt of 6,000 token ids has about 35 KB.
	composeAhead = 16
)

// The reasons that end a run without an error. Any other reason is an error of the run.
var (
	errEnough  = errors.New("all counted requests have ended")
	errStopped = errors.New("stopped early")
	errTooLong = errors.New("the last answers took too long")
)

// Run sends the schedule. Once the run-out has begun and all counted requests have ended, Run withdraws (cancels) the
// requests of the run-out and returns. If the schedule ends without a run-out, Run waits for the last answers, but not
// longer than RunLimit. If stop is not nil and returns true, Run withdraws all requests, and pending samples keep a
// zero End. When ctx ends, Run returns the cause (context.Cause).
//
// Run opens connections before it needs them, the first ones before the schedule begins. It closes them all before it
// returns, because vLLM's shutdown hangs while a client holds a connection.
func (c *Client) Run(ctx context.Context, schedule workload.Schedule, stop Stop) (Run, error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	f, err := c.newRun(ctx, end)
	if err != nil {
		return Run{}, err
	}
	f.watched = stop != nil
	if c.dial == nil {
		defer awaitStamps()()
	}

	ready := make(chan departure, composeAhead)
	var helpers sync.WaitGroup
	helpers.Go(func() { f.prepare(schedule, ready) })
	f.pool.fill(ctx, max(minIdle, min(c.MaxInFlight, maxInitialConns)))
	f.start = time.Now()
	before := readProcessStats()
	aborted := make(chan struct{})
	context.AfterFunc(ctx, func() { // always runs, because end(errEnough) below ends ctx
		defer close(aborted)
		f.pool.abort(context.Cause(ctx))
	})
	helpers.Go(f.closeOverdue)
	helpers.Go(func() { f.pool.keepFilled(ctx) })
	if stop != nil || c.Progress != nil {
		helpers.Go(func() { f.watch(c.Progress, stop) })
	}
	f.pace(ready)
	f.startRunLimit()
	f.requests.Wait()
	f.tooLong.Stop()
	end(errEnough)
	f.run.Elapsed, f.run.Lateness = f.now(), before.since()
	helpers.Wait()
	<-aborted
	f.pool.wait()
	return f.result(context.Cause(ctx))
}

// RunClosed is like Run, but has at most the given number of requests (streams) in flight.
func (c *Client) RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop Stop) (Run, error) {
	closed := *c
	closed.MaxInFlight = streams
	return closed.Run(ctx, schedule, stop)
}

// result returns the run, with an error if it did not end as intended.
func (f *runState) result(cause error) (Run, error) {
	f.run.Series.Close()
	if f.run.Tally != nil {
		for i := range f.run.Samples {
			if f.run.Samples[i].WantTokens > 0 { // a withdrawn request; the Tally already has the others
				f.run.Tally.Add(&f.run.Samples[i])
			}
		}
		f.run.Samples = nil
	}
	switch cause {
	case errEnough, errTooLong:
	case errStopped:
		f.run.Stopped = true
	default:
		return f.run, cause
	}
	return f.run, nil
}

// newRun checks the configuration and returns the state of a run.
func (c *Client) newRun(ctx context.Context, end context.CancelCauseFunc) (*runState, error) {
	base, path, err := c.target()
	if err != nil {
		return nil, err
	}
	f := &runState{
		client: *c, chat: c.Endpoint == workload.Chat, ctx: ctx, finish: end,
		head: c.requestHead(base.Host, path), id: fmt.Sprintf("tuner-%08x-", rand.Uint32()),
		pool: newPool(c.dialer(base)),
	}
	f.client.IdleTimeout = cmp.Or(max(0, c.IdleTimeout), defaultIdleTimeout)
	f.client.RunLimit = cmp.Or(max(0, c.RunLimit), defaultRunLimit)
	f.client.MaxSamples = cmp.Or(max(0, c.MaxSamples), defaultMaxSamples)
	if c.MaxInFlight > 0 {
		f.slots = make(chan time.Duration, c.MaxInFlight)
		for range c.MaxInFlight {
			f.slots <- 0
		}
	}
	return f, nil
}

// target checks the configuration and returns the server's URL and the path that requests go to.
func (c *Client) target() (*url.URL, string, error) {
	base, err := serverURL(c.URL)
	switch {
	case err != nil:
		return nil, "", err
	case base.User != nil:
		return nil, "", fmt.Errorf("server URL %q names a user: vLLM knows API keys only", base.Redacted())
	case c.Proxy != nil && (c.Proxy.Scheme != "http" || c.Proxy.Host == "" || c.Proxy.Port() == ""):
		return nil, "", fmt.Errorf("proxy %q must be a URL such as http://proxy:3128", c.Proxy.Redacted())
	case c.Model == "":
		return nil, "", errors.New("no model is named: give a name from the server's /v1/models")
	}
	path := map[string]string{"": "v1/completions", workload.Completions: "v1/completions", workload.Chat: "v1/chat/completions"}[c.Endpoint]
	if path == "" {
		return nil, "", fmt.Errorf("unknown endpoint %q: use %s or %s", c.Endpoint, workload.Completions, workload.Chat)
	}
	return base, strings.TrimRight(base.EscapedPath(), "/") + "/" + path, nil
}
