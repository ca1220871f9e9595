package studyfile

import (
	"bytes"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// Parse reads the text of a study file. name is the file's path: errors show it, and the path of a dataset is relative to it.
// The error is an *Error with every problem.
func Parse(name string, text []byte) (*File, error) {
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // the byte order mark that editors on Windows write
	d := &decoder{
		problems: problems{path: name, lines: strings.Split(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n")},
		nodes:    map[string]ast.Node{}, keys: map[string]ast.Node{},
	}
	f := defaults()
	f.Path, f.Text = name, string(text)
	if root := d.document(text); root != nil {
		d.file(f, root)
		d.check(f)
	}
	if err := d.err(); err != nil {
		return nil, err
	}
	return f, nil
}

// file reads the top-level keys.
func (d *decoder) file(f *File, root ast.Node) {
	readers := map[string]reader{
		"version":                       d.version,
		"name":                          d.text(&f.Name),
		"model":                         d.text(&f.Model),
		"server":                        func(path string, n ast.Node) { d.server(&f.Server, path, n) },
		"slo":                           func(path string, n ast.Node) { d.slo(f, path, n) },
		"workload":                      func(path string, n ast.Node) { d.workload(&f.Workload, path, n) },
		"load":                          func(path string, n ast.Node) { d.load(&f.Load, path, n) },
		"parameters":                    func(path string, n ast.Node) { d.parameters(f, path, n) },
		"speculative_config":            func(path string, n ast.Node) { d.speculative(f, path, n) },
		"speculation":                   func(path string, n ast.Node) { d.speculation(&f.Speculation, path, n) },
		"constraints":                   d.texts(&f.Constraints),
		"allow_quality_change":          d.boolean(&f.AllowQualityChange),
		"allow_meaningless_speculation": d.boolean(&f.AllowMeaninglessSpeculation),
		"sampler":                       func(path string, n ast.Node) { d.sampler(&f.Sampler, path, n) },
		"budget":                        func(path string, n ast.Node) { d.budget(&f.Budget, path, n) },
		"probe":                         func(path string, n ast.Node) { d.probe(&f.Probe, path, n) },
		"cache":                         func(path string, n ast.Node) { d.cache(&f.Cache, path, n) },
		"advice":                        func(path string, n ast.Node) { d.advice(&f.Advice, path, n) },
		"sweep":                         func(path string, n ast.Node) { d.sweep(f, path, n) },
	}
	d.mapping("", root, readers)
	d.missing(root, sortedKeys(readers))
}

// missing adds a problem for each required key that the file lacks.
func (d *decoder) missing(root ast.Node, known []string) {
	if len(d.keys) == 0 && len(d.found) > 0 {
		return // the file is not a mapping, which is reported already
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
		misspelt := slices.ContainsFunc(sortedKeys(d.keys), func(k string) bool {
			return !slices.Contains(known, k) && space.Nearest(k, known) == key.name
		})
		unneeded := key.name == "parameters" && d.nodes["sweep"] != nil
		if d.nodes[key.name] == nil && !misspelt && !unneeded {
			d.failAt("", "key %q is missing; add %s", key.name, key.example)
		}
	}
}

func (d *decoder) version(path string, n ast.Node) {
	if text, ok := d.scalar(path, n); ok && text != strconv.Itoa(Version) {
		d.fail(n, "this tuner does not know version %q; write %d", text, Version)
	}
}

func (d *decoder) server(s *Server, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"command":       d.texts(&s.Command),
		"simulate":      d.text(&s.Simulate),
		"args":          d.texts(&s.Args),
		"current":       d.texts(&s.Current),
		"env":           func(path string, n ast.Node) { d.env(s, path, n) },
		"start_timeout": d.duration(&s.StartTimeout, time.Second, "s"),
		"stop_timeout":  d.duration(&s.StopTimeout, time.Second, "s"),
		"hang_timeout":  d.duration(&s.HangTimeout, 5*time.Second, "s"),
		"port":          d.integer(&s.Port, 0, 65535),

		"gpu":                d.text(&s.GPU),
		"gpu_memory_timeout": d.duration(&s.GPUMemoryTimeout, time.Second, "s"),
		"cache_dir":          d.text(&s.CacheDir),
		"model_copy":         d.text(&s.ModelCopy),
	})
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// env reads the environment. A secret must be a reference, so that neither the file nor the store ever holds one.
func (d *decoder) env(s *Server, path string, n ast.Node) {
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

var (
	latencyKey = regexp.MustCompile(`^(ttft|tpot|itl|e2e)_p([0-9]{1,3}(?:\.[0-9]{1,6})?)$`)
	vllmKey    = regexp.MustCompile(`^p([0-9.]+)_(ttft|tpot|itl|e2e)l?(_ms)?$`)
)

// slo reads the limits: any percentile of a latency, and the share of requests that may fail.
func (d *decoder) slo(f *File, path string, n ast.Node) {
	for _, e := range d.entries(path, n) {
		at := keyPath(path, e.key)
		if e.key == "error_rate" {
			d.fraction(&f.MaxErrorRate)(at, e.value)
			continue
		}
		parts := latencyKey.FindStringSubmatch(e.key)
		if parts == nil {
			d.fail(e.at, "unknown key %q under %s; %s", e.key, path, latencyRemedy(e.key))
			continue
		}
		limit := slo.Limit{Metric: slo.Metric(parts[1])}
		percentile, err := strconv.ParseFloat(parts[2], 64)
		if err != nil || percentile <= 0 || percentile >= 100 {
			d.fail(e.at, "%s: the percentile must be above 0 and below 100; write %s_p99", at, parts[1])
			continue
		}
		limit.Percentile = percentile
		before := len(d.found)
		d.duration(&limit.Max, time.Microsecond, "ms")(at, e.value)
		if len(d.found) > before {
			continue
		}
		if slices.ContainsFunc(f.Limits, func(l slo.Limit) bool { return l.Metric == limit.Metric && l.Percentile == percentile }) {
			d.fail(e.at, "the limit on %s is given twice; remove one", limit)
			continue
		}
		f.Limits = append(f.Limits, limit)
		d.nodes["limit "+limit.String()] = e.value
	}
}

func latencyRemedy(key string) string {
	if parts := vllmKey.FindStringSubmatch(key); parts != nil {
		return "write " + parts[2] + "_p" + parts[1]
	}
	var known []string
	for _, metric := range []slo.Metric{slo.TTFT, slo.TPOT, slo.ITL, slo.E2E} {
		for _, percentile := range []string{"50", "90", "95", "99", "99.9"} {
			known = append(known, string(metric)+"_p"+percentile)
		}
	}
	if best := space.Nearest(key, append(known, "error_rate")); best != "" {
		return "did you mean \"" + best + "\"?"
	}
	return "write ttft, tpot, itl or e2e with a percentile, such as ttft_p99, or error_rate"
}

// maxTokens is far above any context, vocabulary or dataset.
const maxTokens = 100_000_000

// speculative reads the keys of --speculative-config.
func (d *decoder) speculative(f *File, path string, n ast.Node) {
	config, ok := d.jsonValue(path, n).(map[string]any)
	if !ok {
		d.fail(n, "%s is %s; write {method: ngram, prompt_lookup_max: 4}", path, kindOf(n))
		return
	}
	f.Speculative = config
}

func (d *decoder) sampler(s *Sampler, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"name": oneOf(d, &s.Name, Samplers...),
		"seed": d.seed(&s.Seed),
	})
}

func (d *decoder) budget(b *Budget, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"trials":   d.integer(&b.Trials, 1, 1_000_000),
		"gpu_time": d.duration(&b.GPUTime, time.Minute, "h"),
	})
}

func (d *decoder) speculation(s *Speculation, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"min_acceptance": d.fraction(&s.MinAcceptance),
		"min_drafted":    d.integer(&s.MinDrafted, 1, maxTokens),
	})
}

func (d *decoder) probe(p *Probe, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"seconds":      d.seconds(&p.Window),
		"min_requests": d.integer(&p.MinRequests, 1, maxTokens),
		"lead_in":      d.duration(&p.LeadIn, 0, "s"),
		"start_rate":   d.float(&p.StartRate, 0, maxRate),
		"min_rate":     d.float(&p.MinRate, minRate, maxRate),
		"max_rate":     d.float(&p.MaxRate, minRate, maxRate),
		"tolerance":    d.float(&p.Tolerance, 0.001, 10),
		"max_probes":   d.integer(&p.MaxProbes, 1, 1000),
		"worst_case":   d.boolean(&p.WorstCase),
		"precision":    d.fraction(&p.Precision),
	})
	if n := d.nodes[keyPath(path, "precision")]; n != nil && p.Precision != 0 && !(p.Precision > MinPrecision && p.Precision < MaxPrecision) {
		d.fail(n, "%s is %g %%; write more than %g %% and less than %g %%, such as 5%%, or 0 to stop at a bracket",
			keyPath(path, "precision"), 100*p.Precision, 100*MinPrecision, 100*MaxPrecision)
	}
	if p.Precision > 0 && d.nodes[keyPath(path, "max_probes")] == nil {
		p.MaxProbes = defaultPreciseProbes
	}
}

func (d *decoder) advice(a *Advice, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{"margin": d.float(&a.Margin, 0.01, 1)})
}

// Rates outside these bounds are typing errors: minRate is one request in 17 minutes, and no server reaches maxRate.
// Both are in requests per second.
const minRate, maxRate = 0.001, 1e6

func (d *decoder) cache(c *Cache, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"protocol":   oneOf(d, &c.Protocol, trial.Steady, trial.Primed, trial.Reset),
		"prime_rate": d.float(&c.PrimeRate, 0, maxRate),
	})
}
