package gpu

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A field is a column that nvidia-smi is asked for, with the function that stores its value.
type field[T any] struct {
	names []string // the current name, then older ones
	set   func(row *T, name, text string) error
}

// gpuFields are the columns of --query-gpu. The name is last because only it may contain a comma.
func gpuFields() []field[GPU] {
	figure := func(name string, of func(*GPU) **float64) field[GPU] {
		return field[GPU]{[]string{name}, func(g *GPU, name, text string) error { return g.figure(name, text, of(g)) }}
	}
	word := func(name string, of func(*GPU) *string) field[GPU] {
		return field[GPU]{[]string{name}, func(g *GPU, _, text string) error {
			if !unsaid(text) {
				*of(g) = clip(text)
			}
			return nil
		}}
	}
	return []field[GPU]{
		{[]string{"index"}, func(g *GPU, _, text string) (err error) {
			g.Index, err = parseIndex(text)
			return err
		}},
		word("uuid", func(g *GPU) *string { return &g.UUID }),
		word("driver_version", func(g *GPU) *string { return &g.Driver }),
		figure("memory.total", func(g *GPU) **float64 { return &g.TotalMiB }),
		figure("memory.used", func(g *GPU) **float64 { return &g.UsedMiB }),
		figure("memory.free", func(g *GPU) **float64 { return &g.FreeMiB }),
		figure("utilization.gpu", func(g *GPU) **float64 { return &g.Utilization }),
		figure("power.draw", func(g *GPU) **float64 { return &g.PowerW }),
		figure("power.limit", func(g *GPU) **float64 { return &g.PowerLimitW }),
		figure("clocks.sm", func(g *GPU) **float64 { return &g.SMClockMHz }),
		figure("clocks.mem", func(g *GPU) **float64 { return &g.MemoryClockMHz }),
		figure("temperature.gpu", func(g *GPU) **float64 { return &g.TemperatureC }),
		// Drivers before 535 know only the second name.
		{[]string{"clocks_event_reasons.active", "clocks_throttle_reasons.active"}, (*GPU).setThrottle},
		{[]string{"mig.mode.current"}, func(g *GPU, _, text string) error {
			if text == "Enabled" {
				g.MIG = "enabled"
			}
			return nil
		}},
		word("name", func(g *GPU) *string { return &g.Name }),
	}
}

// processFields are the columns of --query-compute-apps. The process's name is left out: it may be a whole command
// line with secrets.
func processFields() []field[Process] {
	return []field[Process]{
		{[]string{"pid"}, func(p *Process, _, text string) (err error) {
			if !unsaid(text) {
				p.PID, err = parseIndex(text)
			}
			return err
		}},
		{[]string{"used_memory", "used_gpu_memory"}, func(p *Process, _, text string) (err error) {
			p.UsedMiB, err = quantity(text)
			return err
		}},
		{[]string{"gpu_uuid"}, func(p *Process, _, text string) error {
			p.GPU = clip(text)
			return nil
		}},
	}
}

// figure stores a number, or the words in its place.
func (g *GPU) figure(name, text string, to **float64) (err error) {
	*to, err = quantity(text)
	if *to == nil && err == nil {
		g.leave(name, text)
	}
	return err
}

func (g *GPU) setThrottle(name, text string) error {
	mask, err := strconv.ParseUint(text, 0, 64)
	switch {
	case unsaid(text):
		g.leave(name, text)
		return nil
	case err != nil:
		return fmt.Errorf("%q is not a mask of reasons", clip(text))
	}
	g.Throttle = throttle(mask)
	return nil
}

// leave keeps the source's words in place of a value.
func (g *GPU) leave(name, text string) {
	if g.Unsaid == nil {
		g.Unsaid = make(map[string]string)
	}
	g.Unsaid[name] = clip(text)
}

// unsaid reports whether a text stands for a missing value: [N/A], [Not Supported], [Insufficient Permissions],
// [Unknown Error], [GPU requires reset] and other words in brackets, or what some drivers write without brackets.
func unsaid(text string) bool {
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		return true
	}
	return slices.Contains([]string{"", "N/A", "Not Supported", "Insufficient Permissions", "Unknown Error", "ERR!"}, text)
}

// quantity parses a value that is never negative. A driver without the value may also write -1 or nan.
func quantity(text string) (*float64, error) {
	if unsaid(text) {
		return nil, nil
	}
	v, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%q is not a number", clip(text))
	case v < 0, math.IsNaN(v), math.IsInf(v, 0):
		return nil, nil
	}
	return &v, nil
}

func parseIndex(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a number", clip(text))
	}
	return n, nil
}

// parseLine parses a line of CSV without header and units. The last field takes the rest of the line.
func parseLine[T any](line string, fields []field[T]) (row T, err error) {
	texts := strings.SplitN(line, ",", len(fields))
	if len(texts) < len(fields) {
		return row, fmt.Errorf("%d of %d values in %q", len(texts), len(fields), clip(line))
	}
	for i, f := range fields {
		if err := f.set(&row, f.names[0], strings.TrimSpace(texts[i])); err != nil {
			return row, fmt.Errorf("%s: %w, in %q", f.names[0], err, clip(line))
		}
	}
	return row, nil
}

// parseTable parses all lines. It skips warnings, such as "WARNING: infoROM is corrupted at gpu 0000:3B:00.0".
func parseTable[T any](text string, fields []field[T]) ([]T, error) {
	var rows []T
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); !isRow(line) {
			continue
		}
		row, err := parseLine(line, fields)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// isRow reports whether a line is neither empty nor a warning.
func isRow(line string) bool { return line != "" && !strings.HasPrefix(line, "WARNING:") }

// unknownField matches what nvidia-smi writes, on its standard output, for a field that it does not know.
var unknownField = regexp.MustCompile(`Field "([^"]+)" is not a valid field to query`)

// without removes the unknown names from the fields, and drops a field without names. It reports whether any name was
// removed: otherwise another query would not help.
func without[T any](fields []field[T], text string) (rest []field[T], changed bool) {
	var unknown []string
	for _, match := range unknownField.FindAllStringSubmatch(text, -1) {
		unknown = append(unknown, match[1])
	}
	for _, f := range fields {
		names := slices.DeleteFunc(slices.Clone(f.names), func(name string) bool { return slices.Contains(unknown, name) })
		changed = changed || len(names) < len(f.names)
		if len(names) > 0 {
			rest = append(rest, field[T]{names, f.set})
		}
	}
	return rest, changed
}

// asked returns the names of the columns to ask for.
func asked[T any](fields []field[T]) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.names[0]
	}
	return strings.Join(names, ",")
}

// clip makes a foreign line printable: no control characters, and short enough for an error message.
func clip(text string) string {
	const maxRunes = 120
	text, _, _ = strings.Cut(strings.TrimSpace(text), "\n")
	text = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
	if runes := []rune(text); len(runes) > maxRunes {
		return string(runes[:maxRunes]) + "…"
	}
	return text
}
