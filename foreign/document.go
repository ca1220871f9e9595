package foreign

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
)

// NewJSON returns a writer that passes JSON on to another writer. It escapes the characters that a Writer would leave
// out, because JSON encoders do not escape all of them.
func NewJSON(to io.Writer) io.Writer { return &jsonWriter{to: to} }

type jsonWriter struct {
	to   io.Writer
	rest pieces
}

func (w *jsonWriter) Write(b []byte) (int, error) {
	var out []byte
	w.rest.decode(b, func(r rune) {
		if hidden(r) { // JSON has such characters only inside strings
			out = append(out, escaped(r)...)
		} else {
			out = utf8.AppendRune(out, r)
		}
	})
	if _, err := w.to.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// escaped returns a character as JSON escapes it.
func escaped(r rune) string {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Sprintf(`\u%04x\u%04x`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, r)
}

// YAML returns the JSON of a value as a YAML document with sorted keys. It quotes each text that a reader of YAML 1.1
// or 1.2 could take for another type, such as 1e3. It escapes the characters that a Writer leaves out. goccy/go-yaml
// does neither.
func YAML(value any) ([]byte, error) {
	object, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	numbers := json.NewDecoder(bytes.NewReader(object))
	numbers.UseNumber()
	var tree any
	if err := numbers.Decode(&tree); err != nil {
		return nil, err
	}
	text, err := yaml.MarshalWithOptions(tree,
		yaml.CustomMarshaler[string](func(text string) ([]byte, error) { return []byte(yamlText(text)), nil }),
		yaml.CustomMarshaler[json.Number](func(number json.Number) ([]byte, error) { return []byte(number), nil }))
	if err != nil {
		return nil, err
	}
	// yamlText quotes with strconv.Quote, which does not escape some hidden characters up to U+FFFF. JSON's escapes for
	// these characters are valid in YAML too.
	var out bytes.Buffer
	_, err = NewJSON(&out).Write(text)
	return out.Bytes(), err
}

var (
	// typed matches texts that a reader of YAML 1.1 or 1.2 takes for a null, a bool, a number or a time.
	typed = regexp.MustCompile(`(?i)^(|~|null|true|false|yes|no|on|off|y|n|=|<<|[-+]?\.(inf|nan)|[-+]?0x[0-9a-f_]+|[-+]?0b[01_]+|[-+]?0o[0-7_]+|` +
		`[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t ].*)?)$`)
	// marked matches texts with characters that have a meaning in YAML's syntax.
	marked = regexp.MustCompile("^---|^[.]{3}|^[,\\[\\]{}#&*!|>'\"%@`]|^[-?:]( |$)|: | #|:$|^ | $")
)

// yamlText returns a text as a YAML scalar, in quotes if it needs them.
func yamlText(text string) string {
	switch {
	case typed.MatchString(text), strings.ContainsFunc(text, func(r rune) bool { return hidden(r) || r == '\n' || r == '\t' }):
		return strconv.Quote(text)
	case marked.MatchString(text):
		return "'" + strings.ReplaceAll(text, "'", "''") + "'"
	}
	return text
}
