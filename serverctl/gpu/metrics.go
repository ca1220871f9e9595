package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// A sample is a line in Prometheus' text format, such as
//
//	DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-6d5c0ac5"} 55 1700000000000
//
// We parse it ourselves because version 0.67.5 of github.com/prometheus/common/expfmt panics on some foreign text,
// such as a comment followed by "{}".
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

// parseSamples parses a whole page. It ignores comments, including types: every value counts as it is.
func parseSamples(text string) ([]sample, error) {
	var all []sample
	number := 0
	for line := range strings.Lines(text) {
		number++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		s, ok := parseSample(line)
		if !ok {
			return nil, fmt.Errorf("line %d of its answer, %q, is not in the format of Prometheus", number, clip(line))
		}
		all = append(all, s)
	}
	return all, nil
}

func parseSample(line string) (s sample, ok bool) {
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 {
		return sample{}, false
	}
	s.name = line[:end]
	rest := line[end:]
	if rest[0] == '{' {
		if s.labels, rest, ok = parseLabels(rest[1:]); !ok {
			return sample{}, false
		}
	}
	fields := strings.Fields(rest) // the value, and perhaps a timestamp
	if len(fields) == 0 {
		return sample{}, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	s.value = value
	return s, err == nil
}

// parseLabels parses the labels after the opening brace, and returns the text after the closing one.
func parseLabels(text string) (labels map[string]string, rest string, ok bool) {
	labels = make(map[string]string)
	for {
		text = strings.TrimLeft(text, " \t,")
		if rest, ok := strings.CutPrefix(text, "}"); ok {
			return labels, rest, true
		}
		name, after, ok := strings.Cut(text, "=")
		if !ok {
			return nil, "", false
		}
		value, after, ok := parseQuoted(strings.TrimLeft(after, " \t"))
		if !ok {
			return nil, "", false
		}
		labels[strings.TrimSpace(name)] = value
		text = after
	}
}

// parseQuoted parses a quoted value, in which \\, \" and \n stand for a backslash, a quote and a line break.
func parseQuoted(text string) (value, rest string, ok bool) {
	if text == "" || text[0] != '"' {
		return "", "", false
	}
	var out strings.Builder
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return out.String(), text[i+1:], true
		case c == '\\' && i+1 < len(text):
			i++
			if text[i] == 'n' {
				out.WriteByte('\n')
			} else {
				out.WriteByte(text[i])
			}
		default:
			out.WriteByte(c)
		}
	}
	return "", "", false
}
