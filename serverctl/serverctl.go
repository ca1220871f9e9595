// Package serverctl owns one inference server: its start, readiness, facts, the class of its death, and its end. It
// never measures load.
package serverctl

import (
	"fmt"
	"slices"
	"time"
)

// Facts are what a server has reported about itself when it is ready. A zero field is unknown.
type Facts struct {
	Version        string        `json:"version,omitempty"`         // such as 0.14.1
	KVCacheTokens  int           `json:"kv_cache_tokens,omitempty"` // size in tokens, from the start-up log
	KVCacheGiB     float64       `json:"kv_cache_gib,omitempty"`    // size per GPU
	MaxConcurrency float64       `json:"max_concurrency,omitempty"` // how many requests of max-model-len tokens fit into the KV cache
	ModelGiB       float64       `json:"model_gib,omitempty"`       // memory of the weights
	GraphGiB       float64       `json:"graph_gib,omitempty"`       // memory of the CUDA graphs
	MaxModelLen    int           `json:"max_model_len,omitempty"`   // from /v1/models
	StartUp        time.Duration `json:"start_up_ns,omitempty"`     // time from exec to the first real token
	Port           int           `json:"port,omitempty"`
	Simulated      bool          `json:"simulated,omitempty"` // the server is a simulator without a GPU
	Virtual        bool          `json:"-"`                   // the server's time is virtual, so no clock of this machine shows it

	Parts    []Part            `json:"start_up_parts,omitempty"` // the parts of StartUp in order; their sum is StartUp
	Compiled bool              `json:"compiled,omitempty"`       // graphs were compiled, not loaded from the compile cache
	Args     map[string]string `json:"args,omitempty"`           // the value of each flag, by flag name without dashes; defaults are included

	UnknownVariables []string `json:"unknown_variables,omitempty"` // environment variables of vLLM that the server does not know
}

// A Part is one phase of a start-up.
type Part struct {
	Name string        `json:"name"` // such as "loading the weights"; see phasePatterns in patterns.go
	Took time.Duration `json:"took_ns"`
}

// Counters are the server's counters and gauges at one moment, from /metrics, summed over engines.
type Counters struct {
	Running          float64 // vllm:num_requests_running
	Waiting          float64 // vllm:num_requests_waiting
	KVUsage          float64 // vllm:kv_cache_usage_perc, 0 to 1
	PrefixQueries    float64 // vllm:prefix_cache_queries_total, tokens
	PrefixHits       float64 // vllm:prefix_cache_hits_total, tokens
	Preemptions      float64 // vllm:num_preemptions_total
	PromptTokens     float64 // vllm:prompt_tokens_total
	GenerationTokens float64 // vllm:generation_tokens_total
	Drafts           float64 // vllm:spec_decode_num_drafts_total
	DraftTokens      float64 // vllm:spec_decode_num_draft_tokens_total
	AcceptedTokens   float64 // vllm:spec_decode_num_accepted_tokens_total

	// AcceptedAt counts the accepted draft tokens by their position in the draft; the first position is 0. The metric
	// is vllm:spec_decode_num_accepted_tokens_per_pos_total. Without speculation, AcceptedAt is empty.
	AcceptedAt []float64
}

// A Class tells in what way a server, and with it its trial, has failed.
type Class string

// These are the classes. For each class, classVerdicts in remedies.go says whether the point (the server's flags) is at
// fault.
const (
	FlagsRejected  Class = "flags-rejected"
	OOMStart       Class = "oom-start"
	KVTooSmall     Class = "kv-too-small"
	StartCrash     Class = "start-crash"
	OOMLoad        Class = "oom-load"
	CrashLoad      Class = "crash-load"
	Hang           Class = "hang"
	StartTimeout   Class = "start-timeout"
	PortTaken      Class = "port-taken"
	ModelNotFound  Class = "model-not-found"
	Infrastructure Class = "infrastructure"
	Aborted        Class = "aborted"

	// AcceptanceNearZero means that the server works, but accepts hardly any of its draft tokens.
	AcceptanceNearZero Class = "acceptance-near-zero"

	// DroppedByRace means that the server works, but carries clearly less traffic than the best point.
	DroppedByRace Class = "dropped-by-race"

	// ClientLimited means that the server works, but the load generator was late and spoiled the measurement.
	ClientLimited Class = "client-limited"
)

// OutOfMemory reports whether the server ran out of GPU memory, in its start or under load.
func (c Class) OutOfMemory() bool { return c == OOMStart || c == OOMLoad }

// A Cause says what exactly happened, if more than the class is known. Its text is for people and scripts.
type Cause string

// The causes.
const (
	EngineDead    Cause = "engine-dead"           // the engine died, and its API server lived on
	ExitZero      Cause = "exit-0"                // the server ended under load with exit code 0; no flag causes that
	IllegalAccess Cause = "illegal-memory-access" // a GPU kernel accessed memory that it must not access
	NCCL          Cause = "nccl"                  // the GPUs could not communicate
	DiskFull      Cause = "disk-full"
	TooManyFiles  Cause = "too-many-open-files"
	GatedModel    Cause = "gated-model"      // the model exists, but these credentials may not read it
	Profiling     Cause = "memory-profiling" // another process freed GPU memory while this server measured how much was free
	SlowDisk      Cause = "slow-disk"        // the weights were still loading at the start timeout
	OthersMemory  Cause = "memory-of-others" // another process holds the GPU's memory
	NoToken       Cause = "no-token"         // requests run but no token comes
	Deaf          Cause = "deaf"             // the API server does not answer
	NotDrained    Cause = "not-drained"      // requests remain although there is no load

	Terminated  Cause = "terminated" // somebody asked the server to end: SIGTERM, SIGINT or SIGHUP
	Killed      Cause = "killed"     // somebody killed a process of the server, or a process ended silently
	HostOOM     Cause = "host-oom"   // the machine, or the cgroup, was out of memory
	Segfault    Cause = "segfault"   // a process of the server crashed: SIGSEGV, SIGABRT or the like
	BusError    Cause = "bus-error"  // a mapped file could not be read, or /dev/shm was full
	Driver      Cause = "gpu-driver" // the GPU or its driver does not work
	Command     Cause = "command"    // the server's command cannot be run
	Compiler    Cause = "compiler"   // kernels could not be compiled
	TooManyProc Cause = "too-many-processes"
	NotAllowed  Cause = "permission"        // a file may not be read or written
	DiskError   Cause = "disk-error"        // a file could not be read
	Hub         Cause = "hub-unreachable"   // the model is not on disk, and its hub does not answer
	Damaged     Cause = "damaged-weights"   // the weights' files are truncated or damaged
	RemoteCode  Cause = "remote-code"       // the model brings its own code, which the flags do not allow
	Unsupported Cause = "unsupported-model" // this server does not know the model's architecture
	SameWords   Cause = "same-words"        // the study's first servers all died with the same message: see studies.AllDiedAlike
)

// An ExitError says how a server failed.
type ExitError struct {
	Class    Class
	Cause    Cause         // empty when only the class is known
	Evidence string        // the log line that shows the class, or what was observed
	Argparse bool          // argparse refused the args; it would refuse them again, whatever the other flags are
	KVGiB    *float64      // size of the KV cache, in GiB, for the class KVTooSmall; nil if the log does not tell it
	Code     int           // exit code; -1 when the server still ran or a signal ended it
	Tail     []string      // last lines of the server's log
	Took     time.Duration // time from the start to the failure; set only by the simulator, whose time is virtual
}

// memoryFlags are the flags that make vLLM allocate memory of the host. vllm/config/cache.py, kv_transfer.py and
// multimodal.py define them.
var memoryFlags = []string{"swap-space", "cpu-offload-gb", "kv-offloading-size", "mm-processor-cache-gb", "cpu-offload-params"}

// AsksHostMemory reports whether a flag requests memory of the host.
func AsksHostMemory(flag string) bool { return slices.Contains(memoryFlags, flag) }

// Error returns the class with its evidence.
func (e *ExitError) Error() string {
	if e.Evidence == "" {
		return fmt.Sprintf("server failed (%s), exit code %d", e.Class, e.Code)
	}
	return fmt.Sprintf("server failed (%s): %s", e.Class, e.Evidence)
}
