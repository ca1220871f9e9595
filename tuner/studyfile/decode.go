package studyfile

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// Parse parses the text of a study file. name is the path of the file. Errors show this path. The path of a dataset is
// relative to the directory of the file. The error is an *Error with every problem.
func Parse(name string, text []byte) (*File, error) {
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // the byte order mark that editors on Windows write
	d := &decoder{
		problems: problems{path: name, lines: strings.Split(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n")},
		nodes:    map[string]ast.Node{}, keys: map[string]ast.Node{},
	}
	f := defaults()
	f.Path, f.Text = name, string(text)
	if root := d.document(text); root != nil {
		known := d.keysOf(f)
		d.mapping(known)("", root)
		d.missing(slices.Sorted(maps.Keys(known)))
		checker{d, f}.check()
	}
	if err := d.err(); err != nil {
		return nil, err
	}
	f.places = d.places()
	return f, nil
}

// places returns the line and column of each key, by the path of the key.
func (d *decoder) places() map[string]string {
	places := make(map[string]string, len(d.keys))
	for path, n := range d.keys {
		line, column := position(n)
		places[path] = fmt.Sprintf("%d:%d", line, column)
	}
	return places
}

// A table maps each known key of a YAML mapping to the reader of its value.
type table map[string]reader

// keysOf returns the table of the top-level keys.
func (d *decoder) keysOf(f *File) table {
	return table{
		"version":                       d.version,
		"name":                          d.text(&f.Name),
		"model":                         d.text(&f.Model),
		"server":                        d.mapping(d.server(&f.Server)),
		"slo":                           d.slo(f),
		"objective":                     oneOf(d, &f.Objective, studies.Objectives...),
		"workload":                      d.mapping(d.workload(&f.Workload)),
		"parameters":                    d.parameters(f),
		"speculative_config":            d.speculative(f),
		"constraints":                   d.texts(&f.Constraints),
		"allow_quality_change":          read(d, &f.AllowQualityChange, boolean),
		"allow_meaningless_speculation": read(d, &f.AllowMeaninglessSpeculation, boolean),
		"probe":                         d.mapping(d.probe(&f.Probe)),
		"sweep":                         d.sweep(f),
		"advice":                        d.mapping(table{"margin": read(d, &f.Advice.Margin, number(0.01, 1))}),
		"load": d.mapping(table{
			"driver":     oneOf(d, &f.Load.Driver, drivers...),
			"command":    d.texts(&f.Load.Command),
			"burstiness": read(d, &f.Load.Burstiness, number(0.01, 1000)),
		}),
		"speculation": d.mapping(table{
			"min_acceptance": read(d, &f.Speculation.MinAcceptance, Fraction),
			"min_drafted":    read(d, &f.Speculation.MinDrafted, integer(1, maxTokens)),
		}),
		"sampler": d.mapping(table{
			"name":    oneOf(d, &f.Sampler.Name, append(slices.Clone(Samplers), Ask)...),
			"seed":    read(d, &f.Sampler.Seed, seed),
			"presets": read(d, &f.Sampler.Presets, boolean),
			"command": d.texts(&f.Sampler.Command),
			"timeout": read(d, &f.Sampler.Timeout, duration(time.Second, "s")),
		}),
		"prior": d.prior(&f.Prior),
		"budget": d.mapping(table{
			"trials":   read(d, &f.Budget.Trials, integer(1, 1_000_000)),
			"gpu_time": read(d, &f.Budget.GPUTime, duration(time.Minute, "h")),
			"min_gain": read(d, &f.Budget.MinGain, Fraction),
			"confirm":  read(d, &f.Budget.Confirm, integer(0, 10)),
		}),
		"cache": d.mapping(table{
			"protocol":   oneOf(d, &f.Cache.Protocol, trial.Steady, trial.Primed, trial.Reset),
			"prime_rate": read(d, &f.Cache.PrimeRate, number(0, maxRate)),
		}),
	}
}

// missing adds a problem for each required key that is not in the file. It ignores a key that seems to be misspelt,
// because that is a problem already.
func (d *decoder) missing(known []string) {
	if len(d.keys) == 0 && len(d.found) > 0 {
		return // the file is not a mapping, and this is already reported
	}
	for _, key := range []struct{ name, example string }{
		{"version", "version: 1"},
		{"name", "name: llama70b"},
		{"model", "model: nvidia/Llama-3.3-70B-Instruct-FP8"},
		{"server", "server: {command: [vllm, serve]}"},
		{"slo", "slo: {ttft_p99: 1000ms, tpot_p99: 60ms}"},
		{"workload", "workload: {kind: production}"},
		{"parameters", "parameters: {max-num-seqs: {int: [16, 1024], log: true}}"},
	} {
		unneeded := key.name == "parameters" && d.nodes["sweep"] != nil
		if d.nodes[key.name] != nil || unneeded {
			continue
		}
		misspelt := slices.ContainsFunc(slices.Sorted(maps.Keys(d.keys)), func(k string) bool {
			return !slices.Contains(known, k) && space.Nearest(k, known) == key.name
		})
		if !misspelt {
			d.failAt("", "key %q is missing; add %s", key.name, key.example)
		}
	}
}

func (d *decoder) version(path string, n ast.Node) {
	if text, ok := d.scalar(path, n); ok && text != strconv.Itoa(Version) {
		d.fail(n, "this tuner does not know version %q; write %d", text, Version)
	}
}

func (d *decoder) server(s *Server) table {
	return table{
		"command":       d.texts(&s.Command),
		"simulate":      d.text(&s.Simulate),
		"args":          d.texts(&s.Args),
		"current":       d.splitCurrent(s),
		"env":           d.env(s),
		"start_timeout": read(d, &s.StartTimeout, duration(time.Second, "s")),
		"stop_timeout":  read(d, &s.StopTimeout, duration(time.Second, "s")),
		"hang_timeout":  read(d, &s.HangTimeout, duration(5*time.Second, "s")),
		"port":          read(d, &s.Port, integer(0, 65535)),

		"gpu":                d.text(&s.GPU),
		"gpu_memory_timeout": read(d, &s.GPUMemoryTimeout, duration(time.Second, "s")),
		"cache_dir":          d.text(&s.CacheDir),
		"model_copy":         d.text(&s.ModelCopy),
	}
}

// prior reads "simulate", "none", or a mapping with the profile to simulate.
func (d *decoder) prior(p *Prior) reader {
	return func(path string, n ast.Node) {
		if _, ok := n.(ast.MapNode); ok {
			p.Simulate, p.Asked = true, true
			d.mapping(table{"simulate": d.text(&p.Profile)})(path, n)
			if p.Profile == "" && len(d.entries(path, n)) == 0 {
				d.fail(n, "prior names no profile; write simulate, none, or {simulate: PROFILE}")
			}
			return
		}
		kind := ""
		oneOf(d, &kind, simulatePrior, noPrior)(path, n)
		p.Simulate, p.Asked = kind != noPrior, kind == simulatePrior
	}
}

func (d *decoder) probe(p *Probe) table {
	return table{
		"seconds":      read(d, &p.Window, seconds),
		"min_requests": read(d, &p.MinRequests, integer(1, maxTokens)),
		"lead_in":      read(d, &p.LeadIn, duration(0, "s")),
		"start_rate":   read(d, &p.StartRate, number(0, maxRate)),
		"min_rate":     read(d, &p.MinRate, number(minRate, maxRate)),
		"max_rate":     read(d, &p.MaxRate, number(minRate, maxRate)),
		"tolerance":    read(d, &p.Tolerance, number(0.001, 10)),
		"max_probes":   read(d, &p.MaxProbes, integer(1, 1000)),
		"worst_case":   read(d, &p.WorstCase, boolean),
		"precision":    read(d, &p.Precision, Fraction),
	}
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// env reads the environment variables. A secret must be a ${NAME} reference, so that neither the file nor the store has
// secrets.
func (d *decoder) env(s *Server) reader {
	return func(path string, n ast.Node) {
		s.Env = map[string]string{}
		for _, e := range d.entries(path, n) {
			at := keyPath(path, e.key)
			value, ok := scalarText(e.value)
			switch {
			case !envName.MatchString(e.key):
				d.fail(e.at, "%s: %q cannot name an environment variable; use letters, digits and _", path, e.key)
				continue
			case !ok:
				d.fail(e.value, "%s is %s; write one value", at, kindOf(e.value))
				continue
			}
			if isSecret(e.key, value) {
				d.failHidden(e.at, "%s looks like a secret, and the file is stored with the study; write \"${%s}\" and set it where the tuner runs", at, e.key)
				continue
			}
			if strings.Contains(reference.ReplaceAllString(value, ""), "${") {
				d.fail(e.value, "%s has a ${ without a name; write ${NAME}", at)
			}
			s.Env[e.key] = value
		}
	}
}

// slo reads the limits on percentiles of latencies, and on the share of failed requests.
func (d *decoder) slo(f *File) reader {
	return func(path string, n ast.Node) {
		for _, e := range d.entries(path, n) {
			at := keyPath(path, e.key)
			if e.key == errorRate {
				read(d, &f.SLO.MaxErrorRate, Fraction)(at, e.value)
				continue
			}
			limit, ok := limitNamed(e.key)
			if !ok {
				d.fail(e.at, "unknown key %q under %s; %s", e.key, path, limitRemedy(e.key))
				continue
			}
			if err := checkPercentile(limit); err != nil {
				d.fail(e.at, "%s: %v", at, err)
				continue
			}
			before := len(d.found)
			read(d, &limit.Max, latency)(at, e.value)
			if len(d.found) > before {
				continue
			}
			if err := addLimit(&f.SLO, limit); err != nil {
				d.fail(e.at, "%v", err)
				continue
			}
			d.nodes["limit "+limit.String()] = e.value
		}
	}
}

// maxTokens is the limit for numbers of tokens and of requests. It is far above any real context, vocabulary or
// dataset.
const maxTokens = 100_000_000

// speculative reads speculative_config, which has the keys of --speculative-config.
func (d *decoder) speculative(f *File) reader {
	return func(path string, n ast.Node) {
		config, ok := d.jsonValue(path, n).(map[string]any)
		if !ok {
			d.fail(n, "%s is %s; write {method: ngram, prompt_lookup_max: 4}", path, kindOf(n))
			return
		}
		f.Speculative = config
	}
}

// minRate and maxRate are in requests per second. A rate outside them must be a typing error: minRate is one request in
// 17 minutes, and no server reaches maxRate.
const minRate, maxRate = 0.001, 1e6
