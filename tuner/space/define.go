package space

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/xrash/smetrics"
)

// A Space is what a study searches. It is safe for concurrent use as long as nobody changes Defaults.
type Space struct {
	// Defaults are the values of flags that a point does not name, such as the server's fixed args. Constraints and
	// conditions look there. It may be nil.
	Defaults map[string]string

	parameters  []Parameter
	index       map[string]int // by name
	when        []*expression  // by parameter; nil means always active
	order       []int          // parameters, each after those that its condition names
	constraints []*expression
	speculative map[string]any
}

// A DefinitionError is one thing that is wrong with the definition of a space.
type DefinitionError struct {
	Parameter  string // whose definition is wrong; "" for a constraint
	When       bool   // it is the parameter's condition
	Constraint int    // 0-based place of the constraint, when Parameter is ""
	What       string // what is wrong, and the remedy
}

// Error returns what is wrong with its place.
func (e *DefinitionError) Error() string {
	switch {
	case e.Parameter == "":
		return fmt.Sprintf("constraint %d: %s", e.Constraint+1, e.What)
	case e.When:
		return fmt.Sprintf("parameter %s: when: %s", e.Parameter, e.What)
	}
	return fmt.Sprintf("parameter %s: %s", e.Parameter, e.What)
}

// New returns the space of the parameters. Constraints are expressions over their names which must hold in every point.
// speculative holds the other keys of --speculative-config, which SpeculativeTokens needs. The error joins a
// *DefinitionError for everything that is wrong.
func New(parameters []Parameter, constraints []string, speculative map[string]any) (*Space, error) {
	return NewWithDefaults(parameters, constraints, speculative, nil)
}

// NewWithDefaults is New for a server with fixed args: expressions may name the flags in defaults too.
func NewWithDefaults(parameters []Parameter, constraints []string, speculative map[string]any, defaults map[string]string) (*Space, error) {
	s := &Space{
		Defaults: defaults, parameters: slices.Clone(parameters), index: map[string]int{},
		when: make([]*expression, len(parameters)), speculative: speculative,
	}
	var errs []error
	for i := range s.parameters {
		p := &s.parameters[i]
		what := p.wrong()
		if _, twice := s.index[p.Name]; twice {
			what = "it is given twice; remove one"
		}
		if what == "" && p.Name == SpeculativeTokens {
			what = s.wrongSpeculation(p)
		}
		if what != "" {
			errs = append(errs, &DefinitionError{Parameter: p.Name, What: what})
		}
		s.index[p.Name] = i
	}
	errs = append(errs, s.compile(constraints)...)
	errs = append(errs, s.sortByCondition()...)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// Parameters returns the searched flags in their order. The caller must not change them.
func (s *Space) Parameters() []Parameter { return s.parameters }

// Parameter returns the searched flag of the name, or nil.
func (s *Space) Parameter(name string) *Parameter {
	if i, ok := s.index[name]; ok {
		return &s.parameters[i]
	}
	return nil
}

// Constraints returns the constraints as they were written.
func (s *Space) Constraints() []string {
	texts := make([]string, len(s.constraints))
	for i, c := range s.constraints {
		texts[i] = c.text
	}
	return texts
}

// compile reads the conditions and constraints.
func (s *Space) compile(constraints []string) (errs []error) {
	words := newVocabulary(s.parameters, s.Defaults)
	for i := range s.parameters {
		p := &s.parameters[i]
		if p.When == "" {
			continue
		}
		e, err := words.compile(p.When)
		if err != nil {
			errs = append(errs, &DefinitionError{Parameter: p.Name, When: true, What: err.Error()})
		}
		s.when[i] = e
	}
	for i, text := range constraints {
		e, err := words.compile(text)
		if err != nil {
			errs = append(errs, &DefinitionError{Constraint: i, What: err.Error()})
		}
		s.constraints = append(s.constraints, e)
	}
	return errs
}

// sortByCondition puts each parameter after those that its condition names.
func (s *Space) sortByCondition() []error {
	const visiting, done = 1, 2
	state := make([]int, len(s.parameters))
	var cycle []string
	var visit func(i int) bool
	visit = func(i int) bool {
		if state[i] != 0 {
			return state[i] == done
		}
		state[i] = visiting
		if s.when[i] != nil {
			for _, name := range s.when[i].names {
				if j, searched := s.index[name]; searched && !visit(j) {
					cycle = append(cycle, s.parameters[i].Name)
					return false
				}
			}
		}
		state[i] = done
		s.order = append(s.order, i)
		return true
	}
	for i := range s.parameters {
		if !visit(i) {
			slices.Reverse(cycle)
			return []error{&DefinitionError{Parameter: s.parameters[i].Name, When: true, What: fmt.Sprintf(
				"the conditions go in a circle (%s); remove one of them", strings.Join(append(cycle, cycle[0]), " → "))}}
		}
	}
	return nil
}

// wrongSpeculation says what is wrong with the parameter SpeculativeTokens, or "".
func (s *Space) wrongSpeculation(p *Parameter) string {
	whole := p.Kind == Int && p.Min >= 0 || p.Kind == Categorical && !slices.ContainsFunc(p.Choices, func(c string) bool {
		return !wholeNumber.MatchString(c)
	})
	switch {
	case !whole:
		return "it counts tokens: write whole numbers such as [0, 1, 2, 3]"
	case len(s.speculative) == 0:
		return "it needs the other keys of vLLM's --speculative-config; write speculative_config: {method: ngram, prompt_lookup_max: 4}"
	case s.speculative[speculativeKey] != nil:
		return "speculative_config has num_speculative_tokens too; remove it there"
	case s.Parameter("speculative-config") != nil:
		return "speculative-config is searched too, and both would render --speculative-config; remove one"
	}
	if _, err := encode(s.speculative); err != nil {
		return fmt.Sprintf("speculative_config cannot be written as JSON (%v)", err)
	}
	return ""
}

var (
	flagName    = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
	wholeNumber = regexp.MustCompile(`^[0-9]{1,9}$`)
)

// Whole numbers beyond 2^53 cannot be told apart as float64.
const mostInt = 1 << 53

// wrong says what is wrong with the parameter by itself, or "".
func (p *Parameter) wrong() string {
	switch {
	case !flagName.MatchString(p.Name):
		return fmt.Sprintf("%q is no flag name; write it without leading dashes, such as %s", p.Name, SpeculativeTokens)
	case slices.Contains(reserved, p.Name):
		return fmt.Sprintf("%q is a word of the expressions and cannot be searched", p.Name)
	case p.Kind == Float || p.Kind == Int:
		return p.wrongRange()
	case p.Kind == Categorical || p.Kind == JSON:
		return p.wrongChoices()
	case p.Kind != Bool:
		return fmt.Sprintf("%q is no kind of parameter; take float, int, bool, choices or json", p.Kind)
	case len(p.Choices) > 0 || p.Min != 0 || p.Max != 0 || p.Step != 0 || p.Log:
		return "a bool has no range and no choices; remove them"
	}
	return ""
}

func (p *Parameter) wrongRange() string {
	for _, v := range []float64{p.Min, p.Max, p.Step} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return "its range and step must be finite numbers"
		}
		if p.Kind == Int && (v != math.Trunc(v) || math.Abs(v) > mostInt) {
			return fmt.Sprintf("%g is no whole number; write whole numbers, or float", v)
		}
	}
	switch {
	case len(p.Choices) > 0:
		return "it has a range and choices; remove one of them"
	case p.Min > p.Max:
		return fmt.Sprintf("the range [%g, %g] is empty; write [%g, %g]", p.Min, p.Max, p.Max, p.Min)
	case p.Log && p.Min <= 0:
		return fmt.Sprintf("a logarithmic scale needs a range above 0, not [%g, %g]; raise the lower end or remove log", p.Min, p.Max)
	case p.Step < 0:
		return fmt.Sprintf("the step %g is negative; write %g", p.Step, -p.Step)
	case p.Step > p.Max-p.Min:
		return fmt.Sprintf("the step %g is larger than the range [%g, %g]; write a smaller step", p.Step, p.Min, p.Max)
	}
	return ""
}

func (p *Parameter) wrongChoices() string {
	if len(p.Choices) == 0 {
		return "it has no choices; list at least one"
	}
	if p.Min != 0 || p.Max != 0 || p.Step != 0 || p.Log {
		return "choices have no range, step or log; remove them"
	}
	for i, c := range p.Choices {
		switch {
		case slices.ContainsFunc(p.Choices[:i], func(d string) bool { return p.same(c, d) }):
			return fmt.Sprintf("the choice %s is given twice; remove one", c)
		case strings.TrimSpace(c) == "":
			return "a choice is empty; remove it"
		case p.Kind == JSON:
			if _, err := compact(c); err != nil {
				return fmt.Sprintf("the choice %s is no JSON (%v)", c, err)
			}
		}
	}
	return ""
}

// Nearest returns the name that was probably meant by word, or "" when none is near.
func Nearest(word string, names []string) string {
	best, least := "", len(word)/4+2
	for _, name := range names {
		if d := smetrics.WagnerFischer(strings.ToLower(word), strings.ToLower(name), 1, 1, 1); d < least {
			best, least = name, d
		}
	}
	return best
}

// DidYouMean returns the remedy for an unknown word: the nearest of the names, or all of them.
func DidYouMean(word string, names []string) string {
	if best := Nearest(word, names); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	return "known are " + strings.Join(names, ", ")
}

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
