package plan

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/doctor"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/weights"
	"vllmtuner/tuner/studyfile"
)

// GPUSource returns the program or exporter that reports the GPUs of a study's server. It returns nil if the server is
// simulated or uses no GPU.
func GPUSource(s studyfile.Server) gpu.Source {
	switch {
	case s.Simulate != "" || s.GPU == studyfile.NoGPU:
		return nil
	case strings.HasPrefix(s.GPU, "http://") || strings.HasPrefix(s.GPU, "https://"):
		return &gpu.DCGM{URL: s.GPU}
	}
	return &gpu.NvidiaSMI{Path: s.GPU}
}

// CheckMachine checks that this machine has what the server and the load generator need. It returns an error if all
// measurements on this machine would be wrong, and warns if they may be wrong.
func (p *Plan) CheckMachine(ctx context.Context, say Say) error {
	if p.File.Server.Simulate != "" {
		return nil
	}
	if err := p.checkGPUs(ctx, say); err != nil {
		return err
	}
	machine := host.Reader{}.Read()
	var errs []error
	for _, f := range host.Check(machine, p.need()) {
		text := fmt.Sprintf("%s: %s, wanted %s; %s", f.What, f.Have, f.Need, f.Remedy)
		switch f.Severity {
		case host.Error:
			errs = append(errs, errors.New(text))
		case host.Warning:
			say(Warning, "%s", text)
		}
	}
	if len(errs) > 0 {
		return InputError{errors.Join(errs...)}
	}
	say("machine", "%.3g cores, %s of memory free", machine.Cores.Usable, render.Bytes(machine.Memory.Free))
	return nil
}

// need returns what the machine must have. The number of requests in flight is known only for a sweep over
// concurrencies.
func (p *Plan) need() host.Need {
	need := host.Need{GPUs: len(p.GPUs), GeneratorCores: 1, Streams: host.DefaultStreams}
	if sweep := p.File.Sweep; sweep != nil && len(sweep.Concurrencies) > 0 {
		need.Streams, need.Certain = min(slices.Max(sweep.Concurrencies), sweep.Requests), true
	}
	return need
}

// MoreCores returns advice for a study whose load generator was late: how many cores it needs.
func (p *Plan) MoreCores() string {
	have := host.Reader{}.Read().Cores.Usable
	need := host.Need{GPUs: len(p.GPUs), GeneratorCores: 1}.Filled().Cores
	return fmt.Sprintf("the server and the load generator may use %.3g cores on this machine, but they need %.3g cores on which nothing else runs: "+
		"run the study on such a machine (in Kubernetes, set both the CPU request and limit to that); the same command continues it there", have, need)
}

// checkGPUs finds the GPUs that the server will use. It accepts a machine without a GPU, because vLLM can run on the
// CPU.
func (p *Plan) checkGPUs(ctx context.Context, say Say) error {
	source := GPUSource(p.File.Server)
	if source == nil {
		return nil
	}
	reading, err := source.Query(ctx)
	if errors.Is(err, gpu.ErrNone) && p.File.Server.GPU == "" {
		say("gpu", "none: %v", err)
		return nil
	}
	if err != nil {
		return inputf("%s: server.gpu: %w", p.File.Path, err)
	}
	p.GPUs = serverctl.OwnGPUs(reading, p.Env, p.File.Server.Args)
	for _, g := range p.GPUs {
		used := ""
		if g.UsedMiB != nil && g.TotalMiB != nil {
			used = fmt.Sprintf(", %.1f of %.1f GiB in use", *g.UsedMiB/1024, *g.TotalMiB/1024)
		}
		say("gpu", "%d: %s, driver %s%s", g.Index, g.Name, g.Driver, used)
		if doctor.InUse(g) {
			say(Warning, "GPU %d is not free%s: the server may run out of memory, or get a smaller cache; `tuner doctor` shows which processes use it", g.Index, used)
		}
	}
	return nil
}

// Weights returns the files of the model's weights, and their directory. The error wraps weights.ErrUnknown if the
// server will download them.
func (p *Plan) Weights() ([]weights.File, string, error) {
	files, dir, err := weights.Files(weights.Model{
		Name: p.File.Model, Revision: p.File.FixedArg("revision"), CacheDir: p.File.FixedArg("download-dir"),
		Env: func(name string) string { value, _ := p.Lookup(name); return value },
	})
	if err != nil && !errors.Is(err, weights.ErrUnknown) {
		err = inputf("%s: model: %w; complete it, or measure with made-up weights (server.args: [--load-format, dummy])", p.File.Path, err)
	}
	return files, dir, err
}

// NeedsWeights reports whether the servers load weights. Simulated servers and servers with --load-format dummy do not.
func (p *Plan) NeedsWeights() bool {
	return p.File.Server.Simulate == "" && p.File.FixedArg("load-format") != "dummy"
}

// checkWeights returns an error if the model's directory lacks weights. A model that is not on this machine is no
// error, because the server downloads it.
func (p *Plan) checkWeights(say Say) error {
	if !p.NeedsWeights() {
		return nil
	}
	files, dir, err := p.Weights()
	switch {
	case errors.Is(err, weights.ErrUnknown):
		say("model", "%s is not on this machine: the server downloads it", p.File.Model)
		return nil
	case err != nil:
		return err
	}
	if to := p.File.Server.ModelCopy; to != "" {
		if err := weights.CheckCopy(dir, to); err != nil {
			return inputf("%s: server.model_copy: %w", p.File.Path, err)
		}
	}
	say("model", "%s of weights in %s", render.Count(len(files), "file"), dir)
	return nil
}
