package vllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"mime"
	"net/http"
	"slices"
	"strings"

	"vllmtuner/serverctl/sim"
)

// An apiError is an answer with vLLM's error envelope.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // the field at fault; empty is null
}

// badRequest refuses a request. param is the field at fault, if there is one.
func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), param}
}

// write answers with the error.
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
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic("vllm: an answer that is not JSON: " + err.Error()) // answers have only texts, integers and nulls
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// A completionBody has the fields of a completion or a chat that the server checks. It ignores all other fields. A null
// field means the same as a missing one.
type completionBody struct {
	Model         string  `json:"model"`
	Prompt        prompts `json:"prompt"`
	Suffix        *string `json:"suffix"`
	Messages      *chat   `json:"messages"`
	Stream        bool    `json:"stream"`
	StreamOptions *struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"` // for chats, instead of MaxTokens
	N                   *int `json:"n"`

	// The fields below do not change the simulated answer. The server checks them because vLLM refuses wrong values.
	MinTokens         *int               `json:"min_tokens"`
	Temperature       *float64           `json:"temperature"`
	TopP              *float64           `json:"top_p"`
	TopK              *int               `json:"top_k"`
	MinP              *float64           `json:"min_p"`
	PresencePenalty   *float64           `json:"presence_penalty"`
	FrequencyPenalty  *float64           `json:"frequency_penalty"`
	RepetitionPenalty *float64           `json:"repetition_penalty"`
	Logprobs          any                `json:"logprobs"`     // a number in completions, a bool in chats
	TopLogprobs       *int               `json:"top_logprobs"` // only in chats
	Stop              stopTexts          `json:"stop"`
	LogitBias         map[string]float64 `json:"logit_bias"`
	Seed              *int               `json:"seed"`
	Echo              bool               `json:"echo"`
	IgnoreEOS         bool               `json:"ignore_eos"`
}

// prompts are the prompts of a completion: a text, a list of texts, token ids, or a list of lists of token ids.
type prompts [][]int32

// UnmarshalJSON reads prompts of any of the four forms.
func (p *prompts) UnmarshalJSON(body []byte) error {
	if string(body) == "null" {
		return nil
	}
	var text string
	var texts []string
	var ids []int32
	var lists [][]int32
	switch {
	case json.Unmarshal(body, &text) == nil:
		*p = prompts{sim.Tokenize(text)}
	case json.Unmarshal(body, &texts) == nil:
		for _, text := range texts {
			*p = append(*p, sim.Tokenize(text))
		}
	case json.Unmarshal(body, &ids) == nil:
		*p = prompts{ids}
	case json.Unmarshal(body, &lists) == nil:
		*p = lists
	default:
		return errors.New("prompt must be a text, a list of texts, token ids, or a list of lists of token ids")
	}
	for _, ids := range *p {
		if len(ids) == 0 {
			return errors.New("prompt must not be empty")
		}
		if slices.Min(ids) < 0 {
			return errors.New("prompt must have no negative token id")
		}
	}
	return nil
}

// A chat is the text of a list of messages: the role and the contents of each.
type chat string

// UnmarshalJSON joins messages whose contents are texts or lists of text parts.
func (c *chat) UnmarshalJSON(body []byte) error {
	var messages []struct {
		Role    *string         `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(body, &messages) != nil {
		return errors.New("messages must be a list of objects with role and content")
	}
	var text strings.Builder
	for _, m := range messages {
		if m.Role == nil {
			return errors.New("messages must be objects with a role")
		}
		var content string
		var parts []struct {
			Text *string `json:"text"`
		}
		switch {
		case len(m.Content) == 0 || json.Unmarshal(m.Content, &content) == nil: // content may be null
		case json.Unmarshal(m.Content, &parts) == nil:
			for _, part := range parts {
				if part.Text == nil {
					return errors.New("messages must have content of text alone")
				}
				content += *part.Text
			}
		default:
			return errors.New("messages must have a text or a list of text parts as content")
		}
		text.WriteString(*m.Role + "\n" + content + "\n")
	}
	*c = chat(text.String())
	return nil
}

// stopTexts are the texts that end an answer: one text or a list.
type stopTexts []string

// UnmarshalJSON reads one text or a list of texts.
func (s *stopTexts) UnmarshalJSON(body []byte) error {
	var one *string // nil for null
	if json.Unmarshal(body, &one) == nil {
		if one != nil {
			*s = stopTexts{*one}
		}
		return nil
	}
	if json.Unmarshal(body, (*[]string)(s)) != nil {
		return errors.New("stop must be a text or a list of texts")
	}
	return nil
}

// readJSON reads the body of a request into v, or says in plain words what is wrong with it.
func (a *api) readJSON(w http.ResponseWriter, r *http.Request, v any) *apiError {
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return badRequest("", "Unsupported Media Type: Only 'application/json' is allowed")
	}
	text, refusal := a.readBody(w, r)
	if refusal != nil {
		return refusal
	}
	err := json.Unmarshal(text, v)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if wrong.Field == "" {
			return badRequest("", "the body must be a JSON object, got %s", wrong.Value)
		}
		return badRequest(wrong.Field, "%s must be of type %s, got %s", wrong.Field, wrong.Type, wrong.Value)
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		return badRequest("", "the body is not valid JSON: %v", err)
	}
	if err != nil {
		param, _, _ := strings.Cut(err.Error(), " ") // the messages of this file begin with the field
		return badRequest(param, "%v", err)
	}
	return nil
}

// A completion is what one request asks for.
type completion struct {
	chat     bool
	prompts  [][]int32
	output   int     // tokens of each answer
	n        int     // answers to each prompt
	stream   bool    // the answer is a stream of chunks
	usage    bool    // a stream ends with its usage
	allUsage bool    // every chunk has its usage
	arrived  float64 // time of the request, in seconds of the engine's clock
}

// readCompletion reads and checks a request for a completion or a chat.
func (a *api) readCompletion(w http.ResponseWriter, r *http.Request, isChat bool) (*completion, *apiError) {
	c := &completion{chat: isChat, n: 1, arrived: a.live.clock()}
	var body completionBody
	if refusal := a.readJSON(w, r, &body); refusal != nil {
		return nil, refusal
	}
	if refusal := a.checkModel(body.Model); refusal != nil {
		return nil, refusal
	}
	switch {
	case body.StreamOptions != nil && !body.Stream:
		return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
	case isChat && (body.Messages == nil || *body.Messages == ""):
		return nil, badRequest("messages", "messages must be a list with at least one message")
	case isChat:
		c.prompts = [][]int32{sim.Tokenize(string(*body.Messages))}
	case len(body.Prompt) == 0:
		return nil, badRequest("prompt", "prompt must not be empty")
	case body.Suffix != nil:
		return nil, badRequest("suffix", "suffix is not supported")
	case a.release.since032 && len(body.Prompt) > maxPrompts:
		return nil, badRequest("prompt", "prompt must have at most %d prompts, got %d.", maxPrompts, len(body.Prompt))
	default:
		c.prompts = body.Prompt
	}
	if body.N != nil {
		c.n = *body.N
	}
	c.stream = body.Stream
	if o := body.StreamOptions; o != nil {
		c.usage, c.allUsage = o.IncludeUsage, o.IncludeUsage && o.ContinuousUsageStats
	}
	if refusal := c.setLength(a, &body); refusal != nil {
		return nil, refusal
	}
	if refusal := c.checkRanges(a, &body); refusal != nil {
		return nil, refusal
	}
	return c, c.checkRest(a.release, &body)
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
	defaultMaxTokens = 16   // tokens of a completion without max_tokens
	maxPrompts       = 1024 // since 0.32.0
	maxStops         = 4    // since 0.32.0
	// maxAnswers limits n. Since 0.32.0 this is vLLM's own limit; 0.14.1 has none, and would run out of memory.
	maxAnswers = 16384
	// maxSequences limits the answers to all prompts of one request, for the simulator's own memory. vLLM has no such
	// limit.
	maxSequences = 16 * maxAnswers
	// defaultMaxLogprobs is the default of --max-logprobs.
	defaultMaxLogprobs = 20
	// minTemperature is the lowest temperature that is not greedy sampling (_SAMPLING_EPS in vllm/sampling_params.py).
	minTemperature = 1e-5
)

// setLength sets how many tokens each answer has. 0.14.1 refuses a request that would not fit the context. Later
// versions shorten the answer, and refuse only a prompt that does not fit (get_max_tokens in
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
		return badRequest(param, "This model's maximum context length is %d tokens. However, your request has %d input tokens and asks for %d output tokens. "+
			"(parameter=%s, value=%d)", limit, longest, c.output, param, value)
	}
	switch room := limit - longest; {
	case room < 0 || c.chat && !a.release.since032 && room == 0:
		return refuse("input_tokens", longest)
	case a.release.since032:
		c.output = min(c.output, room)
	case c.output > room:
		return refuse("max_tokens", c.output)
	}
	return nil
}

// checkRanges refuses the numbers that vLLM refuses (_verify_args in vllm/sampling_params.py; check_logprobs in
// vllm/entrypoints/openai/protocol.py and _validate_logprobs in vllm/v1/engine/processor.py, 0.14.1).
func (c *completion) checkRanges(a *api, body *completionBody) *apiError {
	const above0 = math.SmallestNonzeroFloat64
	inf := math.Inf(1)
	maxTemperature := inf
	if a.release.since032 {
		maxTemperature = 2
	}
	maxLogprobs := float64(defaultMaxLogprobs)
	if n, ok := a.live.engine.Options.Given["max_logprobs"].(int); ok {
		maxLogprobs = float64(n)
	}
	if maxLogprobs == -1 { // all tokens of the vocabulary
		maxLogprobs = inf
	}
	var logprobs *float64
	if n, ok := body.Logprobs.(float64); ok && !c.chat {
		logprobs = &n
	}
	for _, f := range []struct {
		name     string
		value    *float64
		min, max float64
	}{
		{"n", toFloat(&c.n), 1, maxAnswers},
		{"max_tokens", toFloat(&c.output), 1, inf},
		{"min_tokens", toFloat(body.MinTokens), 0, float64(c.output)},
		{"presence_penalty", body.PresencePenalty, -2, 2},
		{"frequency_penalty", body.FrequencyPenalty, -2, 2},
		{"repetition_penalty", body.RepetitionPenalty, above0, inf},
		{"temperature", body.Temperature, 0, maxTemperature},
		{"top_p", body.TopP, above0, 1},
		{"top_k", toFloat(body.TopK), -1, inf},
		{"min_p", body.MinP, 0, 1},
		{"logprobs", logprobs, 0, maxLogprobs},
		{"top_logprobs", toFloat(body.TopLogprobs), 0, maxLogprobs},
	} {
		if f.value == nil || *f.value >= f.min && *f.value <= f.max {
			continue
		}
		want := fmt.Sprintf("from %g to %g", f.min, f.max)
		switch {
		case f.min == above0 && f.max == inf:
			want = "above 0"
		case f.min == above0:
			want = fmt.Sprintf("above 0 and at most %g", f.max)
		case f.max == inf:
			want = fmt.Sprintf("at least %g", f.min)
		}
		return badRequest(f.name, "%s must be %s, got %.15g.", f.name, want, *f.value)
	}
	return nil
}

// toFloat converts a number that may be missing.
func toFloat(n *int) *float64 {
	if n == nil {
		return nil
	}
	f := float64(*n)
	return &f
}

// checkRest refuses what vLLM refuses besides single numbers.
func (c *completion) checkRest(r *release, body *completionBody) *apiError {
	greedy := body.Temperature != nil && *body.Temperature < minTemperature
	switch {
	case c.n*len(c.prompts) > maxSequences:
		return badRequest("n", "n times the number of prompts must be at most %d, got %d; this limit is the simulator's.", maxSequences, c.n*len(c.prompts))
	case c.n > 1 && greedy:
		return badRequest("n", "n must be 1 when using greedy sampling, got %d.", c.n)
	case c.chat && body.TopLogprobs != nil && *body.TopLogprobs > 0 && body.Logprobs != true:
		return badRequest("top_logprobs", "top_logprobs needs logprobs to be true.")
	case slices.Contains(body.Stop, ""):
		return badRequest("stop", "stop cannot contain an empty string.")
	case r.since032 && len(body.Stop) > maxStops:
		return badRequest("stop", "stop must have at most %d texts, got %d.", maxStops, len(body.Stop))
	}
	return nil
}
