package space

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Unset is the choice of a variable that is not in the server's environment.
const Unset = "unset"

// IsVariable reports whether a parameter is an environment variable of the server. The name of a variable is in
// capitals, and the name of a flag never is.
func IsVariable(name string) bool {
	return name != "" && name[0] >= 'A' && name[0] <= 'Z' && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_'
	})
}

// Env returns the environment variables of a server with this point, by name. It returns nil if there are none.
func (p Point) Env() map[string]string {
	var env map[string]string
	for name, value := range p {
		if !IsVariable(name) || value == Unset {
			continue
		}
		if env == nil {
			env = map[string]string{}
		}
		env[name] = value
	}
	return env
}

// Variables returns the names of the searched environment variables. A server has only those of these variables that
// its point sets.
func (s *Space) Variables() (names []string) {
	for i := range s.parameters {
		if name := s.parameters[i].Name; IsVariable(name) {
			names = append(names, name)
		}
	}
	return names
}

// WithoutVariables returns a new point: this point without its environment variables.
func (p Point) WithoutVariables() Point {
	flags := make(Point, len(p))
	for name, value := range p {
		if !IsVariable(name) {
			flags[name] = value
		}
	}
	return flags
}

// IsUnset reports whether a value of the parameter means that the variable is not in the environment.
func (p *Parameter) IsUnset(value string) bool { return value == Unset && IsVariable(p.Name) }

// HasUnset reports whether one of the choices means that the variable is not in the environment.
func (p *Parameter) HasUnset() bool { return slices.ContainsFunc(p.Choices, p.IsUnset) }

// EnvWords returns variables as NAME=value words, sorted by name. They are not quoted.
func EnvWords(env map[string]string) []string {
	words := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		words = append(words, name+"="+env[name])
	}
	return words
}

// CutEnv splits a command line in the same way as a shell. It returns the NAME=value words at the beginning, and the
// rest.
func CutEnv(words []string) (env, rest []string) {
	n := slices.IndexFunc(words, func(word string) bool {
		name, _, assigns := strings.Cut(word, "=")
		return !assigns || !IsVariable(name)
	})
	switch {
	case n < 0:
		n = len(words)
	case n == 0:
		return nil, words
	}
	return words[:n:n], words[n:]
}

// ParseVariable returns the name and value of a searched variable from a NAME=value word. The value may be out of
// range, as in ParseArgs.
func (s *Space) ParseVariable(word string) (name, value string, err error) {
	name, text, _ := strings.Cut(word, "=")
	p := s.Parameter(name)
	if p == nil {
		remedy := "move it to server.env, or search it under parameters"
		if best := Nearest(name, s.Variables()); best != "" {
			remedy = fmt.Sprintf("did you mean %s? If not, %s", best, remedy)
		}
		return "", "", fmt.Errorf("%s is not searched; %s", name, remedy)
	}
	value, err = p.Read(text)
	return name, value, err
}

// variableProblem describes a mistake that only a variable can have. It returns "" if there is none.
func (p *Parameter) variableProblem() string {
	if p.Kind == Bool {
		return "a variable has no --no- form; write the values that the server reads, such as [0, 1]"
	}
	for _, c := range p.Choices {
		switch {
		case strings.TrimSpace(c) == "":
			return "a choice is empty; write null for a variable that is not set"
		case strings.ContainsFunc(c, func(r rune) bool { return r < ' ' || r == 0x7f }):
			return fmt.Sprintf("the choice %q has a line break or a control character; remove it", c)
		}
	}
	return ""
}
