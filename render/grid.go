package render

import (
	"fmt"
	"strings"
)

// A Grid is a table that fits a terminal. Columns that do not fit follow in a block below, which repeats the row names.
type Grid struct {
	Title   string
	Corner  string   // head of the row names; if it is set, the names are aligned on the right
	Rows    []string // row names
	Columns []GridColumn
}

// A GridColumn is a column of a Grid.
type GridColumn struct {
	Head  string
	Cells []string // one for each row
}

// Grid adds a grid below an empty line.
func (t *Text) Grid(g Grid) {
	t.WriteString("\n" + g.Title + "\n")
	first := len(g.Corner)
	for _, row := range g.Rows {
		first = max(first, len(row))
	}
	for rest := g.Columns; len(rest) > 0; {
		n, width := 0, first
		for n < len(rest) && (n == 0 || width+1+rest[n].width() <= t.Columns()) {
			width += 1 + rest[n].width()
			n++
		}
		g.writeBlock(t, first, rest[:n])
		rest = rest[n:]
		if len(rest) > 0 {
			t.WriteString("\n")
		}
	}
}

func (g Grid) writeBlock(t *Text, first int, columns []GridColumn) {
	heads, tallest := make([][]string, len(columns)), 0
	for i, c := range columns {
		heads[i] = c.headLines()
		tallest = max(tallest, len(heads[i]))
	}
	for line := range tallest {
		corner := ""
		if line == tallest-1 {
			corner = g.Corner
		}
		cells := make([]string, len(columns))
		for i := range columns {
			if from := tallest - len(heads[i]); line >= from {
				cells[i] = heads[i][line-from]
			}
		}
		g.writeLine(t, first, corner, columns, cells)
	}
	for r, row := range g.Rows {
		cells := make([]string, len(columns))
		for i, c := range columns {
			cells[i] = c.Cells[r]
		}
		g.writeLine(t, first, row, columns, cells)
	}
}

func (g Grid) writeLine(t *Text, first int, row string, columns []GridColumn, cells []string) {
	line := fmt.Sprintf("%*s", first, row)
	if g.Corner == "" {
		line = fmt.Sprintf("%-*s", first, row)
	}
	for i, c := range columns {
		line += fmt.Sprintf(" %*s", c.width(), cells[i])
	}
	t.WriteString(strings.TrimRight(line, " ") + "\n")
}

// width returns the width of the widest cell, or of the longest word of the header if that is wider.
func (c GridColumn) width() int {
	width := 0
	for _, cell := range c.Cells {
		width = max(width, len(cell))
	}
	for _, piece := range headPieces(c.Head) {
		width = max(width, len(strings.TrimSpace(piece)))
	}
	return width
}

// headLines breaks the head so that it fits the column.
func (c GridColumn) headLines() []string {
	width, lines := c.width(), []string{""}
	for _, piece := range headPieces(c.Head) {
		last := &lines[len(lines)-1]
		if *last != "" && len(*last)+len(piece) > width {
			lines = append(lines, strings.TrimSpace(piece))
			continue
		}
		*last += piece
	}
	return lines
}

var breakable = strings.NewReplacer(" ", "\x00 ", "-", "-\x00", "_", "_\x00", ".", ".\x00")

// headPieces splits a name where a line may break: "phase1-baseline" becomes "phase1-" and "baseline".
func headPieces(name string) []string {
	return strings.FieldsFunc(breakable.Replace(name), func(r rune) bool { return r == 0 })
}
