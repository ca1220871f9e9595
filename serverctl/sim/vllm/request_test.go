package vllm

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"vllmtuner/serverctl/sim"
)

// The simulator refuses all requests that vLLM refuses with status 400. The simulator's error has the same status and
// the same form of JSON, but another message.
func TestBadRequestsAreRefused(t *testing.T) {
	t.Parallel()
	const served = "served"
	urls := map[string]string{}
	for _, version := range sim.Versions {
		urls[version] = serveFast(t, version, "m", "--served-model-name", "m", "--max-model-len", "128")
	}
	prompt := func(tokens int) string { return "[5" + strings.Repeat(",5", tokens-1) + "]" }
	for _, row := range []struct {
		name, path, body string
		old, later       string // part of the message: of 0.14.1, and of later versions (empty: the same)
	}{
		{"no body", "completions", ``, "not valid", ""},
		{"a list", "completions", `[]`, "not valid", ""},
		{"no prompt", "completions", `{}`, "must not be empty", ""},
		{"an empty text", "completions", `{"prompt":""}`, "must not be empty", ""},
		{"an empty list", "completions", `{"prompt":[]}`, "must not be empty", ""},
		{"a list with an empty prompt", "completions", `{"prompt":[[1],[]]}`, "must not be empty", ""},
		{"a prompt that is a number", "completions", `{"prompt":1}`, "prompt must be a text", ""},
		{"a token and a text", "completions", `{"prompt":[1,"a"]}`, "prompt must be a text", ""},
		{"max_tokens 0", "completions", `{"prompt":[1],"max_tokens":0}`, "max_tokens must be at least 1, got 0.", ""},
		{"max_tokens a fraction", "completions", `{"prompt":[1],"max_tokens":1.5}`, "max_tokens of type int", ""},
		{"too long a prompt", "completions", `{"prompt":` + prompt(130) + `,"max_tokens":5}`, "maximum context length is 128 tokens", ""},
		{"a prompt as long as the context", "completions", `{"prompt":` + prompt(128) + `,"max_tokens":1}`, "maximum context length is 128 tokens", "max_tokens must be at least 1, got 0."},
		{"too many tokens together", "completions", `{"prompt":[1,2,3],"max_tokens":126}`, "maximum context length is 128 tokens", served},
		{"n 0", "completions", `{"prompt":[1],"n":0}`, "n must be from 1 to 16384, got 0.", ""},
		{"too large an n", "completions", `{"prompt":[1],"n":2000000}`, "n must be from 1 to 16384, got 2000000.", ""},
		{"too many answers to all prompts", "completions", `{"n":16384,"prompt":[` + strings.Repeat(`"a",`, 16) + `"a"]}`, "must be at most 262144, got 278528", ""},
		{"a high temperature", "completions", `{"prompt":[1],"temperature":3}`, served, "temperature must be from 0 to 2, got 3."},
		{"a low temperature", "completions", `{"prompt":[1],"temperature":-1}`, "temperature must be at least 0, got -1.", "temperature must be from 0 to 2, got -1."},
		{"top_p 0", "completions", `{"prompt":[1],"top_p":0}`, "top_p must be above 0 and at most 1, got 0.", ""},
		{"top_k below -1", "completions", `{"prompt":[1],"top_k":-5}`, "top_k must be at least -1, got -5.", ""},
		{"min_p above 1", "completions", `{"prompt":[1],"min_p":2}`, "min_p must be from 0 to 1, got 2.", ""},
		{"a presence penalty", "completions", `{"prompt":[1],"presence_penalty":99}`, "must be from -2 to 2, got 99.", ""},
		{"a frequency penalty", "completions", `{"prompt":[1],"frequency_penalty":-99}`, "must be from -2 to 2, got -99.", ""},
		{"no repetition penalty", "completions", `{"prompt":[1],"repetition_penalty":0}`, "must be above 0, got 0.", ""},
		{"min_tokens above max_tokens", "completions", `{"prompt":[1],"max_tokens":1,"min_tokens":2}`, "min_tokens must be from 0 to 1, got 2.", ""},
		{"usage without stream", "completions", `{"prompt":[1],"stream_options":{"include_usage":true}}`, "Stream options can only be defined", ""},
		{"null fields, and fields without effect", "completions", `{"prompt":[1],"max_tokens":1,"n":null,"stop":["a","b"],"temperature":null}`, served, ""},
		{"stream_options of another type", "completions", `{"prompt":[1],"stream":true,"stream_options":1}`, "stream_options of type", ""},

		{"chat, no messages", "chat/completions", `{}`, "must not be empty", ""},
		{"chat, an empty list", "chat/completions", `{"messages":[]}`, "must not be empty", ""},
		{"chat, messages of another type", "chat/completions", `{"messages":"hello"}`, "messages must be a list of objects", ""},
		{"chat, an image", "chat/completions", `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "list of text parts", ""},
		{"chat, max_completion_tokens 0", "chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_completion_tokens":0}`, "must be at least 1, got 0.", ""},
		{"chat, a prompt as long as the context", "chat/completions", `{"messages":[{"role":"user","content":"` + strings.Repeat("a ", 127) + `"}],"max_tokens":1}`, "maximum context length is 128 tokens", "max_tokens must be at least 1, got 0."},

		{"a megabyte of brackets", "completions", strings.Repeat("[", 1<<20), "not valid", ""},
		{"a megabyte of objects", "completions", strings.Repeat(`{"a":`, 1<<20/5), "not valid", ""},
		{"brackets in a text", "completions", `{"max_tokens":1,"prompt":"` + strings.Repeat("[", 200) + `"}`, served, ""},
	} {
		for version, url := range urls {
			want := row.old
			if version != "0.14.1" && row.later != "" {
				want = row.later
			}
			status, text := post(t, url+"/v1/"+row.path, row.body)
			if want == served {
				if status != http.StatusOK {
					t.Errorf("%s %s: %d %.500s, want it served", version, row.name, status, text)
				}
				continue
			}
			var answer struct {
				Error struct {
					Message, Type string
					Code          int
				}
			}
			if err := json.Unmarshal([]byte(text), &answer); err != nil {
				t.Errorf("%s %s: the answer is %.500s: %v", version, row.name, text, err)
				continue
			}
			if e := answer.Error; status != 400 || e.Code != 400 || e.Type != "BadRequestError" || !strings.Contains(e.Message, want) {
				t.Errorf("%s %s: %d %.500s\nwant 400 with %q", version, row.name, status, text, want)
			}
		}
	}
}
