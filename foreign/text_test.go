package foreign

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
)

func TestATerminalGetsOnlyText(t *testing.T) {
	for _, row := range []struct{ name, in, want string }{
		{"plain text", "tab\tand ünï… 漢 🙂\n", "tab\tand ünï… 漢 🙂\n"},
		{"a colour", "\x1b[0;36mblue\x1b[0m\n", "blue\n"},
		{"a window's title", "\x1b]0;title\x07text \x1b]0;title\x1b\\text\n", "text text\n"},
		{"a character set", "\x1b(Btext\x1b=!\n", "text!\n"},
		{"an unfinished sequence costs only the rest of its line", "a\x1b]0;never\nb\x1b[31\nc\n", "a\nb\nc\n"},
		{"bells and backspaces", "a\a\b\x7fb\r\n", "ab\n"},
		{"a return that would overwrite its line", "passed 9\rfailed\n", "passed 9\nfailed\n"},
		{"a C1 colour", "a\u009b31mb\n", "ab\n"},
		{"a C1 title", "a\u009d0;title\u009cb\n", "ab\n"},
		{"other C1 characters", "a\u0085\u0084b\n", "ab\n"},
		{"a single byte of C1 is not UTF-8", "a\x9b31mb\n", "a\ufffd31mb\n"},
		{"marks that change the direction of text", "a\u202egnp.\u202c\u2066x\u2069\u200e\u200f\u061cb\n", "agnp.xb\n"},
		{"characters without width", "a\u200b\u200c\u200d\u2060\ufeff\u00ad\u3164\U000e0041b\n", "ab\n"},
		{"other line breaks", "a\u2028b\u2029c\v\fd\n", "abcd\n"},
		{"an unfinished character", "a\xe2\x80", "a"},
	} {
		t.Run(row.name, func(t *testing.T) {
			for size := 1; size <= len(row.in); size++ {
				var got strings.Builder
				w := NewWriter(&got)
				for i := 0; i < len(row.in); i += size {
					piece := row.in[i:min(i+size, len(row.in))]
					if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
						t.Fatalf("Write = %d, %v", n, err)
					}
				}
				if got.String() != row.want {
					t.Errorf("in pieces of %d: %q, want %q", size, &got, row.want)
				}
			}
		})
	}
	if got := Text("a\x1b[1m\xe2\x80"); got != "a\ufffd\ufffd" {
		t.Errorf("Text of an unfinished character = %q, want U+FFFD for each of its bytes", got)
	}
}

// hostile has a character of each kind that a Writer leaves out, and texts that look like escape sequences.
const hostile = "x\u202ey\u009b31m\x1b[31m\u0085\x7f \U000e0041 \u200b\\\u200b \\x9F\u2066 \u2028\ufeff"

func TestDocumentsLoseNothingAndHideNothing(t *testing.T) {
	value := map[string]any{"name": hostile, hostile: []any{"plain", hostile, strings.Repeat("long words ", 30) + hostile}}
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	document, err := YAML(value)
	if err != nil {
		t.Fatal(err)
	}
	var asJSON strings.Builder
	w := NewJSON(&asJSON)
	for i := range text { // single bytes, so that characters are split
		if _, err := w.Write(text[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	for name, row := range map[string]struct {
		text string
		read func(text []byte, into any) error
	}{"JSON": {asJSON.String(), json.Unmarshal}, "YAML": {string(document), func(text []byte, into any) error { return yaml.Unmarshal(text, into) }}} {
		got := row.text
		if Text(got) != got {
			t.Errorf("the %s has characters that control a terminal: %q", name, got)
		}
		var back map[string]any
		if err := row.read([]byte(got), &back); err != nil {
			t.Fatalf("the %s cannot be read again: %v\n%s", name, err, got)
		}
		if back["name"] != hostile || len(back) != 2 || len(back[hostile].([]any)) != 3 {
			t.Errorf("the %s lost something: %q", name, back)
		}
	}
	// A YAML 1.1 reader, such as Kubernetes, and a YAML 1.2 reader read each of these texts unchanged.
	for _, text := range []string{"1e3", "0x1F", "1_000", "yes", "~", "1:30", "2024-01-01", ".5", "1.", "+1", "0o17", "012", ".inf", "=", "<<", "", " a", "a ", "a: b", "a #b", "a:",
		"- a", "-", "?", "--flag", "::1", "'a'", `"a"`, `\`, "{}", "[a]", "a,b", "&a", "*a", "!a", "%a", "@a", "`a", "|", ">", "a\nb", "a\tb", "#", "0.14.1", "true", "n", "---", "...", hostile, "\u3164 \""} {
		document, err := YAML(map[string]any{text: []any{text, []any{text, map[string]any{"k": text}}}})
		if err != nil {
			t.Fatal(err)
		}
		for name, read := range map[string]func([]byte, any) error{"goccy": func(b []byte, v any) error { return yaml.Unmarshal(b, v) }, "Kubernetes": func(b []byte, v any) error { return yamlutil.Unmarshal(b, v) }} {
			var back map[string]any
			if err := read(document, &back); err != nil {
				t.Errorf("%s cannot read %q: %v\n%s", name, text, err, document)
			} else if got := fmt.Sprintf("%q", back); got != fmt.Sprintf("%q", map[string]any{text: []any{text, []any{text, map[string]any{"k": text}}}}) {
				t.Errorf("%s reads %s from\n%s", name, got, document)
			}
		}
	}
	if plain, err := YAML(map[string]any{"b": 1, "a": "ünï", "c": "9\u00a0MiB"}); err != nil || string(plain) != "a: ünï\nb: 1\nc: 9\u00a0MiB\n" {
		t.Errorf("YAML with nothing hidden is %q, %v", plain, err)
	}
}

func TestDocumentsKeepTheOrderOfTheFields(t *testing.T) {
	type inner struct {
		Z []int          `json:"z"`
		Y map[string]int `json:"y"`
	}
	value := struct {
		B     string         `json:"b"`
		A     *inner         `json:"a"`
		Null  *int           `json:"null"`
		Rates []float64      `json:"rates"`
		List  []inner        `json:"list"`
		Map   map[string]any `json:"map"`
	}{"p99 <= 60 ms & more", &inner{[]int{}, map[string]int{}}, nil, []float64{1e-9, 2.50, 1e21, 12345678}, []inner{{Z: []int{1, 2}}}, map[string]any{"d": 1, "c": true}}
	const wantYAML = `b: p99 <= 60 ms & more
a:
  z: []
  "y": {}
"null": null
rates:
- 1e-9
- 2.5
- 1e+21
- 12345678
list:
- z:
  - 1
  - 2
  "y": null
map:
  c: true
  d: 1
`
	if got, err := YAML(value); err != nil || string(got) != wantYAML {
		t.Errorf("the YAML is, %v\n%s\nwant\n%s", err, got, wantYAML)
	}
	const wantJSON = `{"b":"p99 <= 60 ms & more","a":{"z":[],"y":{}},"null":null,"rates":[1e-9,2.5,1e+21,12345678],"list":[{"z":[1,2],"y":null}],"map":{"c":true,"d":1}}`
	if got, err := JSON(value, "", ""); err != nil || string(got) != wantJSON {
		t.Errorf("the JSON is %s, %v, want %s", got, err, wantJSON)
	}
	var indented strings.Builder
	if err := WriteJSON(&indented, value.List); err != nil || indented.String() != "[\n  {\n    \"z\": [\n      1,\n      2\n    ],\n    \"y\": null\n  }\n]\n" {
		t.Errorf("indented, the JSON is %q, %v", indented.String(), err)
	}
	if err := WriteJSON(&indented, func() {}); err == nil {
		t.Error("a function was written as JSON")
	}
}
