package bench

import (
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	token    = `data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null}]}` + "\n\n"
	last     = `data: {"id":"cmpl-1","choices":[{"index":0,"text":"","finish_reason":"length"}]}` + "\n\n"
	counted  = `data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"
	done     = "data: [DONE]\n\n"
	roleOnly = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	said     = `data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}` + "\n\n"
)

// readWhole feeds a text to the answer in pieces of n bytes, the k-th piece at k milliseconds. Then it ends the stream.
func readWhole(a *answer, text string, n int) {
	at := time.Duration(0)
	for piece := range slices.Chunk([]byte(text), n) {
		at += time.Millisecond
		a.feed(piece, at)
	}
	a.finish(io.EOF, at)
	a.judge()
}

func TestAnAnswerIsReadAndJudged(t *testing.T) {
	tests := []struct {
		name   string
		chat   bool
		text   string
		want   Failure
		detail string
	}{
		{"three tokens, usage and the end are a good answer", false, token + token + last + counted + done, "", ""},
		{"an empty text is a token", false, last + counted + done, "", ""},
		{"a text that looks like an error is not one", false, `data: {"choices":[{"text":"\"error\": {} \"finish_reason\":\"abort\""}]}` + "\n\n" + counted + done, "", ""},
		{"an error of null is not one", false, `data: {"choices":[{"text":"a"}],"error":null}` + "\n\n" + counted + done, "", ""},
		{"an error object under 200", false, token + `data: {"error":{"message":"EngineCore encountered an issue","code":500}}` + "\n\n" + done, StreamError, "EngineCore encountered an issue"},
		{"an error that is only a text", false, `data: {"error":"boom"}` + "\n\n" + done, StreamError, "boom"},
		{"an aborted answer", false, token + `data: {"choices":[{"text":"","finish_reason":"abort"}]}` + "\n\n" + counted + done, StreamError, `finish_reason "abort"`},
		{"no end", false, token + counted, Truncated, "without [DONE]"},
		{"nothing at all", false, "", Truncated, "without [DONE]"},
		{"no usage", false, token + done, NoUsage, "include_usage"},
		{"no tokens", false, done, NoTokens, "no token"},
		{"a count of zero", false, strings.ReplaceAll(counted, `"completion_tokens":3`, `"completion_tokens":0`) + done, NoTokens, "no token"},
		{"a count and no chunk", false, counted + done, NoTokens, "no chunk carried any"},
		{"a wrong length", false, token + strings.ReplaceAll(counted, `"completion_tokens":3`, `"completion_tokens":2`) + done, WrongLength, "the server generated 2 tokens instead of 3"},
		{"a page of HTML", false, "<html>\n<body>", Malformed, `"<html>"`},
		{"JSON without a stream", false, "{\"choices\":[]}\n", Malformed, "not an event stream"},
		{"data that is not an object", false, "data: hello\n\n", Malformed, `"hello"`},
		{"a usage that is cut", false, token + `data: {"usage":{"completion_tokens":}` + "\n\n", Malformed, "chunk"},
		{"a line without end", false, "data: {" + strings.Repeat("a", maxLine), Malformed, "a line of the stream has more than"},
		{"a chat that says something", true, roleOnly + said + counted + done, "", ""},
		{"a chat that only names its role", true, roleOnly + counted + done, NoTokens, "no chunk carried any"},
		{"a chat that reasons", true, roleOnly + `data: {"choices":[{"delta":{"reasoning":"hm"}}]}` + "\n\n" + counted + done, "", ""},
		{"a chat that calls a tool", true, `data: {"choices":[{"delta":{"role":"assistant","tool_calls": [{"id":"x"}]}}]}` + "\n\n" + counted + done, "", ""},
		{"a chat with empty lists of calls", true, `data: {"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}` + "\n\n" + counted + done, NoTokens, ""},
		{"a chat with empty content and no role", true, `data: {"choices":[{"delta":{"content":""}}]}` + "\n\n" + counted + done, "", ""},
	}
	for _, test := range tests {
		for _, size := range []int{1, 7, 4096} {
			if len(test.text) > maxLine {
				size = 4096
			}
			a := &answer{chat: test.chat, want: 3}
			readWhole(a, test.text, size)
			if a.failure != test.want || !strings.Contains(a.detail, test.detail) {
				t.Errorf("%s, in pieces of %d: failure %q (%s), want %q (%s)", test.name, size, a.failure, a.detail, test.want, test.detail)
			}
		}
	}
}

func TestAnAnswerIsTimedByItsChunksOfOutput(t *testing.T) {
	a := &answer{chat: true, itl: true, want: 3}
	for i, piece := range []string{roleOnly, said, said[:20], said[20:], ": ping\n\n", said + said, counted, done} {
		a.feed([]byte(piece), time.Duration(i+1)*time.Second)
	}
	if a.first != 2*time.Second || a.last != 6*time.Second {
		t.Errorf("first token at %s, last at %s, want 2 s and 6 s", a.first, a.last)
	}
	if want := []time.Duration{2 * time.Second, 2 * time.Second, 0}; !slices.Equal(a.gaps, want) {
		t.Errorf("gaps %v, want %v", a.gaps, want)
	}
	if a.usage.PromptTokens != 9 || a.usage.Details.CachedTokens != 8 || a.usage.CompletionTokens != 3 {
		t.Errorf("usage %+v, want 9 prompt, 8 cached and 3 output tokens", *a.usage)
	}
}

// A stream gives the same answer, text included, wherever it is cut into pieces. In this test all bytes arrive at the
// same time, so the recorded times must agree too. Memory is bounded, however long the lines are.
func FuzzAnswerCutAnywhere(f *testing.F) {
	f.Add([]byte(token+last+counted+done), []byte{1, 7, 0, 200}, false)
	f.Add([]byte(strings.ReplaceAll(roleOnly+said+counted+done, "\n", "\r\n")), []byte{3}, true)
	f.Add([]byte(": ping\n\n"+token+": \xff\xfe\n\ndata: {\"choices\":[{\"text\":\"\xff\"}]}\n\n"+counted+done), []byte{2, 9}, false)
	f.Add([]byte("data: {"+strings.Repeat("x", maxLine+10)), []byte{255}, false)
	f.Add([]byte("\ufeffdata\rdata: {\rdata:}\r\r\nid\nfoo: bar\n"+strings.ReplaceAll(token+counted+done, "\n", "\r")), []byte{0, 4}, false)
	f.Add([]byte(`data: {"error":{"message":"x"}}`+"\r\n\r\n"+done), []byte{1}, false)
	f.Add([]byte("\r\n\r\r\ndata:\n\ndata: \ndata: {}\n\ndata: [DONE] \r"), []byte{0}, true)
	f.Fuzz(func(t *testing.T, text, cuts []byte, chat bool) {
		const at = time.Second
		read := func(cut func(left []byte) int) *answer {
			a := &answer{chat: chat, itl: true, keep: true, want: 3}
			for left := text; len(left) > 0; {
				n := cut(left)
				a.feed(left[:n], at)
				left = left[n:]
			}
			if held := cap(a.rest) + cap(a.data); held > 8*maxLine+len(text) {
				t.Fatalf("the answer holds %d bytes of a stream of %d", held, len(text))
			}
			a.finish(io.EOF, at)
			a.judge()
			a.lines = lines{}
			return a
		}
		whole := read(func(left []byte) int { return len(left) })
		i := 0
		pieces := read(func(left []byte) int {
			n := len(left)
			if len(cuts) > 0 {
				n = min(n, 1+int(cuts[i%len(cuts)])*(1+len(text)/4096)) // a very long text must not give too many pieces
				i++
			}
			return n
		})
		if strings.Contains(whole.detail+pieces.detail, "has more than") {
			return // the same line may be too long in several pieces, but not in one
		}
		if whole.failure == "" && (whole.usage == nil || whole.usage.CompletionTokens != whole.want || whole.first == 0) {
			t.Errorf("%q counts as an answer of 3 tokens", text)
		}
		if !reflect.DeepEqual(whole, pieces) {
			t.Errorf("whole: %+v\nin pieces: %+v", whole, pieces)
		}
	})
}
