package sim

import (
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
	to         any // the field of the Profile: *float64 or *[]float64
	min, max   float64
	optional   bool // 0 when the file lacks it
}

// No real server is beyond these limits. They catch MiB written for GiB, and s for ms.
const (
	maxGiB = 4096
	maxMS  = 60_000
)

// entries returns the constants of a profile in the order in which Text writes them.
func (p *Profile) entries() []entry {
	m, s, d, n, t := &p.Memory, &p.Step, &p.Speculation, &p.Noise, &p.StartUp
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
	}
}

// Value returns the field of a constant that is one number; nil when there is none with that path.
func (p *Profile) Value(path string) *float64 {
	for _, f := range p.entries() {
		if v, ok := f.to.(*float64); ok && f.path == path {
			return v
		}
	}
	return nil
}

// Set changes the values of a constant and their origin. It returns false for an unknown constant and for a wrong
// number of values. Copies of the profile do not change.
func (p *Profile) Set(path string, values []float64, confidence, source string) bool {
	i := slices.IndexFunc(p.entries(), func(f entry) bool { return f.path == path })
	if i < 0 {
		return false
	}
	f := p.entries()[i]
	switch to := f.to.(type) {
	case *[]float64:
		*to = slices.Clone(values)
	case *float64:
		if len(values) != 1 {
			return false
		}
		*to = values[0]
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

// A profileReader reads a profile's file and collects all errors in it.
type profileReader struct {
	file  string
	nodes map[string]ast.Node // nodes of the file by their path
	errs  []error
}

// ParseProfile reads a profile. Its error joins all mistakes in the file, each with its line. The messages call the
// file by the name file.
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
		return nil, fmt.Errorf("%s: the file holds %d YAML documents; a profile is one", file, len(tree.Docs))
	}
	root := tree.Docs[0].Body
	r.collect("", root)
	p := &Profile{Name: strings.TrimSuffix(strings.TrimPrefix(file, "profiles/"), ".yaml")}
	if IsProfileFile(file) && !strings.HasPrefix(file, "profiles/") {
		p.Name = file
	}
	p.Model, p.About = r.text("model.name"), r.text("about")
	for _, f := range p.entries() {
		r.constant(p, f, root)
	}
	r.defaults(&p.Defaults, root)
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

// constant reads one constant with its unit, source and confidence.
func (r *profileReader) constant(p *Profile, f entry, root ast.Node) {
	at, ok := r.nodes[f.path]
	if !ok {
		if !f.optional {
			r.missing(f, root)
		}
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
	switch to := f.to.(type) {
	case *[]float64:
		*to = c.Values
	case *float64:
		if len(c.Values) == 1 {
			*to = c.Values[0]
		}
	}
}

// missing reports a missing constant, at its section if the file has that.
func (r *profileReader) missing(f entry, root ast.Node) {
	section, name, _ := strings.Cut(f.path, ".")
	at, ok := r.nodes[section]
	if !ok {
		at = root
	}
	r.fail(at, "%s is missing; add %s: {value: …, unit: %s, source: \"…\", confidence: …} under %s", f.path, name, f.unit, section)
}

// numbers reads the value of a constant: one number, or a list where the constant may have several.
func (r *profileReader) numbers(f entry, n ast.Node) []float64 {
	values := []ast.Node{n}
	if list, ok := n.(*ast.SequenceNode); ok {
		if _, several := f.to.(*[]float64); !several {
			r.fail(n, "%s is a list, want one number", f.path)
			return nil
		}
		values = list.Values
	}
	var numbers []float64
	for _, n := range values {
		v, err := strconv.ParseFloat(n.String(), 64)
		switch {
		case err != nil || math.IsNaN(v) || math.IsInf(v, 0):
			r.fail(n, "%s: %q is not a number", f.path, n.String())
		case v < f.min:
			r.fail(n, "%s is %g, want at least %g", f.path, v, f.min)
		case v > f.max:
			r.fail(n, "%s is %g, want at most %g %s", f.path, v, f.max, f.unit)
		}
		numbers = append(numbers, v)
	}
	return numbers
}

// maxDefault is larger than the context of any model.
const maxDefault = 100_000_000

// defaultFlags are the flags whose defaults a profile sets.
func defaultFlags(o *Options) map[string]any {
	return map[string]any{
		"gpu_memory_utilization": &o.GPUMemoryUtilization, "max_num_seqs": &o.MaxNumSeqs,
		"max_num_batched_tokens": &o.MaxNumBatchedTokens, "max_model_len": &o.MaxModelLen,
	}
}

// defaults reads the values that flags have when the command line does not set them.
func (r *profileReader) defaults(o *Options, root ast.Node) {
	flags := defaultFlags(o)
	for _, name := range []string{"gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len"} {
		n, ok := r.nodes["defaults."+name]
		if !ok {
			r.fail(root, "defaults.%s is missing; add it under defaults", name)
			continue
		}
		var err error
		switch to := flags[name].(type) {
		case *float64:
			*to, err = strconv.ParseFloat(n.String(), 64)
		case *int:
			*to, err = strconv.Atoi(n.String())
		}
		if err != nil {
			r.fail(n, "defaults.%s: %q is not a number of that kind", name, n.String())
		} else if to, ok := flags[name].(*int); ok && *to > maxDefault {
			r.fail(n, "defaults.%s is %d, want at most %d", name, *to, maxDefault)
		}
	}
	if len(r.errs) == 0 {
		if err := o.check(); err != nil {
			r.fail(r.nodes["defaults"], "defaults: %v", err)
		}
	}
}

// checkTogether finds constants that contradict each other.
func (r *profileReader) checkTogether(p *Profile, root ast.Node) {
	at := func(path string) ast.Node {
		if n, ok := r.nodes[path]; ok {
			return n
		}
		return root
	}
	switch n := p.Noise; {
	case n.Stall > 0 && n.StallGap == 0:
		r.fail(at("noise.stall"), "noise.stall gives the length of a stall, but nothing gives how often one comes; add noise.stall_gap")
	case n.StallGap > 0 && n.Stall == 0:
		r.fail(at("noise.stall_gap"), "noise.stall_gap gives how often a stall comes, but nothing gives its length; add noise.stall")
	}
	if p.Model == "" {
		r.fail(root, "model.name is missing; add name under model")
	}
	if r.nodes["step.fixed"] != nil && r.nodes["step.weights"] != nil && p.Step.Fixed+p.Step.Weights == 0 {
		r.fail(at("step"), "step.fixed and step.weights are both 0: a step would take no time")
	}
}

// unknown reports the keys that a profile does not have.
func (r *profileReader) unknown(p *Profile) {
	known := []string{"about", "model", "model.name", "defaults"}
	for name := range defaultFlags(&Options{}) {
		known = append(known, "defaults."+name)
	}
	for _, f := range p.entries() {
		section, _, _ := strings.Cut(f.path, ".")
		known = append(known, section, f.path)
		for _, part := range []string{".value", ".unit", ".source", ".confidence"} {
			known = append(known, f.path+part)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(r.nodes)) {
		if !slices.Contains(known, path) {
			r.fail(r.nodes[path], "unknown key %s; %s", path, space.DidYouMean(path, known))
		}
	}
}

// Text returns the profile as a file for ParseProfile.
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

// value returns the value with all its digits.
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
