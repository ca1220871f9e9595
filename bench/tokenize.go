package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
)

// errNoTokenize means that the server cannot count tokens. Only vLLM can.
var errNoTokenize = errors.New("the server has no /tokenize")

// countTokens returns the length of a request's prompt in tokens. If the request has no token ids, the server counts
// the tokens of its text, chat template included (POST /tokenize, vllm/entrypoints/serve/tokenize in 0.14.1).
func (c *Client) countTokens(ctx context.Context, r *workload.Request) (int, error) {
	if r.Tokens != nil {
		return len(r.Tokens), nil
	}
	question := map[string]any{"prompt": r.Text}
	if r.Messages != nil {
		question = map[string]any{"messages": r.Messages}
	}
	var count int
	status, err := c.tokenizer(ctx, "/tokenize", question, "count", &count)
	switch {
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
		return 0, errNoTokenize
	case err != nil:
		return 0, fmt.Errorf("count the tokens of a prompt: %w", err)
	}
	return count, nil
}

// Detokenize returns the text of token ids (POST /detokenize of vLLM, 0.14.1 and 0.33), for load generators that accept
// only text. Tokenizing that text may give a few tokens more or fewer.
func (c *Client) Detokenize(ctx context.Context, ids []int32) (text string, err error) {
	if _, err := c.tokenizer(ctx, "/detokenize", map[string]any{"tokens": ids}, "prompt", &text); err != nil {
		return "", fmt.Errorf("turn token ids into text: %w", err)
	}
	return text, nil
}

// tokenizer asks the server's tokenizer a question and decodes one field of its answer.
func (c *Client) tokenizer(ctx context.Context, path string, question map[string]any, field string, to any) (status int, err error) {
	question["model"] = c.Model
	text, err := json.Marshal(question)
	if err != nil {
		return 0, err
	}
	status, body, err := c.ask(ctx, http.MethodPost, path, bytes.NewReader(text))
	switch {
	case err != nil:
		return status, err
	case status != http.StatusOK:
		return status, fmt.Errorf("the server answers %d: %s", status, errorMessage(body))
	}
	var answer map[string]json.RawMessage
	if json.Unmarshal(body, &answer) != nil || string(answer[field]) == "null" || json.Unmarshal(answer[field], to) != nil {
		return status, fmt.Errorf("the server answers %s", snippet(body))
	}
	return status, nil
}

const (
	// templateBytes is how many bytes a chat template may add to a text. Llama's template, the longest in wide use, adds
	// about 200 bytes.
	templateBytes = 512
	maxCounted    = 256 // limit on the number of texts whose tokens the server counts; it counts the longest texts
	countAtOnce   = 8
	maxNamed      = 3 // limit on the requests that a message names
)

// A longRequest is a request that may be longer than the server allows.
type longRequest struct {
	index int // from 0
	*workload.Request
	bytes  int // bytes of the prompt's text
	prompt int // tokens of the prompt; 0 if not counted yet
}

// CheckLengths returns a *PreflightError if the prompt and answer of a request are together longer than maxModelLen
// tokens. A text has at least one byte for each token, so the server only counts the few texts that could be too long.
// CheckLengths also returns how many of these texts were not counted, because the server has no /tokenize or there were
// too many.
func (c *Client) CheckLengths(ctx context.Context, requests iter.Seq[*workload.Request], maxModelLen int) (uncounted int, err error) {
	var over, ask []*longRequest
	i := -1
	for r := range requests {
		i++
		l := &longRequest{index: i, Request: r, bytes: textBytes(r), prompt: len(r.Tokens)}
		switch {
		case r.Tokens == nil && l.bytes+templateBytes+r.OutputTokens > maxModelLen:
			ask = append(ask, l)
		case r.Tokens != nil && l.prompt+r.OutputTokens > maxModelLen:
			over = append(over, l)
		}
	}
	slices.SortStableFunc(ask, func(a, b *longRequest) int { return cmp.Compare(b.bytes+b.OutputTokens, a.bytes+a.OutputTokens) })
	uncounted = max(0, len(ask)-maxCounted)
	ask = ask[:len(ask)-uncounted]
	switch err := c.countAll(ctx, ask); {
	case errors.Is(err, errNoTokenize):
		uncounted += len(ask)
	case err != nil:
		return uncounted, err
	default:
		over = append(over, slices.DeleteFunc(ask, func(l *longRequest) bool { return l.prompt+l.OutputTokens <= maxModelLen })...)
	}
	if len(over) == 0 {
		return uncounted, nil
	}
	slices.SortFunc(over, func(a, b *longRequest) int { return cmp.Compare(a.index, b.index) })
	return uncounted, tooLong(over, i+1, maxModelLen)
}

// countAll asks the server for the lengths of the prompts and stores them.
func (c *Client) countAll(ctx context.Context, ask []*longRequest) error {
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(countAtOnce)
	for _, l := range ask {
		work.Go(func() (err error) {
			l.prompt, err = c.countTokens(ctx, l.Request)
			return err
		})
	}
	return work.Wait()
}

func textBytes(r *workload.Request) int {
	n := len(r.Text)
	for _, m := range r.Messages {
		n += len(m.Role) + len(m.Content)
	}
	return n
}

func tooLong(over []*longRequest, of, maxModelLen int) error {
	var named []string
	for _, l := range over[:min(maxNamed, len(over))] {
		named = append(named, fmt.Sprintf("request %d has %d + %d", l.index+1, l.prompt, l.OutputTokens))
	}
	if more := len(over) - len(named); more > 0 {
		named = append(named, fmt.Sprintf("%d more", more))
	}
	return trouble(TooLong, nil,
		"in %s, prompt and answer together are longer than the server's max-model-len of %d tokens: %s; shorten them, or start the server with a larger --max-model-len",
		render.Of(len(over), of, "request"), maxModelLen, strings.Join(named, ", "))
}
