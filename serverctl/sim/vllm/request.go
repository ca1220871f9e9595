package vllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"vllmtuner/foreign"
	"vllmtuner/serverctl/sim"
)

// An apiError is an error answer in vLLM's JSON form.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // the wrong field of the request; empty means null
}

// badRequest returns the error for a request that is refused with status 400. The parameter param names the wrong
// field; it may be empty.
func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), param}
}

// write sends the error as the answer.
func (e *apiError) write(w http.ResponseWriter) {
	param := "null"
	if e.param != "" {
		param = toJSON(e.param)
	}
	writeJSON(w, e.status, fmt.Sprintf(`{"error":{"message":%s,"type":%s,"param":%s,"code":%d}}`,
		toJSON(e.message), toJSON(e.kind), param, e.status))
}

// writeJSON sends a body. It ignores the error of a client that has disconnected.
func writeJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
}

// toJSON writes a value as JSON, without Go's escapes of <, > and &.
func toJSON(v any) string {
	text, err := foreign.JSON(v, "", "")
	if err != nil {
		panic("vllm: an answer that is not JSON: " + err.Error()) // answers have only texts, integers and nulls
	}
	return string(text)
}

// A completionBody has the fields of a completion or chat request that the server reads. The server ignores all other
// fields. A null field means the same as a missing one.
type completionBody struct {
	Model         string  `json:"model"`
	Prompt        prompts `json:"prompt"`
	Messages      chat    `json:"messages"`
	Stream        bool    `json:"stream"`
	StreamOptions struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"` // for chats, instead of MaxTokens
	N                   *int `json:"n"`
	samplingParams
}

// prompts are the prompts of a completion: a text, a list of texts, token ids, or a list of lists of token ids.
type prompts [][]int32

// UnmarshalJSON reads prompts of any of the four forms.
func (p *prompts) UnmarshalJSON(body []byte) error {
	var text string
	var texts []string
	var ids []int32
	switch {
	case string(body) == "null":
	case json.Unmarshal(body, &text) == nil:
		*p = prompts{sim.Tokenize(text)}
	case json.Unmarshal(body, &texts) == nil:
		for _, text := range texts {
			*p = append(*p, sim.Tokenize(text))
		}
	case json.Unmarshal(body, &ids) == nil:
		*p = prompts{ids}
	case json.Unmarshal(body, (*[][]int32)(p)) != nil:
		return errors.New("prompt must be a text, a list of texts, token ids, or a list of lists of token ids")
	}
	return nil
}

// A chat is a list of messages as one text: the role and the content of each message.
type chat string

// UnmarshalJSON joins messages whose contents are texts or lists of text parts.
func (c *chat) UnmarshalJSON(body []byte) error {
	var messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(body, &messages) != nil {
		return errors.New("messages must be a list of objects with role and content")
	}
	for _, m := range messages {
		content, err := contentOf(m.Content)
		if err != nil {
			return err
		}
		*c += chat(m.Role + "\n" + content + "\n")
	}
	return nil
}

// contentOf joins the texts of one message. The content may be missing or null.
func contentOf(content json.RawMessage) (text string, err error) {
	if len(content) == 0 || json.Unmarshal(content, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Text *string `json:"text"`
	}
	err = json.Unmarshal(content, &parts)
	for _, part := range parts {
		if part.Text == nil {
			err = errors.New("a part has no text")
			break
		}
		text += *part.Text
	}
	if err != nil {
		return "", errors.New("messages must have a text or a list of text parts as content")
	}
	return text, nil
}

// readJSON reads the body of a request into v, and checks that the server serves the model which the body names.
func (a *api) readJSON(w http.ResponseWriter, r *http.Request, v any, model *string) *apiError {
	text, refusal := a.readBody(w, r)
	if refusal != nil {
		return refusal
	}
	if err := json.Unmarshal(text, v); err != nil {
		return badRequest("", "the body is not valid: %v", err)
	}
	return a.checkModel(*model)
}

// A completion is what one request for a completion or a chat asks for.
type completion struct {
	chat     bool
	prompts  [][]int32
	output   int     // number of tokens in each answer
	n        int     // number of answers to each prompt
	stream   bool    // the answer is a stream of chunks
	usage    bool    // the last chunk of a stream has the token counts
	allUsage bool    // every chunk has the token counts so far
	arrived  float64 // time of the request, in seconds of the engine's clock
}

// readCompletion reads and checks a request for a completion or a chat.
func (a *api) readCompletion(w http.ResponseWriter, r *http.Request) (*completion, *apiError) {
	c := &completion{chat: r.URL.Path == "/v1/chat/completions", n: 1, arrived: a.live.clock()}
	var body completionBody
	if refusal := a.readJSON(w, r, &body, &body.Model); refusal != nil {
		return nil, refusal
	}
	c.prompts = body.Prompt
	if c.chat {
		c.prompts = [][]int32{sim.Tokenize(string(body.Messages))}
	}
	if len(c.prompts) == 0 || slices.ContainsFunc(c.prompts, func(ids []int32) bool { return len(ids) == 0 }) {
		return nil, badRequest("", "the prompt, or the list of messages, must not be empty")
	}
	if body.N != nil {
		c.n = *body.N
	}
	if body.StreamOptions.IncludeUsage && !body.Stream {
		return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
	}
	c.stream = body.Stream
	c.usage = body.StreamOptions.IncludeUsage
	c.allUsage = c.usage && body.StreamOptions.ContinuousUsageStats
	if refusal := c.setLength(a, &body); refusal != nil {
		return nil, refusal
	}
	return c, body.check(a.release, c.output)
}

// checkModel refuses a model that is not served. An empty name means the served model.
func (a *api) checkModel(name string) *apiError {
	o := a.live.engine.Options
	if name == "" || o.Serves(name) {
		return nil
	}
	e := &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", name), "model"}
	if a.release.since032 {
		e.message += fmt.Sprintf(" Valid aliases: %s.", strings.Join(append([]string{o.Model}, o.Aliases...), ", "))
	}
	return e
}

const (
	defaultMaxTokens = 16 // number of tokens in an answer, for a completion without max_tokens
	// maxAnswers limits n, the number of answers to each prompt. vLLM has the same limit since 0.32.0. 0.14.1 has no
	// limit, and would run out of memory.
	maxAnswers = 16384
	// maxSequences limits the number of answers to all prompts of one request, to save the simulator's memory. vLLM has
	// no such limit.
	maxSequences = 16 * maxAnswers
)

// setLength sets how many tokens each answer has, and checks the number of answers. 0.14.1 refuses a request that would
// not fit the context. Later versions shorten the answer, and refuse only a prompt that does not fit (get_max_tokens in
// vllm/entrypoints/serve/utils/api_utils.py, 0.32.0).
func (c *completion) setLength(a *api, body *completionBody) *apiError {
	limit, longest := a.live.engine.Options.MaxModelLen, 0
	for _, p := range c.prompts {
		longest = max(longest, len(p))
	}
	c.output = defaultMaxTokens
	if c.chat {
		c.output = max(limit-longest, 1)
	}
	if body.MaxTokens != nil {
		c.output = *body.MaxTokens
	}
	if c.chat && body.MaxCompletionTokens != nil {
		c.output = *body.MaxCompletionTokens
	}
	refuse := func(param string, value int) *apiError {
		return badRequest(param, "This model's maximum context length is %d tokens. However, your request has %d input "+
			"tokens and asks for %d output tokens. (parameter=%s, value=%d)", limit, longest, c.output, param, value)
	}
	switch room := limit - longest; {
	case room < 0 || c.chat && !a.release.since032 && room == 0:
		return refuse("input_tokens", longest)
	case a.release.since032:
		c.output = min(c.output, room)
	case c.output > room:
		return refuse("max_tokens", c.output)
	}
	switch {
	case c.output < 1:
		return badRequest("max_tokens", "max_tokens must be at least 1, got %d.", c.output)
	case c.n < 1 || c.n > maxAnswers:
		return badRequest("n", "n must be from 1 to %d, got %d.", maxAnswers, c.n)
	case c.n*len(c.prompts) > maxSequences:
		return badRequest("n", "n times the number of prompts must be at most %d, got %d; this limit is the simulator's.",
			maxSequences, c.n*len(c.prompts))
	}
	return nil
}
