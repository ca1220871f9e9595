package studyfile

import (
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A Sweep is a manual sweep: named configs, each measured at every rate or concurrency of one list.
type Sweep struct {
	Configs       []Config  // in the order of the file; the first is the baseline
	Rates         []float64 // requests per second, ascending; nil in a closed loop
	Concurrencies []int     // requests in flight, ascending; nil in an open loop
	Requests      int       // of each rate or concurrency
	WarmUp        WarmUp
	Cooldown      time.Duration  // pause between two rates
	Cache         trial.Protocol // Carried or Reset
	Seed          uint64         // of requests and arrivals
}

// A Config is one server to be swept.
type Config struct {
	Name        string
	Description string   // for readers
	Args        []string // after those of the server
}

// WarmUp is what a server is sent before the first rate.
type WarmUp struct {
	Requests int     // 0 means none
	Rate     float64 // requests per second
	Cooldown time.Duration
}

// defaultSweep is what the manual sweeps did with vllm bench serve: 300 prompts at each rate, after ten of them at 0.5 req/s.
func defaultSweep() *Sweep {
	return &Sweep{
		Requests: 300, WarmUp: WarmUp{Requests: 10, Rate: 0.5, Cooldown: 15 * time.Second}, Cooldown: 30 * time.Second,
		Cache: trial.Carried, Seed: 1,
	}
}

// mostGrid is how many rates a sweep may have, and mostConfigs how many configs: more are no manual sweep.
const mostGrid, mostConfigs = 1000, 200

// mostRequests is how many requests a load of a sweep may have. Each one's prompt and answer are kept until the end: 1.5 million
// were seen to take 2.9 GB.
const mostRequests = 200_000

func (d *decoder) sweep(f *File, path string, n ast.Node) {
	s := defaultSweep()
	f.Sweep = s
	d.mapping(path, n, map[string]reader{
		"configs":       func(path string, n ast.Node) { d.configs(s, path, n) },
		"rates":         func(path string, n ast.Node) { d.rates(s, path, n) },
		"concurrencies": func(path string, n ast.Node) { d.concurrencies(s, path, n) },
		"requests":      d.whole(&s.Requests, 1, mostRequests),
		"warm_up":       func(path string, n ast.Node) { d.warmUp(&s.WarmUp, path, n) },
		"cooldown":      d.duration(&s.Cooldown, 0, "s"),
		"cache":         oneOf(d, &s.Cache, trial.Carried, trial.Reset),
		"seed":          d.seed(&s.Seed),
	})
}

// A config's name heads the column of a table, and is part of a file's name.
var configName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$`)

func (d *decoder) configs(s *Sweep, path string, n ast.Node) {
	for _, e := range d.entries(path, n) {
		if !configName.MatchString(e.key) {
			d.fail(e.at, "config name %q must be 1 to 40 of a-z, A-Z, 0-9, ., _ and -, and begin with a letter or digit", e.key)
		}
		c := Config{Name: e.key}
		if _, empty := e.value.(*ast.NullNode); empty {
			d.fail(e.at, "%s is empty; write %s: {} for a server without flags of its own", below(path, e.key), e.key)
			continue
		}
		d.mapping(below(path, e.key), e.value, map[string]reader{
			"args":        d.words(&c.Args),
			"description": d.text(&c.Description),
		})
		s.Configs = append(s.Configs, c)
	}
}

func (d *decoder) rates(s *Sweep, path string, n ast.Node) {
	s.Rates = []float64{}
	for i, v := range d.list(path, n) {
		var rate float64
		d.ascending(&rate, item(path, i), v, leastRate, mostRate, s.Rates)
		s.Rates = append(s.Rates, rate)
	}
}

// mostStreams is more requests in flight than any one server holds.
const mostStreams = 100_000

func (d *decoder) concurrencies(s *Sweep, path string, n ast.Node) {
	s.Concurrencies = []int{}
	var before []float64
	for i, v := range d.list(path, n) {
		var streams float64
		known := len(d.found)
		d.ascending(&streams, item(path, i), v, 1, mostStreams, before)
		if len(d.found) == known && streams != float64(int(streams)) {
			d.fail(v, "%s is %g; write a whole number", item(path, i), streams)
		}
		before = append(before, streams)
		s.Concurrencies = append(s.Concurrencies, int(streams))
	}
}

// ascending reads a number that must be above the one before it: a falling load would find what a higher one has left in the
// cache, and each is measured once.
func (d *decoder) ascending(to *float64, path string, n ast.Node, low, high float64, before []float64) {
	known := len(d.found)
	d.real(to, low, high)(path, n)
	if last := len(before) - 1; len(d.found) == known && last >= 0 && *to <= before[last] {
		d.fail(n, "%s is %g, and the one before it %g; write them in rising order, each once", path, *to, before[last])
	}
}

func (d *decoder) warmUp(w *WarmUp, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"requests": d.whole(&w.Requests, 0, mostRequests),
		"rate":     d.real(&w.Rate, leastRate, mostRate),
		"cooldown": d.duration(&w.Cooldown, 0, "s"),
	})
}

// checkSweep holds the configs against the server's args and the tuner's own, and the grid against the load.
func (d *decoder) checkSweep(f *File) {
	s := f.Sweep
	if s == nil {
		return
	}
	rates, streams := d.nodes["sweep.rates"] != nil, d.nodes["sweep.concurrencies"] != nil
	switch {
	case len(s.Configs) == 0 && d.nodes["sweep.configs"] == nil:
		d.failAtKey("sweep", "sweep has no configs; add configs: {default: {}, seqs128: {args: [--max-num-seqs, \"128\"]}}")
	case len(s.Configs) == 0:
		d.failAtKey("sweep.configs", "sweep.configs is empty; add default: {}, which is the server without flags of its own")
	case len(s.Configs) > mostConfigs:
		d.failAtKey("sweep.configs", "sweep.configs has %d configs, more than %d; let `tuner run` search among so many", len(s.Configs), mostConfigs)
	}
	switch {
	case rates && streams:
		d.failAtKey("sweep.concurrencies", "sweep has rates and concurrencies; keep one of them, and the other in a file of its own")
	case !rates && !streams:
		d.failAtKey("sweep", "sweep has no loads; add rates: [0.5, 1, 2], or concurrencies: [1, 2, 4]")
	case rates && len(s.Rates) == 0, streams && len(s.Concurrencies) == 0:
		d.failAtKey(gridKey(streams), "%s is empty; write numbers in rising order", gridKey(streams))
	case len(s.Rates)+len(s.Concurrencies) > mostGrid:
		d.failAtKey(gridKey(streams), "%s has more than %d loads; `tuner run` finds the highest with a few", gridKey(streams), mostGrid)
	}
	if streams && f.Load.Driver == VLLMBench {
		d.failAtKey("sweep.concurrencies", "driver %s is for rates; write driver: %s", VLLMBench, TunerBench)
	}
	if n := len(s.Concurrencies); n > 0 && s.Requests < 2*s.Concurrencies[n-1] {
		at := "sweep.requests"
		if d.nodes[at] == nil {
			at = "sweep.concurrencies"
		}
		d.failAtKey(at, "%d requests are too few for a concurrency of %d, which would hardly be reached; write requests: %d, or lower concurrencies",
			s.Requests, s.Concurrencies[n-1], 2*s.Concurrencies[n-1])
	}
	if least, limit := f.SLO().MinRequests(); s.Requests > 0 && s.Requests < least {
		d.failAtKey("sweep.requests", "%s takes %d requests for a verdict, a load has only %d; write requests: %d, or take a lower percentile",
			limit, least, s.Requests, least)
	}
	if s.WarmUp.Requests == 0 && (d.nodes["sweep.warm_up.rate"] != nil || d.nodes["sweep.warm_up.cooldown"] != nil) {
		d.failAtKey("sweep.warm_up.requests", "sweep.warm_up of 0 requests has no rate and no cooldown; remove them, or warm up with some")
	}
	for _, c := range s.Configs {
		d.checkConfig(f, c)
	}
}

func gridKey(streams bool) string {
	if streams {
		return "sweep.concurrencies"
	}
	return "sweep.rates"
}

// checkConfig holds the args of one config against those that every config has.
func (d *decoder) checkConfig(f *File, c Config) {
	path := "sweep.configs." + c.Name + ".args"
	at := func(i int) string { return item(path, i) }
	d.checkFlags(f, path, at, c.Args, false)
	flags, err := space.Flags(c.Args)
	if err != nil {
		return // said by checkFlags
	}
	given := fixed(f.Server.Args)
	for _, flag := range flags {
		if _, twice := given[flag.Base()]; twice {
			d.failAt(at(flag.Index), "--%s is in server.args already, which every config has; remove it in one of them", flag.Name)
		}
	}
}

// ConfigArgs returns all args that a config's server gets after the model.
func (f *File) ConfigArgs(c Config) []string { return slices.Concat(f.Server.Args, c.Args) }

// ConfigFlags returns the flags of a config's own args with their values, by name without dashes; a switch is true or false.
func ConfigFlags(c Config) map[string]string { return fixed(c.Args) }

// MaxModelLenOf returns the --max-model-len of a config's server, or 0 when it has none that is a plain number.
func (f *File) MaxModelLenOf(c Config) int {
	n, err := strconv.Atoi(fixed(f.ConfigArgs(c))["max-model-len"])
	if err != nil {
		return 0
	}
	return n
}

// checkSweepSpeculation is checkSpeculation for the configs of a sweep.
func (d *decoder) checkSweepSpeculation(f *File) {
	if f.Sweep == nil || f.AllowMeaninglessSpeculation {
		return
	}
	for _, c := range f.Sweep.Configs {
		if _, ok := fixed(c.Args)["speculative-config"]; ok {
			format := fixed(f.ConfigArgs(c))["load-format"]
			d.meaninglessSpeculation("sweep.configs."+c.Name+".args", format == "dummy", f.Workload.Kind)
		}
	}
}

// meaninglessSpeculation refuses speculation where what is accepted means nothing.
func (d *decoder) meaninglessSpeculation(at string, dummy bool, kind string) {
	const remedy = "do without speculation, or add allow_meaningless_speculation: true, which marks every figure"
	if dummy {
		d.failAtKey(at, "speculation on dummy weights (--load-format dummy) accepts nothing and says nothing; %s", remedy)
	}
	if slices.Contains(workload.Kinds, kind) && !slices.Contains(workload.ChatKinds, kind) {
		d.failAtKey(at, "speculation on workload %s, whose prompts are random tokens, accepts nothing and says nothing; take real prompts, %s", kind, remedy)
	}
}
