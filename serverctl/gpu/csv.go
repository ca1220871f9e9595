package gpu

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A column is a field that nvidia-smi can report. The field's current name comes first, and older names follow.
type column []string

// throttleColumn has two names: drivers before 535 know only the second.
var throttleColumn = column{"clocks_event_reasons.active", "clocks_throttle_reasons.active"}

// gpuColumns returns the columns of --query-gpu. The name is last because only it may contain a comma.
func gpuColumns() []column {
	all := []column{{"index"}, {"uuid"}, {"driver_version"}}
	for _, f := range figures {
		all = append(all, column{f.smi})
	}
	return append(all, throttleColumn, column{"mig.mode.current"}, column{"name"})
}

// processColumns are the columns of --query-compute-apps. The process's name is left out: it may be a whole command
// line with secrets.
var processColumns = []column{{"pid"}, {"used_memory", "used_gpu_memory"}, {"gpu_uuid"}}

// A row is one line of a table. It maps the names of the columns to their texts.
type row map[string]string

// word returns the text in a column, or "" if the value is missing.
func (r row) word(name string) string {
	if unsaid(r[name]) {
		return ""
	}
	return clip(r[name])
}

// newGPU reads a row of --query-gpu.
func newGPU(r row) (g GPU, err error) {
	g = GPU{UUID: r.word("uuid"), Name: r.word("name"), Driver: r.word("driver_version")}
	if r["mig.mode.current"] == "Enabled" {
		g.MIG = "enabled"
	}
	if g.Index, err = parseIndex(r["index"]); err != nil {
		return g, fmt.Errorf("index: %w", err)
	}
	for _, f := range figures {
		text, asked := r[f.smi]
		if !asked {
			continue
		}
		v, err := quantity(text)
		if err != nil {
			return g, fmt.Errorf("%s: %w", f.smi, err)
		}
		if v == nil {
			g.setUnsaid(f.smi, text)
		}
		*f.of(&g) = v
	}
	return g, g.setThrottle(r)
}

func (g *GPU) setThrottle(r row) error {
	for _, name := range throttleColumn {
		text, asked := r[name]
		if !asked {
			continue
		}
		mask, err := strconv.ParseUint(text, 0, 64)
		switch {
		case unsaid(text):
			g.setUnsaid(name, text)
		case err != nil:
			return fmt.Errorf("%s: %q is not a mask of reasons", name, clip(text))
		default:
			g.Throttle = throttle(mask)
		}
	}
	return nil
}

// setUnsaid stores the source's own words for a field without a value.
func (g *GPU) setUnsaid(name, text string) {
	if g.Unsaid == nil {
		g.Unsaid = make(map[string]string)
	}
	g.Unsaid[name] = clip(text)
}

// newProcess reads a row of --query-compute-apps.
func newProcess(r row) (p Process, err error) {
	p.GPU = clip(r["gpu_uuid"])
	if text := r["pid"]; !unsaid(text) {
		if p.PID, err = parseIndex(text); err != nil {
			return p, fmt.Errorf("pid: %w", err)
		}
	}
	if p.UsedMiB, err = quantity(cmp.Or(r["used_memory"], r["used_gpu_memory"])); err != nil {
		return p, fmt.Errorf("used_memory: %w", err)
	}
	return p, nil
}

// unsaid reports whether a text stands for a missing value. Such texts are words in brackets: [N/A], [Not Supported],
// [Insufficient Permissions], [Unknown Error], [GPU requires reset] and others. Some drivers leave out the brackets.
func unsaid(text string) bool {
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		return true
	}
	return slices.Contains([]string{"", "N/A", "Not Supported", "Insufficient Permissions", "Unknown Error", "ERR!"}, text)
}

// quantity parses a value that is never negative. It returns nil for a missing value, for which a driver may also write
// -1 or nan.
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

// parseLine parses a line of CSV without header and units. The last column takes the rest of the line.
func parseLine[T any](line string, names []string, read func(row) (T, error)) (v T, err error) {
	texts := strings.SplitN(line, ",", len(names))
	if len(texts) < len(names) {
		return v, fmt.Errorf("the line %q has %d values, want %d", clip(line), len(texts), len(names))
	}
	r := row{}
	for i, name := range names {
		r[name] = strings.TrimSpace(texts[i])
	}
	if v, err = read(r); err != nil {
		return v, fmt.Errorf("%w, in %q", err, clip(line))
	}
	return v, nil
}

// parseTable parses all lines. It skips warnings, such as "WARNING: infoROM is corrupted at gpu 0000:3B:00.0".
func parseTable[T any](text string, names []string, read func(row) (T, error)) (all []T, err error) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); !isRow(line) {
			continue
		}
		v, err := parseLine(line, names, read)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// isRow reports whether a line is neither empty nor a warning.
func isRow(line string) bool { return line != "" && !strings.HasPrefix(line, "WARNING:") }

// unknownField matches what nvidia-smi writes, on its standard output, for a column that it does not know.
var unknownField = regexp.MustCompile(`Field "([^"]+)" is not a valid field to query`)

// clip makes a foreign line safe to print, without control characters, and short enough for an error message.
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
