package bench

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"vllmtuner/bench/workload"
)

// A Trouble is the kind of thing that keeps a run from making sense.
type Trouble string

// The troubles that a Preflight tells apart.
const (
	Unreachable  Trouble = "unreachable"   // nothing answers: refused, no such host, TLS, time out
	NotOpenAI    Trouble = "not-openai"    // something answers that is no OpenAI-compatible server
	Unauthorized Trouble = "unauthorized"  // 401 or 403
	WrongModel   Trouble = "wrong-model"   // the server does not serve the model
	NotStreaming Trouble = "not-streaming" // the answers are no streams, or have no usage
	TooLong      Trouble = "too-long"      // a prompt with its answer is longer than the server takes
	BadAnswer    Trouble = "bad-answer"    // a request of two tokens fails otherwise
)

// A PreflightError is what keeps a run from making sense, with its remedy.
type PreflightError struct {
	Trouble Trouble
	Served  []string // the names of the models that the server serves, where it said so
	text    string
	cause   error
}

// Error says what was found and what to do about it.
func (e *PreflightError) Error() string { return e.text }

// Unwrap returns the error of the network, if there is one.
func (e *PreflightError) Unwrap() error { return e.cause }

func trouble(kind Trouble, cause error, format string, args ...any) *PreflightError {
	return &PreflightError{Trouble: kind, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Info is what a server says of itself before a run.
type Info struct {
	Models      []string // served names; empty when the server has no /v1/models
	Model       string   // that requests will name: the client's own, or else the first
	MaxModelLen int      // tokens of a prompt with its answer; 0 when the server does not say
}

const (
	askLimit     = 10 * time.Second // for an answer that needs no model
	preflightRun = 2 * time.Minute  // for two tokens: a server that just started may compile kernels for its first request
	mostBody     = 1 << 20          // of such an answer
)

// Preflight finds out whether a run against the server makes sense: it asks for the models and sends one request of two
// tokens, just as a run would. Its error is a *PreflightError, or the end of ctx.
func (c *Client) Preflight(ctx context.Context) (Info, error) {
	if _, err := serverURL(c.URL); err != nil {
		return Info{}, err
	}
	info, err := c.models(ctx)
	if err != nil {
		return info, err
	}
	one := *c
	one.Model, one.MaxInFlight, one.RunLimit = info.Model, 0, preflightRun
	request := &workload.Request{Text: "Hello", OutputTokens: 2, Conversation: -1}
	run, err := one.Run(ctx, func(yield func(workload.Arrival) bool) {
		yield(workload.Arrival{Phase: workload.Window, Request: request})
	}, nil)
	if err != nil {
		return info, err
	}
	if len(run.Samples) != 1 {
		return info, fmt.Errorf("the request of the preflight has %d samples, want 1", len(run.Samples))
	}
	if s := run.Samples[0]; s.Failure != "" {
		return info, one.explain(s, info)
	}
	return info, nil
}

// serverURL reads the base URL of a server.
func serverURL(text string) (*url.URL, error) {
	base, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("server URL: %w", err)
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("server URL %q needs a scheme and a host, such as http://127.0.0.1:8000", base.Redacted())
	}
	return base, nil
}

// models asks for the served models, and chooses the one to ask.
func (c *Client) models(ctx context.Context) (Info, error) {
	info := Info{Model: c.Model}
	status, body, err := c.ask(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return info, err
	}
	missing := status == http.StatusNotFound || status == http.StatusMethodNotAllowed
	if missing && c.Model != "" {
		return info, nil // some gateways have no list; the request that follows tells
	}
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	switch err := json.Unmarshal(body, &list); {
	case missing:
		return info, trouble(NotOpenAI, nil, "%s has no /v1/models (%s): check the URL, or name the model where the server is known to have none", c.URL, snippet(body))
	case status == http.StatusBadRequest && strings.Contains(string(body), "HTTPS"):
		return info, trouble(Unreachable, nil, "%s speaks TLS: write https:// instead of http://", c.URL)
	case status != http.StatusOK:
		return info, trouble(NotOpenAI, nil, "%s/v1/models answers %d: %s", c.URL, status, snippet([]byte(errorMessage(body))))
	case err != nil:
		return info, trouble(NotOpenAI, nil, "%s/v1/models does not answer with JSON but with %s: the URL is not that of an OpenAI-compatible server", c.URL, snippet(body))
	case len(list.Data) == 0:
		return info, trouble(NotOpenAI, nil, "%s/v1/models names no model (%s): the URL is not that of an OpenAI-compatible server", c.URL, snippet(body))
	}
	for _, m := range list.Data {
		info.Models = append(info.Models, m.ID)
	}
	if info.Model == "" {
		info.Model = info.Models[0]
	}
	for _, m := range list.Data {
		if m.ID == info.Model {
			info.MaxModelLen = m.MaxModelLen
			return info, nil
		}
	}
	wrong := trouble(WrongModel, nil, "the server does not serve the model %q; it serves %s", c.Model, quoted(info.Models))
	wrong.Served = info.Models
	return info, wrong
}

// quoted lists names for a message.
func quoted(names []string) string {
	const most = 8
	var text strings.Builder
	for i, name := range names {
		if i == most {
			fmt.Fprintf(&text, " and %d more", len(names)-most)
			break
		}
		if i > 0 {
			text.WriteString(", ")
		}
		fmt.Fprintf(&text, "%q", firstLine(name))
	}
	return text.String()
}

// snippet is the beginning of a foreign text, as it is quoted in a message.
func snippet(body []byte) string {
	text := strings.Join(strings.Fields(string(body)), " ")
	if text == "" {
		return "nothing"
	}
	const most = 80
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return fmt.Sprintf("%q", text)
}

// ask sends one small request, and returns the status and the body of its answer. Nothing but 401 and 403 is an error among
// the statuses.
func (c *Client) ask(ctx context.Context, method, path string, body io.Reader) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.URL, "/")+path, body)
	if err != nil {
		return 0, nil, fmt.Errorf("server URL: %w", err)
	}
	for name, values := range c.Header {
		request.Header[http.CanonicalHeaderKey(name)] = values
	}
	if host := request.Header.Get("Host"); host != "" {
		request.Host = host
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if c.APIKey != "" {
		request.Header.Set("Authorization", "Bearer "+string(c.APIKey))
	}
	transport := &http.Transport{TLSClientConfig: c.TLS.Clone(), DisableKeepAlives: true}
	if c.Proxy != nil {
		transport.Proxy = http.ProxyURL(c.Proxy)
	}
	asker := http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := asker.Do(request)
	if err == nil {
		defer response.Body.Close() // only read
		status = response.StatusCode
		answer, err = io.ReadAll(io.LimitReader(response.Body, mostBody))
	}
	switch {
	case err != nil && context.Cause(ctx) == context.Canceled:
		return 0, nil, context.Canceled
	case err != nil:
		return 0, nil, c.unreachable(err)
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return status, nil, c.unauthorized(c.hide(fmt.Sprintf("%d: %s", status, errorMessage(answer))))
	case status >= 300 && status < 400:
		return status, nil, trouble(NotOpenAI, nil, "%s%s redirects to %s: give that URL", c.URL, path, response.Header.Get("Location"))
	}
	return status, answer, nil
}

// ResetCache empties the server's prefix cache by /reset_prefix_cache, which vLLM has with VLLM_SERVER_DEV_MODE=1. 0.14.1 says
// 200 also when it failed, which it does while requests run; later versions say so in their answer.
func (c *Client) ResetCache(ctx context.Context) error {
	status, answer, err := c.ask(ctx, http.MethodPost, "/reset_prefix_cache", nil)
	switch {
	case err != nil:
		return fmt.Errorf("reset the prefix cache: %w", err)
	case status == http.StatusNotFound:
		return errors.New("the server has no /reset_prefix_cache: start vLLM with VLLM_SERVER_DEV_MODE=1, on loopback only")
	case status != http.StatusOK || strings.Contains(strings.ReplaceAll(string(answer), " ", ""), `"success":false`):
		return fmt.Errorf("the server does not reset its prefix cache: %d: %s", status, snippet(answer))
	}
	return nil
}

// unauthorized is the error of a server that wants another key.
func (c *Client) unauthorized(detail string) error {
	had := "no API key was sent: set OPENAI_API_KEY"
	if c.APIKey != "" {
		had = "the API key that was sent is not the server's"
	} else if c.Header.Get("Authorization") != "" {
		had = "the Authorization header that was sent is not what it wants"
	}
	return trouble(Unauthorized, nil, "the server refuses with %s; %s", detail, had)
}

// unreachable says why no answer came.
func (c *Client) unreachable(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // its URL is said here
	}
	say := func(format string, args ...any) error {
		return trouble(Unreachable, err, "%s cannot be reached: %s", c.URL, fmt.Sprintf(format, args...))
	}
	if c.Proxy != nil {
		return say("by way of the proxy %s: %v", c.Proxy.Redacted(), err)
	}
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		return say("the name %q has no address: check its spelling", name.Name)
	}
	if errors.Is(err, http.ErrSchemeMismatch) {
		return say("it does not speak TLS: write http:// instead of https://")
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); unknown {
			return say("%v: name the file of its authority, or do not have it checked", err)
		}
		return say("%v: ask for it by the name that the certificate has, or do not have it checked", err)
	}
	if wait, ok := errors.AsType[net.Error](err); errors.Is(err, context.DeadlineExceeded) || ok && wait.Timeout() {
		return say("no answer came within %s: is a firewall or a load balancer without a server in between?", askLimit)
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return say("the connection was refused: nothing listens there; check the port, and whether the model is still loading")
	}
	return say("%v", err)
}

// explain turns the failure of the preflight's request into its remedy.
func (c *Client) explain(s Sample, info Info) error {
	switch s.Failure {
	case Refused:
		return trouble(Unreachable, nil, "%s cannot be reached: %s", c.URL, s.Detail)
	case Malformed, Truncated, NoTokens:
		return trouble(NotStreaming, nil, "the server does not stream its answers (%s): latencies cannot be measured without \"stream\": true", s.Detail)
	case NoUsage:
		return trouble(NotStreaming, nil, "%s; tokens cannot be counted without it", s.Detail)
	case WrongLength:
		return trouble(BadAnswer, nil, "%s: the server does not pin lengths by ignore_eos, as vLLM does; only natural lengths can be measured (--natural)", s.Detail)
	case Status:
		return c.explainStatus(s.Detail, info)
	}
	return trouble(BadAnswer, nil, "a request of two tokens fails with %s: %s", s.Failure, s.Detail)
}

// explainStatus is for an answer with another status than 200, whose number begins the detail.
func (c *Client) explainStatus(detail string, info Info) error {
	switch number, _, _ := strings.Cut(detail, ":"); number {
	case "401", "403":
		return c.unauthorized(detail)
	case "404":
		// A server without a list of models says here that it does not know the name.
		if len(info.Models) == 0 || strings.Contains(detail, "model") {
			wrong := trouble(WrongModel, nil, "the server does not know the model %q, or has no such endpoint (%s)", c.Model, detail)
			wrong.Served = info.Models
			return wrong
		}
		return trouble(NotOpenAI, nil, "the server serves the model but not the endpoint (%s): take the other one, completions or chat", detail)
	}
	return trouble(BadAnswer, nil, "a request of two tokens is answered with %s", detail)
}
