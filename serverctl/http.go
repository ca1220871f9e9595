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
	callTimeout = 30 * time.Second // time limit of all requests except /health; it is long because the first token may need a compilation
	maxAnswer   = 32 << 20         // bytes; /metrics of a server with 16 engines has about 1 MB
)

// An answer is an HTTP response whose body was read to the end.
type answer struct {
	status int
	body   []byte
}

// A client sends requests to the server.
type client struct {
	http *http.Client
	url  string   // base URL, such as http://127.0.0.1:8000
	key  string   // API key for every request; empty means none
	log  *logbook // ask() quotes the log's last lines in its errors
}

// call sends one request and reads the answer, within one time limit for both steps together. If body is not nil, call
// sends it as JSON.
func (c *client) call(ctx context.Context, method, path string, body any, limit time.Duration) (answer, error) {
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
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, content)
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
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

// ask sends a request to a starting server, and decodes the JSON answer into v. If the server cannot answer yet, ask
// returns what the server still lacks. It returns "" when it has decoded v. An error means that no wait can help.
func (c *client) ask(ctx context.Context, method, path string, body, v any) (waiting string, err error) {
	a, err := c.call(ctx, method, path, body, callTimeout)
	switch {
	case err != nil:
		return fmt.Sprintf("%s (%v)", path, err), nil
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		return "", fmt.Errorf("%s %s: HTTP %d: the server wants an API key; give it as VLLM_API_KEY: \"${VLLM_API_KEY}\" in server.env", method, path, a.status)
	case a.status >= 500:
		return fmt.Sprintf("%s (HTTP %d)", path, a.status), nil
	case a.status != http.StatusOK:
		return "", c.log.failure(Infrastructure, "", "%s %s: HTTP %d: %s", method, path, a.status, shorten(string(a.body)))
	}
	if err := json.Unmarshal(a.body, v); err != nil {
		return "", c.log.failure(Infrastructure, "", "%s %s: the answer is not JSON (%v): %s", method, path, err, shorten(string(a.body)))
	}
	return "", nil
}

// checkStatus returns an error if the status is not 200.
func (a answer) checkStatus(what string) error {
	if a.status == http.StatusOK {
		return nil
	}
	return fmt.Errorf("%s: HTTP %d: %s", what, a.status, strings.TrimSpace(shorten(string(a.body))))
}

// A model is an entry of /v1/models.
type model struct {
	ID          string `json:"id"`
	MaxModelLen int    `json:"max_model_len"`
}

// model reads the first model of /v1/models.
func (c *client) model(ctx context.Context) (m model, waiting string, err error) {
	var models struct {
		Data []model `json:"data"`
	}
	waiting, err = c.ask(ctx, http.MethodGet, "/v1/models", nil, &models)
	if waiting != "" || err != nil {
		return model{}, waiting, err
	}
	if len(models.Data) == 0 {
		return model{}, "a model in /v1/models", nil
	}
	return models.Data[0], "", nil
}

// firstToken asks a model for one token, because /health does not run the model.
func (c *client) firstToken(ctx context.Context, modelID string) (waiting string, err error) {
	var completion struct {
		Choices []struct{} `json:"choices"`
	}
	body := map[string]any{"model": modelID, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
	waiting, err = c.ask(ctx, http.MethodPost, "/v1/completions", body, &completion)
	if waiting == "" && err == nil && len(completion.Choices) == 0 {
		return "a first token", nil
	}
	return waiting, err
}

// version asks the server for its version. It returns "" if the server cannot tell.
func (c *client) version(ctx context.Context) string {
	var v struct{ Version string }
	if waiting, err := c.ask(ctx, http.MethodGet, "/version", nil, &v); waiting != "" || err != nil {
		return ""
	}
	return v.Version
}
