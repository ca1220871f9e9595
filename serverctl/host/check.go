package host

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"vllmtuner/render"
)

// A Severity tells how much a finding matters to a study.
type Severity string

const (
	Error   Severity = "error"   // measurements would be wrong, or nothing starts
	Warning Severity = "warning" // a study works, but worse than it should
	Fact    Severity = "fact"    // worth knowing
)

// A Finding is something to know before a study begins on a machine.
type Finding struct {
	Severity Severity `json:"severity"`
	What     string   `json:"what"`
	Have     string   `json:"have"`
	Need     string   `json:"need,omitempty"`
	Remedy   string   `json:"remedy,omitempty"`
}

// Text says what was found and what is needed, such as "open files: 64; wanted 2304". It leaves out the remedy.
func (f Finding) Text() string {
	if f.Need == "" {
		return f.What + ": " + f.Have
	}
	return f.What + ": " + f.Have + "; wanted " + f.Need
}

// TextWithRemedy returns Text and the remedy in one line.
func (f Finding) TextWithRemedy() string {
	if f.Remedy == "" {
		return f.Text()
	}
	return f.Text() + "; " + f.Remedy
}

// A Need is what a server and its load require of a machine.
type Need struct {
	GPUs           int     `json:"gpus"`            // GPUs of one server; 0 means that the server computes on the CPU
	GeneratorCores float64 `json:"generator_cores"` // cores of the load generator; Cores includes them
	Streams        int     `json:"streams"`         // maximum of requests in flight
	Certain        bool    `json:"-"`               // exactly Streams requests will be in flight; otherwise there may be fewer
	Cores          float64 `json:"cores"`           // all cores; 0 means the sum of what vLLM, the GPUs and the load generator need
	OpenFiles      int64   `json:"open_files"`      // 0 means a number that Filled derives from the streams
	Shm            int64   `json:"shm_bytes"`       // free bytes; 0 means a number that Filled derives from the GPUs
}

// DefaultStreams is the assumed maximum of requests in flight in a study. An H200 serves a few hundred at once.
const DefaultStreams = 1024

const (
	// vllmCores is one core for the API server and one for the engine core, which never sleeps. The worker of each GPU
	// needs one more core (vLLM 0.33, docs/configuration/optimization.md).
	vllmCores = 2
	// filesPerStream counts the load generator's socket, and a second socket while the generator reconnects.
	filesPerStream = 2
	// filesBeside counts the other open files: the log, the store, the metrics listener, pipes and libraries.
	filesBeside = 256
	// minFiles is the number of open files below which the limit is too low for any run. A study of two trials with
	// eight streams had half as many files open.
	minFiles = 128
	// shmAlone is the shared memory that a container has by default, in bytes. It is enough for one GPU, whose worker
	// communicates over pipes.
	shmAlone = 64 << 20
	// shmParallel is the shared memory for tensor parallelism, in bytes. The ring buffers of NCCL and vLLM between the
	// workers take hundreds of MiB.
	shmParallel = 1 << 30
)

// Filled returns the need with derived values for the zero fields Cores, OpenFiles and Shm.
func (n Need) Filled() Need {
	if n.Cores == 0 {
		n.Cores = vllmCores + float64(n.GPUs) + n.GeneratorCores
	}
	if n.OpenFiles == 0 {
		n.OpenFiles = filesPerStream*int64(n.Streams) + filesBeside
	}
	if n.Shm == 0 {
		n.Shm = shmAlone
		if n.GPUs > 1 {
			n.Shm = shmParallel
		}
	}
	return n
}

// Check compares a machine with a need. The most severe findings come first.
func Check(m Machine, need Need) []Finding {
	need = need.Filled()
	var all []Finding
	all = append(all, checkCores(m.Cores, need)...)
	all = append(all, CheckFiles(m.Limits.OpenFiles, need)...)
	all = append(all, checkShm(m.Shm, need)...)
	for _, unknown := range m.Unknown {
		all = append(all, Finding{Fact, "not known", unknown, "", ""})
	}
	Sort(all)
	return all
}

// Sort puts the most severe findings first. It keeps the order of equally severe findings.
func Sort(findings []Finding) {
	order := []Severity{Error, Warning, Fact}
	slices.SortStableFunc(findings, func(a, b Finding) int {
		return slices.Index(order, a.Severity) - slices.Index(order, b.Severity)
	})
}

// checkCores treats a CPU limit more strictly than a small machine. The kernel enforces a CPU limit in periods of 100
// ms. When a pod has used its share of a period, all its threads stop until the period ends. That spoils every
// measurement. On a small machine threads only take turns. A small machine gets only a warning, because a laptop should
// still run the demo, and vLLM without a GPU.
func checkCores(have Cores, need Need) []Finding {
	want := need.Cores
	var gpus string
	if need.GPUs > 0 {
		gpus = fmt.Sprintf("%d more for its GPUs, ", need.GPUs)
	}
	wanted := fmt.Sprintf("%s (%d for vLLM, %s%s for the load generator)", formatCores(want), vllmCores, gpus, formatCores(need.GeneratorCores))
	switch {
	case have.Limit != nil && *have.Limit < want:
		severity := Error
		if need.GPUs == 0 {
			severity = Warning
		}
		return []Finding{{severity, "CPU limit", fmt.Sprintf("%s cores, by %s", formatCores(*have.Limit), have.LimitAt), wanted,
			fmt.Sprintf("raise resources.limits.cpu of the container to %s or more (docker: --cpus): "+
				"a throttled engine or generator makes every latency wrong", formatCores(math.Ceil(want)))}}
	case have.Usable > 0 && have.Usable < want:
		return []Finding{{Warning, "cores", formatCores(have.Usable), wanted,
			"the server lacks CPU time, so its latencies are too high; use a machine, or a cpuset, with more cores"}}
	}
	return nil
}

// CheckFiles compares the limit of open files with a need. When a Go program starts, it raises its soft limit to the
// hard limit. It starts its children with the original soft limit. vLLM raises its own soft limit too.
func CheckFiles(have *Limit, need Need) []Finding {
	need = need.Filled()
	want := need.OpenFiles
	if have == nil || have.Soft == nil || *have.Soft >= want {
		return nil
	}
	severity := Warning
	if *have.Soft < minFiles || need.Certain && *have.Soft < minFiles+int64(need.Streams) {
		severity = Error
	}
	return []Finding{{severity, "open files", strconv.FormatInt(*have.Soft, 10), fmt.Sprintf("%d, for %s", want, render.Count(need.Streams, "stream")),
		fmt.Sprintf("run `ulimit -Hn %d` as root before the tuner (systemd: LimitNOFILE=), "+
			"or set it for the container's runtime; otherwise requests fail with \"too many open files\"", want)}}
}

func checkShm(have Shm, need Need) []Finding {
	want := need.Shm
	if have.Total == 0 || have.Free >= want {
		return nil // if there is no shared memory, Machine.Unknown says so
	}
	why := "one GPU"
	if need.GPUs > 1 {
		why = "tensor parallelism"
	}
	return []Finding{{Warning, have.Dir, fmt.Sprintf("%s of %s free", render.Bytes(have.Free), render.Bytes(have.Total)),
		fmt.Sprintf("%s free, for %s", render.Bytes(want), why),
		"mount a volume there: emptyDir {medium: Memory} at /dev/shm (docker: --shm-size); " +
			"you can remove psm_* files of dead servers"}}
}

// formatCores formats a number of cores with at most two decimals.
func formatCores(v float64) string { return strconv.FormatFloat(math.Round(100*v)/100, 'f', -1, 64) }
