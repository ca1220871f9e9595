package studyfile

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/tuner/space"
)

// forms is the advice for a parameter that is written in an unknown form.
const forms = "write {float: [0.8, 0.97], step: 0.01}, {int: [16, 1024], log: true}, a list of choices, or bool"

// parameters reads the searched flags and variables.
func (d *decoder) parameters(f *File) reader {
	return func(path string, n ast.Node) {
		for _, e := range d.entries(path, n) {
			name := e.key
			if !space.IsVariable(name) {
				name = strings.ReplaceAll(name, "_", "-")
			}
			at := keyPath(path, name)
			d.nodes[at], d.keys[at] = e.value, e.at
			if slices.ContainsFunc(f.Parameters, func(p space.Parameter) bool { return p.Name == name }) {
				d.fail(e.at, "%q is given twice; remove one", name)
				continue
			}
			before := len(d.found)
			p := space.Parameter{Name: name}
			d.parameter(&p, at, e.value)
			if space.IsVariable(name) && p.Kind == space.Bool {
				p.Kind, p.Choices = space.Categorical, slices.Clone(switchValues)
			}
			// Later checks would report a wrong parameter again. A nil node tells them to skip it, but its name is
			// still known.
			if len(d.found) > before {
				d.nodes[at] = nil
			}
			f.Parameters = append(f.Parameters, p)
		}
		if m, ok := n.(*ast.MappingNode); ok && len(m.Values) == 0 {
			d.fail(n, "%s is empty; list at least one flag to search", path)
		}
	}
}

// parameter reads one searched flag, which may be a mapping, a list of choices or the word bool.
func (d *decoder) parameter(p *space.Parameter, path string, n ast.Node) {
	switch n := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		d.parameterMapping(p, path, n)
	case *ast.SequenceNode:
		p.Kind = space.Categorical
		d.choices(p)(path, n)
	default:
		p.Kind = space.Bool
		if text, _ := scalarText(n); text != string(space.Bool) {
			d.fail(n, "%s has an unknown form; %s", path, forms)
		}
	}
}

func (d *decoder) parameterMapping(p *space.Parameter, path string, n ast.Node) {
	kinds := 0
	of := func(kind space.Kind, read reader) reader {
		return func(path string, n ast.Node) {
			kinds++
			p.Kind = kind
			read(path, n)
		}
	}
	d.mapping(table{
		"float":   of(space.Float, d.bounds(p)),
		"int":     of(space.Int, d.bounds(p)),
		"choices": of(space.Categorical, d.choices(p)),
		"json":    of(space.JSON, d.jsonChoices(p)),
		"bool": of(space.Bool, func(path string, n ast.Node) {
			if _, empty := n.(*ast.NullNode); !empty {
				d.fail(n, "%s takes no value; write {bool: , when: …}", path)
			}
		}),
		"log":  read(d, &p.Log, boolean),
		"step": read(d, &p.Step, number(-math.MaxFloat64, math.MaxFloat64)),
		"when": d.text(&p.When),
	})(path, n)
	switch {
	case kinds == 0:
		d.failAtKey(path, "%s has no values; %s", path, forms)
	case kinds > 1:
		d.failAtKey(path, "%s has more than one of float, int, choices, json and bool; keep one", path)
	}
}

// bounds reads a range: a list of the smallest and the largest value.
func (d *decoder) bounds(p *space.Parameter) reader {
	return func(path string, n ast.Node) {
		values := d.list(path, n)
		if _, isList := n.(*ast.SequenceNode); isList && len(values) != 2 {
			d.fail(n, "%s is not a range; write two numbers, such as [16, 1024]", path)
			return
		}
		for i, to := range []*float64{&p.Min, &p.Max} {
			if i < len(values) {
				read(d, to, number(-math.MaxFloat64, math.MaxFloat64))(itemPath(path, i), values[i])
			}
		}
	}
}

// choices reads the values of a flag as texts, because vLLM gets them as texts.
func (d *decoder) choices(p *space.Parameter) reader {
	if space.IsVariable(p.Name) {
		return d.variableChoices(p)
	}
	return func(path string, n ast.Node) {
		d.texts(&p.Choices)(path, n)
		if slices.Contains(p.Choices, "true") && slices.Contains(p.Choices, "false") {
			d.fail(n, "%s: a vLLM switch takes no value; write bool, which gives --name or --no-name", path)
		}
	}
}

// jsonChoices reads a list of JSON texts. It converts a YAML mapping or list to JSON.
func (d *decoder) jsonChoices(p *space.Parameter) reader {
	return func(path string, n ast.Node) {
		for i, v := range d.list(path, n) {
			if text, ok := scalarText(v); ok {
				p.Choices = append(p.Choices, text)
				continue
			}
			text, _ := json.Marshal(d.jsonValue(itemPath(path, i), v)) // no error: jsonValue returns only values that JSON has
			p.Choices = append(p.Choices, string(text))
		}
	}
}

// describe returns a short text for World. It changes whenever the parameter changes.
func describe(p space.Parameter) string {
	text := string(p.Kind)
	switch p.Kind {
	case space.Float, space.Int:
		text += fmt.Sprintf(" %g to %g", p.Min, p.Max)
		if p.Step > 0 {
			text += fmt.Sprintf(" in steps of %g", p.Step)
		}
		if p.Log {
			text += ", logarithmic"
		}
	case space.Categorical, space.JSON:
		text += " " + strings.Join(p.Choices, ", ")
	}
	if p.When != "" {
		text += ", when " + p.When
	}
	return text
}
