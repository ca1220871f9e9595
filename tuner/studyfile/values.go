package studyfile

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/samber/lo"

	"vllmtuner/tuner/space"
)

// A valueParser parses the text of one value. The text of its error begins with the path.
type valueParser[T any] func(path, text string) (T, error)

// read returns a reader of one value. If the value is wrong, *to keeps its default.
func read[T any](d *decoder, to *T, parse valueParser[T]) reader {
	return func(path string, n ast.Node) {
		text, ok := d.scalar(path, n)
		if !ok {
			return
		}
		v, err := parse(path, text)
		if err != nil {
			d.fail(n, "%v", err)
			return
		}
		*to = v
	}
}

// text returns a reader of one text. An empty text is a problem, and so is a secret.
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

// texts returns a reader of a list of texts. A secret in a text is a problem. A number is kept as the text in the file.
func (d *decoder) texts(to *[]string) reader {
	return func(path string, n ast.Node) {
		*to = []string{}
		for i, v := range d.list(path, n) {
			if text, ok := d.scalar(itemPath(path, i), v); ok {
				d.checkWord(itemPath(path, i), v, text)
				*to = append(*to, text)
			}
		}
	}
}

// ascending returns a reader of a list of numbers in rising order. If a lower load came after a higher one, it would
// find the higher load's prompts in the cache. If two loads were equal, one would be measured twice.
func ascending[T int | float64](d *decoder, to *[]T, parse valueParser[T]) reader {
	return func(path string, n ast.Node) {
		*to = []T{}
		for i, item := range d.list(path, n) {
			var v T
			at, known := itemPath(path, i), len(d.found)
			read(d, &v, parse)(at, item)
			if i > 0 && len(d.found) == known && v <= (*to)[i-1] {
				d.fail(item, "%s is %v, and the number before it is %v; write each number once, in rising order", at, v, (*to)[i-1])
			}
			*to = append(*to, v)
		}
	}
}

// oneOf returns a reader of a value that must be one of the given words. An unknown word is a problem, but *to gets it
// for later checks.
func oneOf[T ~string](d *decoder, to *T, words ...T) reader {
	return read(d, to, func(path, text string) (T, error) {
		*to = T(text)
		if slices.Contains(words, T(text)) {
			return T(text), nil
		}
		names := lo.Map(words, func(w T, _ int) string { return string(w) })
		return "", fmt.Errorf("%s: unknown value %q; %s", path, text, space.DidYouMean(text, names))
	})
}

func boolean(path, text string) (bool, error) {
	if text != "true" && text != "false" {
		return false, fmt.Errorf("%s is %q; write true or false", path, text)
	}
	return text == "true", nil
}

// number returns a parser of numbers from low to high.
func number(low, high float64) valueParser[float64] {
	return func(path, text string) (float64, error) {
		v, err := parseNumber(text)
		switch {
		case err != nil:
			return 0, fmt.Errorf("%s: %w; write %s", path, err, rangeText(low, high))
		case v < low || v > high:
			return 0, fmt.Errorf("%s is %s; write %s", path, text, rangeText(low, high))
		}
		return v, nil
	}
}

// integer returns a parser of whole numbers from low to high.
func integer(low, high int) valueParser[int] {
	return func(path, text string) (int, error) {
		v, err := number(float64(low), float64(high))(path, text)
		if err == nil && v != math.Trunc(v) {
			err = fmt.Errorf("%s is %g; write a whole number", path, v)
		}
		return int(v), err
	}
}

// seed parses the seed of a random generator.
func seed(path, text string) (uint64, error) {
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is %q; write a whole number, 0 or above", path, text)
	}
	return v, nil
}

// seconds parses a number of seconds, from 0.1 to a week.
func seconds(path, text string) (time.Duration, error) {
	v, err := number(0.1, week.Seconds())(path, text)
	return time.Duration(v * float64(time.Second)), err
}

// duration returns a parser of durations from low to a year. If the text has no unit, the error suggests the given one.
func duration(low time.Duration, unit string) valueParser[time.Duration] {
	return func(path, text string) (time.Duration, error) {
		v, err := parseDuration(text, unit)
		switch {
		case err != nil:
			return 0, fmt.Errorf("%s: %w", path, err)
		case v < low || v > year:
			return 0, fmt.Errorf("%s is %s; write a duration from %s to a year", path, text, cmp.Or(low.String(), "0s"))
		}
		return v, nil
	}
}

// Fraction parses a fraction from 0 to 1, such as 0.01 or 1%. Errors name the path of the value.
func Fraction(path, text string) (float64, error) {
	digits, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := parseNumber(strings.TrimSpace(digits))
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s: %q is not a percentage; write 1%% or 0.01", path, text)
	case percent:
		v /= 100
	case v > 1 && v <= 100:
		return 0, fmt.Errorf("%s is %s, which is more than 100 %%; write %s%%", path, text, digits)
	}
	if v < 0 || v > 1 {
		return 0, fmt.Errorf("%s is %s; write 0%% to 100%%", path, text)
	}
	return v, nil
}

const (
	week = 7 * 24 * time.Hour
	year = 366 * 24 * time.Hour
)

func rangeText(low, high float64) string {
	if high == math.MaxFloat64 {
		return "a number"
	}
	return fmt.Sprintf("a number from %s to %s", strconv.FormatFloat(low, 'f', -1, 64), strconv.FormatFloat(high, 'f', -1, 64))
}

// parseNumber parses a finite number.
func parseNumber(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err == nil && !math.IsNaN(v) && !math.IsInf(v, 0) {
		return v, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return 0, fmt.Errorf("%q is a duration; in seconds it is %g", text, d.Seconds())
	}
	return 0, fmt.Errorf("%q is not a number", text)
}

// units has Go's unit for each name of a time unit that people write.
var units = map[string]string{
	"msec": "ms", "msecs": "ms", "millisecond": "ms", "milliseconds": "ms", "millis": "ms",
	"sec": "s", "secs": "s", "second": "s", "seconds": "s",
	"min": "m", "mins": "m", "minute": "m", "minutes": "m",
	"hr": "h", "hrs": "h", "hour": "h", "hours": "h",
}

var amount = regexp.MustCompile(`^([0-9]*\.?[0-9]+)\s*([A-Za-zµ]*)$`)

// parseDuration parses a duration. If the text has no unit, the error suggests the given one.
func parseDuration(text, unit string) (time.Duration, error) {
	if v, err := time.ParseDuration(text); err == nil {
		return v, nil
	}
	parts := amount.FindStringSubmatch(strings.TrimSpace(text))
	if parts == nil {
		return 0, fmt.Errorf("%q is not a duration; write a number with its unit, such as 30%s", text, unit)
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
	return 0, fmt.Errorf("%q writes its unit in an unknown form; write %s%s", text, written, known)
}

// jsonValue converts a node to a Go value, with the types that encoding/json uses; whole numbers stay whole.
func (d *decoder) jsonValue(path string, n ast.Node) any {
	switch n := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		m := map[string]any{}
		for _, e := range d.entries(path, n) {
			m[e.key] = d.jsonValue(keyPath(path, e.key), e.value)
		}
		return m
	case *ast.SequenceNode:
		list := []any{}
		for i, v := range d.list(path, n) {
			list = append(list, d.jsonValue(itemPath(path, i), v))
		}
		return list
	case *ast.NullNode:
		return nil
	case *ast.BoolNode:
		return n.Value
	case *ast.IntegerNode:
		return n.Value // type int64 or uint64
	case *ast.FloatNode:
		if math.IsNaN(n.Value) || math.IsInf(n.Value, 0) {
			d.fail(n, "%s is not a finite number; write one", path)
			return nil
		}
		return n.Value
	}
	text, _ := d.scalar(path, n)
	return text
}
