package studyfile

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// check adds what is wrong between the settings.
func (d *decoder) check(f *File) {
	d.checkNames(f)
	d.checkServer(f)
	d.checkLimits(f)
	d.checkWorkload(f)
	d.checkLoad(f)
	d.checkProbe(f)
	d.checkArgs(f)
	d.checkQuality(f)
	d.checkSpeculation(f)
	d.checkSweepSpeculation(f)
	d.checkSweep(f)
	d.checkSpace(f)
	d.readDynamo(f)
}

func (d *decoder) checkNames(f *File) {
	if f.Name != "" {
		if err := studies.ValidName(f.Name); err != nil {
			d.failAt("name", "%v", err)
		}
	}
	if strings.HasPrefix(f.Model, "-") || strings.ContainsAny(f.Model, " \t\n") {
		d.failAt("model", "model %q is no Hugging Face id and no path; write one such as nvidia/Llama-3.3-70B-Instruct-FP8", f.Model)
	}
}

func (d *decoder) checkServer(f *File) {
	s := &f.Server
	command, simulate := d.nodes["server.command"] != nil, d.nodes["server.simulate"] != nil
	switch {
	case d.nodes["server"] == nil:
	case command && simulate:
		d.failAtKey("server.simulate", "server has a command and simulate; keep one of them")
	case !command && !simulate:
		d.failAt("server", "server has no command; add command: [vllm, serve], or simulate: %s", strings.Join(sim.ProfileNames(), " or "))
	case command && (len(s.Command) == 0 || s.Command[0] == ""):
		d.failAt("server.command", "server.command is empty; write [vllm, serve]")
	case simulate && s.Simulate != "" && !sim.IsProfileFile(s.Simulate) && !slices.Contains(sim.ProfileNames(), s.Simulate):
		d.failAt("server.simulate", "there is no simulated server %q; %s", s.Simulate, space.DidYouMean(s.Simulate, sim.ProfileNames()))
	case simulate && sim.IsProfileFile(s.Simulate) && !filepath.IsAbs(s.Simulate):
		s.Simulate = filepath.Join(filepath.Dir(f.Path), s.Simulate)
	}
}

// checkLimits finds promises of which one can never bind: of the same metric, a higher percentile is never smaller.
func (d *decoder) checkLimits(f *File) {
	tried := func(path string) bool { return strings.HasPrefix(path, "slo.") && path != "slo.error_rate" }
	if m, ok := d.nodes["slo"].(*ast.MappingNode); ok && !slices.ContainsFunc(sortedKeys(d.keys), tried) {
		d.fail(m, "slo promises no latency; add one such as ttft_p99: 1000ms")
	}
	for _, high := range f.Limits {
		for _, low := range f.Limits {
			if high.Metric == low.Metric && high.Percentile > low.Percentile && high.Max < low.Max {
				d.failAt("limit "+high.String(), "the limit of %s (%s) is below that of %s (%s), which then says nothing; raise the first or remove the second",
					high, high.Max, low, low.Max)
			}
		}
	}
}

func (d *decoder) checkProbe(f *File) {
	p := &f.Probe
	d.checkEnough(f)
	if p.MinRate >= p.MaxRate {
		at := "probe.max_rate"
		if d.nodes[at] == nil {
			at = "probe.min_rate"
		}
		d.failAt(at, "the rates from min_rate %g to max_rate %g are none; raise max_rate", p.MinRate, p.MaxRate)
		return
	}
	if p.StartRate > 0 && (p.StartRate < p.MinRate || p.StartRate > p.MaxRate) {
		d.failAt("probe.start_rate", "start_rate %g is outside min_rate %g to max_rate %g; move it inside, or write 0 to start from the KV cache's size",
			p.StartRate, p.MinRate, p.MaxRate)
	}
	if rate := f.Cache.PrimeRate; rate > p.MaxRate {
		d.failAt("cache.prime_rate", "prime_rate %g is above probe.max_rate %g; lower it", rate, p.MaxRate)
	}
}

// checkEnough finds promises for which a probe has too few requests to tell. What counts is a probe at the lowest rate.
func (d *decoder) checkEnough(f *File) {
	least, limit := f.SLO().MinRequests()
	n := max(f.Probe.MinRequests, int(f.Probe.Window.Seconds()*f.Probe.MinRate))
	if n >= least {
		return
	}
	at := "probe.min_requests"
	if d.nodes[at] == nil {
		at = "limit " + limit.String()
	}
	d.failAt(at, "%s takes %d requests for a verdict, a probe has only %d at low rates; raise probe.min_requests to %d or take a lower percentile",
		limit, least, n, least)
}

// ours are the flags that the tuner gives itself, with where they are set.
var ours = map[string]string{
	"model": "the model is given by the key model; remove it",
	"port":  "the port is given by server.port; remove it",
	"host":  "the tuner listens on the loopback address only; remove it",
	// Their values would be stored with the study.
	"api-key":  "the tuner's own server needs none; remove it",
	"hf-token": "a secret would be stored with the study; set HF_TOKEN under server.env",
}

// checkArgs holds the args of the server against what is searched.
func (d *decoder) checkArgs(f *File) {
	at := func(path string) func(int) string { return func(i int) string { return item(path, i) } }
	d.checkFlags(f, "server.args", at("server.args"), f.Server.Args, true)
	d.checkFlags(f, "server.current", at("server.current"), f.Server.Current, false)
}

// checkFlags holds the flags of one list against our own and, where the list is fixed, against what is searched. at is the
// place in the file of the list's i-th word.
func (d *decoder) checkFlags(f *File, path string, at func(i int) string, args []string, fixed bool) {
	flags, err := space.Flags(args)
	if err != nil {
		d.failAt(at(0), "%s: %v", path, err)
		return
	}
	for _, flag := range flags {
		name := flag.Base()
		searched := slices.ContainsFunc(f.Parameters, func(p space.Parameter) bool {
			return p.Name == name || p.Name == space.SpeculativeTokens && name == "speculative-config"
		})
		if remedy := ours[name]; remedy != "" {
			d.failAt(at(flag.Index), "%s has --%s; %s", path, name, remedy)
		} else if fixed && searched {
			d.failAt(at(flag.Index), "--%s is in %s and searched; remove one of them", name, path)
		}
	}
}

// qualityFlags change the answers of the model and not only their speed.
var qualityFlags = []string{"quantization", "kv-cache-dtype", "dtype"}

func (d *decoder) checkQuality(f *File) {
	for _, p := range f.Parameters {
		if slices.Contains(qualityFlags, p.Name) && !f.AllowQualityChange {
			d.failAtKey("parameters."+p.Name, "%s changes the answers and not only their speed; add allow_quality_change: true, or move it to server.args", p.Name)
		}
	}
}

// checkSpeculation refuses to measure speculation where what is accepted means nothing.
func (d *decoder) checkSpeculation(f *File) {
	if f.AllowMeaninglessSpeculation && d.nodes["speculation.min_acceptance"] == nil {
		f.Speculation.MinAcceptance = 0 // what is accepted says nothing either
	}
	at, searched := "parameters."+space.SpeculativeTokens, false
	for _, p := range f.Parameters {
		searched = searched || p.Name == space.SpeculativeTokens
	}
	if !searched && f.Speculative != nil {
		d.failAtKey("speculative_config", "speculative_config has no effect; search num-speculative-tokens: [0, 1, 2, 3] under parameters, or remove it")
	}
	if !searched {
		at = "server.args"
		if _, ok := argOf(f, "speculative-config"); !ok {
			return
		}
	}
	if f.AllowMeaninglessSpeculation {
		return
	}
	format, _ := argOf(f, "load-format")
	d.meaninglessSpeculation(at, format == "dummy", f.Workload.Kind)
}

// argOf returns the value of a flag in the fixed or the current args.
func argOf(f *File, name string) (string, bool) {
	for _, args := range [][]string{f.Server.Args, f.Server.Current} {
		if value, ok := fixed(args)[name]; ok {
			return value, true
		}
	}
	return "", false
}

// checkSpace finds what is wrong with the parameters, their conditions and the constraints, and with the current args.
func (d *decoder) checkSpace(f *File) {
	sound := true
	parameters := slices.Clone(f.Parameters)
	for i, p := range parameters {
		if d.broken(p.Name) {
			// Its name may stand in expressions, where it should not be reported again: choices of several types fit any.
			sound, parameters[i] = false, space.Parameter{Name: p.Name, Kind: space.Categorical, Choices: []string{"0", "auto"}}
		}
	}
	s, err := space.NewWithDefaults(parameters, f.Constraints, f.Speculative, fixed(f.Server.Args))
	for _, e := range each(err) {
		definition, ok := errors.AsType[*space.DefinitionError](e)
		switch {
		case !ok:
			d.failAt("parameters", "%v", e)
		case d.broken(definition.Parameter):
		case definition.Parameter == "":
			d.failAt(item("constraints", definition.Constraint), "constraint: %s", definition.What)
		case definition.When:
			d.failAt("parameters."+definition.Parameter+".when", "%s: when: %s", definition.Parameter, definition.What)
		default:
			d.failAtKey("parameters."+definition.Parameter, "%s: %s", definition.Parameter, definition.What)
		}
	}
	if sound && err == nil {
		d.checkCurrent(f, s)
	}
}

// broken reports whether a parameter could not be read, and it has been said why.
func (d *decoder) broken(parameter string) bool {
	n, given := d.nodes["parameters."+parameter]
	return given && n == nil
}

// checkCurrent reads the current args flag by flag, so that each error has its place.
func (d *decoder) checkCurrent(f *File, s *space.Space) {
	flags, err := space.Flags(f.Server.Current)
	if err != nil {
		return // said by checkArgs
	}
	given := fixed(f.Server.Args)
	for i, flag := range flags {
		end := len(f.Server.Current)
		if i+1 < len(flags) {
			end = flags[i+1].Index
		}
		at := item("server.current", flag.Index)
		if _, twice := given[flag.Name]; twice {
			d.failAt(at, "--%s is in server.args already, which every trial has; remove it here", flag.Name)
		} else if _, err := s.ParseArgs(f.Server.Current[flag.Index:end]); err != nil && ours[flag.Base()] == "" {
			d.failAt(at, "server.current: %v", err)
		}
	}
}

// each returns the errors that were joined.
func each(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	if err == nil {
		return nil
	}
	return []error{err}
}
