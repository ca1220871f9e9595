package sweep

import (
	"cmp"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial"
)

// A grid is a line of heads and more lines, each with the name of its row first. Its cells are empty where nothing was measured.
type grid [][]string

// A column is one column of a table over the loads.
type column struct {
	head   string
	config *Config
	cell   cell
}

func (c *Config) cellAt(level trial.Level, shown cell) string {
	if p, ok := c.at(level); ok {
		return shown(c, p)
	}
	return ""
}

// overLoads returns a table with a line for each load.
func (s *Sweep) overLoads(corner string, columns []column) grid {
	head := []string{corner}
	for _, c := range columns {
		head = append(head, c.head)
	}
	lines := grid{head}
	for _, level := range s.Plan.Levels {
		line := []string{s.loadWord(level.Load())}
		for _, c := range columns {
			line = append(line, c.config.cellAt(level, c.cell))
		}
		lines = append(lines, line)
	}
	return lines
}

func (s *Sweep) byConfig(corner string, shown cell) grid {
	var columns []column
	for _, c := range s.Configs {
		columns = append(columns, column{c.Name, c, shown})
	}
	return s.overLoads(corner, columns)
}

// loopTable returns the figures of a config over concurrencies, for people.
func (s *Sweep) loopTable(c *Config) grid {
	var columns []column
	for _, f := range loopFigures {
		columns = append(columns, column{strings.TrimSuffix(f.title, " (ms)"), c, f.people})
	}
	return s.overLoads("conc", append(columns, column{"SLO", c, verdictCell}))
}

// loopRecords returns the figures of a config over the measured concurrencies, for programs.
func (s *Sweep) loopRecords(c *Config) grid {
	var columns []column
	for _, f := range loopFigures {
		columns = append(columns, column{f.key, c, f.programs})
	}
	lines := s.overLoads("concurrency", columns)
	return slices.DeleteFunc(lines, func(line []string) bool { return strings.Join(line[1:], "") == "" })
}

// detail returns a table of all figures by configs at one level. as writes a figure for people, or for programs.
func (s *Sweep) detail(corner string, level trial.Level, as func(figure, *Config, trial.Probe) string) grid {
	lines := grid{{corner}}
	for _, c := range s.Configs {
		lines[0] = append(lines[0], c.Name)
	}
	for _, f := range detailFigures {
		line := []string{f.title}
		for _, c := range s.Configs {
			line = append(line, c.cellAt(level, func(c *Config, p trial.Probe) string { return as(f, c, p) }))
		}
		lines = append(lines, line)
	}
	return lines
}

// table returns the grid for a terminal.
func (t grid) table(title string) render.Grid {
	g := render.Grid{Title: title, Corner: t[0][0]}
	for _, line := range t[1:] {
		g.Rows = append(g.Rows, line[0])
	}
	for i, head := range t[0][1:] {
		c := render.GridColumn{Head: head}
		for _, line := range t[1:] {
			c.Cells = append(c.Cells, cmp.Or(line[i+1], "-"))
		}
		g.Columns = append(g.Columns, c)
	}
	return g
}
