package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// readCaptures reads a log of the user's own traffic, with one JSON object on each line. The object is the body of a
// request to /v1/completions or /v1/chat/completions, or it has the body under "body" or "request", as in OpenAI's
// batch files. "timestamp" is the time of arrival. If withTimes is true, a row without a timestamp is bad. "usage"
// gives the length of the answer. "usage" may also be within "response".
func readCaptures(from io.Reader, spec Spec, withTimes bool, bad *badRows) ([]recordedRow, error) {
	return readLines(from, bad, func(text []byte) (row recordedRow, err error) {
		row.Request, row.at, err = spec.parseCapture(text, withTimes)
		return row, err
	})
}

// A usage gives the length of an answer.
type usage struct {
	CompletionTokens int `json:"completion_tokens"`
}

// A capturedLine has the fields of a line that may surround the body of a request.
type capturedLine struct {
	Timestamp json.RawMessage `json:"timestamp"`
	URL       string          `json:"url"`
	Body      json.RawMessage `json:"body"`
	Request   json.RawMessage `json:"request"`
	Usage     json.RawMessage `json:"usage"`
	Response  json.RawMessage `json:"response"`
}

// answerTokens returns the length of the answer in tokens, or 0 if the line does not have this length in a known form.
func (l *capturedLine) answerTokens() int {
	var used usage
	var response struct {
		Usage usage `json:"usage"`
		Body  struct {
			Usage usage `json:"usage"`
		} `json:"body"`
	}
	if json.Unmarshal(l.Usage, &used) == nil && used.CompletionTokens > 0 {
		return used.CompletionTokens
	}
	if json.Unmarshal(l.Response, &response) == nil {
		return max(response.Usage.CompletionTokens, response.Body.Usage.CompletionTokens)
	}
	return 0
}

// parseCapture reads one line.
func (s Spec) parseCapture(text []byte, withTimes bool) (request Request, came time.Duration, err error) {
	if text[0] == '[' {
		return request, 0, errors.New("is a JSON array, not one object a line")
	}
	var line capturedLine
	if err := json.Unmarshal(text, &line); err != nil {
		return request, 0, explain(err)
	}
	if withTimes {
		if came, err = parseTimestamp(line.Timestamp); err != nil {
			return request, 0, err
		}
	}
	if line.URL != "" && !strings.HasSuffix(line.URL, "/completions") {
		return request, 0, fmt.Errorf("url %q is neither /v1/completions nor /v1/chat/completions", line.URL)
	}
	body := json.RawMessage(text)
	for _, wrapped := range []json.RawMessage{line.Request, line.Body} {
		if len(wrapped) > 0 && string(wrapped) != "null" {
			body = wrapped
		}
	}
	request, err = s.parseBody(body, line.answerTokens())
	return request, came, err
}

// parseBody reads the body of a request. It ignores sampling, streaming and stop words, because the work is pinned.
func (s Spec) parseBody(text json.RawMessage, answered int) (Request, error) {
	if text[0] == '"' { // some logs have the body as a string
		var inner string
		if err := json.Unmarshal(text, &inner); err != nil {
			return Request{}, explain(err)
		}
		text = json.RawMessage(inner)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return Request{}, explain(err)
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if changesWork(name, fields[name]) {
			return Request{}, fmt.Errorf("%s cannot be sent: remove such requests from the file", name)
		}
	}
	prompt, ids, err := parsePrompt(fields["prompt"])
	if err != nil {
		return Request{}, err
	}
	messages, err := parseMessages(fields["messages"])
	if err != nil {
		return Request{}, err
	}
	request := Request{Conversation: -1}
	switch {
	case ids != nil && s.Endpoint == Chat:
		return Request{}, errors.New("prompt has token ids, which endpoint chat does not take: use endpoint completions")
	case ids != nil:
		request.Tokens, request.PromptTokens = ids, len(ids)
	default:
		if err := request.ask(prompt, messages, s.Endpoint); err != nil {
			return Request{}, err
		}
	}
	request.OutputTokens, err = s.answerLength(answered, fields)
	return request, err
}

// answerLength returns how many tokens to ask for. It takes the length of the spec, or else the recorded length, or
// else the request's own limit.
func (s Spec) answerLength(answered int, fields map[string]json.RawMessage) (int, error) {
	if s.OutputTokens > 0 {
		return s.OutputTokens, nil
	}
	if answered > 0 {
		return answered, checkLength("completion_tokens", answered, 1)
	}
	for _, name := range []string{"max_completion_tokens", "max_tokens"} {
		if empty(fields[name]) {
			continue
		}
		var n int
		if err := json.Unmarshal(fields[name], &n); err != nil {
			return 0, fmt.Errorf("%s is not a whole number", name)
		}
		return n, checkLength(name, n, 1)
	}
	return 0, errors.New(`has no length for its answer: add "usage" or "max_tokens" to each line, or set the workload's output tokens`)
}

// workFields are the fields of a request, other than prompt and length, that change the server's work
// (vllm/entrypoints/openai/protocol.py, 0.14.1).
var workFields = []string{
	"tools", "functions", "response_format", "structured_outputs", "n", "best_of", "use_beam_search", "logprobs", "top_logprobs",
	"prompt_logprobs", "logit_bias", "suffix", "echo", "audio", "modalities", "prompt_embeds", "documents", "chat_template",
	"chat_template_kwargs", "mm_processor_kwargs", "continue_final_message", "truncate_prompt_tokens",
}

// workDefaults are the defaults of some workFields. A field with its default value does not change the work.
var workDefaults = map[string][]string{
	"n": {"1"}, "best_of": {"1"}, "response_format": {`{"type":"text"}`}, "modalities": {`["text"]`}, "truncate_prompt_tokens": {"-1"},
}

func changesWork(name string, value json.RawMessage) bool {
	if !slices.Contains(workFields, name) && !strings.HasPrefix(name, "guided_") || empty(value) {
		return false
	}
	return !slices.Contains(workDefaults[name], strings.Join(strings.Fields(string(value)), ""))
}

// empty reports whether a field is missing or has an empty value.
func empty(value json.RawMessage) bool {
	return slices.Contains([]string{"", "null", "false", `""`, "[]", "{}"}, string(value))
}

// parsePrompt reads a prompt. The prompt is a text, a list of token ids, or a list that holds one such prompt.
func parsePrompt(text json.RawMessage) (prompt string, ids []int32, err error) {
	if empty(text) {
		return "", nil, nil
	}
	if text[0] == '[' {
		var list []json.RawMessage
		if err := json.Unmarshal(text, &list); err != nil {
			return "", nil, explain(err)
		}
		switch {
		case len(list) == 0:
			return "", nil, nil
		case list[0][0] != '"' && list[0][0] != '[':
			ids, err = parseIDs(text)
			return "", ids, err
		case len(list) > 1:
			return "", nil, fmt.Errorf("prompt has %d prompts: make each a separate request", len(list))
		case list[0][0] == '[':
			ids, err = parseIDs(list[0])
			return "", ids, err
		}
		text = list[0]
	}
	if err := json.Unmarshal(text, &prompt); err != nil {
		return "", nil, errors.New("prompt is neither a text nor a list of token ids")
	}
	return prompt, nil, nil
}

func parseIDs(text json.RawMessage) ([]int32, error) {
	var ids []int32
	if err := json.Unmarshal(text, &ids); err != nil {
		return nil, errors.New("prompt is neither a text nor a list of token ids")
	}
	for _, id := range ids {
		if id < 0 {
			return nil, fmt.Errorf("prompt has the token id %d, which is negative", id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	return ids, nil
}

// parseMessages reads the messages of a chat.
func parseMessages(text json.RawMessage) ([]Message, error) {
	if empty(text) {
		return nil, nil
	}
	var list []map[string]json.RawMessage
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, errors.New("messages is not a list of JSON objects")
	}
	messages := make([]Message, len(list))
	for i, fields := range list {
		at := fmt.Sprintf("messages[%d]", i)
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if name != "role" && name != "content" && !empty(fields[name]) {
				return nil, fmt.Errorf("%s.%s cannot be sent: remove such requests from the file", at, name)
			}
		}
		if err := json.Unmarshal(fields["role"], &messages[i].Role); err != nil || messages[i].Role == "" {
			return nil, fmt.Errorf("%s needs a role", at)
		}
		if role := messages[i].Role; role == "tool" || role == "function" {
			return nil, fmt.Errorf("%s.role is %s, which cannot be sent: remove such requests from the file", at, role)
		}
		var err error
		if messages[i].Content, err = parseContent(at, fields["content"]); err != nil {
			return nil, err
		}
	}
	return messages, nil
}

// parseContent reads the content of a message: a text, or a list of text parts. It joins parts by line breaks, as vLLM
// does for chat templates that take one text (vllm/entrypoints/chat_utils.py, 0.14.1 and 0.33).
func parseContent(at string, text json.RawMessage) (string, error) {
	var content string
	if err := json.Unmarshal(text, &content); err == nil && string(text) != "null" {
		return content, nil
	}
	var parts []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(text, &parts); err != nil || len(parts) == 0 {
		return "", fmt.Errorf("%s needs a content: a text or a list of text parts", at)
	}
	texts := make([]string, len(parts))
	for i, part := range parts {
		if part.Type != "text" || part.Text == nil {
			return "", fmt.Errorf("%s.content[%d] is a part of type %q, which cannot be sent: remove such requests from the file", at, i, part.Type)
		}
		texts[i] = *part.Text
	}
	return strings.Join(texts, "\n"), nil
}

// parseTimestamp reads a time of arrival in RFC 3339 or as a number of seconds. Numbers too large for seconds since 1970
// are milliseconds, microseconds or nanoseconds.
func parseTimestamp(text json.RawMessage) (time.Duration, error) {
	if empty(text) {
		return 0, errNoTime
	}
	var date string
	if err := json.Unmarshal(text, &date); err == nil {
		at, err := time.Parse(time.RFC3339, date)
		if err != nil {
			return 0, fmt.Errorf("timestamp %q is not a date such as 2026-01-31T12:00:00.5Z", date)
		}
		return sinceEpoch(at)
	}
	var number float64
	if err := json.Unmarshal(text, &number); err != nil {
		return 0, errors.New("timestamp is neither a number of seconds nor a date")
	}
	for range 3 {
		if number > 1e11 {
			number /= 1000
		}
	}
	return clockTime(number)
}
