package vllmsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// A question is the body of both endpoints, as far as the simulation reads it.
type question struct {
	Model    string          `json:"model"`
	Prompt   json.RawMessage `json:"prompt"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	Stream              bool `json:"stream"`
	StreamOptions       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

// Lengths without max_tokens, as in vLLM: 16 for completions.
const defaultMaxTokens = 16

func (a *api) completions(w http.ResponseWriter, r *http.Request) {
	q, ok := a.read(w, r)
	if !ok {
		return
	}
	tokens, err := promptTokens(q.Prompt)
	if err != nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", "%v", err)
		return
	}
	a.generate(w, r, q, tokens, false)
}

func (a *api) chat(w http.ResponseWriter, r *http.Request) {
	q, ok := a.read(w, r)
	if !ok {
		return
	}
	var text strings.Builder
	for _, m := range q.Messages {
		content, err := messageText(m.Content)
		if err != nil {
			refuse(w, http.StatusBadRequest, "BadRequestError", "%v", err)
			return
		}
		text.WriteString(m.Role + "\n" + content + "\n")
	}
	a.generate(w, r, q, Tokenize(text.String()), true)
}

// read decodes the body and checks the model.
func (a *api) read(w http.ResponseWriter, r *http.Request) (question, bool) {
	var q question
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", "invalid JSON: %v", err)
		return q, false
	}
	if served := a.live.engine.Options.Model; q.Model != "" && q.Model != served {
		refuse(w, http.StatusNotFound, "NotFoundError", "The model `%s` does not exist.", q.Model)
		return q, false
	}
	return q, true
}

// promptTokens reads a prompt that is a text or a list of token ids.
func promptTokens(raw json.RawMessage) ([]int32, error) {
	var ids []int32
	if err := json.Unmarshal(raw, &ids); err == nil {
		return ids, nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return nil, fmt.Errorf("prompt must be a string or a list of token ids")
	}
	return Tokenize(text), nil
}

// messageText reads a content that is a text or a list of text parts.
func messageText(raw json.RawMessage) (string, error) {
	var text string
	if err := json.Unmarshal(raw, &text); err == nil {
		return text, nil
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("message content must be a string or a list of text parts")
	}
	for _, p := range parts {
		text += p.Text
	}
	return text, nil
}

// generate puts the request into the engine and answers as its tokens come.
func (a *api) generate(w http.ResponseWriter, r *http.Request, q question, tokens []int32, chat bool) {
	limit := a.live.engine.Options.MaxModelLen
	output := defaultMaxTokens
	if chat {
		output = limit - len(tokens)
	}
	for _, n := range []*int{q.MaxTokens, q.MaxCompletionTokens} {
		if n != nil {
			output = *n
		}
	}
	switch {
	case len(tokens) == 0:
		refuse(w, http.StatusBadRequest, "BadRequestError", "The decoder prompt cannot be empty")
		return
	case output < 1:
		refuse(w, http.StatusBadRequest, "BadRequestError", "max_tokens must be at least 1, got %d.", output)
		return
	case len(tokens)+output > limit:
		refuse(w, http.StatusBadRequest, "BadRequestError",
			"This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the messages, %d in the completion). "+
				"Please reduce the length of the messages or completion.", limit, len(tokens)+output, len(tokens), output)
		return
	}
	if q.Stream { // set before anything can go wrong with the engine: from now on an error is a chunk of the stream
		w.Header().Set("Content-Type", eventStream)
	}
	time.Sleep(seconds(a.live.engine.Profile.Latency.BeforeScheduling / 1000))
	number := a.next.Add(1)
	request := &Request{Prompt: len(tokens), Output: output, Hashes: HashBlocks(tokens), Salt: number}
	news := a.live.submit(request)
	defer a.live.abort(request)
	s := &stream{w: w, id: number, model: a.live.engine.Options.Model, chat: chat, usage: q.StreamOptions.IncludeUsage, prompt: len(tokens), output: output}
	if !q.Stream {
		a.whole(r, s, news)
		return
	}
	a.stream(r, s, news)
}

// stream answers with one SSE chunk a token.
func (a *api) stream(r *http.Request, s *stream, news <-chan token) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := 0; ; n++ {
		select {
		case <-r.Context().Done():
			return
		case t := <-news:
			timer.Reset(time.Until(t.at))
			select {
			case <-r.Context().Done():
				return
			case <-timer.C:
			}
			if n == 0 {
				s.begin()
			}
			if err := s.token(n, t.last); err != nil || t.last {
				return
			}
		}
	}
}

// whole answers with one body when the last token is there.
func (a *api) whole(r *http.Request, s *stream, news <-chan token) {
	for {
		select {
		case <-r.Context().Done():
			return
		case t := <-news:
			if t.last {
				time.Sleep(time.Until(t.at))
				s.body()
				return
			}
		}
	}
}
