// Package plan opens everything that a study file names, such as the data set, and checks it before GPU time is spent.
// It never starts a server, except to read the output of --help.
package plan

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/samber/lo"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/studies/rights"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// An InputError is a mistake in the user's input. The same command fails again until the user corrects the mistake.
type InputError struct{ error }

// Unwrap returns the wrapped error for errors.Is and errors.As.
func (e InputError) Unwrap() error { return e.error }

func inputf(format string, args ...any) error { return InputError{fmt.Errorf(format, args...)} }

// A Plan is a study file with everything that the file names.
type Plan struct {
	File    *studyfile.File
	Source  workload.Source
	Space   *space.Space      // nil for a sweep
	Sampler sampler.Sampler   // nil for a sweep
	Current space.Point       // nil if the file has none
	Env     map[string]string // environment of the server with resolved references; may hold secrets
	Model   string            // model argument of the server: the file's model, or the path of a copy
	Seed    uint64            // seed of requests and arrivals
	ITL     bool              // record the times between tokens even if the SLO does not need them

	GPUs []gpu.GPU // GPUs that the server will use; set by CheckMachine
}

// Open opens a study with everything that a run needs.
func Open(file *studyfile.File) (*Plan, error) {
	if file.Sweep != nil && len(file.Parameters) == 0 {
		return nil, inputf("%s: there are no parameters to search; add some, or measure its configs with `tuner sweep %s`", file.Path, file.Path)
	}
	return newPlan(file).open((*Plan).openServer, (*Plan).openSearch)
}

// OpenSweep opens a sweep. It has a server and a load, but nothing to search.
func OpenSweep(file *studyfile.File) (*Plan, error) {
	p := newPlan(file)
	p.Seed, p.ITL = file.Sweep.Seed, true
	return p.open((*Plan).openServer)
}

// OpenSearch opens the workload and the search. It does not check the server, which may be on another machine.
func OpenSearch(file *studyfile.File) (*Plan, error) {
	if len(file.Parameters) == 0 {
		return nil, inputf("%s: there are no parameters to search; add some", file.Path)
	}
	return newPlan(file).open((*Plan).openWorkload, (*Plan).openSearch)
}

// OpenWorkload opens only the workload.
func OpenWorkload(file *studyfile.File) (*Plan, error) {
	return newPlan(file).open((*Plan).openWorkload)
}

func newPlan(file *studyfile.File) *Plan {
	return &Plan{File: file, Model: file.Model, Seed: file.Sampler.Seed}
}

// open opens the given parts of the plan. Every error is an InputError, because only the user can correct it.
func (p *Plan) open(parts ...func(*Plan) error) (*Plan, error) {
	for _, part := range parts {
		if err := part(p); err != nil {
			return nil, InputError{err}
		}
	}
	return p, nil
}

func (p *Plan) openSearch() (err error) {
	file := p.File
	if p.Space, err = file.Space(); err != nil {
		return err
	}
	if p.Current, err = file.CurrentPoint(); err != nil {
		return err
	}
	if p.Sampler, err = sampler.New(file.Sampler.Name, p.Space, file.Sampler.Seed, file.Budget.Trials); err != nil {
		return fmt.Errorf("%s: sampler: %w", file.Path, err)
	}
	return errors.Join(p.checkLegal(), p.checkLongest())
}

func (p *Plan) openServer() (err error) {
	file := p.File
	if err := p.openWorkload(); err != nil {
		return err
	}
	if p.Env, err = file.Environment(os.LookupEnv); err != nil {
		return err
	}
	for key, dir := range map[string]string{"cache_dir": file.Server.CacheDir, "model_copy": file.Server.ModelCopy} {
		if err := CheckWritable(dir); err != nil {
			return fmt.Errorf("%s: server.%s: %w; give a directory that can be written", file.Path, key, err)
		}
	}
	if dir := file.Server.CacheDir; dir != "" {
		// vLLM keeps everything that it compiles and downloads below this directory (vllm/envs.py). A value from the
		// user is not replaced.
		if _, given := p.Env[cacheVariable]; !given {
			p.Env[cacheVariable] = dir
		}
	}
	return errors.Join(p.checkServer(), p.checkLoad(), p.checkBudget())
}

// cacheVariable is the environment variable for vLLM's cache directory. Its subdirectory torch_compile_cache has the
// compiled graphs.
const cacheVariable = "VLLM_CACHE_ROOT"

// openWorkload opens the requests. If the file has no lead-in, openWorkload computes one from the requests.
func (p *Plan) openWorkload() (err error) {
	f := p.File
	if p.Source, err = workload.Open(f.WorkloadSpec(), p.Seed); err != nil {
		return fmt.Errorf("%s: workload: %w", f.Path, err)
	}
	if f.Probe.LeadIn < 0 {
		f.Probe.LeadIn = trial.SearchLeadIn(f.SLO, p.Source)
	}
	return nil
}

// Protocol returns what happens to the prefix cache between probes.
func (p *Plan) Protocol() trial.Protocol { return p.File.Protocol(p.Source.Len() == 0) }

// CheckWritable creates a directory. It returns an error if the directory cannot be created or written. It does nothing
// if dir is "".
func CheckWritable(dir string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, rights.Dir(filepath.Dir(dir))); err != nil {
		return err
	}
	file, err := os.CreateTemp(dir, ".tuner-")
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}

// Names returns the names of the searched flags.
func (p *Plan) Names() []string {
	return lo.Map(p.File.Parameters, func(parameter space.Parameter, _ int) string { return parameter.Name })
}

// Lookup returns the value of a variable in the server's environment.
func (p *Plan) Lookup(name string) (string, bool) {
	if value, ok := p.Env[name]; ok {
		return value, true
	}
	return os.LookupEnv(name)
}
