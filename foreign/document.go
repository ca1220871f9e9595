package foreign

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// NewJSON returns a writer for JSON that escapes every character that a Writer would leave out. JSON encoders do not.
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

// escaped returns a character as JSON and YAML escape it.
func escaped(r rune) string {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Sprintf(`\u%04x\u%04x`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, r)
}

// YAML allows escapes only in double quotes. unprintable, put into the JSON, makes the YAML encoder choose double quotes for a text,
// in which it writes printed.
const (
	unprintable = `\u009f`
	printed     = `\x9F`
)

// YAML returns a value as YAML, with the keys and the escapes of its JSON. The library's encoder alone fails for some characters.
// It is not the library that reads study files, because that one writes control characters raw and "1e3" without quotes.
func YAML(value any) ([]byte, error) {
	object, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	var marked strings.Builder
	for rest := string(object); rest != ""; {
		r, size := utf8.DecodeRuneInString(rest)
		switch {
		case r == '\\':
			if strings.HasPrefix(rest, `\u2028`) || strings.HasPrefix(rest, `\u2029`) {
				marked.WriteString(unprintable)
			}
			size = 2
			marked.WriteString(rest[:size])
		case !hidden(r) || r > 0xffff: // the encoder escapes all characters above U+FFFF itself
			marked.WriteRune(r)
		case r == '\ufeff' || unicode.Is(unicode.Cc, r): // the encoder escapes these too, but not as JSON does
			marked.WriteString(escaped(r))
		default:
			marked.WriteString(unprintable + escaped(r))
		}
		rest = rest[size:]
	}
	body, err := yaml.JSONToYAML([]byte(marked.String()))
	if err != nil {
		return nil, err
	}
	for _, line := range []string{`\L`, `\P`} { // U+2028 and U+2029, which the encoder escapes in double quotes only
		body = bytes.ReplaceAll(body, []byte(printed+line), []byte(line))
	}
	var out []byte
	for rest := body; ; {
		i := bytes.IndexFunc(rest, hidden)
		if i < 0 {
			return append(out, rest...), nil
		}
		r, size := utf8.DecodeRune(rest[i:])
		out = append(append(out, bytes.TrimSuffix(rest[:i], []byte(printed))...), escaped(r)...)
		rest = rest[i+size:]
	}
}
