package space

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Check says what is wrong with a point, all of it: unknown names, values out of range or off the step, parameters that
// are not active, constraints that do not hold. A parameter that is active and absent is left to the server's default.
// A constraint holds as long as the value of one of its flags is known neither from the point nor from Defaults, and a
// condition with such a flag does not.
func (s *Space) Check(p Point) error {
	var errs []error
	for _, name := range sortedNames(p) {
		parameter := s.Parameter(name)
		if parameter == nil {
			errs = append(errs, fmt.Errorf("unknown parameter %q; %s", name, DidYouMean(name, sortedNames(s.index))))
			continue
		}
		if err := parameter.Check(p[name]); err != nil {
			errs = append(errs, err)
		}
		if !s.active(s.index[name], p) {
			errs = append(errs, fmt.Errorf("%s=%s is not active, for not: %s", name, p[name], parameter.When))
		}
	}
	for _, c := range s.constraints {
		holds, known, err := c.holds(s.lookup(p))
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("constraint %w", err))
		case known && !holds:
			errs = append(errs, fmt.Errorf("constraint %q is broken by %s", c.text, s.values(c.names, p)))
		}
	}
	return errors.Join(errs...)
}

// active reports whether the parameter's condition holds in the point.
func (s *Space) active(i int, p Point) bool {
	if s.when[i] == nil {
		return true
	}
	// A condition that has no value, such as a remainder by zero, does not hold.
	holds, known, err := s.when[i].holds(s.conditionLookup(p))
	return err == nil && known && holds
}

// lookup returns the values that constraints see.
func (s *Space) lookup(p Point) func(name string) (any, bool) {
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
		return guess(text), true
	}
}

// conditionLookup returns the values that conditions see: what a searched flag would be by default says nothing, since it
// is absent when it is not active.
func (s *Space) conditionLookup(p Point) func(name string) (any, bool) {
	lookup := s.lookup(p)
	return func(name string) (any, bool) {
		if _, given := p[name]; !given && s.Parameter(name) != nil {
			return nil, false
		}
		return lookup(name)
	}
}

// values returns the flags with their values, such as "a=1, b=2".
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

// Rounding of decimal fractions is forgiven up to this part of a step.
const forgiven = 1e-6

// Check says what is wrong with a value, by itself.
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
	step, slack := p.step(), forgiven*p.step()
	switch {
	case v < p.Min-slack:
		return fmt.Errorf("%s=%s is below the range [%g, %g]", p.Name, text, p.Min, p.Max)
	case v > p.Max+slack:
		return fmt.Errorf("%s=%s is above the range [%g, %g]", p.Name, text, p.Min, p.Max)
	case step > 0 && math.Abs(math.Remainder(v-p.Min, step)) > slack:
		return fmt.Errorf("%s=%s is not on the step %g from %g", p.Name, text, step, p.Min)
	}
	return nil
}

// Number reads a value as a number: a legal or illegal value of Float and Int, and a choice that is a number.
func (p *Parameter) Number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil || math.IsNaN(v) || math.IsInf(v, 0):
		return 0, fmt.Errorf("%s=%s is no number", p.Name, text)
	case p.Kind == Int && (v != math.Trunc(v) || math.Abs(v) > mostInt):
		return 0, fmt.Errorf("%s=%s is no whole number", p.Name, text)
	}
	return v, nil
}
