package bench

import (
	"encoding/json"
	"slices"
	"testing"

	"vllmtuner/bench/workload"
)

func TestBodiesPinTheWork(t *testing.T) {
	tests := []struct {
		name     string
		endpoint string
		request  workload.Request
		prompt   string // JSON
		messages []workload.Message
	}{
		{"token ids", workload.Completions, workload.Request{Tokens: []int32{3, 1000, 31999}, OutputTokens: 9}, "[3,1000,31999]", nil},
		{"text", "", workload.Request{Text: "say \"<hi>\"\n", OutputTokens: 9}, `"say \"\u003chi\u003e\"\n"`, nil},
		{"text at chat", workload.Chat, workload.Request{Text: "hi", OutputTokens: 9}, "", []workload.Message{{Role: "user", Content: "hi"}}},
		{"messages", workload.Chat, workload.Request{Messages: []workload.Message{{Role: "system", Content: "x"}, {Role: "user", Content: "y"}}, OutputTokens: 9}, "",
			[]workload.Message{{Role: "system", Content: "x"}, {Role: "user", Content: "y"}}},
	}
	for _, test := range tests {
		c := &Client{Model: "tiny \"quoted\"", Endpoint: test.endpoint}
		body, err := c.appendBody(nil, &test.request)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		var q asked
		if err := json.Unmarshal(body, &q); err != nil {
			t.Errorf("%s: %s: %v", test.name, body, err)
			continue
		}
		limit := q.MaxTokens
		if test.endpoint == workload.Chat {
			limit = q.MaxChat
		}
		if limit != 9 || q.MinTokens != 0 || q.MaxTokens+q.MaxChat != 9 || !q.IgnoreEOS || !q.Stream || !q.Options.IncludeUsage || q.Temperature == nil || *q.Temperature != 0 {
			t.Errorf("%s: body %s does not pin the work", test.name, body)
		}
		if string(q.Prompt) != test.prompt || !slices.Equal(q.Messages, test.messages) || q.Model != c.Model {
			t.Errorf("%s: body %s, want prompt %s, messages %v", test.name, body, test.prompt, test.messages)
		}
	}
}
