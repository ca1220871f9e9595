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

// Optuna's distributions (optuna/distributions.py). Files of Optuna before 3.0 have others; all of them but the choices are numbers.
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

// numbers are the attributes of a range. A step and a logarithmic scale exclude each other in Optuna; the step of whole numbers is then 1.
type numbers struct {
	Step *float64 `json:"step"` // nil is any
	Low  float64  `json:"low"`
	High float64  `json:"high"`
	Log  bool     `json:"log"`
}

type choices struct {
	Choices []any `json:"choices"`
}

// encodeParam returns the value of a parameter as Optuna keeps it: a number, or the place of a choice; and its distribution. It reports
// false where the value is no choice, which Optuna has no way to write.
//
// A number out of the range, or off its step, as the user's current args may have, has a wider range of its own.
func encodeParam(p *space.Parameter, text string) (value float64, dist distribution, ok bool) {
	switch p.Kind {
	case space.Bool:
		i := slices.Index([]string{"false", "true"}, text)
		return float64(i), distribution{categorical, choices{[]any{false, true}}}, i >= 0
	case space.Float, space.Int:
		value, err := p.Number(text)
		return value, rangeOf(p, value), err == nil
	}
	all := make([]any, len(p.Choices))
	for i, c := range p.Choices {
		all[i] = c
	}
	i := slices.Index(p.Choices, text)
	return float64(i), distribution{categorical, choices{all}}, i >= 0
}

// A parameter is a flag as the file has it.
type parameter struct {
	name   string
	encode func(text string) (value float64, dist distribution, ok bool)
}

// parametersOf are the searched flags, and after them those that only the points of trials have: the study file had them once, and what it allowed
// then is not known.
func parametersOf(searched []space.Parameter, trials []studies.Trial) (all []parameter) {
	for i := range searched {
		p := &searched[i]
		all = append(all, parameter{p.Name, func(text string) (float64, distribution, bool) { return encodeParam(p, text) }})
	}
	former := map[string]map[string]bool{} // their values by name
	for i := range trials {
		for name, text := range trials[i].Point {
			if slices.ContainsFunc(searched, func(p space.Parameter) bool { return p.Name == name }) {
				continue
			}
			if former[name] == nil {
				former[name] = map[string]bool{}
			}
			former[name][text] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(former)) {
		all = append(all, parameter{name, seen(slices.Sorted(maps.Keys(former[name])))})
	}
	return all
}

// seen encodes a parameter of which nothing is known but the values that it had: a range from the least to the greatest, where all are numbers, and
// else a choice among them.
func seen(values []string) func(text string) (float64, distribution, bool) {
	name, within := intDistribution, numbers{Step: new(1.0), Low: math.Inf(1), High: math.Inf(-1)}
	isNumber := true
	for _, text := range values {
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsInf(v, 0) || math.IsNaN(v) || shortest(v) != text { // it would come back as another text
			isNumber = false
			break
		}
		within.Low, within.High = min(within.Low, v), max(within.High, v)
		if v != math.Trunc(v) || math.Abs(v) > mostInt {
			name, within.Step = floatDistribution, nil
		}
	}
	switch {
	case isNumber:
		return func(text string) (float64, distribution, bool) {
			v, err := strconv.ParseFloat(text, 64)
			return v, distribution{name, within}, err == nil
		}
	case !slices.ContainsFunc(values, func(text string) bool { return text != "true" && text != "false" }):
		p := &space.Parameter{Kind: space.Bool}
		return func(text string) (float64, distribution, bool) { return encodeParam(p, text) }
	}
	p := &space.Parameter{Kind: space.Categorical, Choices: values}
	return func(text string) (float64, distribution, bool) { return encodeParam(p, text) }
}

// mostInt is the greatest whole number up to which each is a floating-point number, as which Optuna keeps them.
const mostInt = 1 << 53

// rangeOf is the distribution of a Float or an Int that has the value.
func rangeOf(p *space.Parameter, value float64) distribution {
	levels := p.Levels(2) // the highest legal value, which Optuna wants to be on a step
	n := numbers{Low: p.Min, High: p.Max, Log: p.Log}
	if high, err := p.Number(levels[len(levels)-1]); err == nil {
		n.High = high
	}
	name := floatDistribution
	if p.Step > 0 && !p.Log {
		n.Step = &p.Step
	}
	if p.Kind == space.Int {
		name = intDistribution
		if n.Step == nil {
			n.Step = new(1.0)
		}
	}
	if p.Check(shortest(value)) != nil {
		n.Low, n.High = min(n.Low, value), max(n.High, value)
		n.Log = n.Log && n.Low > 0
		n.Step = nil
		if p.Kind == space.Int {
			n.Step = new(1.0)
		}
	}
	return distribution{name, n}
}

// shortest has no exponent but where there would be many digits that say nothing.
func shortest(v float64) string {
	if size := math.Abs(v); size >= 1e21 || size < 1e-9 && size > 0 {
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// decodeParam returns a value as text; ok is false for the choice None, which leaves the parameter out.
func decodeParam(value float64, text []byte) (word string, ok bool, err error) {
	var d struct {
		Name       string `json:"name"`
		Attributes struct {
			Choices []json.RawMessage `json:"choices"`
		} `json:"attributes"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		return "", false, fmt.Errorf("its distribution is no JSON object: %w", err)
	}
	if d.Name != categorical {
		return shortest(value), true, nil
	}
	i := int(value)
	if float64(i) != value || i < 0 || i >= len(d.Attributes.Choices) {
		return "", false, fmt.Errorf("choice %g of %d", value, len(d.Attributes.Choices))
	}
	return choiceText(d.Attributes.Choices[i])
}

// choiceText is a choice as a flag has it.
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
	return "", false, fmt.Errorf("the choice %s is neither text nor number", raw)
}
