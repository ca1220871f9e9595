package studyfile

import (
	"regexp"
	"slices"
	"time"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A Sweep has the settings of a sweep. The sweep measures named configs, each at every rate or concurrency of one list.
type Sweep struct {
	Configs       []Config  // configs in the order of the file; the first is the baseline
	Rates         []float64 // requests per second, ascending; nil in a closed loop
	Concurrencies []int     // requests in flight, ascending; nil in an open loop
	Requests      int       // requests at each rate or concurrency
	WarmUp        WarmUp
	Cooldown      time.Duration  // pause between two rates
	Cache         trial.Protocol // Carried or Reset
	Seed          uint64         // seed of requests and arrivals
}

// A Config is one of the servers that a sweep compares.
type Config struct {
	Name        string
	Description string   // text for people who read the file
	Args        []string // appended to server.args
}

// WarmUp is the uncounted load before the first rate or concurrency.
type WarmUp struct {
	Requests int     // 0 means no warm-up
	Rate     float64 // requests per second
	Cooldown time.Duration
}

// defaultSweep returns the settings that people used in sweeps by hand with vllm bench serve: 300 prompts at each rate,
// after a warm-up with ten of these prompts at 0.5 req/s.
func defaultSweep() *Sweep {
	return &Sweep{
		Requests: 300, WarmUp: WarmUp{Requests: 10, Rate: 0.5, Cooldown: 15 * time.Second}, Cooldown: 30 * time.Second,
		Cache: trial.Carried, Seed: 1,
	}
}

// maxLoads limits the number of rates or concurrencies of a sweep. maxConfigs limits the number of its configs. For
// more, `tuner run` is better, because it searches.
const maxLoads, maxConfigs = 1000, 200

// maxRequests limits the requests at one rate or concurrency. The tuner keeps each prompt and answer until the end, and
// 1.5 million of them took 2.9 GB.
const maxRequests = 200_000

// maxStreams limits a concurrency. It is far above the number of requests that one server can have in flight.
const maxStreams = 100_000

func (d *decoder) sweep(f *File) reader {
	return func(path string, n ast.Node) {
		s := defaultSweep()
		f.Sweep = s
		d.mapping(table{
			"configs":       d.configs(s),
			"rates":         ascending(d, &s.Rates, number(minRate, maxRate)),
			"concurrencies": ascending(d, &s.Concurrencies, integer(1, maxStreams)),
			"requests":      read(d, &s.Requests, integer(1, maxRequests)),
			"warm_up": d.mapping(table{
				"requests": read(d, &s.WarmUp.Requests, integer(0, maxRequests)),
				"rate":     read(d, &s.WarmUp.Rate, number(minRate, maxRate)),
				"cooldown": read(d, &s.WarmUp.Cooldown, duration(0, "s")),
			}),
			"cooldown": read(d, &s.Cooldown, duration(0, "s")),
			"cache":    oneOf(d, &s.Cache, trial.Carried, trial.Reset),
			"seed":     read(d, &s.Seed, seed),
		})(path, n)
	}
}

// configName matches names that fit into the head of a table column and into a file name.
var configName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$`)

func (d *decoder) configs(s *Sweep) reader {
	return func(path string, n ast.Node) {
		for _, e := range d.entries(path, n) {
			if !configName.MatchString(e.key) {
				d.fail(e.at, "config name %q must have 1 to 40 characters of a-z, A-Z, 0-9, ., _ and -, and begin with a letter or digit", e.key)
			}
			if _, empty := e.value.(*ast.NullNode); empty {
				d.fail(e.at, "%s is empty; write %s: {} for server.args alone", keyPath(path, e.key), e.key)
				continue
			}
			c := Config{Name: e.key}
			d.mapping(table{"args": d.texts(&c.Args), "description": d.text(&c.Description)})(keyPath(path, e.key), e.value)
			s.Configs = append(s.Configs, c)
		}
	}
}

// checkSweep adds problems for configs that are missing or have wrong flags, and for loads that cannot be measured.
func (c checker) checkSweep() {
	s := c.Sweep
	if s == nil {
		return
	}
	rates, streams := c.nodes["sweep.rates"] != nil, c.nodes["sweep.concurrencies"] != nil
	key := "sweep.rates"
	if streams {
		key = "sweep.concurrencies"
	}
	switch {
	case len(s.Configs) == 0 && c.nodes["sweep.configs"] == nil:
		c.failAtKey("sweep", "sweep has no configs; add configs: {default: {}, seqs128: {args: [--max-num-seqs, \"128\"]}}")
	case len(s.Configs) == 0:
		c.failAtKey("sweep.configs", "sweep.configs is empty; add default: {}, which is server.args alone")
	case len(s.Configs) > maxConfigs:
		c.failAtKey("sweep.configs", "sweep.configs has %d configs, more than %d; use `tuner run`, which searches among that many", len(s.Configs), maxConfigs)
	}
	switch {
	case rates && streams:
		c.failAtKey("sweep.concurrencies", "sweep has rates and concurrencies; keep one of them, and move the other to a second file")
	case !rates && !streams:
		c.failAtKey("sweep", "sweep has no loads; add rates: [0.5, 1, 2], or concurrencies: [1, 2, 4]")
	case rates && len(s.Rates) == 0, streams && len(s.Concurrencies) == 0:
		c.failAtKey(key, "%s is empty; write numbers in rising order", key)
	case len(s.Rates)+len(s.Concurrencies) > maxLoads:
		c.failAtKey(key, "%s has more than %d loads; use `tuner run`, which finds the highest rate with a few", key, maxLoads)
	}
	if streams && c.Load.Driver == VLLMBench {
		c.failAtKey("sweep.concurrencies", "driver %s cannot hold a concurrency; write driver: %s, or rates", VLLMBench, TunerBench)
	}
	if n := len(s.Concurrencies); n > 0 && s.Requests < 2*s.Concurrencies[n-1] {
		at := "sweep.requests"
		if c.nodes[at] == nil {
			at = "sweep.concurrencies"
		}
		c.failAtKey(at, "a load of %s hardly reaches a concurrency of %d; write requests: %d, or lower concurrencies",
			render.Count(s.Requests, "request"), s.Concurrencies[n-1], 2*s.Concurrencies[n-1])
	}
	if least, limit := c.SLO.MinRequests(); s.Requests > 0 && s.Requests < least {
		c.failAtKey("sweep.requests", "a verdict on %s needs %d requests, and a load has only %d; write requests: %d, or take a lower percentile",
			limit, least, s.Requests, least)
	}
	if s.WarmUp.Requests == 0 && (c.nodes["sweep.warm_up.rate"] != nil || c.nodes["sweep.warm_up.cooldown"] != nil) {
		c.failAtKey("sweep.warm_up.requests", "sweep.warm_up has a rate or a cooldown but 0 requests; remove them, or write requests: 10")
	}
	for _, config := range s.Configs {
		c.checkConfig(config)
	}
}

// checkConfig adds a problem for each flag of a config that the user may not set, or that is also in server.args.
func (c checker) checkConfig(config Config) {
	at := wordPaths("sweep.configs." + config.Name + ".args")
	given := space.FlagValues(c.Server.Args)
	for _, flag := range c.checkFlags("sweep.configs."+config.Name+".args", at, config.Args, false) {
		if _, twice := given[flag.Base()]; twice {
			c.failAt(at(flag.Index), "--%s is in server.args, which every config gets; remove it in one of the two", flag.Name)
		}
	}
}

// ConfigArgs returns all args of a config's server that come after the model.
func (f *File) ConfigArgs(c Config) []string { return slices.Concat(f.Server.Args, c.Args) }
