package render

import (
	"cmp"
	"fmt"
	"io"
	"strings"
)

// A Text collects the lines of a report and writes them at once, so that a failed write is one error.
type Text struct {
	strings.Builder
	Width int // columns; 0 means DefaultWidth
}

// nameWidth is the width of the names of a definition list, such as "capacity  2.71 req/s".
const nameWidth = 10

// Columns returns how wide the text may be.
func (t *Text) Columns() int { return cmp.Or(t.Width, DefaultWidth) }

// Line adds a line as it is.
func (t *Text) Line(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }

// Item adds a definition, such as "capacity  2.71 req/s". It breaks a long one between words, below where it began.
func (t *Text) Item(name, format string, args ...any) {
	t.WriteString(Hang(Pad(name, nameWidth, false), fmt.Sprintf(format, args...), blank(nameWidth), t.Columns()))
}

// Paragraph adds a text, broken between words. Its lines after the first begin with the margin; the first keeps its own indent.
func (t *Text) Paragraph(text, margin string) {
	t.WriteString(Paragraph(text, margin, t.Columns()))
}

// Flush writes what was collected.
func (t *Text) Flush(w io.Writer) error {
	if _, err := io.WriteString(w, t.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
