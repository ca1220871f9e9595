// Package doctor examines a machine, or a container, for a study. It reports what it found, what is missing, and what
// to do about it, as data and as text. It never changes the machine.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/render"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies/fence"
)

// A Report is the result of an examination. Its lists are never nil, so that JSON has [] and not null.
type Report struct {
	Ready    bool           `json:"ready"` // no finding is an error
	Findings []host.Finding `json:"findings"`
	Need     host.Need      `json:"need"`
	GPUs     GPUs           `json:"gpus"`
	Machine  host.Machine   `json:"machine"`
	Means    []string       `json:"means"`           // ways in which a server is ended if the tuner dies
	Store    *Store         `json:"store,omitempty"` // nil when no disk was examined
}

// GPUs describes the GPUs of the machine, or of the container.
type GPUs struct {
	Source    string        `json:"source"`
	None      string        `json:"none,omitempty"` // why there is no GPU
	List      []gpu.GPU     `json:"list"`           // GPUs that the server will see
	Hidden    int           `json:"hidden"`         // how many GPUs CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES hide
	Processes []gpu.Process `json:"processes"`      // processes that hold memory on the GPUs
}

// A Store is the disk that studies would be kept on.
type Store struct {
	Root   string      `json:"root"`
	Mount  fence.Mount `json:"mount"`
	Commit float64     `json:"commit_ms"` // time until a small write is on the disk
	Text   string      `json:"text"`      // what the other fields say, in words
}

// An Examination says what to examine.
type Examination struct {
	Need       host.Need // Need.GPUs may be -1, which means all GPUs
	Source     gpu.Source
	SourceName string // nvidia-smi or dcgm
	Machine    host.Machine
	Lookup     func(name string) (string, bool) // looks up a variable of the server's environment; for example os.LookupEnv
}

// Examine asks e.Source for the GPUs, and compares the GPUs and the machine with e.Need.
func Examine(ctx context.Context, e Examination) *Report {
	r := &Report{
		Need: e.Need, Machine: e.Machine, Findings: []host.Finding{}, Means: []string{},
		GPUs: GPUs{Source: e.SourceName, List: []gpu.GPU{}, Processes: []gpu.Process{}},
	}
	r.findGPUs(ctx, e)
	if r.Need.GPUs < 0 {
		r.Need.GPUs = len(r.GPUs.List)
	}
	r.Need = r.Need.Filled()
	for _, g := range r.GPUs.List {
		r.Add(checkGPU(g)...)
	}
	r.Add(host.Check(e.Machine, r.Need)...)
	return r
}

// Add adds findings, sorts all findings with the most serious first, and decides again whether the machine is ready.
func (r *Report) Add(findings ...host.Finding) {
	r.Findings = append(r.Findings, findings...)
	host.Sort(r.Findings)
	r.Ready = r.Count(host.Error) == 0
}

// Count returns how many findings have the given severity.
func (r *Report) Count(severity host.Severity) int {
	n := 0
	for _, f := range r.Findings {
		if f.Severity == severity {
			n++
		}
	}
	return n
}

// AddMeans adds the ways in which this machine lets the tuner find and end a server's processes. One of these ways is
// enough for a well-behaved server.
func (r *Report) AddMeans() {
	for _, means := range []struct {
		name string
		err  error
	}{{"subreaper", proc.SubreaperSupport()}, {"watchdog", proc.WatchdogSupport()}, {"cgroup v2", proc.CgroupSupport()}} {
		if means.err == nil {
			r.Means = append(r.Means, means.name)
			continue
		}
		r.Add(host.Finding{Severity: host.Fact, What: "no " + means.name, Have: means.err.Error()})
	}
}

// AddStore adds the disk for studies with its warnings. If the disk cannot be used, err says why, and AddStore adds
// only this error.
func (r *Report) AddStore(store Store, warnings []string, err error) {
	if err != nil {
		r.Add(host.Finding{Severity: host.Error, What: "studies", Have: err.Error()})
		return
	}
	r.Store = &store
	for _, text := range warnings {
		r.Add(host.Finding{Severity: host.Warning, What: "studies", Have: text})
	}
}

// findGPUs asks the source for the GPUs. A machine without GPUs is an error only if e.Need asks for GPUs. A source that
// fails is an error too, but only a warning if e.Need asks for 0 GPUs.
func (r *Report) findGPUs(ctx context.Context, e Examination) {
	reading, err := e.Source.Query(ctx)
	none, isNone := errors.AsType[*gpu.NoneError](err)
	switch failure, failed := errors.AsType[*gpu.Failure](err); {
	case isNone:
		r.GPUs.None = none.Why
	case failed:
		r.addLack("not known: "+failure.Doing+": "+failure.Why, failure.Remedy)
		return
	case err != nil:
		r.addLack("not known: "+err.Error(), "")
		return
	default:
		r.GPUs.List = append(r.GPUs.List, gpu.Visible(reading, e.Lookup)...)
		r.GPUs.Hidden = len(reading.GPUs) - len(r.GPUs.List)
	}
	if have := len(r.GPUs.List); have < r.Need.GPUs {
		text := strconv.Itoa(have)
		if r.GPUs.None != "" {
			text = "none: " + r.GPUs.None
		}
		r.addLack(text, "use a machine with more GPUs, request them in the container's resources (nvidia.com/gpu), or check CUDA_VISIBLE_DEVICES")
	}
	r.findProcesses(ctx, e.Source)
}

// addLack adds the finding that GPUs are missing, or that their number is not known.
func (r *Report) addLack(have, remedy string) {
	f := host.Finding{Severity: host.Error, What: "GPUs", Have: have, Remedy: remedy}
	switch {
	case r.Need.GPUs > 0:
		f.Need = strconv.Itoa(r.Need.GPUs)
	case r.Need.GPUs == 0:
		f.Severity = host.Warning
	}
	r.Add(f)
}

// findProcesses lists the processes that hold memory on the GPUs that the server will see. Only nvidia-smi reports
// them.
func (r *Report) findProcesses(ctx context.Context, source gpu.Source) {
	smi, ok := source.(*gpu.NvidiaSMI)
	if !ok || len(r.GPUs.List) == 0 {
		return
	}
	processes, err := smi.Processes(ctx)
	if err != nil {
		r.Add(host.Finding{Severity: host.Fact, What: "GPU processes", Have: "not known: " + err.Error()})
		return
	}
	for _, p := range processes {
		if slices.ContainsFunc(r.GPUs.List, func(g gpu.GPU) bool { return g.UUID == p.GPU }) {
			r.GPUs.Processes = append(r.GPUs.Processes, p)
		}
	}
}

// maxOthersMiB is how much memory of a GPU other processes may use without a warning. A display or a monitoring program
// takes less.
const maxOthersMiB = 1024

// InUse reports whether other processes use so much of a GPU's memory that a server would suffer.
func InUse(g gpu.GPU) bool { return g.UsedMiB != nil && *g.UsedMiB >= maxOthersMiB }

// checkGPU returns what is wrong with one GPU.
func checkGPU(g gpu.GPU) (all []host.Finding) {
	find := func(severity host.Severity, what, have, need, remedy string) {
		all = append(all, host.Finding{
			Severity: severity, What: fmt.Sprintf("GPU %d %s", g.Index, what), Have: have, Need: need, Remedy: remedy,
		})
	}
	for _, state := range g.Unsaid {
		if strings.Contains(state, "lost") || strings.Contains(state, "reset") { // [GPU is lost], [GPU requires reset]
			find(host.Error, "state", state, "", "reset the GPU, or reboot the node")
			return all
		}
	}
	switch {
	case g.UsedMiB == nil:
		find(host.Fact, "memory", "not reported: "+cmp.Or(g.Unsaid["memory.used"], "no figure"), "",
			"the tuner cannot check that the memory of a stopped server is free again")
	case InUse(g):
		find(host.Warning, "memory", render.Mebibytes(*g.UsedMiB)+" in use by other processes", "nearly all free: vLLM takes 90 % by default",
			"end the processes that use it, or choose another GPU with CUDA_VISIBLE_DEVICES")
	}
	if slow := g.Slowdowns(); len(slow) > 0 {
		find(host.Warning, "clocks", strings.Join(slow, ", "), "",
			"check the node's cooling and power (nvidia-smi -q -d PERFORMANCE); until then, measured capacities are too low")
	}
	return all
}
