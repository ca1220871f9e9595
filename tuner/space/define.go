package space

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/samber/lo"
	"github.com/xrash/smetrics"
)

// A Space has the flags and environment variables that a study searches. It is safe for concurrent use if nobody
// changes Defaults.
type Space struct {
	// Defaults has values of flags that are not in a point, such as those in server.args. Constraints and conditions
	// read these values. It may be nil.
	Defaults map[string]string

	parameters  []Parameter
	index       map[string]int // index in parameters, by name
	when        []*expression  // condition of each parameter; nil means always active
	order       []int          // indexes of the parameters; a parameter comes after those in its condition
	constraints []*expression
	speculative map[string]any
}

// A DefinitionError is one mistake in the definition of a space.
type DefinitionError struct {
	Parameter  string // name of the wrong parameter; "" for a constraint
	When       bool   // the mistake is in the parameter's condition
	Constraint int    // index of the constraint, from 0, if Parameter is ""
	What       string // the mistake and the remedy
}

// Error returns the mistake and its place.
func (e *DefinitionError) Error() string {
	switch {
	case e.Parameter == "":
		return fmt.Sprintf("constraint %d: %s", e.Constraint+1, e.What)
	case e.When:
		return fmt.Sprintf("parameter %s: when: %s", e.Parameter, e.What)
	}
	return fmt.Sprintf("parameter %s: %s", e.Parameter, e.What)
}

// DefinitionErrors are all mistakes in the definition of a space.
type DefinitionErrors []*DefinitionError

// Error returns one line for each mistake.
func (all DefinitionErrors) Error() string {
	return strings.Join(lo.Map(all, func(e *DefinitionError, _ int) string { return e.Error() }), "\n")
}

// New returns the space of the parameters. The constraints are expressions with names of flags; each must hold in every
// point. The map speculative has the keys of --speculative-config, except the number of tokens. This map is needed if
// one of the parameters is SpeculativeTokens. The map defaults becomes Space.Defaults, and may be nil. The error is a
// DefinitionErrors.
func New(parameters []Parameter, constraints []string, speculative map[string]any, defaults map[string]string) (*Space, error) {
	s := &Space{
		Defaults: defaults, parameters: slices.Clone(parameters), index: map[string]int{},
		when: make([]*expression, len(parameters)), speculative: speculative,
	}
	var errs DefinitionErrors
	for i := range s.parameters {
		p := &s.parameters[i]
		what := p.problem()
		if _, twice := s.index[p.Name]; twice {
			what = "the name is given twice; remove one"
		}
		if what == "" && p.Name == SpeculativeTokens {
			what = s.speculationProblem(p)
		}
		if what != "" {
			errs = append(errs, &DefinitionError{Parameter: p.Name, What: what})
		}
		s.index[p.Name] = i
	}
	errs = append(errs, s.compile(constraints)...)
	errs = append(errs, s.sortByCondition()...)
	if len(errs) > 0 {
		return nil, errs
	}
	return s, nil
}

// Parameters returns the searched flags in their order. The caller must not change them.
func (s *Space) Parameters() []Parameter { return s.parameters }

// Parameter returns the searched flag with the given name, or nil.
func (s *Space) Parameter(name string) *Parameter {
	if i, ok := s.index[name]; ok {
		return &s.parameters[i]
	}
	return nil
}

// compile compiles the conditions and constraints.
func (s *Space) compile(constraints []string) (errs DefinitionErrors) {
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

// sortByCondition sets the field order, in which a parameter comes after those in its condition. It returns an error if
// conditions depend on each other.
func (s *Space) sortByCondition() DefinitionErrors {
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
			return DefinitionErrors{{Parameter: s.parameters[i].Name, When: true, What: fmt.Sprintf(
				"the conditions depend on each other (%s); remove one of them", strings.Join(append(cycle, cycle[0]), " → "))}}
		}
	}
	return nil
}

// speculationProblem describes the mistake in the parameter SpeculativeTokens; "" if there is none.
func (s *Space) speculationProblem(p *Parameter) string {
	whole := p.Kind == Int && p.Min >= 0 || p.Kind == Categorical && !slices.ContainsFunc(p.Choices, func(c string) bool {
		return !wholeNumber.MatchString(c)
	})
	switch {
	case !whole:
		return "the values must be whole numbers of tokens; write [0, 1, 2, 3]"
	case len(s.speculative) == 0:
		return "the keys of vLLM's --speculative-config are missing; add speculative_config: {method: ngram, prompt_lookup_max: 4}"
	case s.speculative[speculativeKey] != nil:
		return "speculative_config has num_speculative_tokens too; remove that key"
	case s.Parameter("speculative-config") != nil:
		return "speculative-config is searched too, and both set --speculative-config; remove one"
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

// maxInt is the limit up to which float64 holds all whole numbers exactly.
const maxInt = 1 << 53

// problem describes the mistake in the parameter itself; "" if there is none.
func (p *Parameter) problem() string {
	switch {
	case !flagName.MatchString(p.Name) && !IsVariable(p.Name):
		return fmt.Sprintf("%q is not the name of a flag; write it in lower case without leading dashes, such as %s, or a variable in capitals",
			p.Name, SpeculativeTokens)
	case IsVariable(p.Name) && p.variableProblem() != "":
		return p.variableProblem()
	case slices.Contains(reserved, p.Name):
		return fmt.Sprintf("%q is an operator or function of expressions, so it cannot be searched", p.Name)
	case p.Kind == Float || p.Kind == Int:
		return p.rangeProblem()
	case p.Kind == Categorical || p.Kind == JSON:
		return p.choicesProblem()
	case p.Kind != Bool:
		return fmt.Sprintf("%q is not a kind of parameter; write float, int, bool, choices or json", p.Kind)
	case len(p.Choices) > 0 || p.Min != 0 || p.Max != 0 || p.Step != 0 || p.Log:
		return "a bool takes no range and no choices; remove them"
	}
	return ""
}

func (p *Parameter) rangeProblem() string {
	for _, v := range []float64{p.Min, p.Max, p.Step} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return "range and step must be finite numbers"
		}
		if p.Kind == Int && (v != math.Trunc(v) || math.Abs(v) > maxInt) {
			return fmt.Sprintf("%g is not a whole number; write whole numbers, or float", v)
		}
	}
	switch {
	case len(p.Choices) > 0:
		return "a range and choices are given; remove one of them"
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

func (p *Parameter) choicesProblem() string {
	if len(p.Choices) == 0 {
		return "the list of choices is empty; add at least one"
	}
	if p.Min != 0 || p.Max != 0 || p.Step != 0 || p.Log {
		return "choices take no range, step or log; remove them"
	}
	for i, c := range p.Choices {
		switch {
		case slices.ContainsFunc(p.Choices[:i], func(d string) bool { return p.equalChoices(c, d) }):
			return fmt.Sprintf("the choice %s is given twice; remove one", c)
		case strings.TrimSpace(c) == "":
			return "a choice is empty; remove it"
		case p.Kind == JSON:
			if _, err := compact(c); err != nil {
				return fmt.Sprintf("the choice %s is not JSON (%v)", c, err)
			}
		}
	}
	return ""
}

// Nearest returns the name that differs from a word by the fewest typing errors; "" if all names differ too much.
func Nearest(word string, names []string) string {
	best, least := "", len(word)/4+2
	for _, name := range names {
		if d := smetrics.WagnerFischer(strings.ToLower(word), strings.ToLower(name), 1, 1, 1); d < least {
			best, least = name, d
		}
	}
	return best
}

// DidYouMean returns advice for an unknown word: the nearest name, or all names if none is near.
func DidYouMean(word string, names []string) string {
	if best := Nearest(word, names); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	return "use one of " + strings.Join(names, ", ")
}
