package studyfile

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/tuner/space"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// text reads a single value that is not empty.
func (d *decoder) text(to *string) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if ok && strings.TrimSpace(text) == "" {
			d.fail(n, "%s is empty; write a value or remove the key", path)
		}
		d.checkWord(path, n, text)
		*to = text
	}
}

// oneOf reads one of the words.
func oneOf[T ~string](d *decoder, to *T, words ...T) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if !ok {
			return
		}
		*to = T(text)
		if !slices.Contains(words, T(text)) {
			names := make([]string, len(words))
			for i, w := range words {
				names[i] = string(w)
			}
			d.fail(n, "%s: unknown value %q; %s", path, text, space.DidYouMean(text, names))
		}
	}
}

// yes reads true or false.
func (d *decoder) yes(to *bool) reader {
	return func(path string, n ast.Node) {
		switch text, ok := d.scalar(path, n); {
		case !ok:
		case text == "true" || text == "false":
			*to = text == "true"
		default:
			d.fail(n, "%s is %q; write true or false", path, text)
		}
	}
}

// words reads a list of texts, none of which may be a secret. Numbers are taken as they are written.
func (d *decoder) words(to *[]string) reader {
	return func(path string, n ast.Node) {
		*to = []string{}
		for i, v := range d.list(path, n) {
			if text, ok := d.scalar(item(path, i), v); ok {
				d.checkWord(item(path, i), v, text)
				*to = append(*to, text)
			}
		}
	}
}

// real reads a number of at least low and at most high.
func (d *decoder) real(to *float64, low, high float64) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if !ok {
			return
		}
		v, err := number(text)
		if err != nil {
			d.fail(n, "%s: %v; write %s", path, err, between(low, high))
			return
		}
		*to = v
		if v < low || v > high {
			d.fail(n, "%s is %s; write %s", path, text, between(low, high))
		}
	}
}

// whole reads a whole number of at least low and at most high.
func (d *decoder) whole(to *int, low, high int) reader {
	return func(path string, n ast.Node) {
		before := len(d.found)
		var v float64
		d.real(&v, float64(low), float64(high))(path, n)
		if len(d.found) > before {
			return
		}
		if v != math.Trunc(v) {
			d.fail(n, "%s is %g; write a whole number", path, v)
			return
		}
		*to = int(v)
	}
}

// seconds reads a number of seconds above 0.
func (d *decoder) seconds(to *time.Duration) reader {
	return func(path string, n ast.Node) {
		v := to.Seconds()
		d.real(&v, 0.1, float64(week/time.Second))(path, n)
		*to = time.Duration(v * float64(time.Second))
	}
}

// duration reads a duration of at least low. unit is what a number without one probably meant.
func (d *decoder) duration(to *time.Duration, low time.Duration, unit string) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if !ok {
			return
		}
		v, err := duration(text, unit)
		if err != nil {
			d.fail(n, "%s: %v", path, err)
			return
		}
		*to = v
		if v < low || v > year {
			d.fail(n, "%s is %s; write a duration from %s to a year", path, text, cmp.Or(low.String(), "0s"))
		}
	}
}

const (
	week = 7 * 24 * time.Hour
	year = 366 * 24 * time.Hour
)

func between(low, high float64) string {
	if high == math.MaxFloat64 {
		return "a number"
	}
	return fmt.Sprintf("a number from %s to %s", strconv.FormatFloat(low, 'f', -1, 64), strconv.FormatFloat(high, 'f', -1, 64))
}

// number reads a finite number.
func number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err == nil && !math.IsNaN(v) && !math.IsInf(v, 0) {
		return v, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return 0, fmt.Errorf("%q is a duration, %g in seconds", text, d.Seconds())
	}
	return 0, fmt.Errorf("%q is no number", text)
}

// units are what people write for Go's units of time.
var units = map[string]string{
	"msec": "ms", "msecs": "ms", "millisecond": "ms", "milliseconds": "ms", "millis": "ms",
	"sec": "s", "secs": "s", "second": "s", "seconds": "s",
	"min": "m", "mins": "m", "minute": "m", "minutes": "m",
	"hr": "h", "hrs": "h", "hour": "h", "hours": "h",
}

var amount = regexp.MustCompile(`^([0-9]*\.?[0-9]+)\s*([A-Za-zµ]*)$`)

// duration reads a time with its unit.
func duration(text, unit string) (time.Duration, error) {
	if v, err := time.ParseDuration(text); err == nil {
		return v, nil
	}
	parts := amount.FindStringSubmatch(strings.TrimSpace(text))
	if parts == nil {
		return 0, fmt.Errorf("%q is no duration; write a number with its unit, such as 30%s", text, unit)
	}
	written, name := parts[1], strings.ToLower(parts[2])
	if days, err := strconv.ParseFloat(written, 64); err == nil && (name == "d" || name == "day" || name == "days") {
		return 0, fmt.Errorf("%q is in days; write %gh", text, 24*days)
	}
	known := cmp.Or(units[name], name)
	switch {
	case name == "":
		return 0, fmt.Errorf("%q has no unit; write %s%s", text, written, unit)
	case !slices.Contains([]string{"ns", "us", "µs", "ms", "s", "m", "h"}, known):
		return 0, fmt.Errorf("%q has the unknown unit %q; write ms, s, m or h", text, parts[2])
	case written+known == text:
		return 0, fmt.Errorf("%q is too long; write a duration of at most a year", text)
	}
	return 0, fmt.Errorf("%q has its unit in another form; write %s%s", text, written, known)
}

// share reads a part of 1, as 0.01 or as 1%.
func (d *decoder) share(to *float64) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if !ok {
			return
		}
		digits, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
		v, err := number(strings.TrimSpace(digits))
		switch {
		case err != nil:
			d.fail(n, "%s: %q is no share; write 1%% or 0.01", path, text)
			return
		case percent:
			v /= 100
		case v > 1 && v <= 100:
			d.fail(n, "%s is %s, more than the whole; write %s%%", path, text, digits)
			return
		}
		if v < 0 || v > 1 {
			d.fail(n, "%s is %s; write 0%% to 100%%", path, text)
			return
		}
		*to = v
	}
}

// anything returns a value of any form, as encoding/json would decode it.
func (d *decoder) anything(path string, n ast.Node) any {
	switch n := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		m := map[string]any{}
		for _, e := range d.entries(path, n) {
			m[e.key] = d.anything(below(path, e.key), e.value)
		}
		return m
	case *ast.SequenceNode:
		list := []any{}
		for i, v := range d.list(path, n) {
			list = append(list, d.anything(item(path, i), v))
		}
		return list
	case *ast.NullNode:
		return nil
	case *ast.BoolNode:
		return n.Value
	case *ast.IntegerNode:
		return n.Value // an int64 or a uint64
	case *ast.FloatNode:
		if math.IsNaN(n.Value) || math.IsInf(n.Value, 0) {
			d.fail(n, "%s is not finite; write a finite number", path)
			return nil
		}
		return n.Value
	}
	text, _ := d.scalar(path, n)
	return text
}

// seed reads the seed of something drawn.
func (d *decoder) seed(to *uint64) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		seed, err := strconv.ParseUint(text, 10, 64)
		if ok && err != nil {
			d.fail(n, "%s is %q; write a whole number from 0 on", path, text)
		}
		*to = seed
	}
}
