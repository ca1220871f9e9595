package foreign

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// NewJSON returns a writer that passes JSON on to another writer. It escapes the characters that a Writer would leave out, because
// JSON encoders do not escape all of them.
func NewJSON(to io.Writer) io.Writer { return &jsonWriter{to: to} }

type jsonWriter struct {
	to   io.Writer
	rest []byte // first bytes of a character whose other bytes have not been written yet
}

func (w *jsonWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	var out []byte
	for len(w.rest) > 0 && utf8.FullRune(w.rest) {
		r, size := utf8.DecodeRune(w.rest)
		w.rest = w.rest[size:]
		if hidden(r) { // JSON has such characters only inside strings
			out = append(out, escaped(r)...)
		} else {
			out = utf8.AppendRune(out, r)
		}
	}
	w.rest = slices.Clone(w.rest)
	if _, err := w.to.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// escaped returns a character as JSON escapes it. YAML escapes characters up to U+FFFF in the same way.
func escaped(r rune) string {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Sprintf(`\u%04x\u%04x`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, r)
}

// YAML returns the JSON of a value as a YAML document with sorted keys. It quotes each text that a reader of YAML 1.1 or 1.2 could
// take for another type, such as 1e3. It escapes the characters that a Writer leaves out. No library does both.
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
	var out bytes.Buffer
	writeNode(&out, tree, 0)
	return out.Bytes(), nil
}

// writeNode writes a node of a document. The first line of a map or a list continues the current line; the other lines are indented.
func writeNode(out *bytes.Buffer, node any, indent int) {
	margin := strings.Repeat(" ", indent)
	switch node := node.(type) {
	case map[string]any:
		for i, key := range slices.Sorted(maps.Keys(node)) {
			if i > 0 {
				out.WriteString(margin)
			}
			out.WriteString(yamlText(key) + ":")
			switch value := node[key]; {
			case isEmpty(value):
				out.WriteString(" ")
				writeNode(out, value, 0)
			case isList(value): // a list has the indentation of its key
				out.WriteString("\n" + margin)
				writeNode(out, value, indent)
			default:
				out.WriteString("\n" + margin + "  ")
				writeNode(out, value, indent+2)
			}
		}
		if len(node) == 0 {
			out.WriteString("{}\n")
		}
	case []any:
		for i, value := range node {
			if i > 0 {
				out.WriteString(margin)
			}
			out.WriteString("- ")
			writeNode(out, value, indent+2)
		}
		if len(node) == 0 {
			out.WriteString("[]\n")
		}
	case string:
		out.WriteString(yamlText(node) + "\n")
	case nil:
		out.WriteString("null\n")
	default: // a number or a bool
		fmt.Fprintln(out, node)
	}
}

func isList(node any) bool { _, ok := node.([]any); return ok }

// isEmpty reports whether a node is an empty map or list, which stands on the line of its key.
func isEmpty(node any) bool {
	switch node := node.(type) {
	case map[string]any:
		return len(node) == 0
	case []any:
		return len(node) == 0
	}
	return true
}

var (
	// typed matches texts that a reader of YAML 1.1 or 1.2 takes for a null, a bool, a number or a time.
	typed = regexp.MustCompile(`(?i)^(~|null|true|false|yes|no|on|off|y|n|=|<<|[-+]?\.(inf|nan)|[-+]?0x[0-9a-f_]+|[-+]?0b[01_]+|[-+]?0o[0-7_]+|` +
		`[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t ].*)?)$`)
	// marked matches texts with characters that have a meaning in YAML's syntax.
	marked = regexp.MustCompile("^---|^[.]{3}|^[,\\[\\]{}#&*!|>'\"%@`]|^[-?:]( |$)|: | #|:$|^ | $")
)

// yamlText returns a text as a YAML scalar, in quotes if it needs them.
func yamlText(text string) string {
	switch {
	case strings.ContainsFunc(text, func(r rune) bool { return hidden(r) || r == '\n' || r == '\t' }):
		return quoted(text)
	case text == "" || typed.MatchString(text):
		return `"` + text + `"`
	case marked.MatchString(text):
		return "'" + strings.ReplaceAll(text, "'", "''") + "'"
	}
	return text
}

// quoted returns a text in double quotes, escaped for JSON and YAML.
func quoted(text string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			out.WriteString(`\` + string(r))
		case r == '\n':
			out.WriteString(`\n`)
		case r == '\t':
			out.WriteString(`\t`)
		case hidden(r) && r > 0xffff: // YAML does not read surrogate pairs
			fmt.Fprintf(&out, `\U%08x`, r)
		case hidden(r):
			out.WriteString(escaped(r))
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
	return out.String()
}
