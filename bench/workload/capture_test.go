package workload

import (
	"fmt"
	"strings"
	"testing"
)

// asked returns the prompt and the answer length of a request in one line.
func asked(r *Request) string {
	switch {
	case r.Tokens != nil:
		return fmt.Sprintf("%v > %d", r.Tokens, r.OutputTokens)
	case r.Messages != nil:
		return fmt.Sprintf("%q > %d", r.Messages, r.OutputTokens)
	}
	return fmt.Sprintf("%q > %d", r.Text, r.OutputTokens)
}

func TestCapturedRequestsAreRead(t *testing.T) {
	tests := []struct {
		name, line, endpoint, want string
	}{
		{"a bare body", `{"model":"m","prompt":"hello","max_tokens":5,"stream":true,"temperature":1,"stop":["x"]}`, "", `"hello" > 5`},
		{"a list of one prompt", `{"prompt":["hello"],"max_tokens":5}`, "", `"hello" > 5`},
		{"token ids", `{"prompt":[1,2,3],"max_tokens":5}`, "", `[1 2 3] > 5`},
		{"a list of token ids", `{"prompt":[[1,2,3]],"max_tokens":5}`, "", `[1 2 3] > 5`},
		{"a prompt at chat", `{"prompt":"hello","max_tokens":5}`, Chat, `[{"user" "hello"}] > 5`},
		{"a chat", `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}],"max_completion_tokens":7,"max_tokens":9}`, Chat, `[{"system" "s"} {"user" "u"}] > 7`},
		{"parts that are texts", `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],"max_tokens":9}`, Chat, `[{"user" "a\nb"}] > 9`},
		{"an answer with empty fields", `{"messages":[{"role":"assistant","content":"u","refusal":null,"annotations":[],"tool_calls":[]}],"max_tokens":9}`, Chat, `[{"assistant" "u"}] > 9`},
		{"the batch layout", `{"custom_id":"r1","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"u"}],"max_tokens":9}}`, Chat, `[{"user" "u"}] > 9`},
		{"a log with request and response", `{"request":{"prompt":"p","max_tokens":100},"response":{"id":"x","usage":{"prompt_tokens":3,"completion_tokens":11}}}`, "", `"p" > 11`},
		{"the response of a batch", `{"body":{"prompt":"p"},"response":{"status_code":200,"body":{"usage":{"completion_tokens":11}}}}`, "", `"p" > 11`},
		{"a usage beside the body", `{"body":{"prompt":"p","max_tokens":null},"usage":{"completion_tokens":12},"response":"text"}`, "", `"p" > 12`},
		{"a body that is logged as a string", `{"body":"{\"prompt\":\"p\",\"max_tokens\":4}"}`, "", `"p" > 4`},
		{"fields with their defaults", `{"prompt":"p","max_tokens":4,"n":1,"tools":[],"tool_choice":"none","response_format":{"type": "text"},"logprobs":null,"echo":false}`, "", `"p" > 4`},
	}
	for _, test := range tests {
		trace, err := openText(t, Spec{Kind: "capture", Endpoint: test.endpoint}, test.line, false)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if got := asked(trace.request(0)); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

func TestCapturedRequestsThatCannotBeSent(t *testing.T) {
	const cannot = " cannot be sent"
	chat := func(message string) string {
		return `{"messages":[{"role":"user","content":"u"},` + message + `],"max_tokens":9}`
	}
	tests := []struct {
		name, line, endpoint string
		want                 []string
	}{
		{"an array", `[{"prompt":"p"}]`, "", []string{"line 1: is a JSON array"}},
		{"no JSON", `prompt`, "", []string{"line 1: is not JSON"}},
		{"another endpoint", `{"url":"/v1/embeddings","body":{"input":"x"}}`, "", []string{`line 1: url "/v1/embeddings" is neither`}},
		{"nothing asked", `{"model":"m","max_tokens":1}`, "", []string{`line 1: has neither "prompt" nor "messages"`}},
		{"a chat at completions", chat(`{"role":"user","content":"x"}`), "", []string{"line 1: has messages but no prompt: use endpoint chat"}},
		{"ids at chat", `{"prompt":[1],"max_tokens":1}`, Chat, []string{"token ids, which endpoint chat does not take: use endpoint completions"}},
		{"several prompts", `{"prompt":["a","b"],"max_tokens":1}`, "", []string{"prompt has 2 prompts: make each a separate request"}},
		{"a negative id", `{"prompt":[5,-1],"max_tokens":1}`, "", []string{"prompt has the token id -1"}},
		{"a prompt of another type", `{"prompt":{"a":1},"max_tokens":1}`, "", []string{"prompt is neither a text nor a list of token ids"}},
		{"no length", `{"prompt":"p"}`, "", []string{"line 1: has no length for its answer", `add "usage" or "max_tokens"`}},
		{"a length of zero", `{"prompt":"p","max_tokens":0}`, "", []string{"line 1: max_tokens is 0"}},
		{"a length in words", `{"prompt":"p","max_tokens":"many"}`, "", []string{"line 1: max_tokens is not a whole number"}},
		{"tools", `{"prompt":"p","max_tokens":1,"tools":[{"type":"function"}]}`, "", []string{"line 1: tools" + cannot, "remove such requests from the file", "or skip bad rows"}},
		{"two answers", `{"prompt":"p","max_tokens":1,"n":2}`, "", []string{"line 1: n" + cannot}},
		{"a grammar", `{"prompt":"p","max_tokens":1,"guided_json":{"a":1}}`, "", []string{"line 1: guided_json" + cannot}},
		{"a format", `{"prompt":"p","max_tokens":1,"response_format":{"type":"json_object"}}`, "", []string{"line 1: response_format" + cannot}},
		{"an image", chat(`{"role":"user","content":[{"type":"text","text":"t"},{"type":"image_url","image_url":{"url":"x"}}]}`), Chat, []string{`line 1: messages[1].content[1] is a part of type "image_url", which cannot be sent`}},
		{"a call of a tool", chat(`{"role":"assistant","content":null,"tool_calls":[{"id":"x"}]}`), Chat, []string{"line 1: messages[1].tool_calls" + cannot}},
		{"the answer of a tool", chat(`{"role":"tool","content":"42"}`), Chat, []string{"line 1: messages[1].role is tool"}},
		{"no content", chat(`{"role":"user"}`), Chat, []string{"line 1: messages[1] needs a content"}},
		{"a content of null", chat(`{"role":"user","content":null}`), Chat, []string{"line 1: messages[1] needs a content"}},
		{"no role", chat(`{"content":"x"}`), Chat, []string{"line 1: messages[1] needs a role"}},
		{"messages that are none", `{"messages":"hello","max_tokens":1}`, Chat, []string{"messages is not a list of JSON objects"}},
		{"an empty body as text", `{"body":" "}`, "", []string{"line 1: is not JSON"}},
	}
	for _, test := range tests {
		_, err := openText(t, Spec{Kind: "capture", Endpoint: test.endpoint}, test.line, false)
		explains(t, test.name, err, test.want)
	}
}

func TestTimesOfCapturedRequests(t *testing.T) {
	tests := []struct {
		name, stamp, want string
	}{
		{"a date", `"2026-02-03T09:00:00.5Z"`, ""},
		{"a date of another zone", `"2026-02-03T10:00:00.5+01:00"`, ""},
		{"seconds", `1770109200.5`, ""},
		{"milliseconds", `1770109200500`, ""},
		{"microseconds", `1770109200500000`, ""},
		{"nanoseconds", `1770109200500000000`, ""},
		{"a date without zone", `"2026-02-03 09:00:00"`, `timestamp "2026-02-03 09:00:00" is not a date such as`},
		{"words", `[1]`, "timestamp is neither a number of seconds nor a date"},
		{"nothing", `null`, `has no "timestamp"`},
		{"no time at all", `-1e300`, "timestamp -1e+300 is too large"},
	}
	for _, test := range tests {
		text := `{"prompt":"a","max_tokens":1,"timestamp":"2026-02-03T09:00:00Z"}` + "\n" + `{"prompt":"b","max_tokens":2,"timestamp":` + test.stamp + `}`
		trace, err := openText(t, Spec{Kind: "capture"}, text, true)
		if test.want != "" {
			explains(t, test.name, err, []string{"line 2: " + test.want})
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		} else if got, want := recorded(trace), "0 0/1, 0.5 0/2"; got != want {
			t.Errorf("%s: %s, want %s", test.name, got, want)
		}
	}
	if _, err := openText(t, Spec{Kind: "capture"}, `{"prompt":"a","max_tokens":1,"timestamp":[1]}`, false); err != nil {
		t.Errorf("a bad time that nobody needs: %v", err)
	}
	_, err := openText(t, Spec{Kind: "capture", Endpoint: Chat}, strings.Repeat(`{"prompt":"a","max_tokens":1}`+"\n", 2), true)
	explains(t, "a log without times", err, []string{`line 1: has no "timestamp", which arrivals need: add it`})
}
