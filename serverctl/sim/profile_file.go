package sim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	yamlparser "github.com/goccy/go-yaml/parser"

	"vllmtuner/tuner/space"
)

// An entry describes one constant in a profile's file.
type entry struct {
	path, unit string
	to         any // pointer to the field of the Profile: *float64, *int or *[]float64
	min, max   float64
	optional   bool // the file may leave the constant out; its value is then 0
}

// isDefault reports whether the entry is the default of a flag. A default is a bare number without an origin.
func (f entry) isDefault() bool { return f.unit == "" }

// No real server is beyond these limits. The limits catch a value in the wrong unit, such as MiB where GiB is meant.
const (
	maxGiB     = 4096
	maxMS      = 60_000
	maxDefault = 100_000_000 // tokens; larger than the context of any model
)

// entries returns the constants of a profile in the order in which the method Text writes them.
func (p *Profile) entries() []entry {
	m, s, d, n, t, o := &p.Memory, &p.Step, &p.Speculation, &p.Noise, &p.StartUp, &p.Defaults
	return []entry{
		{path: "memory.gpu", unit: "GiB", to: &m.GPUGiB, max: maxGiB},
		{path: "memory.fixed", unit: "GiB", to: &m.FixedGiB, max: maxGiB},
		{path: "memory.kv_per_token", unit: "B/token", to: &m.KVBytesPerToken, min: 1, max: 1e9},
		{path: "memory.batch_per_token", unit: "B/token", to: &m.BatchBytesPerToken, max: 1e9},
		{path: "memory.sampler_per_sequence", unit: "B/sequence", to: &m.SamplerBytesPerSeq, max: 1e12},
		{path: "memory.activation", unit: "GiB", to: &m.ActivationGiB, max: maxGiB},
		{path: "memory.activation_exponent", unit: "1", to: &m.ActivationExponent, max: 64},
		{path: "memory.graph_reserve", unit: "GiB", to: &m.GraphReserveGiB, max: maxGiB},
		{path: "step.fixed", unit: "ms", to: &s.Fixed, max: maxMS},
		{path: "step.weights", unit: "ms", to: &s.Weights, max: maxMS},
		{path: "step.per_token", unit: "ms/token", to: &s.PerToken, max: maxMS},
		{path: "step.roofline_exponent", unit: "1", to: &s.RooflineExponent, min: 1, max: 64},
		{path: "step.per_sequence", unit: "ms/sequence", to: &s.PerSequence, max: maxMS},
		{path: "step.per_kv_token", unit: "ms/token", to: &s.PerKVToken, max: maxMS},
		{path: "step.per_attention_pair", unit: "ms/token²", to: &s.PerAttentionPair, max: 1},
		{path: "step.prefill_extra", unit: "ms", to: &s.PrefillExtra, max: maxMS},
		{path: "step.eager_extra", unit: "ms", to: &s.EagerExtra, optional: true, max: maxMS},
		{path: "step.graph_padding", unit: "1", to: &s.GraphPadding, optional: true, max: 1},
		{path: "latency.before_scheduling", unit: "ms", to: &p.Latency.BeforeScheduling, max: maxMS},
		{path: "latency.after_step", unit: "ms", to: &p.Latency.AfterStep, max: maxMS},
		{path: "speculation.drafter", unit: "GiB", to: &d.DrafterGiB, optional: true, max: maxGiB},
		{path: "speculation.per_draft_token", unit: "ms/token", to: &d.PerDraftToken, optional: true, max: maxMS},
		{path: "speculation.per_draft_token_and_sequence", unit: "ms/token", to: &d.PerDraftTokenAndSequence, optional: true, max: maxMS},
		{path: "speculation.per_verified_token", unit: "ms/token", to: &d.PerVerifiedToken, optional: true, max: maxMS},
		{path: "speculation.acceptance", unit: "1", to: &d.Acceptance, optional: true, max: 1},
		{path: "speculation.lookup_acceptance", unit: "1", to: &d.LookupAcceptance, optional: true, max: 1},
		{path: "noise.relative", unit: "1", to: &n.Relative, optional: true, max: 0.15},
		{path: "noise.jitter", unit: "ms", to: &n.Jitter, optional: true, max: maxMS},
		{path: "noise.stall", unit: "ms", to: &n.Stall, optional: true, max: maxMS},
		{path: "noise.stall_gap", unit: "s", to: &n.StallGap, optional: true, max: 86400},
		{path: "start_up.weights", unit: "s", to: &t.Weights, max: 86400},
		{path: "start_up.profile", unit: "s", to: &t.Profile, max: 86400},
		{path: "start_up.compile", unit: "s", to: &t.Compile, max: 86400},
		{path: "start_up.graphs", unit: "s", to: &t.Graphs, max: 86400},
		{path: "stop.time", unit: "s", to: &p.Stop, max: 86400},
		{path: "model.vocabulary", unit: "tokens", to: &p.Vocabulary, min: 1, max: 1e8},
		{path: "defaults.gpu_memory_utilization", to: &o.GPUMemoryUtilization, max: 1},
		{path: "defaults.max_num_seqs", to: &o.MaxNumSeqs, min: 1, max: maxDefault},
		{path: "defaults.max_num_batched_tokens", to: &o.MaxNumBatchedTokens, min: 1, max: maxDefault},
		{path: "defaults.max_model_len", to: &o.MaxModelLen, min: 1, max: maxDefault},
	}
}

// Value returns a pointer to the value of the constant with the given path. It returns nil if no constant has that
// path, or if the constant is not a single float64.
func (p *Profile) Value(path string) *float64 {
	for _, f := range p.entries() {
		if v, ok := f.to.(*float64); ok && f.path == path {
			return v
		}
	}
	return nil
}

// store sets the field of the entry. It returns false for a wrong number of values.
func (f entry) store(values []float64) bool {
	if to, ok := f.to.(*[]float64); ok {
		*to = slices.Clone(values)
		return true
	}
	if len(values) != 1 {
		return false
	}
	switch to := f.to.(type) {
	case *float64:
		*to = values[0]
	case *int:
		*to = int(values[0])
	}
	return true
}

// Set changes the values of a constant and their origin. It returns false for an unknown constant and for a wrong
// number of values. Copies of the profile do not change.
func (p *Profile) Set(path string, values []float64, confidence, source string) bool {
	i := slices.IndexFunc(p.entries(), func(f entry) bool { return f.path == path })
	if i < 0 {
		return false
	}
	f := p.entries()[i]
	if !f.store(values) {
		return false
	}
	c := Constant{Path: path, Unit: f.unit, Values: slices.Clone(values), Source: source, Confidence: confidence}
	p.Constants = slices.Clone(p.Constants)
	if i := slices.IndexFunc(p.Constants, func(c Constant) bool { return c.Path == path }); i >= 0 {
		p.Constants[i] = c
	} else {
		p.Constants = append(p.Constants, c)
	}
	return true
}

// A profileReader reads a profile's file, and collects all mistakes in it.
type profileReader struct {
	file  string
	nodes map[string]ast.Node // nodes of the file by their path
	errs  []error
}

// ParseProfile reads a profile. Its error joins all mistakes in the file. Each mistake has its line, and the parameter
// file as the file's name.
func ParseProfile(file string, text []byte) (*Profile, error) {
	tree, err := yamlparser.ParseBytes(text, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", file, strings.TrimSpace(yaml.FormatError(err, false, false)))
	}
	r := &profileReader{file: file, nodes: map[string]ast.Node{}}
	if len(tree.Docs) == 0 || tree.Docs[0].Body == nil {
		return nil, fmt.Errorf("%s: the file is empty; copy a built-in profile and change it", file)
	}
	if len(tree.Docs) > 1 {
		return nil, fmt.Errorf("%s: the file holds %d YAML documents; a profile must be a single document", file, len(tree.Docs))
	}
	root := tree.Docs[0].Body
	r.collect("", root)
	p := &Profile{Name: strings.TrimSuffix(strings.TrimPrefix(file, "profiles/"), ".yaml")}
	if IsProfileFile(file) && !strings.HasPrefix(file, "profiles/") {
		p.Name = file
	}
	p.Model, p.About = r.text("model.name"), r.text("about")
	for _, f := range p.entries() {
		r.entry(p, f, root)
	}
	r.checkTogether(p, root)
	r.unknown(p)
	if len(r.errs) > 0 {
		return nil, errors.Join(r.errs...)
	}
	return p, nil
}

func (r *profileReader) fail(at ast.Node, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("%s:%d: %s", r.file, at.GetToken().Position.Line, fmt.Sprintf(format, args...)))
}

// collect stores the nodes of a mapping by their paths.
func (r *profileReader) collect(path string, n ast.Node) {
	if m, ok := n.(ast.MapNode); ok {
		for i := m.MapRange(); i.Next(); {
			key := strings.TrimPrefix(path+"."+i.Key().String(), ".")
			r.nodes[key] = i.Value()
			r.collect(key, i.Value())
		}
	}
}

func (r *profileReader) text(path string) string {
	if s, ok := r.nodes[path].(ast.ScalarNode); ok {
		return fmt.Sprint(s.GetValue())
	}
	return ""
}

// entry reads a constant with its origin, or the default of a flag.
func (r *profileReader) entry(p *Profile, f entry, root ast.Node) {
	at, ok := r.nodes[f.path]
	switch {
	case !ok && f.optional:
		return
	case !ok:
		r.missing(f, root)
		return
	case f.isDefault():
		f.store(r.numbers(f, at))
		return
	}
	value, ok := r.nodes[f.path+".value"]
	if !ok {
		r.fail(at, "%s has no value; write {value: 1.5, unit: %s, source: \"…\", confidence: measured}", f.path, f.unit)
		return
	}
	c := Constant{Path: f.path, Unit: r.text(f.path + ".unit"), Source: r.text(f.path + ".source"), Confidence: r.text(f.path + ".confidence")}
	if c.Unit != f.unit {
		r.fail(at, "%s has the unit %q, want %q", f.path, c.Unit, f.unit)
	}
	if !slices.Contains(confidences, c.Confidence) {
		r.fail(at, "%s has the confidence %q; write one of %s", f.path, c.Confidence, strings.Join(confidences, ", "))
	}
	if c.Source == "" {
		r.fail(at, "%s has no source; say where the value comes from", f.path)
	}
	c.Values = r.numbers(f, value)
	p.Constants = append(p.Constants, c)
	f.store(c.Values)
}

// missing reports a missing entry. The message gives the line of the entry's section, if the file has that section.
func (r *profileReader) missing(f entry, root ast.Node) {
	section, name, _ := strings.Cut(f.path, ".")
	value := "…"
	if !f.isDefault() {
		value = fmt.Sprintf(`{value: …, unit: %s, source: "…", confidence: …}`, f.unit)
	}
	r.fail(cmp.Or(r.nodes[section], root), "%s is missing; add %s: %s under %s", f.path, name, value, section)
}

// numbers reads the value of an entry: one number, or a list where the entry may have several.
func (r *profileReader) numbers(f entry, n ast.Node) []float64 {
	values := []ast.Node{n}
	if list, ok := n.(*ast.SequenceNode); ok {
		if _, several := f.to.(*[]float64); !several {
			r.fail(n, "%s is a list, want one number", f.path)
			return nil
		}
		values = list.Values
	}
	_, isWhole := f.to.(*int)
	var numbers []float64
	for _, n := range values {
		v, err := strconv.ParseFloat(n.String(), 64)
		switch {
		case err != nil || math.IsNaN(v) || math.IsInf(v, 0):
			r.fail(n, "%s: %q is not a number", f.path, n.String())
		case isWhole && v != math.Trunc(v):
			r.fail(n, "%s is %s, want a whole number", f.path, n.String())
		case v < f.min:
			r.fail(n, "%s is %s, want at least %g", f.path, n.String(), f.min)
		case v > f.max:
			r.fail(n, "%s is %s, want at most %s", f.path, n.String(), strings.TrimSpace(strconv.FormatFloat(f.max, 'f', -1, 64)+" "+f.unit))
		}
		numbers = append(numbers, v)
	}
	return numbers
}

// checkTogether finds constants that contradict each other.
func (r *profileReader) checkTogether(p *Profile, root ast.Node) {
	at := func(path string) ast.Node { return cmp.Or(r.nodes[path], root) }
	switch n := p.Noise; {
	case n.Stall > 0 && n.StallGap == 0:
		r.fail(at("noise.stall"), "noise.stall is the length of a stall, but the time between stalls is missing; add noise.stall_gap")
	case n.StallGap > 0 && n.Stall == 0:
		r.fail(at("noise.stall_gap"), "noise.stall_gap is the time between stalls, but the length of a stall is missing; add noise.stall")
	}
	if p.Model == "" {
		r.fail(root, "model.name is missing; add name under model")
	}
	if err := p.Defaults.check(); err != nil && len(r.errs) == 0 {
		r.fail(r.nodes["defaults"], "defaults: %v", err)
	}
	if r.nodes["step.fixed"] != nil && r.nodes["step.weights"] != nil && p.Step.Fixed+p.Step.Weights == 0 {
		r.fail(at("step"), "step.fixed and step.weights are both 0: a step would take no time")
	}
}

// unknown reports the keys in the file that no profile has.
func (r *profileReader) unknown(p *Profile) {
	known := []string{"about", "model", "model.name"}
	for _, f := range p.entries() {
		section, _, _ := strings.Cut(f.path, ".")
		known = append(known, section, f.path)
		if !f.isDefault() {
			known = append(known, f.path+".value", f.path+".unit", f.path+".source", f.path+".confidence")
		}
	}
	for _, path := range slices.Sorted(maps.Keys(r.nodes)) {
		if !slices.Contains(known, path) {
			r.fail(r.nodes[path], "unknown key %s; %s", path, space.DidYouMean(path, known))
		}
	}
}

// Text returns the text of a file that ParseProfile reads as this profile.
func (p *Profile) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "about: %s\n", strconv.Quote(p.About))
	origin := map[string]Constant{}
	for _, c := range p.Constants {
		origin[c.Path] = c
	}
	section := ""
	for _, f := range p.entries() {
		c, ok := origin[f.path]
		if !ok {
			continue
		}
		in, name, _ := strings.Cut(f.path, ".")
		if in != section {
			section = in
			fmt.Fprintf(&b, "%s:\n", section)
			if section == "model" {
				fmt.Fprintf(&b, "  name: %s\n", strconv.Quote(p.Model))
			}
		}
		fmt.Fprintf(&b, "  %s: {value: %s, unit: %s, confidence: %s, source: %s}\n",
			name, f.value(), strconv.Quote(f.unit), c.Confidence, strconv.Quote(c.Source))
	}
	o := p.Defaults
	fmt.Fprintf(&b, "defaults: {gpu_memory_utilization: %g, max_num_seqs: %d, max_num_batched_tokens: %d, max_model_len: %d}\n",
		o.GPUMemoryUtilization, o.MaxNumSeqs, o.MaxNumBatchedTokens, o.MaxModelLen)
	return b.String()
}

// value returns the entry's value as text, with all its digits.
func (f entry) value() string {
	write := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	switch v := f.to.(type) {
	case *float64:
		return write(*v)
	case *[]float64:
		texts := make([]string, len(*v))
		for i, x := range *v {
			texts[i] = write(x)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	}
	return ""
}
