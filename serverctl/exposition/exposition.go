// Package exposition parses the text format in which Prometheus reads metrics. It never fetches a page.
//
// It does not use github.com/prometheus/common/expfmt, whose version 0.67.5 panics on some foreign text, such as "{}".
package exposition

import (
	"fmt"
	"strconv"
	"strings"
)

// A Sample is one line of a page, such as
//
//	DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-6d5c0ac5"} 55 1700000000000
type Sample struct {
	Name   string
	Labels map[string]string // nil if the line has no braces
	Value  float64
}

// Parse parses a whole page. It ignores comments. The types of the metrics stand in comments, so Parse returns each
// value as it stands, whatever its type.
func Parse(text string) ([]Sample, error) {
	var all []Sample
	number := 0
	for line := range strings.Lines(text) {
		number++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		s, ok := parse(line)
		if !ok {
			const maxShown = 120 // bytes
			return nil, fmt.Errorf("line %d of its answer, %q, is not in the format of Prometheus", number, line[:min(len(line), maxShown)])
		}
		all = append(all, s)
	}
	return all, nil
}

func parse(line string) (s Sample, ok bool) {
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 {
		return Sample{}, false
	}
	name, rest := line[:end], line[end:]
	var labels map[string]string
	if rest[0] == '{' {
		if labels, rest, ok = parseLabels(rest[1:]); !ok {
			return Sample{}, false
		}
	}
	fields := strings.Fields(rest) // the value, and perhaps a timestamp
	if len(fields) == 0 {
		return Sample{}, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	return Sample{name, labels, value}, err == nil
}

// parseLabels parses the labels after the opening brace, and returns the text after the closing one.
func parseLabels(text string) (labels map[string]string, rest string, ok bool) {
	labels = map[string]string{}
	for {
		text = strings.TrimLeft(text, " \t,")
		if rest, ok := strings.CutPrefix(text, "}"); ok {
			return labels, rest, true
		}
		name, after, _ := strings.Cut(text, "=")
		after = strings.TrimLeft(after, " \t")
		quoted, err := strconv.QuotedPrefix(after) // Prometheus escapes backslashes, quotes and line breaks as Go does
		if err != nil || quoted[0] != '"' {
			return nil, "", false
		}
		value, err := strconv.Unquote(quoted)
		if err != nil {
			return nil, "", false
		}
		labels[strings.TrimSpace(name)] = value
		text = after[len(quoted):]
	}
}
