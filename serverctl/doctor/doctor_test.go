package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
)

// A fixedSource gives the same answer each time.
type fixedSource struct {
	gpus []gpu.GPU
	err  error
}

func (s fixedSource) Query(context.Context) (gpu.Reading, error) {
	return gpu.Reading{GPUs: s.gpus}, s.err
}

// h200 returns an H200 that has been idle since its driver was loaded.
func h200(index int) gpu.GPU {
	return gpu.GPU{
		Index: index, UUID: fmt.Sprintf("GPU-5ab4ffcb-1234-1234-1234-00000000000%d", index), Name: "NVIDIA H200", Driver: "580.173.02",
		TotalMiB: new(143771.0), UsedMiB: new(0.0), FreeMiB: new(143158.0), Utilization: new(0.0), PowerW: new(76.12), PowerLimitW: new(700.0),
		SMClockMHz: new(345.0), MemoryClockMHz: new(3201.0), TemperatureC: new(29.0), Throttle: []string{"idle"},
	}
}

// gpuPod returns a pod with limits of 96 GiB of memory and the given number of CPUs.
func gpuPod(cpus float64) host.Machine {
	files, memory, processes := int64(1048575), int64(8<<20), int64(8255000)
	return host.Machine{
		Cores:  host.Cores{Usable: cpus, Affinity: 96, Limit: &cpus, LimitAt: "/sys/fs/cgroup/cpu.max"},
		Memory: host.Memory{Total: 2113375344 << 10, Free: 70866960384, Limit: new(int64(96 << 30)), LimitAt: "/sys/fs/cgroup/memory.max"},
		Shm:    host.Shm{Dir: host.DevShm, Total: 16 << 30, Free: 16 << 30},
		Limits: host.Limits{
			OpenFiles: &host.Limit{Soft: &files, Hard: &files}, LockedMemory: &host.Limit{Soft: &memory, Hard: nil},
			Processes: &host.Limit{Soft: &processes, Hard: &processes},
		},
	}
}

func unset(string) (string, bool) { return "", false }

// The texts in testdata are what people see. UPDATE_SCRIPTS=1 writes them again; read the diff before you commit it.
func TestText(t *testing.T) {
	busy, lost, divided := h200(1), h200(2), h200(3)
	busy.UsedMiB, busy.FreeMiB, busy.Throttle = new(129000.0), new(14158.0), []string{"power cap", "hardware thermal slowdown"}
	lost.FreeMiB, lost.UsedMiB, lost.Unsaid = nil, nil, map[string]string{"memory.used": "[GPU is lost]"}
	divided.MIG, divided.FreeMiB, divided.UsedMiB, divided.TotalMiB, divided.Utilization, divided.Throttle = "enabled", nil, nil, nil, nil, nil
	divided.Unsaid = map[string]string{"memory.used": "[Insufficient Permissions]"}
	tight := gpuPod(2)
	tight.Shm = host.Shm{Dir: host.DevShm, Total: 64 << 20, Free: 64 << 20}
	tight.Limits.OpenFiles = &host.Limit{Soft: new(int64(1024)), Hard: new(int64(1024))}
	tight.Unknown = []string{`memory: /sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-pod7c.slice/memory.max: "banana" is not a number`}
	for _, row := range []struct {
		name    string
		source  fixedSource
		machine host.Machine
		gpus    int // -1 means all
		ready   bool
	}{
		{"one_gpu", fixedSource{gpus: []gpu.GPU{h200(0)}}, gpuPod(8), -1, true},
		{"troubles", fixedSource{gpus: []gpu.GPU{h200(0), busy, lost, divided}}, tight, -1, false},
		{"no_gpu", fixedSource{err: &gpu.NoneError{Why: "there is no nvidia-smi in PATH"}}, gpuPod(8), -1, true},
		{"no_gpu_needed_one", fixedSource{err: &gpu.NoneError{Why: "there is no nvidia-smi in PATH"}}, gpuPod(8), 1, false},
		{"driver", fixedSource{err: &gpu.Failure{Doing: "query nvidia-smi", Why: "exit status 18: Failed to initialize NVML: Driver/library version mismatch",
			Remedy: "the driver was updated under its loaded kernel module: reboot the node, or load the module anew"}}, gpuPod(8), -1, false},
		{"driver_not_needed", fixedSource{err: &gpu.Failure{Doing: "query nvidia-smi", Why: "signal: killed"}}, gpuPod(8), 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := Examine(t.Context(), Examination{
				Need: host.Need{GPUs: row.gpus, GeneratorCores: 1, Streams: 1024}, Source: row.source, SourceName: "nvidia-smi", Machine: row.machine, Lookup: unset,
			})
			if r.Ready != row.ready {
				t.Errorf("ready is %v, want %v", r.Ready, row.ready)
			}
			got := r.Text(80)
			for line := range strings.Lines(got) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
					t.Errorf("a line of %d columns: %s", n, line)
				}
			}
			golden := filepath.Join("testdata", row.name+".txt")
			if os.Getenv("UPDATE_SCRIPTS") != "" {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("the report is\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestExamineListsTheGPUsThatTheServerWillSee(t *testing.T) {
	r := Examine(t.Context(), Examination{
		Need: host.Need{GPUs: -1, GeneratorCores: 1}, Source: fixedSource{gpus: []gpu.GPU{h200(0), h200(1)}}, Machine: gpuPod(8),
		Lookup: func(name string) (string, bool) { return "1", name == "CUDA_VISIBLE_DEVICES" },
	})
	if len(r.GPUs.List) != 1 || r.GPUs.List[0].Index != 1 || r.GPUs.Hidden != 1 || r.Need.GPUs != 1 {
		t.Errorf("the GPUs are %+v, needed %d; want GPU 1 alone", r.GPUs, r.Need.GPUs)
	}
}

func TestExamineReportsAnInterruptedSource(t *testing.T) {
	why := errors.New("interrupted")
	r := Examine(t.Context(), Examination{
		Need: host.Need{GPUs: -1}, Source: fixedSource{err: fmt.Errorf("query nvidia-smi: %w", why)}, Machine: gpuPod(8), Lookup: unset,
	})
	if r.Ready || !strings.Contains(r.Text(80), "not known: query nvidia-smi: interrupted") {
		t.Errorf("the report is %s", r.Text(80))
	}
}
