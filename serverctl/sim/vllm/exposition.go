package vllm

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// An exposition is the text of /metrics as Python's prometheus_client writes it (prometheus_client/exposition.py,
// 0.23). Families come in the order of their registration, floats look as in Python, labels are sorted by name, and a
// gauge NAME_created follows each counter and histogram. Go's client library differs in all of this, and some clients
// match samples by their text.
type exposition struct {
	buf     bytes.Buffer
	created float64 // Unix time in seconds
}

// A sample is one value of a family. Its labels are pairs of name and value.
type sample struct {
	labels []string
	value  float64
}

func (e *exposition) head(name, kind, help string) {
	e.buf.WriteString("# HELP " + name + " " + help + "\n# TYPE " + name + " " + kind + "\n")
}

func (e *exposition) line(name string, labels []string, value float64) {
	e.buf.WriteString(name)
	e.buf.WriteString(labelText(labels))
	e.buf.WriteByte(' ')
	e.buf.WriteString(pythonFloat(value))
	e.buf.WriteByte('\n')
}

// gauge writes a family of gauges.
func (e *exposition) gauge(name, help string, samples ...sample) {
	e.head(name, "gauge", help)
	for _, s := range samples {
		e.line(name, s.labels, s.value)
	}
}

// counter writes a family of counters; name is without _total.
func (e *exposition) counter(name, help string, samples ...sample) {
	e.head(name+"_total", "counter", help)
	for _, s := range samples {
		e.line(name+"_total", s.labels, s.value)
	}
	e.creation(name, help, samples)
}

// creation writes when counting began, once for each sample of a family.
func (e *exposition) creation(name, help string, samples []sample) {
	e.head(name+"_created", "gauge", help)
	for _, s := range samples {
		e.line(name+"_created", s.labels, e.created)
	}
}

// histogram writes a family with one histogram.
func (e *exposition) histogram(name, help string, labels []string, h *histogram) {
	e.head(name, "histogram", help)
	var count uint64
	for i, n := range h.counts {
		count += n
		bound := math.Inf(1)
		if i < len(h.bounds) {
			bound = h.bounds[i]
		}
		e.line(name+"_bucket", append([]string{"le", pythonFloat(bound)}, labels...), float64(count))
	}
	e.line(name+"_count", labels, float64(count))
	e.line(name+"_sum", labels, h.sum)
	e.creation(name, help, []sample{{labels: labels}})
}

// labelText writes pairs of name and value, sorted by name.
func labelText(pairs []string) string {
	if len(pairs) == 0 {
		return ""
	}
	sorted := slices.Collect(slices.Chunk(pairs, 2))
	slices.SortFunc(sorted, func(a, b []string) int { return strings.Compare(a[0], b[0]) })
	texts := make([]string, len(sorted))
	for i, pair := range sorted {
		texts[i] = pair[0] + `="` + escapeLabel.Replace(pair[1]) + `"`
	}
	return "{" + strings.Join(texts, ",") + "}"
}

var escapeLabel = strings.NewReplacer("\\", "\\\\", "\n", "\\n", "\"", "\\\"")

// pythonFloat writes a float as prometheus_client's floatToGoString does: Python's repr, and an exponent from 1e6 on.
func pythonFloat(x float64) string {
	switch {
	case math.IsInf(x, 1):
		return "+Inf"
	case math.IsInf(x, -1):
		return "-Inf"
	case math.IsNaN(x):
		return "NaN"
	}
	text := pythonRepr(x)
	dot := strings.IndexByte(text, '.')
	if x <= 0 || dot <= 6 {
		return text
	}
	mantissa := strings.TrimRight(text[:1]+"."+text[1:dot]+text[dot+1:], "0.")
	return fmt.Sprintf("%se+%02d", mantissa, dot-1)
}

// pythonRepr writes a float as Python's repr does: the shortest digits that give the same value, with an exponent below
// 1e-4 and from 1e16 on.
func pythonRepr(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case math.IsInf(x, 0):
		return strings.TrimPrefix(strings.ToLower(fmt.Sprint(x)), "+")
	}
	if size := math.Abs(x); size != 0 && (size < 1e-4 || size >= 1e16) {
		return strconv.FormatFloat(x, 'e', -1, 64)
	}
	text := strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}
