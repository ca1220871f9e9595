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
)

// NewJSON returns a writer that passes JSON on to another writer. The returned writer escapes the characters that a
// Writer would leave out, because JSON encoders do not escape all of them.
func NewJSON(to io.Writer) io.Writer { return &jsonWriter{to: to} }

type jsonWriter struct {
	to   io.Writer
	rest partialRune
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

// JSON is json.MarshalIndent without its escapes of <, > and &, which only a web page would need. If prefix and indent
// are empty, the text takes one line.
func JSON(value any, prefix, indent string) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetIndent(prefix, indent)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return bytes.TrimSuffix(text.Bytes(), []byte("\n")), err
}

// WriteJSON writes a value as indented JSON, with a line break at the end.
func WriteJSON(w io.Writer, value any) error {
	text, err := JSON(value, "", "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(append(text, '\n'))
	return err
}

// YAML returns the JSON of a value as a YAML document. Its keys have the order of the JSON. It quotes each text that a reader of YAML 1.1
// or 1.2 could take for another type, such as 1e3. It escapes the characters that a Writer leaves out. The library
// goccy/go-yaml does neither, and it sorts the keys.
func YAML(value any) ([]byte, error) {
	object, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	decoder := json.NewDecoder(bytes.NewReader(object))
	decoder.UseNumber()
	lines, _, err := yamlLines(decoder)
	if err != nil {
		return nil, err
	}
	// yamlText quotes with strconv.Quote, which does not escape some hidden characters up to U+FFFF. JSON's escapes for
	// these characters are valid in YAML too.
	var out bytes.Buffer
	_, err = NewJSON(&out).Write([]byte(strings.Join(lines, "\n") + "\n"))
	return out.Bytes(), err
}

// yamlLines reads the next JSON value and returns its lines of YAML. The result kind is '{' for an object and '[' for a
// list. It is 0 for a value that fits behind its key: a scalar, or an empty object or list.
func yamlLines(decoder *json.Decoder) (lines []string, kind json.Delim, err error) {
	token, err := decoder.Token()
	switch v := token.(type) {
	case nil:
		return []string{"null"}, 0, err
	case string:
		return []string{yamlText(v)}, 0, nil
	case json.Delim:
		kind = v
	default: // a number or a bool
		return []string{fmt.Sprint(v)}, 0, nil
	}
	for decoder.More() {
		key := ""
		if kind == '{' {
			token, err := decoder.Token()
			if err != nil {
				return nil, 0, err
			}
			key = yamlText(token.(string)) + ":" // the decoder accepts no other keys
		}
		value, valueKind, err := yamlLines(decoder)
		if err != nil {
			return nil, 0, err
		}
		switch {
		case kind == '[':
			lines = append(lines, indented("- ", value)...)
		case valueKind == 0:
			lines = append(lines, key+" "+value[0])
		case valueKind == '{':
			lines = append(append(lines, key), indented("  ", value)...)
		default:
			lines = append(append(lines, key), value...)
		}
	}
	end, err := decoder.Token()
	if len(lines) == 0 {
		return []string{fmt.Sprintf("%v%v", kind, end)}, 0, err
	}
	return lines, kind, err
}

// indented puts the text first before the first line, and two blanks before each other line.
func indented(first string, lines []string) []string {
	for i := range lines {
		lines[i] = first + lines[i]
		first = "  "
	}
	return lines
}

var (
	// otherType matches texts that a reader of YAML 1.1 or 1.2 takes for a null, a bool, a number or a time.
	otherType = regexp.MustCompile(`(?i)^(|~|null|true|false|yes|no|on|off|y|n|=|<<|[-+]?\.(inf|nan)|[-+]?0x[0-9a-f_]+|[-+]?0b[01_]+|[-+]?0o[0-7_]+|` +
		`[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t ].*)?)$`)
	// yamlSyntax matches texts with characters that have a meaning in YAML's syntax.
	yamlSyntax = regexp.MustCompile("^---|^[.]{3}|^[,\\[\\]{}#&*!|>'\"%@`]|^[-?:]( |$)|: | #|:$|^ | $")
)

// yamlText returns a text as a YAML scalar, in quotes if it needs them.
func yamlText(text string) string {
	switch {
	case otherType.MatchString(text), strings.ContainsFunc(text, func(r rune) bool { return hidden(r) || r == '\n' || r == '\t' }):
		return strconv.Quote(text)
	case yamlSyntax.MatchString(text):
		return "'" + strings.ReplaceAll(text, "'", "''") + "'"
	}
	return text
}
