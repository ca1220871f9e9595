package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"vllmtuner/bench/workload"
)

// A Client sends schedules to one server, open loop: each request leaves when it is due, however many are in flight.
// Its fields may be changed until the first call of Run.
type Client struct {
	URL         string        // base URL, such as http://127.0.0.1:8000
	Model       string        // name under which the server serves the model
	Endpoint    string        // workload.Completions (also when empty) or workload.Chat
	APIKey      Secret        // sent as a bearer token; "" sends none
	Header      http.Header   // sent with each request, beside Content-Type and the API key
	TLS         *tls.Config   // for https; nil means the system's certificates
	Proxy       *url.URL      // HTTP proxy to tunnel through; nil means none: what the environment says is not asked
	ITL         bool          // record the times between tokens
	Natural     bool          // let answers end where the model ends them: lengths are not pinned, and no length is a failure
	MaxInFlight int           // requests that may be in flight at a time, the others wait for a place; 0 means open loop
	Rules       Rules         // whose definitions the Tally follows; "" means Rules033
	Limits      []Limit       // that the Tally counts
	MaxSamples  int           // of more counted requests only a Tally is kept, so that memory stays flat; 0 means 1,000,000
	IdleTimeout time.Duration // an answer without a byte for so long has failed, the wait for its first one included; 0 means 60 s
	RunLimit    time.Duration // how long the last answers may take once all counted requests are due; 0 means 10 min

	dial func(ctx context.Context, network, address string) (net.Conn, error) // nil means TCP; tests have a network in memory
}

// A Secret is a text that never shows in a log, a store or an error.
type Secret string

const hidden = "[secret]"

// Format writes a placeholder under every verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, hidden) }

// MarshalText returns a placeholder, for JSON, YAML and structured logs.
func (s Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

const (
	defaultIdleTimeout = time.Minute
	defaultRunLimit    = 10 * time.Minute

	// ahead is how many requests have their bodies ready before they are due: enough for a burst, and little memory (a prompt
	// of 6,000 token ids has some 35 KB).
	ahead = 16
)

// The reasons for which a run ends its requests. Any other is an error of the run.
var (
	errEnough  = errors.New("all counted requests have ended")
	errStopped = errors.New("stopped early")
	errTooLong = errors.New("the last answers took too long")
)

// Run sends the schedule. Once the run-out has begun and all counted requests have ended, it withdraws the requests of the
// run-out and returns; a schedule that ends by itself is waited for, RunLimit at most. stop may be nil. When stop returns
// true, all requests are withdrawn, and pending samples keep a zero End. When ctx ends, Run returns its cause.
//
// All connections are closed when Run returns: vLLM's shutdown hangs while clients hold theirs.
func (c *Client) Run(ctx context.Context, schedule workload.Schedule, stop Stop) (Run, error) {
	target, err := c.target()
	if err != nil {
		return Run{}, err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	transport := c.transport()
	defer transport.CloseIdleConnections()
	f := &flight{
		client: *c, target: target, start: time.Now(), end: end,
		http: http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}
	f.client.IdleTimeout = orDefault(c.IdleTimeout, defaultIdleTimeout)

	ready := make(chan departure, ahead)
	var helpers sync.WaitGroup
	helpers.Go(func() { f.prepare(ctx, schedule, ready) })
	if stop != nil {
		helpers.Go(func() { f.watch(ctx, stop) })
	}
	f.pace(ctx, ready)
	f.limit()
	f.requests.Wait()
	f.tooLong.Stop()
	end(errEnough)
	helpers.Wait()

	f.run.Elapsed = f.now()
	switch cause := context.Cause(ctx); cause {
	case errEnough, errTooLong:
	case errStopped:
		f.run.Stopped = true
	default:
		return f.run, cause
	}
	return f.run, nil
}

// target checks the configuration and returns the URL that requests go to.
func (c *Client) target() (string, error) {
	base, err := url.Parse(c.URL)
	switch {
	case err != nil:
		return "", fmt.Errorf("server URL: %w", err)
	case base.Scheme != "http" && base.Scheme != "https", base.Host == "":
		return "", fmt.Errorf("server URL %q needs a scheme and a host, such as http://127.0.0.1:8000", base.Redacted())
	case c.Model == "":
		return "", errors.New("no model is named: use the name under which the server serves it, see /v1/models")
	}
	path := map[string]string{"": "v1/completions", workload.Completions: "v1/completions", workload.Chat: "v1/chat/completions"}[c.Endpoint]
	if path == "" {
		return "", fmt.Errorf("unknown endpoint %q: use %s or %s", c.Endpoint, workload.Completions, workload.Chat)
	}
	return strings.TrimRight(c.URL, "/") + "/" + path, nil
}

// transport returns a transport for many streams to one near server. It asks no proxy: measurements go straight to it.
func (c *Client) transport() *http.Transport {
	dial := c.dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	return &http.Transport{
		DialContext:         dial,
		TLSHandshakeTimeout: 10 * time.Second,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 1 << 16,
		// Less than the 5 s after which vLLM closes an idle connection (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 0.14.1 and 0.33), so that
		// no request leaves on a connection that is being closed.
		IdleConnTimeout: 3 * time.Second,
	}
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d <= 0 {
		return otherwise
	}
	return d
}
