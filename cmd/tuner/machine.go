package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"vllmtuner/serverctl"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/tuner/studyfile"
)

// gpuSource is who tells of the GPUs of a study's server; nil when nobody is to be asked.
func gpuSource(s studyfile.Server) gpu.Source {
	switch {
	case s.Simulate != "" || s.GPU == studyfile.NoGPU:
		return nil
	case strings.HasPrefix(s.GPU, "http://") || strings.HasPrefix(s.GPU, "https://"):
		return &gpu.DCGM{URL: s.GPU}
	}
	return &gpu.NvidiaSMI{Path: s.GPU}
}

// warning is what is said of something that works, with less than is wanted.
const warning = "warning"

// usualStreams is how many requests may be in flight in a study: an H200 carries a few hundred.
const usualStreams = 1024

// checkMachine holds what the machine lets us use against what the study's server and its load ask for. say is told what is
// well, and what is not as it should be; what would make every figure wrong is an error.
func (p *plan) checkMachine(ctx context.Context, say say) error {
	if p.file.Server.Simulate != "" {
		return nil
	}
	gpus, err := p.checkGPUs(ctx, say)
	if err != nil {
		return err
	}
	machine := host.Reader{}.Read()
	var errs []error
	for _, f := range host.Check(machine, p.need(gpus)) {
		text := fmt.Sprintf("%s: %s, wanted %s; %s", f.What, f.Have, f.Need, f.Remedy)
		switch f.Severity {
		case host.Error:
			errs = append(errs, errors.New(text))
		case host.Warning:
			say(warning, "%s", text)
		}
	}
	if len(errs) > 0 {
		return usageError{errors.Join(errs...)}
	}
	say("machine", "%.3g cores, %.1f GiB of memory free", machine.Cores.Usable, float64(machine.Memory.Free)/(1<<30))
	return nil
}

// need is what the study asks of a machine. A sweep says itself how many requests are in flight.
func (p *plan) need(gpus int) host.Need {
	need := host.Need{GPUs: gpus, GeneratorCores: 1, Streams: usualStreams}
	if sweep := p.file.Sweep; sweep != nil && len(sweep.Concurrencies) > 0 {
		need.Streams, need.Certain = min(slices.Max(sweep.Concurrencies), sweep.Requests), true
	}
	return need
}

// needsCores says which machine a study needs whose load generator was late.
func (p *plan) needsCores() string {
	have := host.Reader{}.Read().Cores.Usable
	need := host.Need{GPUs: len(p.gpus), GeneratorCores: 1}.Filled().Cores
	return fmt.Sprintf("this machine lets the server and the load generator use %.3g cores, and %.3g are needed with nothing else at work on them: "+
		"run the study there (in Kubernetes with so many as both request and limit of the CPU); the same command goes on with it", have, need)
}

// checkGPUs tells of the GPUs that the server will use, and returns how many those are. A machine without one is fit for vLLM on
// CPU, and for nothing else.
func (p *plan) checkGPUs(ctx context.Context, say say) (int, error) {
	source := gpuSource(p.file.Server)
	if source == nil {
		return 0, nil
	}
	reading, err := source.Query(ctx)
	if errors.Is(err, gpu.ErrNone) && p.file.Server.GPU == "" {
		say("gpu", "none: %v", err)
		return 0, nil
	}
	if err != nil {
		return 0, usageError{fmt.Errorf("%s: server.gpu: %w", p.file.Path, err)}
	}
	own := serverctl.OwnGPUs(reading, p.env, p.file.Server.Args)
	p.gpus = own
	for _, g := range own {
		used := ""
		if g.UsedMiB != nil && g.TotalMiB != nil {
			used = fmt.Sprintf(", %.1f of %.1f GiB in use", *g.UsedMiB/1024, *g.TotalMiB/1024)
		}
		say("gpu", "%d: %s, driver %s%s", g.Index, g.Name, g.Driver, used)
		if isHeld(g) {
			say(warning, "GPU %d is not free%s: the server would die of that, or have a smaller cache; see `tuner doctor` for who holds it", g.Index, used)
		}
	}
	return len(own), nil
}

func isHeld(g gpu.GPU) bool { return g.UsedMiB != nil && *g.UsedMiB > foreignMiB }

// lookup finds a variable in the environment that the server gets.
func (p *plan) lookup(name string) (string, bool) {
	if value, ok := p.env[name]; ok {
		return value, true
	}
	return os.LookupEnv(name)
}
