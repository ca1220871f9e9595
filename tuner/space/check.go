package space

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Check reports everything that is wrong with a point: unknown names, values out of range or between two steps,
// parameters that are not active, and broken constraints. An active parameter may be absent, and then has the server's
// default. If neither the point nor Defaults has a flag, a constraint with that flag holds, but a condition with that
// flag does not hold.
func (s *Space) Check(p Point) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(p)) {
		parameter := s.Parameter(name)
		if parameter == nil {
			errs = append(errs, fmt.Errorf("unknown parameter %q; %s", name, DidYouMean(name, slices.Sorted(maps.Keys(s.index)))))
			continue
		}
		if err := parameter.Check(p[name]); err != nil {
			errs = append(errs, err)
		}
		if !s.active(s.index[name], p) {
			errs = append(errs, fmt.Errorf("%s=%s is not active, because its condition does not hold: %s", name, p[name], parameter.When))
		}
	}
	for _, c := range s.constraints {
		holds, known, err := c.holds(s.constraintValue(p))
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("constraint %w", err))
		case known && !holds:
			errs = append(errs, fmt.Errorf("constraint %q is broken by %s", c.text, s.values(c.names, p)))
		}
	}
	return errors.Join(errs...)
}

// Possible reports whether a legal point may have these values. A missing value may be any value, so a constraint or a
// condition on it may hold.
func (s *Space) Possible(p Point) bool {
	for name := range p {
		condition := s.when[s.index[name]]
		if condition == nil {
			continue
		}
		if holds, known, err := condition.holds(s.conditionValue(p)); err == nil && known && !holds {
			return false
		}
	}
	for _, c := range s.constraints {
		if holds, known, err := c.holds(s.constraintValue(p)); err == nil && known && !holds {
			return false
		}
	}
	return true
}

// active reports whether the condition of parameter i holds in the point.
func (s *Space) active(i int, p Point) bool {
	if s.when[i] == nil {
		return true
	}
	// A condition without a value, such as a remainder by zero, does not hold.
	holds, known, err := s.when[i].holds(s.conditionValue(p))
	return err == nil && known && holds
}

// constraintValue returns a function that gives constraints the value of a flag: from the point, or from Defaults.
func (s *Space) constraintValue(p Point) func(name string) (any, bool) {
	return func(name string) (any, bool) {
		text, ok := p[name]
		if !ok {
			text, ok = s.Defaults[name]
		}
		if !ok {
			return nil, false
		}
		if parameter := s.Parameter(name); parameter != nil {
			return parameter.value(text)
		}
		return parseLiteral(text), true
	}
}

// conditionValue returns a function that gives conditions the value of a flag. It does not use the default of a
// searched flag: the flag may be absent because it is inactive, and then its default has no meaning.
func (s *Space) conditionValue(p Point) func(name string) (any, bool) {
	value := s.constraintValue(p)
	return func(name string) (any, bool) {
		if _, given := p[name]; !given && s.Parameter(name) != nil {
			return nil, false
		}
		return value(name)
	}
}

// values returns a text with the flags and their values, such as "a=1, b=2".
func (s *Space) values(names []string, p Point) string {
	words := make([]string, len(names))
	for i, name := range names {
		text, ok := p[name]
		if !ok {
			text = s.Defaults[name]
		}
		words[i] = name + "=" + text
	}
	return strings.Join(words, ", ")
}

// stepTolerance is the largest distance between a value and the nearest step, as a fraction of the step. It allows for
// the rounding of decimal fractions.
const stepTolerance = 1e-6

// Check returns an error if the value is not legal for the parameter.
func (p *Parameter) Check(text string) error {
	switch p.Kind {
	case Float, Int:
		return p.checkNumber(text)
	case Bool:
		if text != "true" && text != "false" {
			return fmt.Errorf("%s=%s is not true or false", p.Name, text)
		}
	default:
		if !slices.Contains(p.Choices, text) {
			return fmt.Errorf("%s=%s is not one of %s", p.Name, text, strings.Join(p.Choices, ", "))
		}
	}
	return nil
}

func (p *Parameter) checkNumber(text string) error {
	v, err := p.Number(text)
	if err != nil {
		return err
	}
	step, slack := p.step(), stepTolerance*p.step()
	switch {
	case v < p.Min-slack:
		return fmt.Errorf("%s=%s is below the range [%g, %g]", p.Name, text, p.Min, p.Max)
	case v > p.Max+slack:
		return fmt.Errorf("%s=%s is above the range [%g, %g]", p.Name, text, p.Min, p.Max)
	case step > 0 && math.Abs(math.Remainder(v-p.Min, step)) > slack:
		return fmt.Errorf("%s=%s is not a multiple of the step %g above %g", p.Name, text, step, p.Min)
	}
	return nil
}

// Number parses a value of a Float or Int, or a choice that is a number. The value may be out of range.
func (p *Parameter) Number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil || math.IsNaN(v) || math.IsInf(v, 0):
		return 0, fmt.Errorf("%s=%s is not a number", p.Name, text)
	case p.Kind == Int && (v != math.Trunc(v) || math.Abs(v) > maxInt):
		return 0, fmt.Errorf("%s=%s is not a whole number", p.Name, text)
	}
	return v, nil
}
