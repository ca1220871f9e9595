package serverctl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const (
	callTimeout = 30 * time.Second // for all requests except /health; the first token may need a compilation
	maxAnswer   = 32 << 20         // bytes; /metrics of a server with 16 engines has about 1 MB
)

// An answer is an HTTP response whose body was read to the end.
type answer struct {
	status int
	body   []byte
}

// call sends one request and reads the answer; limit is the time limit for both. A body that is not nil is sent as
// JSON.
func (s *Server) call(ctx context.Context, method, path string, body any, limit time.Duration) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var content io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return answer{}, fmt.Errorf("%s %s: %w", method, path, err)
		}
		content = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, content)
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.config.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+s.config.APIKey)
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return answer{}, fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	return answer{resp.StatusCode, b}, nil
}

// ask sends a request to a starting server, and decodes the JSON answer into v. If the server cannot answer yet,
// waiting says what to wait for; it is empty when v was decoded. err is an error that waiting does not cure.
func (s *Server) ask(ctx context.Context, method, path string, body, v any) (waiting string, err error) {
	a, err := s.call(ctx, method, path, body, callTimeout)
	switch {
	case err != nil:
		return fmt.Sprintf("%s (%v)", path, err), nil
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		return "", fmt.Errorf("%s %s: HTTP %d: the server wants an API key; give it as VLLM_API_KEY: \"${VLLM_API_KEY}\" in server.env", method, path, a.status)
	case a.status >= 500:
		return fmt.Sprintf("%s (HTTP %d)", path, a.status), nil
	case a.status != http.StatusOK:
		return "", s.failure(Infrastructure, "", "%s %s: HTTP %d: %s", method, path, a.status, shorten(string(a.body)))
	}
	if err := json.Unmarshal(a.body, v); err != nil {
		return "", s.failure(Infrastructure, "", "%s %s: the answer is not JSON (%v): %s", method, path, err, shorten(string(a.body)))
	}
	return "", nil
}

// failed returns an error if the status is not 200.
func (a answer) failed(what string) error {
	if a.status == http.StatusOK {
		return nil
	}
	return fmt.Errorf("%s: HTTP %d: %s", what, a.status, strings.TrimSpace(shorten(string(a.body))))
}
