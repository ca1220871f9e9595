package render

import "strings"

// A Column is a column of a Table.
type Column struct {
	Head  string
	Right bool // align the cells on the right
	Min   int  // smallest width to which cells may be clipped; 0 means that they are never clipped
	Rank  int  // a table that is too wide drops the column with the highest rank first; 0 means that the column is never dropped
}

// A Table fits its cells into the width of a terminal.
type Table struct {
	Columns []Column
	Rows    [][]string

	// Folds makes a table break heads that are longer than their cells. Columns that do not fit follow in another block
	// below, which repeats the first column. A table without Folds clips cells and drops columns instead.
	Folds bool
}

// Add adds a column with a cell for each row.
func (t *Table) Add(c Column, cells []string) {
	t.Columns = append(t.Columns, c)
	t.Rows = append(t.Rows, make([][]string, len(cells)-len(t.Rows))...) // only the first column adds rows
	for i, cell := range cells {
		t.Rows[i] = append(t.Rows[i], cell)
	}
}

// Lines returns the lines of the heads and one line for each row. These lines are wider than width only if no more
// columns may be clipped, dropped or moved into another block.
func (t Table) Lines(width int) (lines []string) {
	shown := make([]int, len(t.Columns)) // width of each column; 0 means dropped
	for i, c := range t.Columns {
		shown[i] = 1
		for _, piece := range t.headPieces(c) {
			shown[i] = max(shown[i], Width(strings.TrimSpace(piece)))
		}
		for _, row := range t.Rows {
			shown[i] = max(shown[i], Width(row[i]))
		}
	}
	if !t.Folds {
		t.shrink(shown, width)
		t.drop(shown, width)
		return t.block(shown)
	}
	for next := 1; next < len(shown); {
		block := make([]int, len(shown))
		block[0], block[next] = shown[0], shown[next]
		for next++; next < len(shown) && t.sum(block)+t.gap()+shown[next] <= width; next++ {
			block[next] = shown[next]
		}
		if len(lines) > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, t.block(block)...)
	}
	return lines
}

// shrink reduces the widths of columns that may be clipped. It begins with the last column.
func (t Table) shrink(shown []int, width int) {
	for i := len(shown) - 1; i >= 0; i-- {
		if floor := t.Columns[i].Min; floor > 0 {
			shown[i] = max(min(shown[i], floor), shown[i]-max(0, t.sum(shown)-width))
		}
	}
}

// drop drops columns until the line fits. It begins with the highest rank.
func (t Table) drop(shown []int, width int) {
	for t.sum(shown) > width {
		last := -1
		for i, c := range t.Columns {
			if shown[i] > 0 && c.Rank > 0 && (last < 0 || c.Rank > t.Columns[last].Rank) {
				last = i
			}
		}
		if last < 0 {
			return
		}
		shown[last] = 0
	}
}

// block returns the heads and the rows of the columns that are shown.
func (t Table) block(shown []int) (lines []string) {
	heads, tallest := make([][]string, len(shown)), 0
	for i, c := range t.Columns {
		if shown[i] > 0 {
			heads[i] = t.headLines(c, shown[i])
			tallest = max(tallest, len(heads[i]))
		}
	}
	for n := tallest; n > 0; n-- { // heads of different heights are aligned at the bottom
		cells := make([]string, len(shown))
		for i, head := range heads {
			if n <= len(head) {
				cells[i] = head[len(head)-n]
			}
		}
		lines = append(lines, t.line(cells, shown))
	}
	for _, row := range t.Rows {
		lines = append(lines, t.line(row, shown))
	}
	return lines
}

func (t Table) line(cells []string, shown []int) string {
	var all []string
	for i, cell := range cells {
		if shown[i] > 0 {
			all = append(all, pad(Clip(cell, shown[i]), shown[i], t.Columns[i].Right))
		}
	}
	return strings.TrimRight(strings.Join(all, blank(t.gap())), " ")
}

// headLines breaks a head into lines of at most width columns.
func (t Table) headLines(c Column, width int) []string {
	lines := []string{""}
	for _, piece := range t.headPieces(c) {
		last := &lines[len(lines)-1]
		if *last != "" && Width(*last+piece) > width {
			lines = append(lines, strings.TrimSpace(piece))
			continue
		}
		*last += piece
	}
	return lines
}

var breakable = strings.NewReplacer(" ", "\x00 ", "-", "-\x00", "_", "_\x00", ".", ".\x00")

// headPieces splits a head where a line may break: "phase1-baseline" becomes "phase1-" and "baseline".
func (t Table) headPieces(c Column) []string {
	if !t.Folds {
		return []string{c.Head}
	}
	return strings.FieldsFunc(breakable.Replace(c.Head), func(r rune) bool { return r == 0 })
}

// gap returns the number of blanks between columns. It is smaller for a table that folds, which has many narrow
// columns.
func (t Table) gap() int {
	if t.Folds {
		return 1
	}
	return 2
}

// sum returns the width of a line, given the widths of its columns.
func (t Table) sum(shown []int) int {
	all := -t.gap()
	for _, n := range shown {
		if n > 0 {
			all += n + t.gap()
		}
	}
	return all
}
