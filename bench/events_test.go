package bench

import (
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"
)

// An event stream may have any form that the specification of server-sent events allows (html.spec.whatwg.org, 9.2.5
// and 9.2.6). Common faults of servers are allowed too, if their meaning is clear.
func TestALegalEventStreamIsUnderstood(t *testing.T) {
	all := token + token + last + counted + done
	each := func(old, new string) string { return strings.ReplaceAll(all, old, new) }
	for _, row := range []struct{ name, text string }{
		{"lines that end with CR", each("\n", "\r")},
		{"lines that end with CR LF", each("\n", "\r\n")},
		{"lines that end in all three ways", strings.Replace(strings.Replace(all, "\n", "\r\n", 2), "\n\n", "\r\r", 1)},
		{"a byte order mark", "\ufeff" + all},
		{"fields without a colon", each("data: ", "id\nevent\nretry\ndata: ")},
		{"a line of data without a colon", each("data: ", "data\ndata: ")},
		{"unknown fields", each("data: ", "x-trace: 7\nfoo\ndata: ")},
		{"comments within an event", each("data: ", ": ping\ndata: ")},
		{"an object over several lines of data", each(`,"choices"`, ",\ndata: \"choices\"")},
		{"an object over many lines of data", each(`{`, "{\ndata:")},
		{"space around objects and [DONE]", each("\n\n", " \t\n\n")},
		{"no space before objects and [DONE]", each("data: ", "data:")},
		{"two spaces before objects and [DONE]", each("data: ", "data:  ")},
		{"space within objects", strings.NewReplacer(`":`, "\" :\t", `[{`, "[ {").Replace(all)},
		{"further empty lines", each("\n\n", "\n\n\n\n")},
		{"no empty line at the end", strings.TrimRight(all, "\n")},
		{"one end of line at the end", strings.TrimRight(all, "\n") + "\r"},
		{"no empty lines at all", each("\n\n", "\n")},
		{"no empty lines at all, and CR LF", each("\n\n", "\r\n")},
	} {
		for size := 1; size <= len(row.text); size += 1 + size/3 {
			a := &answer{want: 3}
			readWhole(a, row.text, size)
			if a.failure != "" || a.chunks != 3 || a.usage == nil || a.usage.CompletionTokens != 3 {
				t.Errorf("%s, in pieces of %d: %d chunks, usage %v, failure %q (%s)", row.name, size, a.chunks, a.usage, a.failure, a.detail)
			}
		}
	}
}

// A stream that ends within an event is truncated, wherever in the event it ends.
func TestAStreamThatEndsWithinAnEventIsTruncated(t *testing.T) {
	for _, text := range []string{token + counted[:len(counted)-9], token + counted + "data: [DO", token + "data", token + "data: {\ndata: \n\n"[:9]} {
		a := &answer{want: 3}
		readWhole(a, text, 50)
		if a.failure != Truncated || !strings.Contains(a.detail, "without [DONE]") {
			t.Errorf("%q is %s (%s), want truncated", text[max(0, len(text)-30):], a.failure, a.detail)
		}
	}
}

// A stream gives the same answer in any legal form, cut at any byte.
func TestTheAnswerDoesNotDependOnTheFormOfTheStream(t *testing.T) {
	const at = time.Second
	read := func(text string, cuts ...int) answer {
		a := answer{keep: true, itl: true, want: 4}
		from := 0
		for _, cut := range append(cuts, len(text)) {
			a.feed([]byte(text[from:cut]), at)
			from = cut
		}
		a.finish(io.EOF, at)
		a.judge()
		a.lines, a.odd = lines{}, ""
		return a
	}
	events := []string{
		`{"id":"1","choices":[{"index":0,"text":" a \"choices\": [","finish_reason":null}],"usage":null}`,
		`{"choices":[{"text":"é\\"}]}`, `{"choices":[{"text":"data: [DONE]"}]}`, `{"choices":[{"text":"","finish_reason":"length"}]}`,
		`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}`, `[DONE]`,
	}
	want := read("data: " + strings.Join(events, "\n\ndata: ") + "\n\n")
	if want.failure != "" || want.chunks != 4 || len(want.text) != 4 {
		t.Fatalf("the plain stream is read as %+v", want)
	}
	for seed := range uint64(8) {
		w := &rewriter{Rand: rand.New(rand.NewPCG(seed, 1))}
		text := w.stream(events)
		for cut := range len(text) {
			second := cut + w.IntN(len(text)-cut)
			if is := read(text, cut, second); !reflect.DeepEqual(is, want) {
				t.Fatalf("seed %d, cut at %d and %d of %q:\n%+v, want\n%+v", seed, cut, second, text, is, want)
			}
		}
	}
}

// A rewriter writes an event stream in a random legal form.
type rewriter struct {
	*rand.Rand
	strings.Builder
	cr bool // the last line ended with CR
}

func (w *rewriter) stream(events []string) string {
	w.WriteString(w.one("", "\ufeff"))
	for i, event := range events {
		w.noise()
		w.event(event)
		w.noise()
		if i < len(events)-1 || w.IntN(2) > 0 {
			w.line("")
		}
		if w.IntN(4) == 0 {
			w.line("")
		}
	}
	return w.String()
}

func (w *rewriter) one(of ...string) string { return of[w.IntN(len(of))] }

// line writes a line with a random line end. An empty line after CR must not end with LF, because CR LF is one line
// end.
func (w *rewriter) line(text string) {
	ends := []string{"\n", "\r\n", "\r"}
	if w.cr && text == "" {
		ends = ends[1:]
	}
	end := w.one(ends...)
	w.cr = end == "\r"
	w.WriteString(text + end)
}

// noise writes lines that must not change the answer.
func (w *rewriter) noise() {
	for w.IntN(3) == 0 {
		w.line(w.one(":", ": ping", ":data: {}", "id", "id: 7", "event", "event:message", "retry", "retry: 10", "foo", "foo: bar", "data2: {}", "dat", "data"))
	}
}

// event writes the data of one event, with random line breaks and spaces outside its strings.
func (w *rewriter) event(data string) {
	line, quoted, escaped := "", false, false
	say := func() {
		w.line("data:" + w.one("", " ") + line)
		line = w.one("", " ", "\t")
		for w.IntN(8) == 0 {
			w.line(w.one(": ping", "id:3", "data", "data:", "data: "))
		}
	}
	if data != "[DONE]" || w.IntN(2) > 0 {
		line = w.one("", "  ")
	}
	for _, c := range data {
		line += string(c)
		if quoted = quoted != (c == '"' && !escaped); quoted || data == "[DONE]" {
			escaped = c == '\\' && !escaped
			continue
		}
		escaped = false
		if strings.ContainsRune(`{}[],:"`, c) {
			line += w.one("", "", "", " ", "\t")
			if w.IntN(6) == 0 {
				say()
			}
		}
	}
	w.line("data:" + w.one("", " ") + line + w.one("", " "))
}
