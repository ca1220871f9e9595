package render

import (
	"cmp"
	"fmt"
	"io"
	"strings"
)

// A Text collects the lines of a report and writes them at once, so that the caller checks only one error.
type Text struct {
	strings.Builder
	Width     int // columns, as Columns returns them; 0 means 80
	NameWidth int // width of the column with the items' names; 0 means 10
}

// Columns returns how wide the text may be.
func (t *Text) Columns() int { return cmp.Or(t.Width, defaultWidth) }

// Line adds a line.
func (t *Text) Line(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }

// Item adds a name with its description, such as "capacity  2.71 req/s". A long description is broken between words and
// goes on in its own column.
func (t *Text) Item(name, format string, args ...any) {
	width := cmp.Or(t.NameWidth, 10)
	t.WriteString(Hang(pad(name, width, false), fmt.Sprintf(format, args...), blank(width), t.Columns()))
}

// Paragraph adds a text and breaks it between words. The first line keeps its indent, and the other lines begin with
// the margin.
func (t *Text) Paragraph(text, margin string) {
	t.WriteString(Paragraph(text, margin, t.Columns()))
}

// Table adds a table below an empty line and its title. An empty title is left out.
func (t *Text) Table(title string, table Table) {
	t.Line("")
	if title != "" {
		t.Line("%s", title)
	}
	for _, line := range table.Lines(t.Columns()) {
		t.Line("%s", line)
	}
}

// Flush writes the collected lines.
func (t *Text) Flush(w io.Writer) error {
	if _, err := io.WriteString(w, t.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
