package vllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"vllmtuner/serverctl/sim"
)

// A request that real vLLM refuses with status 400 gets the same status and error envelope, and a message of our own.
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
		param            string // "" means null
		old, later       string // part of the message of 0.14.1, and of later versions; an empty later means old
	}{
		{"no body", "completions", ``, "", "not valid JSON", ""},
		{"bad JSON", "completions", `{"model": "m", `, "", "not valid JSON", ""},
		{"a list", "completions", `[]`, "", "the body must be a JSON object, got array", ""},
		{"no prompt", "completions", `{}`, "prompt", "prompt must not be empty", ""},
		{"an empty text", "completions", `{"prompt":""}`, "prompt", "prompt must not be empty", ""},
		{"an empty list", "completions", `{"prompt":[]}`, "prompt", "prompt must not be empty", ""},
		{"a list with an empty prompt", "completions", `{"prompt":[[1],[]]}`, "prompt", "prompt must not be empty", ""},
		{"a null prompt", "completions", `{"prompt":null}`, "prompt", "prompt must not be empty", ""},
		{"a prompt that is a number", "completions", `{"prompt":1}`, "prompt", "prompt must be a text", ""},
		{"a token and a text", "completions", `{"prompt":[1,"a"]}`, "prompt", "prompt must be a text", ""},
		{"a negative token", "completions", `{"prompt":[-1]}`, "prompt", "no negative token id", ""},
		{"too many prompts", "completions", `{"prompt":[` + strings.Repeat(`"a",`, 1024) + `"a"]}`, "prompt", served, "prompt must have at most 1024 prompts, got 1025."},
		{"max_tokens 0", "completions", `{"prompt":[1],"max_tokens":0}`, "max_tokens", "max_tokens must be at least 1, got 0.", ""},
		{"max_tokens -1", "completions", `{"prompt":[1],"max_tokens":-1}`, "max_tokens", "max_tokens must be at least 1, got -1.", ""},
		{"max_tokens a word", "completions", `{"prompt":[1],"max_tokens":"x"}`, "max_tokens", "max_tokens must be of type int, got string", ""},
		{"max_tokens a fraction", "completions", `{"prompt":[1],"max_tokens":1.5}`, "max_tokens", "max_tokens must be of type int, got number 1.5", ""},
		{"max_tokens of 1e300", "completions", `{"prompt":[1],"max_tokens":1e300}`, "max_tokens", "max_tokens must be of type int", ""},
		{"too long a prompt", "completions", `{"prompt":` + prompt(130) + `,"max_tokens":5}`, "input_tokens", "maximum context length is 128 tokens", ""},
		{"a prompt as long as the context", "completions", `{"prompt":` + prompt(128) + `,"max_tokens":1}`, "max_tokens", "maximum context length is 128 tokens", "max_tokens must be at least 1, got 0."},
		{"too many tokens together", "completions", `{"prompt":[1,2,3],"max_tokens":126}`, "max_tokens", "maximum context length is 128 tokens", served},
		{"a high temperature", "completions", `{"prompt":[1],"temperature":3}`, "temperature", served, "temperature must be from 0 to 2, got 3."},
		{"a low temperature", "completions", `{"prompt":[1],"temperature":-1}`, "temperature", "temperature must be at least 0, got -1.", "temperature must be from 0 to 2, got -1."},
		{"top_p above 1", "completions", `{"prompt":[1],"top_p":2}`, "top_p", "top_p must be above 0 and at most 1, got 2.", ""},
		{"top_p 0", "completions", `{"prompt":[1],"top_p":0}`, "top_p", "top_p must be above 0 and at most 1, got 0.", ""},
		{"top_k below -1", "completions", `{"prompt":[1],"top_k":-5}`, "top_k", "top_k must be at least -1, got -5.", ""},
		{"min_p above 1", "completions", `{"prompt":[1],"min_p":2}`, "min_p", "min_p must be from 0 to 1, got 2.", ""},
		{"a presence penalty", "completions", `{"prompt":[1],"presence_penalty":99}`, "presence_penalty", "must be from -2 to 2, got 99.", ""},
		{"a frequency penalty", "completions", `{"prompt":[1],"frequency_penalty":-99}`, "frequency_penalty", "must be from -2 to 2, got -99.", ""},
		{"no repetition penalty", "completions", `{"prompt":[1],"repetition_penalty":0}`, "repetition_penalty", "must be above 0, got 0.", ""},
		{"too many logprobs", "completions", `{"prompt":[1],"logprobs":21}`, "logprobs", "logprobs must be from 0 to 20, got 21.", ""},
		{"negative logprobs", "completions", `{"prompt":[1],"logprobs":-1}`, "logprobs", "logprobs must be from 0 to 20, got -1.", ""},
		{"too many top_logprobs", "chat/completions", `{"messages":[{"role":"user","content":"a"}],"logprobs":true,"top_logprobs":21}`, "top_logprobs", "top_logprobs must be from 0 to 20, got 21.", ""},
		{"top_logprobs without logprobs", "chat/completions", `{"messages":[{"role":"user","content":"a"}],"top_logprobs":2}`, "top_logprobs", "top_logprobs needs logprobs to be true.", ""},
		{"good logprobs", "chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"logprobs":true,"top_logprobs":2}`, "", served, ""},
		{"min_tokens above max_tokens", "completions", `{"prompt":[1],"max_tokens":1,"min_tokens":2}`, "min_tokens", "min_tokens must be from 0 to 1, got 2.", ""},
		{"min_tokens below 0", "completions", `{"prompt":[1],"min_tokens":-1}`, "min_tokens", "min_tokens must be from 0 to 16, got -1.", ""},
		{"n 0", "completions", `{"prompt":[1],"n":0}`, "n", "n must be from 1 to 16384, got 0.", ""},
		{"too large an n", "completions", `{"prompt":[1],"n":2000000}`, "n", "n must be from 1 to 16384, got 2000000.", ""},
		{"too many answers to all prompts", "completions", `{"n":16384,"prompt":[` + strings.Repeat(`"a",`, 16) + `"a"]}`, "n", "must be at most 262144, got 278528", ""},
		{"n of greedy sampling", "completions", `{"prompt":[1],"n":2,"temperature":0}`, "n", "n must be 1 when using greedy sampling, got 2.", ""},
		{"a suffix", "completions", `{"prompt":[1],"suffix":"x"}`, "suffix", "suffix is not supported", ""},
		{"a stop that is a number", "completions", `{"prompt":[1],"stop":5}`, "stop", "stop must be a text or a list of texts", ""},
		{"five stops", "completions", `{"prompt":[1],"stop":["a","b","c","d","e"]}`, "stop", served, "stop must have at most 4 texts, got 5."},
		{"an empty stop", "completions", `{"prompt":[1],"stop":""}`, "stop", "stop cannot contain an empty string.", ""},
		{"good and null fields", "completions", `{"prompt":[1],"max_tokens":1,"n":null,"stop":["a","b"],"seed":null,"logit_bias":{"5":1}}`, "", served, ""},
		{"a bias that is a word", "completions", `{"prompt":[1],"logit_bias":{"5":"x"}}`, "logit_bias", "logit_bias must be of type float64, got string", ""},
		{"a model that is a number", "completions", `{"model":123,"prompt":[1]}`, "model", "model must be of type string, got number", ""},
		{"usage without stream", "completions", `{"prompt":[1],"stream_options":{"include_usage":true}}`, "stream_options", "Stream options can only be defined when `stream=True`.", ""},
		{"stream_options of another type", "completions", `{"prompt":[1],"stream":true,"stream_options":1}`, "stream_options", "stream_options must be of type", ""},

		{"chat, no messages", "chat/completions", `{}`, "messages", "messages must be a list with at least one message", ""},
		{"chat, an empty list", "chat/completions", `{"messages":[]}`, "messages", "messages must be a list with at least one message", ""},
		{"chat, messages of another type", "chat/completions", `{"messages":"hello"}`, "messages", "messages must be a list of objects", ""},
		{"chat, no role", "chat/completions", `{"messages":[{"content":"hello"}]}`, "messages", "messages must be objects with a role", ""},
		{"chat, an image", "chat/completions", `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "messages", "content of text alone", ""},
		{"chat, max_completion_tokens 0", "chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_completion_tokens":0}`, "max_tokens", "must be at least 1, got 0.", ""},
		{"chat, a prompt as long as the context", "chat/completions", `{"messages":[{"role":"user","content":"` + strings.Repeat("a ", 127) + `"}],"max_tokens":1}`, "", "maximum context length is 128 tokens", "max_tokens must be at least 1, got 0."},
		{"tokenize, nothing", "tokenize", `{}`, "prompt", "prompt or messages must be given", ""},
		{"detokenize, nothing", "detokenize", `{}`, "tokens", "tokens must be given", ""},

		{"a megabyte of brackets", "completions", strings.Repeat("[", 1<<20), "", "not valid JSON", ""},
		{"a megabyte of objects", "completions", strings.Repeat(`{"a":`, 1<<20/5), "", "not valid JSON", ""},
		{"brackets in a text", "completions", `{"max_tokens":1,"prompt":"` + strings.Repeat("[", 200) + `"}`, "", served, ""},
	} {
		for version, url := range urls {
			want := row.old
			if version != "0.14.1" && row.later != "" {
				want = row.later
			}
			path := "/v1/" + row.path
			if strings.HasSuffix(path, "tokenize") {
				path = "/" + row.path
			}
			status, text := post(t, url+path, row.body)
			if want == served {
				if status != http.StatusOK {
					t.Errorf("%s %s: %d %.500s, want it served", version, row.name, status, text)
				}
				continue
			}
			var answer struct {
				Error struct {
					Message, Type string
					Param         *string
					Code          int
				}
			}
			if err := json.Unmarshal([]byte(text), &answer); err != nil {
				t.Errorf("%s %s: the answer is %.500s: %v", version, row.name, text, err)
				continue
			}
			e, param := answer.Error, ""
			if e.Param != nil {
				param = *e.Param
			}
			if status != 400 || e.Code != 400 || e.Type != "BadRequestError" || !strings.Contains(e.Message, want) || row.param != "" && param != row.param {
				t.Errorf("%s %s: %d %.500s\nwant 400 for %q with %q", version, row.name, status, text, row.param, want)
			}
		}
	}
}

// A body of another media type is refused, even if its content is correct.
func TestABodyMustBeJSON(t *testing.T) {
	t.Parallel()
	url, _ := serveAs(t, "0.32.0", "m")
	for media, want := range map[string]int{"": 400, "text/plain": 400, "application/json": 200, "application/json; charset=utf-8": 200} {
		req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/v1/completions", strings.NewReader(`{"prompt":[1],"max_tokens":1}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", media)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("media type %q: %s, want %s", media, fmt.Sprint(resp.StatusCode), fmt.Sprint(want))
		}
	}
}

// --max-logprobs sets the highest logprobs of a request; -1 means no limit.
func TestMaxLogprobs(t *testing.T) {
	t.Parallel()
	for limit, status := range map[string]int{"4": 400, "5": 200, "-1": 200} {
		url, _ := serveAs(t, "0.32.0", "m", "--max-logprobs="+limit)
		if got, text := post(t, url+"/v1/completions", `{"prompt":[1],"max_tokens":1,"logprobs":5}`); got != status {
			t.Errorf("with --max-logprobs=%s: status %d, want %d: %s", limit, got, status, text)
		}
	}
}
