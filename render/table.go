package render

import (
	"cmp"
	"slices"
	"strings"
)

// A Column is a column of a Table.
type Column struct {
	Head  string
	Group string // head above the heads of neighbouring columns that have the same Group
	Right bool   // align the cells on the right
	Rank  int    // a table that is too wide drops the column with the highest rank first; 0 means that the column is never dropped

	MinWidth int // width of the column even if its cells are shorter; it aligns tables that stand below each other
	ShrinkTo int // width down to which cells may be clipped or wrapped; 0 means that they never are

	// If Wraps is true, cells that are wider than the column go on in lines below and are not clipped. ShrinkTo says how
	// far the column may shrink.
	Wraps bool
	// Alone is for the first column: a cell that is wider than the column gets a line of its own above its row.
	Alone bool
}

// A Table fits its cells into the width of a terminal. It leaves out a column in which no cell has a text. It also
// leaves out the line of the heads if no column has a head.
type Table struct {
	Columns []Column
	Rows    [][]string
	Under   []string // texts below the rows, such as why a row has no figures; "" or a missing text adds nothing
	Indent  int      // number of blanks before each line
	Gap     int      // number of blanks between columns; 0 means 2, or 1 in a table that folds, whose columns are many and narrow

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
	shown := t.widths(width)
	if !t.Folds {
		return t.block(shown, width)
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
		lines = append(lines, t.block(block, width)...)
	}
	return lines
}

// Shows reports whether Lines(width) shows a column, given by its index.
func (t Table) Shows(column, width int) bool { return t.widths(width)[column] > 0 }

// widths returns the width of each column; 0 means that the column is dropped.
func (t Table) widths(width int) []int {
	shown := make([]int, len(t.Columns))
	for i, c := range t.Columns {
		shown[i] = c.MinWidth
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
	}
	return shown
}

// shrink reduces the widths of columns that may be clipped. It begins with the last column.
func (t Table) shrink(shown []int, width int) {
	for i := len(shown) - 1; i >= 0; i-- {
		if floor := t.Columns[i].ShrinkTo; floor > 0 {
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
func (t Table) block(shown []int, width int) (lines []string) {
	heads, tallest := make([][]string, len(shown)), 0
	for i, c := range t.Columns {
		if shown[i] > 0 && c.Head != "" {
			heads[i] = t.headLines(c, shown[i])
			tallest = max(tallest, len(heads[i]))
		}
	}
	if line := t.groups(shown); line != "" {
		lines = append(lines, line)
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
	for i, row := range t.Rows {
		lines = append(lines, t.row(row, shown)...)
		if i < len(t.Under) && t.Under[i] != "" {
			margin := blank(t.Indent + 4)
			lines = append(lines, strings.Split(strings.TrimSuffix(Hang(margin, t.Under[i], margin+"  ", width), "\n"), "\n")...)
		}
	}
	return lines
}

// groups returns the line with the heads of groups; "" if no column has one.
func (t Table) groups(shown []int) string {
	merged := Table{Indent: t.Indent, Gap: t.gap()}
	var cells []string
	var widths []int
	for i, c := range t.Columns {
		switch n := len(cells) - 1; {
		case shown[i] == 0:
		case c.Group != "" && n >= 0 && merged.Columns[n].Group == c.Group:
			widths[n] += t.gap() + shown[i]
		default:
			merged.Columns = append(merged.Columns, c)
			cells, widths = append(cells, c.Group), append(widths, shown[i])
		}
	}
	return merged.line(cells, widths)
}

// row returns the lines of one row.
func (t Table) row(row []string, shown []int) (lines []string) {
	first := slices.Clone(row)
	if t.Columns[0].Alone && Width(row[0]) > shown[0] {
		lines = append(lines, blank(t.Indent)+row[0])
		first[0] = ""
	}
	all := [][]string{first}
	for i, c := range t.Columns {
		if !c.Wraps || shown[i] == 0 {
			continue
		}
		for n, part := range Break(row[i], shown[i]) {
			if n == len(all) {
				all = append(all, make([]string, len(row)))
			}
			all[n][i] = part
		}
	}
	for _, cells := range all {
		lines = append(lines, t.line(cells, shown))
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
	return strings.TrimRight(blank(t.Indent)+strings.Join(all, blank(t.gap())), " ")
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

func (t Table) gap() int {
	if t.Folds {
		return cmp.Or(t.Gap, 1)
	}
	return cmp.Or(t.Gap, 2)
}

// sum returns the width of a line, given the widths of its columns.
func (t Table) sum(shown []int) int {
	all := t.Indent - t.gap()
	for _, n := range shown {
		if n > 0 {
			all += n + t.gap()
		}
	}
	return all
}
