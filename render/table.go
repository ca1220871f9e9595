package render

import "strings"

// A Column is a column of a Table.
type Column struct {
	Head  string
	Right bool // align the cells on the right
	Min   int  // width to which it may be clipped; 0 means never
	Rank  int  // a table that is too wide drops the column with the highest rank first; 0 means never
}

// A Table fits its cells into the width of a terminal.
type Table struct {
	Columns []Column
	Rows    [][]string
}

const gap = 2 // between columns

// Lines returns the line of the heads and a line for each row. A line is wider than width only if nothing more may be clipped.
func (t Table) Lines(width int) []string {
	shown := make([]int, len(t.Columns)) // width of each column; 0 means dropped
	for i, c := range t.Columns {
		shown[i] = max(1, Width(c.Head))
		for _, row := range t.Rows {
			shown[i] = max(shown[i], Width(row[i]))
		}
	}
	t.shrink(shown, width)
	for sum(shown) > width {
		last := -1
		for i, c := range t.Columns {
			if shown[i] > 0 && c.Rank > 0 && (last < 0 || c.Rank > t.Columns[last].Rank) {
				last = i
			}
		}
		if last < 0 {
			break
		}
		shown[last] = 0
	}
	heads := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		heads[i] = c.Head
	}
	lines := []string{t.line(heads, shown)}
	for _, row := range t.Rows {
		lines = append(lines, t.line(row, shown))
	}
	return lines
}

// shrink clips the columns that may be clipped, the last one first.
func (t Table) shrink(shown []int, width int) {
	for i := len(shown) - 1; i >= 0; i-- {
		if least := t.Columns[i].Min; least > 0 {
			shown[i] = max(min(shown[i], least), shown[i]-max(0, sum(shown)-width))
		}
	}
}

func (t Table) line(cells []string, shown []int) string {
	var all []string
	for i, cell := range cells {
		if shown[i] > 0 {
			all = append(all, Pad(Clip(cell, shown[i]), shown[i], t.Columns[i].Right))
		}
	}
	return strings.TrimRight(strings.Join(all, strings.Repeat(" ", gap)), " ")
}

// sum is the width of a line with these columns.
func sum(shown []int) int {
	all := -gap
	for _, n := range shown {
		if n > 0 {
			all += n + gap
		}
	}
	return all
}
