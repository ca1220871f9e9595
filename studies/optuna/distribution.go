package optuna

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// Names of Optuna's distributions (optuna/distributions.py). Optuna before 3.0 has other distributions for numbers.
const (
	floatDistribution = "FloatDistribution"
	intDistribution   = "IntDistribution"
	categorical       = "CategoricalDistribution"
)

// A distribution is the range of a parameter as Optuna writes it.
type distribution struct {
	Name       string `json:"name"`
	Attributes any    `json:"attributes"`
}

// A numberRange has the attributes of a range of numbers. In Optuna a logarithmic range has no step, or the step 1 for
// integers.
type numberRange struct {
	Step *float64 `json:"step"` // nil means no step
	Low  float64  `json:"low"`
	High float64  `json:"high"`
	Log  bool     `json:"log"`
}

// encodeParam returns the value of a parameter as Optuna stores it, and the parameter's distribution. The value is a
// number, or the index of a choice. If the value is not among the choices, ok is false, because Optuna cannot store
// such a value.
//
// The user's current args may have a number outside its range, or off its step. Then the range is widened to include
// the number.
func encodeParam(p *space.Parameter, text string) (value float64, dist distribution, ok bool) {
	if p.Kind == space.Float || p.Kind == space.Int {
		value, err := p.Number(text)
		return value, rangeOf(p, value), err == nil
	}
	choices := p.Levels(1)
	all := make([]any, len(choices))
	for i, c := range choices {
		all[i] = c
		if p.Kind == space.Bool {
			all[i] = c == "true"
		}
	}
	i := slices.Index(choices, text)
	return float64(i), distribution{categorical, map[string]any{"choices": all}}, i >= 0
}

// parametersOf returns the searched flags, and then the former flags. Former flags were searched with an earlier study
// file, so they occur only in the points of trials. The values that the earlier file allowed are not known.
func parametersOf(searched []space.Parameter, trials []studies.Trial) []space.Parameter {
	former := map[string][]string{} // values of former flags, by name
	for i := range trials {
		for name, text := range trials[i].Point {
			if !slices.ContainsFunc(searched, func(p space.Parameter) bool { return p.Name == name }) {
				former[name] = append(former[name], text)
			}
		}
	}
	all := slices.Clone(searched)
	for _, name := range slices.Sorted(maps.Keys(former)) {
		all = append(all, formerParameter(name, slices.Compact(slices.Sorted(slices.Values(former[name])))))
	}
	return all
}

// formerParameter defines a former flag that allows all the values in trials. If all values are numbers, the flag has
// the range from the lowest to the highest; otherwise it is a choice among the values.
func formerParameter(name string, values []string) space.Parameter {
	p := space.Parameter{Name: name, Kind: space.Int, Min: math.Inf(1), Max: math.Inf(-1)}
	for _, text := range values {
		v, err := strconv.ParseFloat(text, 64)
		switch {
		case err != nil || math.IsInf(v, 0) || math.IsNaN(v) || shortestText(v) != text: // the value is not a finite number, or would be read back as another text
			if !slices.ContainsFunc(values, func(text string) bool { return text != "true" && text != "false" }) {
				return space.Parameter{Name: name, Kind: space.Bool}
			}
			return space.Parameter{Name: name, Kind: space.Categorical, Choices: values}
		case v != math.Trunc(v) || math.Abs(v) > maxInt:
			p.Kind = space.Float
		}
		p.Min, p.Max = min(p.Min, v), max(p.Max, v)
	}
	return p
}

// maxInt is the largest integer. Optuna stores integers as floating-point numbers, which are exact up to here.
const maxInt = 1 << 53

// rangeOf returns the distribution of a parameter of the kind Float or Int. Its range includes the value.
func rangeOf(p *space.Parameter, value float64) distribution {
	n := numberRange{Low: p.Min, High: p.Max, Log: p.Log}
	if p.Step > 0 { // Optuna requires that the upper end lies on a step; the highest level of the parameter does
		levels := p.Levels(2)
		if high, err := p.Number(levels[len(levels)-1]); err == nil {
			n.High = high
		}
	}
	isLegal := p.Check(shortestText(value)) == nil
	if !isLegal {
		n.Low, n.High = min(n.Low, value), max(n.High, value)
		n.Log = n.Log && n.Low > 0
	}
	name := floatDistribution
	if p.Kind == space.Int {
		name, n.Step = intDistribution, new(1.0)
	}
	if isLegal && p.Step > 0 && !p.Log {
		n.Step = &p.Step
	}
	return distribution{name, n}
}

// shortestText writes a number with the fewest digits. Very large and very small numbers have an exponent.
func shortestText(v float64) string {
	if size := math.Abs(v); size >= 1e21 || size < 1e-9 && size > 0 {
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// decodeParam returns a value as text. For the choice None, ok is false: None means that the parameter is not set.
func decodeParam(value float64, text []byte) (word string, ok bool, err error) {
	var d struct {
		Name       string `json:"name"`
		Attributes struct {
			Choices []json.RawMessage `json:"choices"`
		} `json:"attributes"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		return "", false, fmt.Errorf("its distribution is not a JSON object: %w", err)
	}
	if d.Name != categorical {
		return shortestText(value), true, nil
	}
	i := int(value)
	if float64(i) != value || i < 0 || i >= len(d.Attributes.Choices) {
		return "", false, fmt.Errorf("its value is %g, but must be the index of one of its %d choices", value, len(d.Attributes.Choices))
	}
	return choiceText(d.Attributes.Choices[i])
}

// choiceText returns a choice as the text of a flag. The second result is false for None.
func choiceText(raw json.RawMessage) (string, bool, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return "", false, err
	}
	switch v := v.(type) {
	case nil:
		return "", false, nil
	case string:
		return v, true, nil
	case bool:
		return strconv.FormatBool(v), true, nil
	case json.Number:
		return v.String(), true, nil
	}
	return "", false, fmt.Errorf("the choice %s must be a text, a number, true or false", raw)
}
