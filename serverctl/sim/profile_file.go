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

// An entry is a constant of a profile as its file has it.
type entry struct {
	path, unit string
	to         any     // *float64 or *[]float64
	least      float64 // that it may be
	most       float64 // likewise
	optional   bool    // 0 when it is not there
}

// Nobody's server is beyond these, but whoever writes MiB for GiB or s for ms is.
const (
	mostGiB = 4096
	mostMS  = 60_000
)

// entries are the constants of a profile in the order in which a file is written.
func (p *Profile) entries() []entry {
	m, s, d, n, t := &p.Memory, &p.Step, &p.Speculation, &p.Noise, &p.StartUp
	return []entry{
		{path: "memory.gpu", unit: "GiB", to: &m.GPUGiB, most: mostGiB},
		{path: "memory.fixed", unit: "GiB", to: &m.FixedGiB, most: mostGiB},
		{path: "memory.kv_per_token", unit: "B/token", to: &m.KVBytesPerToken, least: 1, most: 1e9},
		{path: "memory.batch_per_token", unit: "B/token", to: &m.BatchBytesPerToken, most: 1e9},
		{path: "memory.sampler_per_sequence", unit: "B/sequence", to: &m.SamplerBytesPerSeq, most: 1e12},
		{path: "memory.activation", unit: "GiB", to: &m.ActivationGiB, most: mostGiB},
		{path: "memory.activation_exponent", unit: "1", to: &m.ActivationExponent, most: 64},
		{path: "memory.graph_reserve", unit: "GiB", to: &m.GraphReserveGiB, most: mostGiB},
		{path: "step.fixed", unit: "ms", to: &s.Fixed, most: mostMS},
		{path: "step.weights", unit: "ms", to: &s.Weights, most: mostMS},
		{path: "step.per_token", unit: "ms/token", to: &s.PerToken, most: mostMS},
		{path: "step.roofline_exponent", unit: "1", to: &s.RooflineExponent, least: 1, most: 64},
		{path: "step.per_sequence", unit: "ms/sequence", to: &s.PerSequence, most: mostMS},
		{path: "step.per_kv_token", unit: "ms/token", to: &s.PerKVToken, most: mostMS},
		{path: "step.per_attention_pair", unit: "ms/token²", to: &s.PerAttentionPair, most: 1},
		{path: "step.prefill_extra", unit: "ms", to: &s.PrefillExtra, most: mostMS},
		{path: "step.eager_extra", unit: "ms", to: &s.EagerExtra, optional: true, most: mostMS},
		{path: "step.graph_padding", unit: "1", to: &s.GraphPadding, optional: true, most: 1},
		{path: "latency.before_scheduling", unit: "ms", to: &p.Latency.BeforeScheduling, most: mostMS},
		{path: "latency.after_step", unit: "ms", to: &p.Latency.AfterStep, most: mostMS},
		{path: "speculation.drafter", unit: "GiB", to: &d.DrafterGiB, optional: true, most: mostGiB},
		{path: "speculation.per_draft_token", unit: "ms/token", to: &d.PerDraftToken, optional: true, most: mostMS},
		{path: "speculation.per_draft_token_and_sequence", unit: "ms/token", to: &d.PerDraftTokenAndSequence, optional: true, most: mostMS},
		{path: "speculation.per_verified_token", unit: "ms/token", to: &d.PerVerifiedToken, optional: true, most: mostMS},
		{path: "speculation.acceptance", unit: "1", to: &d.Acceptance, optional: true, most: 1},
		{path: "speculation.lookup_acceptance", unit: "1", to: &d.LookupAcceptance, optional: true, most: 1},
		{path: "noise.relative", unit: "1", to: &n.Relative, optional: true, most: 0.15},
		{path: "noise.jitter", unit: "ms", to: &n.Jitter, optional: true, most: mostMS},
		{path: "noise.stall", unit: "ms", to: &n.Stall, optional: true, most: mostMS},
		{path: "noise.stall_gap", unit: "s", to: &n.StallGap, optional: true, most: 86400},
		{path: "start_up.weights", unit: "s", to: &t.Weights, most: 86400},
		{path: "start_up.profile", unit: "s", to: &t.Profile, most: 86400},
		{path: "start_up.compile", unit: "s", to: &t.Compile, most: 86400},
		{path: "start_up.graphs", unit: "s", to: &t.Graphs, most: 86400},
		{path: "stop.time", unit: "s", to: &p.Stop, most: 86400},
		{path: "model.vocabulary", unit: "tokens", to: &p.Vocabulary, least: 1, most: 1e8},
	}
}

// Value returns where the profile keeps a constant of one number, or nil when it has no such constant.
func (p *Profile) Value(path string) *float64 {
	for _, f := range p.entries() {
		if v, ok := f.to.(*float64); ok && f.path == path {
			return v
		}
	}
	return nil
}

// Set gives a constant its numbers, one but for acceptance, and their origin. It reports whether there is such a constant. A
// copy of the profile is not changed with it.
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
	if at := slices.IndexFunc(p.Constants, func(c Constant) bool { return c.Path == path }); at >= 0 {
		p.Constants[at] = c
	} else {
		p.Constants = append(p.Constants, c)
	}
	return true
}

// A profileReader collects what is wrong with a profile's file.
type profileReader struct {
	file  string
	nodes map[string]ast.Node // by path
	errs  []error
}

// ParseProfile reads a profile. file is its name in errors, which name the line and are told all at once.
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
	r.together(p, root)
	r.unknown(p)
	if len(r.errs) > 0 {
		return nil, errors.Join(r.errs...)
	}
	return p, nil
}

func (r *profileReader) fail(at ast.Node, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("%s:%d: %s", r.file, at.GetToken().Position.Line, fmt.Sprintf(format, args...)))
}

// collect notes the nodes of a mapping by their paths.
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

// constant reads one constant with its unit, its source and its confidence.
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
		r.fail(at, "%s is in %q, want it in %s", f.path, c.Unit, f.unit)
	}
	if !slices.Contains(Confidences, c.Confidence) {
		r.fail(at, "%s has the confidence %q; write one of %s", f.path, c.Confidence, strings.Join(Confidences, ", "))
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

// missing says where a constant should stand: in its section, if that is there.
func (r *profileReader) missing(f entry, root ast.Node) {
	section, name, _ := strings.Cut(f.path, ".")
	at, ok := r.nodes[section]
	if !ok {
		at = root
	}
	r.fail(at, "%s is missing; add %s: {value: …, unit: %s, source: \"…\", confidence: …} under %s", f.path, name, f.unit, section)
}

// numbers reads the value of a constant, several where it may have several.
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
			r.fail(n, "%s: %q is no number", f.path, n.String())
		case v < f.least:
			r.fail(n, "%s is %g, want at least %g", f.path, v, f.least)
		case v > f.most:
			r.fail(n, "%s is %g, want at most %g %s", f.path, v, f.most, f.unit)
		}
		numbers = append(numbers, v)
	}
	return numbers
}

// mostDefault is beyond every model's context.
const mostDefault = 100_000_000

// defaultFlags are the flags whose defaults a profile has.
func defaultFlags(o *Options) map[string]any {
	return map[string]any{
		"gpu_memory_utilization": &o.GPUMemoryUtilization, "max_num_seqs": &o.MaxNumSeqs,
		"max_num_batched_tokens": &o.MaxNumBatchedTokens, "max_model_len": &o.MaxModelLen,
	}
}

// defaults reads the flags that a server has when nothing is said.
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
			r.fail(n, "defaults.%s: %q is no such number", name, n.String())
		} else if to, ok := flags[name].(*int); ok && *to > mostDefault {
			r.fail(n, "defaults.%s is %d, want at most %d", name, *to, mostDefault)
		}
	}
	if len(r.errs) == 0 {
		if err := o.check(); err != nil {
			r.fail(r.nodes["defaults"], "defaults: %v", err)
		}
	}
}

// together finds what makes no sense beside something else.
func (r *profileReader) together(p *Profile, root ast.Node) {
	at := func(path string) ast.Node {
		if n, ok := r.nodes[path]; ok {
			return n
		}
		return root
	}
	switch n := p.Noise; {
	case n.Stall > 0 && n.StallGap == 0:
		r.fail(at("noise.stall"), "noise.stall says how long a stall is, and nothing how often one comes; add noise.stall_gap")
	case n.StallGap > 0 && n.Stall == 0:
		r.fail(at("noise.stall_gap"), "noise.stall_gap says how often a stall comes, and nothing how long it is; add noise.stall")
	}
	if p.Model == "" {
		r.fail(root, "model.name is missing; add name under model")
	}
	if r.nodes["step.fixed"] != nil && r.nodes["step.weights"] != nil && p.Step.Fixed+p.Step.Weights == 0 {
		r.fail(at("step"), "step.fixed and step.weights are both 0: a step would take no time")
	}
}

// unknown names the keys that mean nothing.
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

// Text returns the profile as a file that ParseProfile reads.
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

// value writes the value with all its digits.
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
