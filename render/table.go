package render

import "strings"

// A Column is a column of a Table.
type Column struct {
	Head  string
	Right bool // align the cells on the right
	Min   int  // width to which cells may be clipped; 0 means that they are never clipped
	Rank  int  // a table that is too wide drops columns by rank, the highest first; 0 means never
}

// A Table fits its cells into the width of a terminal.
type Table struct {
	Columns []Column
	Rows    [][]string
}

const gap = 2 // between columns

// Lines returns the line of heads and one line for each row. They are wider than width only if no more columns may be
// clipped or dropped.
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

// shrink reduces the widths of columns that may be clipped, the last column first.
func (t Table) shrink(shown []int, width int) {
	for i := len(shown) - 1; i >= 0; i-- {
		if floor := t.Columns[i].Min; floor > 0 {
			shown[i] = max(min(shown[i], floor), shown[i]-max(0, sum(shown)-width))
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

// sum returns the width of a line, given the widths of its columns.
func sum(shown []int) int {
	all := -gap
	for _, n := range shown {
		if n > 0 {
			all += n + gap
		}
	}
	return all
}
