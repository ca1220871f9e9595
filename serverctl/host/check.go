package host

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"vllmtuner/render"
)

// A Severity says what becomes of a study on a machine with such a finding.
type Severity string

const (
	Error   Severity = "error"   // what is measured would be wrong, or nothing starts
	Warning Severity = "warning" // it works, with less than is wanted
	Fact    Severity = "fact"    // worth saying
)

// A Finding is something to know before a study is begun on a machine.
type Finding struct {
	Severity Severity `json:"severity"`
	What     string   `json:"what"`
	Have     string   `json:"have"`
	Need     string   `json:"need,omitempty"`
	Remedy   string   `json:"remedy,omitempty"`
}

// A Need is what a server and the load on it ask of a machine.
type Need struct {
	GPUs           int     `json:"gpus"`            // of one server; 0 means that it computes on the CPU
	GeneratorCores float64 `json:"generator_cores"` // of the load generator, among Cores
	Streams        int     `json:"streams"`         // requests in flight at most
	Certain        bool    `json:"-"`               // so many are in flight for certain
	Cores          float64 `json:"cores"`           // 0 means by the GPUs and the generator, see Filled
	OpenFiles      int64   `json:"open_files"`      // 0 means by the streams
	Shm            int64   `json:"shm_bytes"`       // free; 0 means by the GPUs
}

// DefaultStreams is how many requests may be in flight in a study: an H200 carries a few hundred.
const DefaultStreams = 1024

const (
	// vllmCores are those of the API server and of the engine core, which never sleeps; each GPU's worker has another one
	// (vLLM 0.33, docs/configuration/optimization.md).
	vllmCores = 2
	// filesPerStream: one socket of the generator's, and one to spare while a connection is made anew.
	filesPerStream = 2
	// filesBeside are the log, the store, the metrics listener, pipes, and libraries.
	filesBeside = 256
	// filesLeast are those that no run does without: half of them were open in a study of two trials with eight streams.
	filesLeast = 128
	// shmAlone is what a container has unless told: enough for one GPU, whose worker is asked over pipes.
	shmAlone = 64 << 20
	// shmParallel is for tensor parallelism: NCCL's and vLLM's rings between the workers take hundreds of MiB.
	shmParallel = 1 << 30
)

// Filled returns the need with the figures in it that follow from the others.
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

// Check holds a machine against a need. The findings that weigh most come first.
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

// Sort puts the findings that weigh most first, and leaves the order of those that weigh the same.
func Sort(findings []Finding) {
	order := []Severity{Error, Warning, Fact}
	slices.SortStableFunc(findings, func(a, b Finding) int {
		return slices.Index(order, a.Severity) - slices.Index(order, b.Severity)
	})
}

// checkCores tells a limit from a small machine. A limit stops every thread of the pod for the rest of each 100 ms once
// its share is used up, and all that is measured with it; on a small machine threads only take turns, and a laptop is to
// run the demo, and vLLM without a GPU.
func checkCores(have Cores, need Need) []Finding {
	want := need.Cores
	wanted := fmt.Sprintf("%s: %d for vLLM, %d more for its GPUs, %s for the load generator",
		number(want), vllmCores, need.GPUs, number(need.GeneratorCores))
	switch {
	case have.Limit != nil && *have.Limit < want:
		severity := Error
		if need.GPUs == 0 {
			severity = Warning
		}
		return []Finding{{severity, "CPU limit", fmt.Sprintf("%s cores, by %s", number(*have.Limit), have.LimitAt), wanted,
			fmt.Sprintf("raise resources.limits.cpu of the container to %s or more (docker: --cpus): "+
				"a throttled engine or generator makes every latency wrong", number(math.Ceil(want)))}}
	case have.Usable > 0 && have.Usable < want:
		return []Finding{{Warning, "cores", number(have.Usable), wanted,
			"latencies are those of a starved server: take a machine, or a cpuset, with more cores for results to rely on"}}
	}
	return nil
}

// CheckFiles holds the limit of open files against a need. Go raises the soft limit to the hard one when it starts, and gives
// its children the one of before; vLLM raises its own likewise.
func CheckFiles(have *Limit, need Need) []Finding {
	need = need.Filled()
	want := need.OpenFiles
	if have == nil || have.Soft == nil || *have.Soft >= want {
		return nil
	}
	severity := Warning
	if least := int64(filesLeast); *have.Soft < least || need.Certain && *have.Soft < least+int64(need.Streams) {
		severity = Error
	}
	return []Finding{{severity, "open files", strconv.FormatInt(*have.Soft, 10), fmt.Sprintf("%d, for %d streams", want, need.Streams),
		fmt.Sprintf("run `ulimit -Hn %d` as root before the tuner (systemd: LimitNOFILE=), "+
			"or set it for the container's runtime; else requests fail with \"too many open files\"", want)}}
}

func checkShm(have Shm, need Need) []Finding {
	want := need.Shm
	if have.Total == 0 || have.Free >= want {
		return nil // that there is none is said among what is not known
	}
	why := "one GPU"
	if need.GPUs > 1 {
		why = "tensor parallelism"
	}
	return []Finding{{Warning, have.Dir, fmt.Sprintf("%s of %s free", render.Bytes(have.Free), render.Bytes(have.Total)),
		fmt.Sprintf("%s free, for %s", render.Bytes(want), why),
		"mount a volume there: emptyDir {medium: Memory} at /dev/shm (docker: --shm-size); " +
			"left-over psm_* files of dead servers can be removed"}}
}

// number writes a count of cores without needless digits.
func number(v float64) string { return strconv.FormatFloat(math.Round(100*v)/100, 'f', -1, 64) }
