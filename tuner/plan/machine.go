package plan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/doctor"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/tuner/studyfile"
)

// A Machine is the machine that a study's server and load generator run on.
type Machine struct {
	GPUs []gpu.GPU // GPUs that a server with server.args alone will use; set by Check

	server *Server
	most   int // number of GPUs of the largest server of the study; set by Check
}

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

// Check checks that this machine has what the server and the load generator need. It returns an error if all
// measurements on this machine would be wrong, and warns if they may be wrong.
func (m *Machine) Check(ctx context.Context, say Say) error {
	if m.server.file.Server.Simulate != "" {
		return nil
	}
	if err := m.checkGPUs(ctx, say); err != nil {
		return err
	}
	machine := host.Reader{}.Read()
	var errs []error
	for _, f := range host.Check(machine, m.need()) {
		switch f.Severity {
		case host.Error:
			errs = append(errs, errors.New(f.TextWithRemedy()))
		case host.Warning:
			say(Warning, "%s", f.TextWithRemedy())
		}
	}
	if len(errs) > 0 {
		return InputError{errors.Join(errs...)}
	}
	say("machine", "%.3g cores, %s of memory free", machine.Cores.Usable, render.Bytes(machine.Memory.Free))
	return nil
}

// checkGPUs finds the GPUs that the server will use. It accepts a machine without a GPU, because vLLM can run on the
// CPU.
func (m *Machine) checkGPUs(ctx context.Context, say Say) error {
	source := GPUSource(m.server.file.Server)
	if source == nil {
		return nil
	}
	reading, err := source.Query(ctx)
	if errors.Is(err, gpu.ErrNone) && m.server.file.Server.GPU == "" {
		say("gpu", "none: %v", err)
		return nil
	}
	if err != nil {
		return inputf("%s: server.gpu: %w", m.server.file.Path, err)
	}
	m.GPUs = serverctl.OwnGPUs(reading, m.server.Env, m.server.file.Server.Args)
	all, err := layouts(m.server.file)
	if err != nil {
		return err
	}
	if usable := len(gpu.Visible(reading, m.server.Lookup)); usable > 0 { // without GPUs vLLM may run on the CPU
		if err := m.checkLayouts(all, usable); err != nil {
			return InputError{err}
		}
	}
	largest := serverctl.OwnGPUs(reading, m.server.Env, largest(all).args)
	m.most = len(largest)
	for _, g := range largest {
		used := ""
		if g.UsedMiB != nil && g.TotalMiB != nil {
			used = fmt.Sprintf(", %s of %s in use", render.Mebibytes(*g.UsedMiB), render.Mebibytes(*g.TotalMiB))
		}
		say("gpu", "%d: %s, driver %s%s", g.Index, g.Name, g.Driver, used)
		if doctor.InUse(g) {
			say(Warning, "GPU %d is not free%s: the server may run out of memory, or get a smaller cache; `tuner doctor` shows which processes use it", g.Index, used)
		}
	}
	return nil
}

// need returns what the machine must have. The number of requests in flight is known only for a sweep over
// concurrencies.
func (m *Machine) need() host.Need {
	need := host.Need{GPUs: m.most, GeneratorCores: 1, Streams: host.DefaultStreams}
	if sweep := m.server.file.Sweep; sweep != nil && len(sweep.Concurrencies) > 0 {
		need.Streams, need.Certain = min(slices.Max(sweep.Concurrencies), sweep.Requests), true
	}
	return need
}

// MoreCores returns advice for a study whose load generator was late. It says how many cores the study needs.
func (m *Machine) MoreCores() string {
	have := host.Reader{}.Read().Cores.Usable
	need := host.Need{GPUs: m.most, GeneratorCores: 1}.Filled().Cores
	return fmt.Sprintf("the server and the load generator may use %.3g cores on this machine, but they need %.3g cores on which nothing else runs: "+
		"run the study on such a machine (in Kubernetes, set both the CPU request and limit to that); the same command continues it there", have, need)
}

// gpuNames returns the kinds of the GPUs that the server will use, and the number of each kind, such as "2 × NVIDIA
// H200". It leaves out their indexes, because two GPUs of one kind count as equal.
func (m *Machine) gpuNames() string {
	counts := lo.CountValuesBy(m.GPUs, func(g gpu.GPU) string {
		if g.MIG == "" {
			return g.Name
		}
		return g.Name + ", MIG " + cmp.Or(g.Profile, g.MIG)
	})
	var names []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		names = append(names, fmt.Sprintf("%d × %s", counts[name], name))
	}
	return strings.Join(names, "; ")
}
