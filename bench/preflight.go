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
	"strconv"
	"strings"
	"syscall"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
)

// A Trouble is a kind of problem that would make a run useless.
type Trouble string

// The kinds of Trouble that Preflight and CheckLengths report.
const (
	Unreachable  Trouble = "unreachable"   // no answer: connection refused, unknown host, TLS error or time-out
	NotOpenAI    Trouble = "not-openai"    // the answer does not come from an OpenAI-compatible server
	Unauthorized Trouble = "unauthorized"  // 401 or 403
	WrongModel   Trouble = "wrong-model"   // the server does not serve the model
	NotStreaming Trouble = "not-streaming" // the answers are not streamed, or have no usage
	TooLong      Trouble = "too-long"      // a prompt and its answer together are longer than the server allows
	BadAnswer    Trouble = "bad-answer"    // a request for two tokens fails in another way
)

// A PreflightError says why a run would be useless, and what to do about it.
type PreflightError struct {
	Trouble Trouble
	Served  []string // names of the models that the server serves, if known
	text    string
	cause   error
}

// Error says what is wrong and what to do about it.
func (e *PreflightError) Error() string { return e.text }

// Unwrap returns the network error, if there is one.
func (e *PreflightError) Unwrap() error { return e.cause }

func trouble(kind Trouble, cause error, format string, args ...any) *PreflightError {
	return &PreflightError{Trouble: kind, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Info is what Preflight learned about a server.
type Info struct {
	Models      []string // names of the served models; empty if the server has no /v1/models
	Model       string   // the model that requests will name: Client.Model; if that is empty, the first of Models
	MaxModelLen int      // limit on the tokens of a prompt and its answer together; 0 if unknown
}

const (
	askLimit     = 10 * time.Second // time limit of a request that does not use the model
	preflightRun = 2 * time.Minute  // time limit of the request for two tokens; a new server may compile kernels for its first request
	maxBody      = 1 << 20          // limit on the answer to a request that does not use the model, in bytes
)

// Preflight checks whether a run against the server makes sense. It asks the server for its models and sends one
// request for two tokens, as a run would. If a run would be useless, it returns a *PreflightError. An error of another
// type has another cause, such as an unusable URL or the end of ctx.
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

// serverURL parses the base URL of a server.
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

// models asks for the served models and chooses the one that requests will name.
func (c *Client) models(ctx context.Context) (Info, error) {
	info := Info{Model: c.Model}
	status, body, err := c.ask(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return info, err
	}
	missing := status == http.StatusNotFound || status == http.StatusMethodNotAllowed
	if missing && c.Model != "" {
		return info, nil // some gateways have no list; the request for two tokens shows whether the model is served
	}
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	switch err := json.Unmarshal(body, &list); {
	case missing:
		return info, trouble(NotOpenAI, nil, "%s has no /v1/models (%s): check the URL; if the server really has none, name the model", c.URL, snippet(body))
	case status == http.StatusBadRequest && strings.Contains(string(body), "HTTPS"):
		return info, trouble(Unreachable, nil, "%s speaks TLS: write https:// instead of http://", c.URL)
	case status != http.StatusOK:
		return info, trouble(NotOpenAI, nil, "%s/v1/models answers %d: %s", c.URL, status, snippet([]byte(errorMessage(body))))
	case err != nil:
		return info, trouble(NotOpenAI, nil, "%s/v1/models does not answer with JSON but with %s: check whether the URL belongs to an OpenAI-compatible server", c.URL, snippet(body))
	case len(list.Data) == 0:
		return info, trouble(NotOpenAI, nil, "%s/v1/models names no model (%s): check whether the URL belongs to an OpenAI-compatible server", c.URL, snippet(body))
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

// quoted returns a list of quoted names for a message, with at most eight names.
func quoted(names []string) string {
	const maxNames = 8
	var first []string
	for _, name := range names[:min(maxNames, len(names))] {
		first = append(first, strconv.Quote(firstLine(name)))
	}
	text := strings.Join(first, ", ")
	if more := len(names) - maxNames; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// snippet quotes the beginning of a server's answer for a message.
func snippet(body []byte) string {
	text := strings.Join(strings.Fields(string(body)), " ")
	if text == "" {
		return "nothing"
	}
	const maxBytes = 80
	if len(text) > maxBytes {
		text = strings.ToValidUTF8(text[:maxBytes], "") + "…"
	}
	return fmt.Sprintf("%q", text)
}

// ask sends one small request and returns the status and body of the answer. The statuses 401, 403 and redirects are
// errors. The caller must check all other statuses.
func (c *Client) ask(ctx context.Context, method, path string, body io.Reader) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.URL, "/")+path, body)
	if err != nil {
		return 0, nil, fmt.Errorf("server URL: %w", err)
	}
	request.Header = c.header()
	if host := request.Header.Get("Host"); host != "" {
		request.Host = host
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	transport := &http.Transport{TLSClientConfig: c.TLS.Clone(), DisableKeepAlives: true}
	if c.Proxy != nil {
		transport.Proxy = http.ProxyURL(c.Proxy)
	}
	asker := http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := asker.Do(request)
	if err == nil {
		defer response.Body.Close() // the body is only read, so an error of Close does not matter
		status = response.StatusCode
		answer, err = io.ReadAll(io.LimitReader(response.Body, maxBody))
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

// ResetCache empties the server's prefix cache with /reset_prefix_cache. vLLM has that path only with
// VLLM_SERVER_DEV_MODE=1. The reset fails while requests run. vLLM 0.14.1 answers 200 even then. Later versions report
// the failure in the body.
func (c *Client) ResetCache(ctx context.Context) error {
	status, answer, err := c.ask(ctx, http.MethodPost, "/reset_prefix_cache", nil)
	switch {
	case err != nil:
		return fmt.Errorf("reset the prefix cache: %w", err)
	case status == http.StatusNotFound:
		return errors.New("the server has no /reset_prefix_cache: start vLLM with VLLM_SERVER_DEV_MODE=1, on loopback only")
	case status != http.StatusOK || strings.Contains(strings.ReplaceAll(string(answer), " ", ""), `"success":false`):
		return fmt.Errorf("the server did not reset its prefix cache: it answered %d: %s", status, snippet(answer))
	}
	return nil
}

// unauthorized returns the error for a server that rejects the API key, or rejects requests without one.
func (c *Client) unauthorized(detail string) error {
	had := "tuner sent no API key: set OPENAI_API_KEY"
	if c.APIKey != "" {
		had = "check the API key"
	} else if c.Header.Get("Authorization") != "" {
		had = "check the Authorization header"
	}
	return trouble(Unauthorized, nil, "the server refuses the request with %s; %s", detail, had)
}

// unreachable returns the error for a request that got no answer.
func (c *Client) unreachable(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the message below already names the URL
	}
	say := func(format string, args ...any) error {
		return trouble(Unreachable, err, "%s cannot be reached: %s", c.URL, fmt.Sprintf(format, args...))
	}
	if c.Proxy != nil {
		return say("through the proxy %s: %v", c.Proxy.Redacted(), err)
	}
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		return say("the name %q has no address: check its spelling", name.Name)
	}
	if errors.Is(err, http.ErrSchemeMismatch) {
		return say("it does not speak TLS: write http:// instead of https://")
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); unknown {
			return say("%v: give the file of its certificate authority, or turn the check off", err)
		}
		return say("%v: use the host name in the certificate, or turn the check off", err)
	}
	if wait, ok := errors.AsType[net.Error](err); errors.Is(err, context.DeadlineExceeded) || ok && wait.Timeout() {
		return say("no answer came within %s: check for a firewall, or a load balancer without a server", render.Took(askLimit))
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return say("the connection was refused, so nothing listens there; check the port, and whether the model is still loading")
	}
	return say("%v", err)
}

// explain turns the failure of the preflight's request into a PreflightError.
func (c *Client) explain(s Sample, info Info) error {
	switch s.Failure {
	case Refused:
		return trouble(Unreachable, nil, "%s cannot be reached: %s", c.URL, s.Detail)
	case Malformed, Truncated, NoTokens:
		return trouble(NotStreaming, nil, "the server does not stream its answers (%s): latencies cannot be measured without \"stream\": true", s.Detail)
	case NoUsage:
		return trouble(NotStreaming, nil, "%s; tuner needs it to count tokens", s.Detail)
	case WrongLength:
		return trouble(BadAnswer, nil, "%s: the server does not follow ignore_eos as vLLM does; measure natural lengths instead (--natural)", s.Detail)
	case Status:
		return c.explainStatus(s, info)
	}
	return trouble(BadAnswer, nil, "a request for two tokens fails with %s: %s", s.Failure, s.Detail)
}

// explainStatus does the work of explain for a status other than 200.
func (c *Client) explainStatus(s Sample, info Info) error {
	switch s.Status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return c.unauthorized(s.Detail)
	case http.StatusNotFound:
		// A server without a list of models can reject an unknown model only here.
		if len(info.Models) == 0 || strings.Contains(s.Detail, "model") {
			wrong := trouble(WrongModel, nil, "the server does not know the model %q, or has no such endpoint (%s)", c.Model, s.Detail)
			wrong.Served = info.Models
			return wrong
		}
		return trouble(NotOpenAI, nil, "the server serves the model but not this endpoint (%s): use the other endpoint, completions or chat", s.Detail)
	}
	return trouble(BadAnswer, nil, "the server answers a request for two tokens with %s", s.Detail)
}
