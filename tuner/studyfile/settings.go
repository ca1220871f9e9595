package studyfile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// Space returns the space of the searched flags and variables. Constraints may also use flags in server.args and
// variables in server.env.
func (f *File) Space() (*space.Space, error) {
	return space.New(f.Parameters, f.Constraints, f.Speculative, f.given())
}

// FixedArg returns the value of a flag in server.args; "" if it is not there. name has no leading dashes.
func (f *File) FixedArg(name string) string { return space.FlagValues(f.Server.Args)[name] }

// WorkloadSpec returns the workload with a path that is relative to the working directory, not to the study file. If
// the file has no vocabulary size and the model is a directory, the size comes from the model.
func (f *File) WorkloadSpec() workload.Spec {
	spec := f.Workload
	if spec.Path != "" && !filepath.IsAbs(spec.Path) {
		spec.Path = filepath.Join(filepath.Dir(f.Path), spec.Path)
	}
	if spec.VocabSize == 0 {
		spec.VocabSize = vocabSize(f.Model)
	}
	return spec
}

// vocabSize reads the size of a model's vocabulary from its config.json. Multimodal models have the size under
// text_config. Without a config.json, as for a Hugging Face id, it returns 0. Then the workload uses its default size,
// which fits any model.
func vocabSize(model string) int {
	text, err := foreign.Read(filepath.Join(model, "config.json"), 16<<20)
	if err != nil {
		return 0
	}
	var config struct {
		VocabSize  int `json:"vocab_size"`
		TextConfig struct {
			VocabSize int `json:"vocab_size"`
		} `json:"text_config"`
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return 0 // vLLM will refuse this model, and with a better message
	}
	return max(config.VocabSize, config.TextConfig.VocabSize, 0)
}

// CurrentPoint returns server.current as a point; nil if the file does not have it.
func (f *File) CurrentPoint() (space.Point, error) {
	s, err := f.Space()
	if err != nil || f.Server.Current == nil {
		return nil, err
	}
	p, err := s.ParseArgs(slices.Concat(f.Server.CurrentEnv, f.Server.Current))
	if err != nil {
		return nil, fmt.Errorf("server.current: %w", err)
	}
	return p, nil
}

// Protocol returns the cache protocol in the file. If the file has none, the protocol is Primed for a finite workload
// and Steady for an endless one.
func (f *File) Protocol(endless bool) trial.Protocol {
	switch {
	case f.Cache.Protocol != "":
		return f.Cache.Protocol
	case endless:
		return trial.Steady
	}
	return trial.Primed
}

var reference = regexp.MustCompile(`\$\{[A-Za-z_][A-Za-z0-9_]*\}`)

// Environment returns server.env. Each ${NAME} is replaced by the value from lookupEnv. A name without a value is an
// error. The values may be secrets.
func (f *File) Environment(lookupEnv func(name string) (string, bool)) (map[string]string, error) {
	env := make(map[string]string, len(f.Server.Env))
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f.Server.Env)) {
		value := reference.ReplaceAllStringFunc(f.Server.Env[name], func(ref string) string {
			variable := ref[2 : len(ref)-1]
			text, ok := lookupEnv(variable)
			if !ok {
				errs = append(errs, fmt.Errorf("%s: server.env.%s: %s is not set; export it, or remove the key", f.Path, name, variable))
			}
			return text
		})
		env[name] = value
	}
	return env, errors.Join(errs...)
}

// Secrets returns the values of the ${NAME} references in server.env. They must not appear in any file or log.
func (f *File) Secrets(lookupEnv func(name string) (string, bool)) []string {
	var values []string
	for _, value := range f.Server.Env {
		for _, ref := range reference.FindAllString(value, -1) {
			if text, ok := lookupEnv(ref[2 : len(ref)-1]); ok {
				values = append(values, text)
			}
		}
	}
	return values
}

// NoPrediction returns why the simulator cannot predict the points of the study; "" if it can.
func (f *File) NoPrediction() string {
	switch {
	case !f.Prior.Simulate:
		return "prior is none"
	case f.Server.Simulate != "" && !f.Prior.Asked:
		return "the server is simulated itself, and the file does not ask for prior: simulate"
	case f.Sampler.Name != "gp":
		return "only the sampler gp learns from predictions"
	case f.Load.Driver == VLLMBench:
		return "a simulated server cannot be measured by " + VLLMBench
	case f.onlyVariables():
		return "the simulator models no environment variable, and the study searches nothing else"
	case f.Workload.Output == workload.Natural:
		return "the model chooses the lengths of its answers (output: natural)"
	}
	return ""
}

// SLOKey is the key of the limits in World.
const SLOKey = "slo"

// EnvKey is the beginning of the keys of server.env in World. The name of a variable follows.
const EnvKey = "server env "

// World returns the settings that must not change when a study resumes, as short texts by name. These settings have an
// effect on the measured capacities or the next points. Timeouts, ports and budgets have no such effect, so World
// leaves them out.
func (f *File) World() map[string]string {
	p, c := f.Probe, f.Cache
	world := map[string]string{
		"model":              f.Model,
		"server command":     strings.Join(f.Server.Command, " "),
		"server simulate":    f.Server.Simulate,
		"server args":        strings.Join(f.Server.Args, " "),
		"server current":     strings.Join(slices.Concat(f.Server.CurrentEnv, f.Server.Current), " "),
		SLOKey:               fmt.Sprintf("%s, error rate <= %g %%", f.SLO, 100*f.SLO.MaxErrorRate),
		"workload":           describeWorkload(f.Workload),
		"constraints":        strings.Join(f.Constraints, "; "),
		"speculative config": describeSpeculation(f.Speculative),
		"sampler":            fmt.Sprintf("%s, seed %d", f.Sampler.Name, f.Sampler.Seed),
		"probe": fmt.Sprintf("window %s and %d requests, lead-in %s, at most %d probes from %g req/s within %g to %g, tolerance %g",
			p.Window, p.MinRequests, p.LeadIn, p.MaxProbes, p.StartRate, p.MinRate, p.MaxRate, p.Tolerance),
		"cache": fmt.Sprintf("protocol %s, prime rate %g req/s", cmp.Or(c.Protocol, "of the workload"), c.PrimeRate),
	}
	if p.Precision > 0 {
		world["probe"] += fmt.Sprintf(", precision %g %%", 100*p.Precision)
	}
	// The following keys are left out if they have their default. So a study that an older tuner began without these
	// keys can be resumed.
	if f.Objective != studies.TotalCapacity {
		world[studies.ObjectiveKey] = string(f.Objective)
	}
	if f.Load.Driver != TunerBench {
		world["load"] = f.Load.Driver + ": " + strings.Join(f.Load.Command, " ")
	}
	if b := f.Load.Burstiness; b != 0 && b != 1 {
		world["burstiness"] = fmt.Sprint(b)
	}
	if !p.WorstCase {
		world["worst case"] = "not tried"
	}
	byDefault := defaults().Speculation
	if f.AllowMeaninglessSpeculation {
		byDefault.MinAcceptance = 0
	}
	if s := f.Speculation; s != byDefault {
		world["speculation"] = fmt.Sprintf("an acceptance of %g %% after %d drafted tokens", 100*s.MinAcceptance, s.MinDrafted)
	}
	if f.Sampler.Name == "grid" { // the points of a grid depend on the number of trials
		world["sampler"] += fmt.Sprintf(", %d trials", f.Budget.Trials)
	}
	for name, value := range f.Server.Env {
		world[EnvKey+name] = value // a secret is still a ${NAME} reference here
	}
	for _, parameter := range f.Parameters {
		world["parameter "+parameter.Name] = describe(parameter)
	}
	maps.DeleteFunc(world, func(_, text string) bool { return text == "" })
	return world
}

// describeSpeculation returns the config as JSON; "" if the file has none.
func describeSpeculation(config map[string]any) string {
	if config == nil {
		return ""
	}
	text, _ := json.Marshal(config) // no error: jsonValue returns only values that JSON has
	return string(text)
}

// MaxModelLen returns --max-model-len in the args of a server; 0 if it is absent or not a plain number.
func MaxModelLen(args []string) int {
	n, err := strconv.Atoi(space.FlagValues(args)["max-model-len"])
	if err != nil {
		return 0
	}
	return n
}
