package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/proc"
	"vllmtuner/serverctl/vllmsim"
	"vllmtuner/studies"
	"vllmtuner/studies/logs"
	"vllmtuner/studies/rights"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// gallop is the first step of the capacity search: about four probes from a hint that is right within a third
// (simulated engines, hint error 0.35 in log rate).
const gallop = 1.35

// A plan is a study file with all that it names at hand: nothing in it has cost GPU time yet.
type plan struct {
	file    *studyfile.File
	source  workload.Source
	space   *space.Space      // nil of a sweep
	sampler sampler.Sampler   // likewise
	current space.Point       // nil when the file has none
	env     map[string]string // of the server, with references filled in; may hold secrets
	model   string            // as the server is given it: the file's, or its copy
	seed    uint64            // of requests and arrivals
	itl     bool              // record the times between tokens whatever the SLO is

	gpus         []gpu.GPU // that the server will use; nil until the machine was looked at
	textsChecked bool      // for their length, by a server
}

// makePlan opens what the file names, and finds what is wrong with it as far as that can be known without starting anything.
// Every error of it is for the user to mend.
func makePlan(file *studyfile.File) (*plan, error) {
	if file.Sweep != nil && len(file.Parameters) == 0 {
		return nil, usage("%s: there are no parameters to search; add some, or measure its configs with `tuner sweep %s`", file.Path, file.Path)
	}
	p := &plan{file: file, model: file.Model, seed: file.Sampler.Seed}
	err := p.open()
	if err == nil {
		err = p.openSearch()
	}
	if err != nil {
		return nil, usageError{err}
	}
	return p, nil
}

// openSearch fills in what is searched.
func (p *plan) openSearch() (err error) {
	file := p.file
	if p.space, err = file.Space(); err != nil {
		return err
	}
	if p.current, _, err = file.CurrentPoint(); err != nil {
		return err
	}
	if p.sampler, err = sampler.New(file.Sampler.Name, p.space, file.Sampler.Seed, file.Budget.Trials); err != nil {
		return fmt.Errorf("%s: sampler: %w", file.Path, err)
	}
	return errors.Join(p.checkLegal(), p.checkLongest())
}

// open fills in the server and its load.
func (p *plan) open() (err error) {
	file := p.file
	if err := p.openWorkload(); err != nil {
		return fmt.Errorf("%s: workload: %w", file.Path, err)
	}
	if p.env, err = file.Environment(os.LookupEnv); err != nil {
		return err
	}
	for key, dir := range map[string]string{"cache_dir": file.Server.CacheDir, "model_copy": file.Server.ModelCopy} {
		if err := writable(dir); err != nil {
			return fmt.Errorf("%s: server.%s: %w; give a folder that can be written", file.Path, key, err)
		}
	}
	if dir := file.Server.CacheDir; dir != "" {
		// Everything that vLLM compiles and downloads of its own lies below it (vllm/envs.py); the user's word stands.
		if _, given := p.env[cacheVariable]; !given {
			p.env[cacheVariable] = dir
		}
	}
	return errors.Join(p.checkServer(), p.checkLoad(), p.checkBudget())
}

// openWorkload fills in the requests, and what the study file leaves to them.
func (p *plan) openWorkload() (err error) {
	f := p.file
	if p.source, err = workload.Open(f.WorkloadSpec(), p.seed); err != nil {
		return err
	}
	if f.Probe.LeadIn < 0 {
		f.Probe.LeadIn = trial.DefaultLeadIn(f.SLO(), p.source, f.Protocol(p.source.Len() == 0))
	}
	return nil
}

// writable reports why a folder cannot be made and written; "" is no folder, and well.
func writable(dir string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, rights.Dir(filepath.Dir(dir))); err != nil {
		return err
	}
	probe, err := os.CreateTemp(dir, ".tuner-")
	if err != nil {
		return err
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// cacheVariable is vLLM's own; compiled graphs lie in its torch_compile_cache.
const cacheVariable = "VLLM_CACHE_ROOT"

// names returns the searched flags.
func (p *plan) names() []string {
	var names []string
	for _, parameter := range p.file.Parameters {
		names = append(names, parameter.Name)
	}
	return names
}

// checkServer finds a missing server binary and a missing local model.
func (p *plan) checkServer() error {
	server := p.file.Server
	if server.Simulate != "" {
		return p.checkSimulated()
	}
	if err := (serverctl.Config{Command: server.Command, Model: p.file.Model, Args: server.Args, Env: p.env}).Check(); err != nil {
		return fmt.Errorf("%s: %w", p.file.Path, err)
	}
	model := p.file.Model
	if strings.HasPrefix(model, "/") || strings.HasPrefix(model, ".") {
		if _, err := os.Stat(filepath.Join(model, "config.json")); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: model: %s holds no config.json; a path must be a model's directory", p.file.Path, model)
		}
	}
	return nil
}

// checkSimulated finds a profile that is not there or wrong, and a search of what it does not model.
func (p *plan) checkSimulated() error {
	if _, err := vllmsim.LoadProfile(p.file.Server.Simulate); err != nil {
		return err
	}
	for _, parameter := range p.file.Parameters {
		if parameter.Name != space.SpeculativeTokens && !vllmsim.Models(parameter.Name) {
			return fmt.Errorf("%s: parameters.%s: the simulated server does not model --%s, so that all its values measure the same; take it out, or search it on a real server",
				p.file.Path, parameter.Name, parameter.Name)
		}
	}
	return nil
}

// ignored are the flags of every server of a simulated study that a real one would heed.
func (p *plan) ignored() []string {
	flags, err := space.Flags(slices.Concat(p.file.Server.Args, p.file.Server.Current))
	if err != nil {
		return nil // said when the file was read
	}
	var names []string
	for _, flag := range flags {
		name := flag.Base()
		if vllmsim.Ignores(name) && !slices.Contains(names, "--"+name) {
			names = append(names, "--"+name)
		}
	}
	return names
}

// checkLoad finds a missing load generator.
func (p *plan) checkLoad() error {
	if p.file.Load.Driver != studyfile.VLLMBench {
		return nil
	}
	if _, err := exec.LookPath(p.file.Load.Command[0]); err != nil {
		return fmt.Errorf("%s: load.command: %w; give its full path, or leave the driver to the tuner", p.file.Path, err)
	}
	return nil
}

// checkLegal refuses a space in which the constraints leave no point.
func (p *plan) checkLegal() error {
	chooser, err := sampler.New("random", p.space, 1, 1)
	if err != nil {
		return err
	}
	if _, err := chooser.Next(0, nil); err != nil {
		return fmt.Errorf("%s: parameters and constraints leave no point to try: %w", p.file.Path, err)
	}
	return nil
}

// checkLongest refuses a model length, fixed or searched, that the workload's longest request does not fit in.
func (p *plan) checkLongest() error {
	const flag = "max-model-len"
	longest, shortest := p.source.Longest(), p.file.MaxModelLen()
	where := "raise it in server.args"
	if searched := p.space.Parameter(flag); searched != nil {
		where = "search longer ones only"
		for _, text := range searched.Levels(2) { // both ends of a range, or all choices
			if n, err := strconv.Atoi(text); err == nil && (shortest == 0 || n < shortest) {
				shortest = n
			}
		}
	}
	if shortest > 0 && longest > shortest {
		return fmt.Errorf("%s: %s %d is less than the workload's longest request of %d tokens; %s", p.file.Path, flag, shortest, longest, where)
	}
	return nil
}

// runner returns what measures the plan's points. dir is the study's directory.
func (p *plan) runner(dir string) (*trial.Runner, error) {
	start, err := p.start(dir)
	if err != nil {
		return nil, err
	}
	runner := p.measuring()
	runner.Start = start
	return runner, nil
}

// measuring is the runner without what starts its servers: how the plan's points are measured.
func (p *plan) measuring() *trial.Runner {
	f := p.file
	return &trial.Runner{
		WorstCase: f.Probe.WorstCase, MinAcceptance: f.Speculation.MinAcceptance, MinDrafted: f.Speculation.MinDrafted,
		Source: p.source, SLO: f.SLO(), Seed: p.seed,
		Lengths:   trial.Lengths{LeadIn: f.Probe.LeadIn, Window: f.Probe.Window, MinRequests: f.Probe.MinRequests},
		Cache:     f.Protocol(p.source.Len() == 0),
		PrimeRate: f.Cache.PrimeRate,
		Marks:     p.marks(),
		Simulated: f.Server.Simulate != "",
		Arrivals:  workload.Arrivals{Burstiness: f.Load.Burstiness},
		Natural:   f.Workload.Output == workload.Natural,
		Search: capacity.Search{
			Hint: f.Probe.StartRate, Min: f.Probe.MinRate, Max: f.Probe.MaxRate,
			Factor: gallop, Tolerance: f.Probe.Tolerance, MaxProbes: f.Probe.MaxProbes, Precision: f.Probe.Precision,
		},
	}
}

// requests is how many a probe counts at the rate where the search begins, as far as that is known before the server is.
func (p *plan) requests() int {
	n, _ := p.probe().Counted()
	return n
}

// probe is the load of a probe at that rate.
func (p *plan) probe() workload.Plan {
	f := p.file
	return workload.Plan{
		Source: p.source, Seed: f.Sampler.Seed, Rate: cmp.Or(f.Probe.StartRate, f.Probe.MinRate), LeadIn: f.Probe.LeadIn, Window: f.Probe.Window,
		MinRequests: f.Probe.MinRequests, Arrivals: workload.Arrivals{Burstiness: f.Load.Burstiness},
	}
}

// marks are what a reader must know of every figure of the study.
func (p *plan) marks() []string {
	var marks []string
	if p.file.AllowMeaninglessSpeculation {
		marks = append(marks, "speculation was measured where what is accepted means nothing (allow_meaningless_speculation)")
	}
	if p.file.AllowQualityChange {
		marks = append(marks, "flags that change the answers were searched (allow_quality_change)")
	}
	if p.file.Workload.Output == workload.Natural {
		marks = append(marks, "answers ended where the model ended them (output: natural): another choice of flags, or another day, is other work")
	}
	if dynamo := p.file.Server.Dynamo; len(dynamo) > 0 {
		marks = append(marks, "Dynamo's own flags were left out: "+strings.Join(dynamo, " "))
	}
	if p.file.Load.Driver == studyfile.VLLMBench {
		marks = append(marks, "load by vllm bench serve: TTFT counts from its POST, not from the due time; the lead-in was a run of its own, and nothing was sent after the window")
	}
	if names := p.ignored(); p.file.Server.Simulate != "" && len(names) > 0 {
		marks = append(marks, "the simulated server takes "+strings.Join(names, ", ")+" without effect")
	}
	return marks
}

// needsITL reports whether the times between tokens are recorded.
func (p *plan) needsITL() bool { return p.itl || p.file.SLO().NeedsITL() }

// start returns what starts the study's servers.
func (p *plan) start(dir string) (trial.Start, error) {
	if name := p.file.Server.Simulate; name != "" {
		profile, err := vllmsim.LoadProfile(name)
		if err != nil {
			return nil, err
		}
		rig := &simload.Rig{Profile: profile, ITL: p.needsITL()}
		return rig.Start, nil
	}
	return func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
		return p.startServer(ctx, dir, launch)
	}, nil
}

// longestWait is how long a request may go without a byte. Priming may overload a small server on purpose, and a queue of minutes
// is then no failure; a probe in which requests wait so long has failed and ended before.
const longestWait = 10 * time.Minute

// apiKey is what the server asks for, when it asks for one: vLLM reads it from its environment.
func (p *plan) apiKey() string {
	const variable = "VLLM_API_KEY"
	return cmp.Or(p.env[variable], os.Getenv(variable))
}

// startServer starts a real server with its log and its process record in the study's directory.
func (p *plan) startServer(ctx context.Context, dir string, launch trial.Launch) (trial.Server, trial.Load, error) {
	log, err := logs.Create(dir, launch.Number)
	if err != nil {
		return nil, nil, err
	}
	s := p.file.Server
	server, err := serverctl.Start(ctx, serverctl.Config{
		Command: s.Command, Model: p.model, Args: launch.Args, Env: p.env, Port: s.Port, APIKey: p.apiKey(), Secrets: p.file.Secrets(os.LookupEnv),
		StartTimeout: s.StartTimeout, StopTimeout: s.StopTimeout, HangTimeout: s.HangTimeout, Log: log, Progress: launch.Progress,
		GPU: gpuSource(s), GPUMemoryTimeout: s.GPUMemoryTimeout,
		OnRecord: func(r proc.Record) error { return writeRecord(dir, r) },
	})
	if err != nil {
		_, left := reclaim(dir) // usually nothing: a start that fails leaves no process
		if lost := log.Close(); lost != nil {
			launch.Progress(lost.Error())
		}
		return nil, nil, errors.Join(err, left)
	}
	client := &bench.Client{
		URL: server.URL(), Model: server.ModelID(), Endpoint: p.file.Workload.Endpoint, ITL: p.needsITL(),
		IdleTimeout: longestWait, APIKey: bench.Secret(p.apiKey()), Natural: p.file.Workload.Output == workload.Natural,
	}
	logged := &loggedServer{Server: server, log: log, dir: dir}
	if err := p.checkTexts(ctx, client, server.Facts().MaxModelLen); err != nil {
		if _, isUsers := errors.AsType[usageError](err); !isUsers && ctx.Err() == nil {
			err = trial.AwaitDeath(ctx, server, &serverctl.ExitError{Class: serverctl.Infrastructure, Evidence: err.Error(), Code: -1})
		}
		_, stopErr := logged.Stop(context.WithoutCancel(ctx))
		return nil, nil, errors.Join(err, stopErr)
	}
	if p.file.Load.Driver != studyfile.VLLMBench {
		return logged, client, nil
	}
	load := &vllmBench{command: p.file.Load.Command, client: client, tokenizer: p.model, dir: dir, log: log, burstiness: p.file.Load.Burstiness}
	for name, value := range p.env {
		load.env = append(load.env, name+"="+value)
	}
	return logged, load, nil
}

// checkTexts names the texts that are too long for the model, which only a server can count. The first one does it for all.
func (p *plan) checkTexts(ctx context.Context, client *bench.Client, maxModelLen int) error {
	if p.textsChecked || maxModelLen == 0 || p.source.Len() == 0 {
		return nil
	}
	_, err := client.CheckLengths(ctx, func(yield func(*workload.Request) bool) {
		for i := range p.source.Len() {
			if !yield(p.source.Request(workload.WindowStream, i)) {
				return
			}
		}
	}, maxModelLen)
	if _, tooLong := errors.AsType[*bench.PreflightError](err); tooLong {
		return usageError{fmt.Errorf("%s: workload: %w", p.file.Path, err)}
	}
	if err != nil {
		return err
	}
	p.textsChecked = true
	return nil
}

// A loggedServer closes its log and forgets its process record when the server is gone.
type loggedServer struct {
	*serverctl.Server
	log    *logs.Writer
	dir    string
	once   sync.Once
	logErr error
	err    error
}

// Stop ends the server and what was kept of it. A log that is incomplete is said, and ends no study.
func (s *loggedServer) Stop(ctx context.Context) (serverctl.Ended, error) {
	ended, err := s.Server.Stop(ctx)
	s.once.Do(func() {
		s.logErr = s.log.Close()
		if err == nil { // else the record stays: the next run must end what is left
			s.err = forgetRecord(s.dir)
		}
	})
	if s.logErr != nil {
		ended.LogError = s.logErr.Error()
	}
	return ended, errors.Join(err, s.err)
}

// study puts the plan on a store.
func (p *plan) study(store *studies.Store, o runOptions, observe func(tuner.Event)) (*tuner.Study, error) {
	runner, err := p.runner(store.Dir())
	if err != nil {
		return nil, err
	}
	return &tuner.Study{
		Store: store, Runner: runner, Space: p.space, Sampler: p.sampler, Current: p.current, FixedArgs: p.file.Server.Args,
		Budget:      tuner.Budget{Trials: p.file.Budget.Trials, GPUTime: p.file.Budget.GPUTime},
		AcceptDrift: o.acceptDrift, Finish: o.finish, Observe: observe,
	}, nil
}
