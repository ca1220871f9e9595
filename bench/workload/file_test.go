package workload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const examples = "../../docs/examples/data/"

// write writes a text to a temporary file and returns the path.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data.txt")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestOpenExplainsWhatIsWrong(t *testing.T) {
	tests := []struct {
		name string
		spec Spec
		file string // content; "" means no file
		want []string
	}{
		{"a misspelt kind", Spec{Kind: "sharegtp"}, "", []string{`"sharegtp"`, `did you mean "sharegpt"`}},
		{"a misspelt endpoint", Spec{Kind: "phase1", Endpoint: "chats"}, "", []string{`did you mean "chat"`}},
		{"token ids at chat", Spec{Kind: "phase1", Endpoint: Chat}, "", []string{"phase1", "use endpoint completions"}},
		{"a file kind without path", Spec{Kind: "jsonl"}, "", []string{"needs the path"}},
		{"a path without use", Spec{Kind: "random", Path: "x.json"}, "", []string{"does not use path: leave it out", "sharegpt, jsonl, trace or capture"}},
		{"lengths for phase1", Spec{Kind: "phase1", OutputTokens: 5}, "", []string{"does not use output tokens", "random, prefix-repetition or shared-prefix"}},
		{"prompt lengths for a file", Spec{Kind: "jsonl", Path: "x", InputTokens: 5}, "", []string{"does not use input tokens", "random or shared-prefix"}},
		{"a spread of one", Spec{Kind: "random", RangeRatio: 1}, "", []string{"range ratio 1 must be at least 0 and below 1"}},
		{"a negative length", Spec{Kind: "random", InputTokens: -1}, "", []string{"input tokens -1 must be from 0 to 10000000"}},
		{"no vocabulary", Spec{Kind: "random", VocabSize: 3}, "", []string{"vocabulary of 3", "config.json"}},
		{"a spread twice", Spec{Kind: "random", RangeRatio: 0.5, InputRangeRatio: 0.5}, "", []string{"range ratio 0.5 applies to prompts and answers, but one of them also has its own"}},
		{"an answer spread of one", Spec{Kind: "random", OutputRangeRatio: 1}, "", []string{"range ratio 1 must be at least 0 and below 1"}},
		{"a gigantic prefix", Spec{Kind: "random", PrefixTokens: 1e9}, "", []string{"prefix tokens 1000000000 must be from 0 to 10000000"}},
		{"a hit rate for random", Spec{Kind: "random", HitPercent: 50}, "", []string{"does not use hit percent: leave it out, or use kind shared-prefix"}},
		{"no hit rate", Spec{Kind: "shared-prefix"}, "", []string{"needs the hit percent"}},
		{"all shared", Spec{Kind: "shared-prefix", HitPercent: 100}, "", []string{"hit percent 100 must be above 0 and below 100"}},
		{"a repetition without end", Spec{Kind: "random", Repeat: Salt}, "", []string{"workload random is endless, so repeat has no effect: leave repeat out, or set requests"}},
		{"a repetition of conversations without end", Spec{Kind: "production", Repeat: Salt}, "", []string{"does not use repeat"}},
		{"an unknown repetition", Spec{Kind: "phase1", Repeat: "sald"}, "", []string{`unknown repeat "sald": did you mean "salt"?`}},
		{"an unknown output", Spec{Kind: "phase1", Output: "nature"}, "", []string{`unknown output "nature": did you mean "natural"?`}},
		{"a missing file", Spec{Kind: "jsonl", Path: "nowhere.jsonl"}, "", []string{"nowhere.jsonl", "no such file", "check the path"}},
		{"an empty JSONL file", Spec{Kind: "jsonl"}, "\n \n", []string{"data.txt", "the file is empty"}},
		{"an empty ShareGPT file", Spec{Kind: "sharegpt"}, " ", []string{"data.txt", "the file is empty"}},
		{"an empty array", Spec{Kind: "sharegpt"}, "[]", []string{"the file is empty"}},
		{"ShareGPT read as JSONL", Spec{Kind: "jsonl"}, `[{"conversations":[]}]`, []string{"line 1", "use kind sharegpt"}},
		{"JSONL read as ShareGPT", Spec{Kind: "sharegpt"}, `{"prompt":"x"}`, []string{"use kind jsonl"}},
		{"a broken line", Spec{Kind: "jsonl"}, "{\"prompt\":\"x\",\"output_tokens\":1}\n\n{\"prompt\"", []string{"data.txt", "line 3", "is not JSON"}},
		{"a line without prompt", Spec{Kind: "jsonl"}, `{"output_tokens":1}`, []string{"line 1", `neither "prompt" nor "messages"`}},
		{"a line without a length", Spec{Kind: "jsonl"}, `{"prompt":"x"}`, []string{"line 1", `no "output_tokens"`, "or set the workload's output tokens"}},
		{"a length of zero", Spec{Kind: "jsonl"}, `{"prompt":"x","output_tokens":0}`, []string{"line 1", "output_tokens is 0"}},
		{"a length in words", Spec{Kind: "jsonl"}, `{"prompt":"x","output_tokens":"9"}`, []string{"line 1: output_tokens is a string, must be a whole number"}},
		{"a half token", Spec{Kind: "jsonl"}, `{"prompt":"x","output_tokens":1.5}`, []string{"output_tokens is a number 1.5, must be a whole number"}},
		{"a number for a line", Spec{Kind: "jsonl"}, `7`, []string{"line 1: it is a number, must be a JSON object"}},
		{"messages at completions", Spec{Kind: "jsonl"}, `{"messages":[{"role":"user","content":"x"}],"output_tokens":1}`, []string{"line 1", "use endpoint chat"}},
		{"a message without content", Spec{Kind: "jsonl", Endpoint: Chat}, `{"messages":[{"role":"user"}],"output_tokens":1}`, []string{"message 1 needs a role and a content"}},
		{"a cut ShareGPT file", Spec{Kind: "sharegpt"}, `[{"conversations":[]},{"conv`, []string{"entry 2", "is not JSON"}},
		{"an array that does not end", Spec{Kind: "sharegpt"}, `[{"conversations":[]}`, []string{"entry 1", "is not JSON"}},
		{"entries of one turn", Spec{Kind: "sharegpt"}, `[{"conversations":[{"value":"what is this?"}]}]`, []string{"it has 1 entry, but none has two turns"}},
		{"a wrong turn", Spec{Kind: "sharegpt"}, `[{"conversations":[{"value":7}]}]`, []string{"entry 1", "conversations.value is a number, must be a string"}},
		{"more than there is", Spec{Kind: "jsonl", Requests: 2}, `{"prompt":"x","output_tokens":1}`, []string{"asks for 2 requests, but only 1 request is usable"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.file != "" {
				test.spec.Path = write(t, test.file)
			}
			_, err := Open(test.spec, 1)
			if err == nil {
				t.Fatalf("Open(%+v) = nil error, want one", test.spec)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Open(%+v) = %q, want %q in it", test.spec, err, want)
				}
			}
		})
	}
}

func TestTheExampleFilesOpenAtBothEndpoints(t *testing.T) {
	tests := []struct {
		spec Spec
		name string
		n    int
	}{
		{Spec{Kind: "sharegpt", Path: examples + "sharegpt.json"}, "sharegpt sharegpt.json (40 requests)", 40},
		{Spec{Kind: "sharegpt", Path: examples + "sharegpt.json", Endpoint: Chat, OutputTokens: 9}, "sharegpt sharegpt.json (40 requests)", 40},
		{Spec{Kind: "jsonl", Path: examples + "questions.jsonl"}, "jsonl questions.jsonl (60 requests)", 60},
		{Spec{Kind: "jsonl", Path: examples + "questions.jsonl", Endpoint: Chat, Requests: 10}, "jsonl questions.jsonl (10 requests)", 10},
	}
	for _, test := range tests {
		source := open(t, test.spec, 1)
		if source.Name() != test.name || source.Len() != test.n || source.Longest() != 0 {
			t.Errorf("Open(%+v) = %q of %d requests, longest %d, want %q, unknown longest", test.spec, source.Name(), source.Len(), source.Longest(), test.name)
		}
		seen := make(map[string]bool)
		for i := range source.Len() {
			r := source.Request(WindowStream, i)
			text := r.Text
			for _, m := range r.Messages {
				text += m.Role + m.Content
			}
			seen[text] = true
			if (len(r.Messages) > 0) != (test.spec.Endpoint == Chat) || (r.Text == "") != (test.spec.Endpoint == Chat) {
				t.Errorf("%+v: request %d does not fit its endpoint: %+v", test.spec, i, r)
			}
			if r.OutputTokens < 1 || test.spec.OutputTokens > 0 && r.OutputTokens != test.spec.OutputTokens {
				t.Errorf("%+v: request %d asks for %d tokens", test.spec, i, r.OutputTokens)
			}
		}
		if len(seen) != test.n {
			t.Errorf("%+v: %d different requests in one pass, want %d", test.spec, len(seen), test.n)
		}
	}
}

func TestShareGPTPrunesAsVLLMDoesByTheEstimate(t *testing.T) {
	text := func(tokens int) string { return strings.Repeat("a", tokens*bytesPerToken) }
	tests := []struct {
		name           string
		prompt, answer string
		override       int
		want           int // output tokens; 0 means that the entry is dropped
	}{
		{"an ordinary one is kept with its answer's length", text(10), text(20), 0, 20},
		{"a part of a token counts as one", text(10), text(20) + "a", 0, 21},
		{"the override replaces the answer's length", text(10), text(20), 7, 7},
		{"a prompt of three tokens is dropped", text(3), text(20), 0, 0},
		{"a prompt of 1,024 tokens is kept", text(1024), text(20), 0, 20},
		{"a prompt of 1,025 tokens is dropped", text(1025), text(20), 0, 0},
		{"an answer of three tokens is dropped", text(10), text(3), 0, 0},
		{"but not when it is overridden", text(10), text(3), 5, 5},
		{"2,048 tokens together are kept", text(1000), text(1048), 0, 1048},
		{"2,049 tokens together are dropped", text(1000), text(1049), 0, 0},
	}
	for _, test := range tests {
		entry := shareGPTEntry{Conversations: []shareGPTTurn{{Value: test.prompt}, {Value: test.answer}}}
		request, ok := entry.request(Spec{OutputTokens: test.override})
		if ok != (test.want > 0) || request.OutputTokens != test.want {
			t.Errorf("%s: request() = %d tokens, %v, want %d", test.name, request.OutputTokens, ok, test.want)
		}
	}
}

// check verifies the result of a reader. The result must be an error, or at least one request and only requests that
// fit the endpoint.
func check(t *testing.T, requests []Request, err error, endpoint string) {
	t.Helper()
	if (err == nil) != (len(requests) > 0) {
		t.Fatalf("%d requests with error %v", len(requests), err)
	}
	for _, r := range requests {
		if r.OutputTokens < 1 || (r.Text == "") == (endpoint == Completions) || (len(r.Messages) == 0) == (endpoint == Chat) {
			t.Fatalf("request %+v does not fit %s", r, endpoint)
		}
	}
}
