package studyfile

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// A checker checks a file that was read. It adds problems at the places of the values that cause them.
type checker struct {
	*decoder
	*File
}

// check adds the problems that depend on more than one setting.
func (c checker) check() {
	c.checkNames()
	c.checkServer()
	c.checkLimits()
	c.checkWorkload()
	c.checkLoad()
	c.checkProbe()
	c.checkArgs()
	c.checkVariables()
	c.checkQuality()
	c.checkSpeculation()
	c.checkSweep()
	c.checkSpace()
	c.checkSampler()
	c.checkPrior()
	c.readDynamo()
}

func (c checker) checkNames() {
	if c.Name != "" {
		if err := studies.ValidName(c.Name); err != nil {
			c.failAt("name", "%v", err)
		}
	}
	if strings.HasPrefix(c.Model, "-") || strings.ContainsAny(c.Model, " \t\n") {
		c.failAt("model", "model %q is neither a Hugging Face id nor a path; write one, such as nvidia/Llama-3.3-70B-Instruct-FP8", c.Model)
	}
}

func (c checker) checkServer() {
	s := &c.Server
	command, simulate := c.nodes["server.command"] != nil, c.nodes["server.simulate"] != nil
	switch {
	case c.nodes["server"] == nil:
	case command && simulate:
		c.failAtKey("server.simulate", "server has a command and simulate; keep one of them")
	case !command && !simulate:
		c.failAt("server", "server has no command; add command: [vllm, serve], or simulate: %s", strings.Join(sim.ProfileNames(), " or "))
	case command && (len(s.Command) == 0 || s.Command[0] == ""):
		c.failAt("server.command", "server.command is empty; write [vllm, serve]")
	case simulate && s.Simulate != "":
		c.checkProfile("server.simulate", &s.Simulate)
	}
}

// checkProfile adds a problem if a profile of the simulator is unknown. It makes the path of a profile file relative to
// the working directory.
func (c checker) checkProfile(path string, name *string) {
	switch {
	case sim.IsProfileFile(*name):
		if !filepath.IsAbs(*name) {
			*name = filepath.Join(filepath.Dir(c.Path), *name)
		}
	case !slices.Contains(sim.ProfileNames(), *name):
		c.failAt(path, "there is no simulated server %q; %s", *name, space.DidYouMean(*name, sim.ProfileNames()))
	}
}

// checkSampler adds a problem if the sampler ask has no command, or if another sampler has keys that only ask may have.
func (c checker) checkSampler() {
	given := c.nodes["sampler.command"] != nil
	switch {
	case c.Sampler.Name != Ask && !slices.Contains(Samplers, c.Sampler.Name):
	case c.Sampler.Name == Ask && !given:
		c.failAtKey("sampler.name", "sampler %s has no program to ask; add command: [python3, optimiser.py]", Ask)
	case c.Sampler.Name == Ask && (len(c.Sampler.Command) == 0 || c.Sampler.Command[0] == ""):
		c.failAt("sampler.command", "sampler.command is empty; write [python3, optimiser.py]")
	case c.Sampler.Name != Ask:
		for _, key := range []string{"command", "timeout"} {
			if c.nodes["sampler."+key] != nil {
				c.failAtKey("sampler."+key, "sampler.%s has no effect on sampler %s; remove it, or write name: %s", key, c.Sampler.Name, Ask)
			}
		}
	}
}

// checkPrior refuses the key prior in a study that cannot be predicted.
func (c checker) checkPrior() {
	if !c.Prior.Asked {
		return
	}
	if why := c.NoPrediction(); why != "" {
		c.failAtKey("prior", "the simulator cannot predict this study: %s; remove prior", why)
	}
	if c.Prior.Profile == "" {
		return
	}
	c.checkProfile("prior.simulate", &c.Prior.Profile)
	if c.Prior.Profile == c.Server.Simulate {
		c.failAt("prior.simulate", "the simulated server has this profile, so the predictions would be the answers; name another profile, or write prior: simulate")
	}
}

// checkLimits adds a problem if there is no latency limit, or if a limit can have no effect. A higher percentile of a
// metric is never below a lower percentile. So if the higher percentile has the lower limit, the other limit has no
// effect.
func (c checker) checkLimits() {
	isLatency := func(path string) bool { return strings.HasPrefix(path, "slo.") && path != "slo.error_rate" }
	if m, ok := c.nodes["slo"].(*ast.MappingNode); ok && !slices.ContainsFunc(slices.Sorted(maps.Keys(c.keys)), isLatency) {
		c.fail(m, "slo has no limit on a latency; add one, such as ttft_p99: 1000ms")
	}
	for _, high := range c.SLO.Limits {
		for _, low := range c.SLO.Limits {
			if high.Metric == low.Metric && high.Percentile > low.Percentile && high.Max < low.Max {
				c.failAt("limit "+high.String(), "the limit on %s (%s) is below the limit on %s (%s), so the second limit never decides; raise the first or remove the second",
					high, high.Max, low, low.Max)
			}
		}
	}
}

func (c checker) checkProbe() {
	p := &c.Probe
	if p.Precision != 0 && !(p.Precision > MinPrecision && p.Precision < MaxPrecision) {
		c.failAt("probe.precision", "probe.precision is %g %%; write more than %g %% and less than %g %%, such as 5%%, or 0 to stop at a bracket",
			100*p.Precision, 100*MinPrecision, 100*MaxPrecision)
	}
	if p.Precision > 0 && c.nodes["probe.max_probes"] == nil {
		p.MaxProbes = defaultPreciseProbes
	}
	c.checkEnough()
	if p.MinRate >= p.MaxRate {
		at := "probe.max_rate"
		if c.nodes[at] == nil {
			at = "probe.min_rate"
		}
		c.failAt(at, "min_rate %g is not below max_rate %g, so there is no rate to search; raise max_rate", p.MinRate, p.MaxRate)
		return
	}
	if p.StartRate > 0 && (p.StartRate < p.MinRate || p.StartRate > p.MaxRate) {
		c.failAt("probe.start_rate", "start_rate %g is outside min_rate %g to max_rate %g; move it inside, or write 0 to start from the KV cache's size",
			p.StartRate, p.MinRate, p.MaxRate)
	}
	if rate := c.Cache.PrimeRate; rate > p.MaxRate {
		c.failAt("cache.prime_rate", "prime_rate %g is above probe.max_rate %g; lower it", rate, p.MaxRate)
	}
}

// checkEnough adds a problem if a limit's percentile needs more requests than a probe at the lowest rate has.
func (c checker) checkEnough() {
	least, limit := c.SLO.MinRequests()
	n := max(c.Probe.MinRequests, int(c.Probe.Window.Seconds()*c.Probe.MinRate))
	if n >= least {
		return
	}
	at := "probe.min_requests"
	if c.nodes[at] == nil {
		at = "limit " + limit.String()
	}
	c.failAt(at, "a verdict on %s needs %d requests, and a probe at a low rate has only %d; raise probe.min_requests to %d, or take a lower percentile",
		limit, least, n, least)
}

// checkLoad adds a problem if the study cannot use the driver. It also sets the default command.
func (c checker) checkLoad() {
	l := &c.Load
	given := c.nodes["load.command"] != nil
	if l.Driver != VLLMBench {
		if given && slices.Contains(drivers, l.Driver) {
			c.failAtKey("load.command", "load.command has no effect on driver %s; remove it, or write driver: %s", l.Driver, VLLMBench)
		}
		return
	}
	switch {
	case c.Server.Simulate != "":
		c.failAt("load.driver", "driver %s needs a server that speaks HTTP, and %s runs in virtual time; write driver: %s", VLLMBench, c.Server.Simulate, TunerBench)
	case given && (len(l.Command) == 0 || l.Command[0] == ""):
		c.failAt("load.command", "load.command is empty; write [vllm, bench, serve]")
	}
	if !given {
		l.Command = []string{"vllm", "bench", "serve"}
	}
}

// tunerFlags are the flags that the user may not set. The text of each flag says what to do instead.
var tunerFlags = map[string]string{
	"model": "the key model sets it; remove it here",
	"port":  "server.port sets it; remove it here",
	"host":  "the server always listens on the loopback address; remove it",
	// These two flags are not allowed because their values would be stored with the study.
	"api-key":  "the tuner's own server needs none; remove it",
	"hf-token": "a secret would be stored with the study; set HF_TOKEN under server.env",
}

// checkArgs adds a problem for each flag in server.args and server.current that the user may not set. It also adds a
// problem for each searched flag in server.args.
func (c checker) checkArgs() {
	c.checkFlags("server.args", wordPaths("server.args"), c.Server.Args, true)
	c.checkFlags("server.current", c.currentFlag, c.Server.Current, false)
}

// currentFlag returns the path of the i-th word of the flags in server.current.
func (c checker) currentFlag(i int) string {
	return itemPath("server.current", len(c.Server.CurrentEnv)+i)
}

// wordPaths returns a function that returns the path of the i-th word of a list.
func wordPaths(path string) func(i int) string {
	return func(i int) string { return itemPath(path, i) }
}

// checkFlags adds a problem for each flag in args that the user may not set. If isFixed is true, searched flags are
// problems too. The function wordPath returns the path of the i-th word. checkFlags returns the flags, or nil if args
// are not valid.
func (c checker) checkFlags(path string, wordPath func(i int) string, args []string, isFixed bool) []space.Flag {
	flags, err := space.Flags(args)
	if err != nil {
		c.failAt(wordPath(0), "%s: %v", path, err)
	}
	for _, flag := range flags {
		name := flag.Base()
		searched := slices.ContainsFunc(c.Parameters, func(p space.Parameter) bool {
			return p.Name == name || p.Name == space.SpeculativeTokens && name == "speculative-config"
		})
		if remedy := tunerFlags[name]; remedy != "" {
			c.failAt(wordPath(flag.Index), "%s has --%s; %s", path, name, remedy)
		} else if isFixed && searched {
			c.failAt(wordPath(flag.Index), "--%s is in %s and under parameters; remove one of them", name, path)
		}
	}
	return flags
}

// qualityFlags change the answers of the model, not only its speed.
var qualityFlags = []string{"quantization", "kv-cache-dtype", "dtype"}

func (c checker) checkQuality() {
	for _, p := range c.Parameters {
		if slices.Contains(qualityFlags, p.Name) && !c.AllowQualityChange {
			c.failAtKey("parameters."+p.Name, "%s changes what the model answers, not only how fast; add allow_quality_change: true, or move it to server.args", p.Name)
		}
	}
}

// checkSpeculation adds a problem if speculation would be measured on dummy weights or random tokens. With these, the
// share of accepted drafts has no meaning.
func (c checker) checkSpeculation() {
	const parameter, flag = "parameters." + space.SpeculativeTokens, "speculative-config"
	searched := slices.ContainsFunc(c.Parameters, func(p space.Parameter) bool { return p.Name == space.SpeculativeTokens })
	if !searched && c.Speculative != nil {
		c.failAtKey("speculative_config", "speculative_config has no effect; search num-speculative-tokens: [0, 1, 2, 3] under parameters, or remove it")
	}
	if c.AllowMeaninglessSpeculation {
		if c.nodes["speculation.min_acceptance"] == nil {
			c.Speculation.MinAcceptance = 0 // the acceptance has no meaning, so it must not end a trial
		}
		return
	}
	flags := space.FlagValues(slices.Concat(c.Server.Current, c.Server.Args)) // if a flag is given twice, the last value counts
	if searched {
		c.meaninglessSpeculation(parameter, flags)
	} else if _, fixed := flags[flag]; fixed {
		c.meaninglessSpeculation("server.args", flags)
	}
	if c.Sweep == nil {
		return
	}
	for _, config := range c.Sweep.Configs {
		if _, own := space.FlagValues(config.Args)[flag]; own {
			c.meaninglessSpeculation("sweep.configs."+config.Name+".args", space.FlagValues(c.ConfigArgs(config)))
		}
	}
}

// meaninglessSpeculation adds a problem if the server has dummy weights or the workload has random tokens. The map
// flags has the values of the server's flags, by name.
func (c checker) meaninglessSpeculation(at string, flags map[string]string) {
	const remedy = "do without speculation, or add allow_meaningless_speculation: true, which marks every figure"
	if flags["load-format"] == "dummy" {
		c.failAtKey(at, "a model with dummy weights (--load-format dummy) accepts no draft, so speculation measures nothing; %s", remedy)
	}
	if kind := c.Workload.Kind; slices.Contains(workload.Kinds, kind) && !slices.Contains(workload.ChatKinds, kind) {
		c.failAtKey(at, "workload %s has random tokens, and no draft of them is accepted, so speculation measures nothing; take real prompts, %s", kind, remedy)
	}
}

// checkSpace adds the problems of the parameters, their conditions, the constraints and server.current.
func (c checker) checkSpace() {
	sound := true
	parameters := slices.Clone(c.Parameters)
	for i, p := range parameters {
		if c.unread(p.Name) {
			// The problem of this parameter is already reported. Expressions may use the parameter, so it gets choices
			// of two types, which fit any expression.
			sound, parameters[i] = false, space.Parameter{Name: p.Name, Kind: space.Categorical, Choices: []string{"0", "auto"}}
		}
	}
	s, err := space.New(parameters, c.Constraints, c.Speculative, c.given())
	mistakes, _ := errors.AsType[space.DefinitionErrors](err)
	for _, e := range mistakes {
		switch {
		case c.unread(e.Parameter):
		case e.Parameter == "":
			c.failAt(itemPath("constraints", e.Constraint), "constraint: %s", e.What)
		case e.When:
			c.failAt("parameters."+e.Parameter+".when", "%s: when: %s", e.Parameter, e.What)
		default:
			c.failAtKey("parameters."+e.Parameter, "%s: %s", e.Parameter, e.What)
		}
	}
	if sound && err == nil {
		c.checkCurrentVariables(s)
		c.checkCurrent(s)
	}
}

// unread reports whether a parameter could not be read. If so, its problem was already added.
func (c checker) unread(parameter string) bool {
	n, given := c.nodes["parameters."+parameter]
	return given && n == nil
}

// checkCurrent checks each flag of server.current separately, so that each problem has a line and column.
func (c checker) checkCurrent(s *space.Space) {
	flags, err := space.Flags(c.Server.Current)
	if err != nil {
		return // checkArgs has added the error
	}
	given := space.FlagValues(c.Server.Args)
	for _, flag := range flags {
		at := c.currentFlag(flag.Index)
		if _, twice := given[flag.Name]; twice {
			c.failAt(at, "--%s is in server.args, which every trial gets; remove it here", flag.Name)
		} else if _, _, err := s.ParseFlag(flag); err != nil && tunerFlags[flag.Base()] == "" {
			c.failAt(at, "server.current: %v", err)
		}
	}
}

// readDynamo replaces the command of an NVIDIA Dynamo worker by `vllm serve` with the same engine flags. It moves
// Dynamo's own flags from the args to Server.Dynamo. It must run last: the other checks report the place of a flag in
// the file, and moving flags changes their indexes.
func (c checker) readDynamo() {
	s := &c.Server
	worker, ok := serverctl.DynamoWorker(s.Command)
	if !ok {
		return
	}
	if worker.Model != "" && c.Model != "" && worker.Model != c.Model {
		c.failAt("server.command", "server.command has --model %s, but model is %s; keep one of them", worker.Model, c.Model)
	}
	c.checkFlags("server.command", func(int) string { return "server.command" }, worker.Args, true)
	own, dynamo := serverctl.SplitDynamo(s.Args)
	s.Command = worker.Command
	s.Args = append(worker.Args, own...)
	s.Dynamo = append(worker.Dynamo, dynamo...)
	s.Current, _ = serverctl.SplitDynamo(s.Current)
	if c.Sweep != nil {
		for i := range c.Sweep.Configs {
			config := &c.Sweep.Configs[i]
			config.Args, _ = serverctl.SplitDynamo(config.Args)
		}
	}
}
