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

// NewJSON returns a writer that passes JSON on to another one. It escapes the characters that a Writer would leave out and that
// encoders let through.
func NewJSON(to io.Writer) io.Writer { return &jsonWriter{to: to} }

type jsonWriter struct {
	to   io.Writer
	rest []byte // first bytes of a character whose last bytes have not come yet
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

// escaped is a character as JSON escapes it. YAML escapes those up to U+FFFF in the same way.
func escaped(r rune) string {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Sprintf(`\u%04x\u%04x`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, r)
}

// YAML writes a value, as JSON has it, as a YAML document with sorted keys. It quotes each text that a reader of YAML 1.1 or 1.2
// could take for something else, such as 1e3, and escapes what a Writer leaves out. No library does both.
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

// writeNode writes a node of a document. The first line of a map or a list stands where the writer is; the others are indented.
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
			case isList(value): // lists stand below their key, not further in
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

// isEmpty reports whether a node takes no line of its own.
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
	// typed matches texts that YAML 1.1 or 1.2 reads as a null, a bool, a number or a time.
	typed = regexp.MustCompile(`(?i)^(~|null|true|false|yes|no|on|off|y|n|=|<<|[-+]?\.(inf|nan)|[-+]?0x[0-9a-f_]+|[-+]?0b[01_]+|[-+]?0o[0-7_]+|` +
		`[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t ].*)?)$`)
	// marked matches texts with a mark of YAML's syntax.
	marked = regexp.MustCompile("^---|^[.]{3}|^[,\\[\\]{}#&*!|>'\"%@`]|^[-?:]( |$)|: | #|:$|^ | $")
)

// yamlText writes a text as a scalar.
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

// quoted writes a text in double quotes, as JSON and YAML escape it.
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
		case hidden(r) && r > 0xffff: // YAML has no surrogates
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
