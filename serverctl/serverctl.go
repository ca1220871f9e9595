// Package serverctl owns one inference server: its start, readiness, facts, the class of its death, and its end.
// It never measures load.
package serverctl

import (
	"fmt"
	"slices"
	"time"
)

// Facts are what a server says of itself once it is ready. A zero field is unknown.
type Facts struct {
	Version        string        `json:"version,omitempty"`         // such as 0.14.1
	KVCacheTokens  int           `json:"kv_cache_tokens,omitempty"` // from the start-up log
	KVCacheGiB     float64       `json:"kv_cache_gib,omitempty"`    // per GPU
	MaxConcurrency float64       `json:"max_concurrency,omitempty"` // requests of max-model-len that fit
	ModelGiB       float64       `json:"model_gib,omitempty"`       // weights
	GraphGiB       float64       `json:"graph_gib,omitempty"`       // CUDA graphs
	MaxModelLen    int           `json:"max_model_len,omitempty"`   // from /v1/models
	StartUp        time.Duration `json:"start_up_ns,omitempty"`     // from exec to the first real token
	Port           int           `json:"port,omitempty"`
	Simulated      bool          `json:"simulated,omitempty"` // no GPU behind it

	Parts    []Part            `json:"start_up_parts,omitempty"` // what StartUp went into, in order; they sum to it
	Compiled bool              `json:"compiled,omitempty"`       // graphs were compiled, not loaded from the compile cache
	Args     map[string]string `json:"args,omitempty"`           // what the flags came to, defaults among them, by flag name without dashes
}

// A Part is a stretch of a start-up.
type Part struct {
	Name string        `json:"name"` // such as "loading the weights"; see phases in patterns.go
	Took time.Duration `json:"took_ns"`
}

// Counters are the server's own counters and gauges at one moment, from /metrics. Sums over engines.
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

	// AcceptedAt are the accepted draft tokens by their position in the draft, from 0:
	// vllm:spec_decode_num_accepted_tokens_per_pos_total. Nil without speculation.
	AcceptedAt []float64
}

// A Class is the kind of way in which a server, and with it a trial, failed (design: failure classes of a trial).
type Class string

// The classes. See Fault for whose they are.
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

	// AcceptanceNearZero is of a server that works well: hardly anything of what it drafts is accepted.
	AcceptanceNearZero Class = "acceptance-near-zero"

	// ClientLimited is of a server that works well, too: the load generator was late, and decided what was measured.
	ClientLimited Class = "client-limited"
)

// Retryable reports whether a fresh server may well not end so again, with the same flags.
func (c Class) Retryable() bool {
	switch c {
	case Hang, StartTimeout, Infrastructure, ClientLimited:
		return true
	}
	return false
}

// A Cause says what exactly happened, where that is known better than the class. Its words are for people and scripts.
type Cause string

// The causes.
const (
	EngineDead    Cause = "engine-dead"           // the engine died, its API server lived on
	ExitZero      Cause = "exit-0"                // it ended under load as if all were well: no flag does that
	IllegalAccess Cause = "illegal-memory-access" // a kernel read or wrote where it must not
	NCCL          Cause = "nccl"                  // the GPUs could not talk to each other
	DiskFull      Cause = "disk-full"
	TooManyFiles  Cause = "too-many-open-files"
	GatedModel    Cause = "gated-model"      // the model is there, and not for these credentials
	Profiling     Cause = "memory-profiling" // another process gave GPU memory back while this one measured it
	SlowDisk      Cause = "slow-disk"        // the weights were still being read at the start's limit
	OthersMemory  Cause = "memory-of-others" // the GPU's memory is held by another process
	NoToken       Cause = "no-token"         // requests run, and nothing comes out
	Deaf          Cause = "deaf"             // the API server does not answer
	NotDrained    Cause = "not-drained"      // requests stay although no load is on

	Terminated  Cause = "terminated" // somebody asked it to end: SIGTERM, SIGINT or SIGHUP
	Killed      Cause = "killed"     // somebody killed one of its processes, or it ended without a word
	HostOOM     Cause = "host-oom"   // the machine, or the cgroup, had no memory left
	Segfault    Cause = "segfault"   // one of its processes crashed: SIGSEGV, SIGABRT or the like
	BusError    Cause = "bus-error"  // a mapped file could not be read, or /dev/shm was full
	Driver      Cause = "gpu-driver" // the GPU or its driver does not work
	Command     Cause = "command"    // the server's command cannot be run as it is
	Compiler    Cause = "compiler"   // kernels could not be compiled
	TooManyProc Cause = "too-many-processes"
	NotAllowed  Cause = "permission"        // a file may not be read or written
	DiskError   Cause = "disk-error"        // a file could not be read
	Hub         Cause = "hub-unreachable"   // the model is not here, and its hub does not answer
	Damaged     Cause = "damaged-weights"   // the weights' files are cut off or damaged
	RemoteCode  Cause = "remote-code"       // the model brings code of its own, which the flags do not allow
	Unsupported Cause = "unsupported-model" // this server does not know the model's architecture
	SameWords   Cause = "same-words"        // the study's first servers all died with these words: see studies
)

// PointsFault reports whether the class says something of the point: it is infeasible. All else is nobody's fault and
// tells the search nothing.
func (c Class) PointsFault() bool {
	switch c {
	case FlagsRejected, OOMStart, KVTooSmall, StartCrash, OOMLoad, CrashLoad, Hang, StartTimeout:
		return true
	}
	return false
}

// An ExitError says how a server failed.
type ExitError struct {
	Class    Class
	Cause    Cause         // empty when no more is known than the class
	Evidence string        // the log line that gave the class, or what was seen
	Code     int           // exit code; -1 when it still ran or died of a signal
	Tail     []string      // last lines of its log
	Took     time.Duration // from the start to the failure, where the clock on the wall does not say it

	KVNeededGiB    float64 // of KVTooSmall: what one request of max-model-len needs; 0 when the server did not say
	KVAvailableGiB float64 // of KVTooSmall: what there was; it may be negative
	KVMaxModelLen  int     // of KVTooSmall: the longest model length that would fit; 0 when the server did not say
}

// Fatal reports whether no choice of flags cures the failure and no second try: the user must do something.
func (e *ExitError) Fatal() bool {
	switch e.Cause {
	case DiskFull, TooManyFiles, TooManyProc, GatedModel, NotAllowed, Command:
		return true
	}
	return e.Class == ModelNotFound
}

// Machine reports whether a second server that fails of the same cause shows that the machine must be mended first.
func (c Cause) Machine() bool { return c == Driver }

// memoryFlags ask for memory of the host: vllm/config/cache.py, kv_transfer.py, multimodal.py.
var memoryFlags = []string{"swap-space", "cpu-offload-gb", "kv-offloading-size", "mm-processor-cache-gb", "cpu-offload-params"}

// AsksHostMemory reports whether a flag is one by which a server asks for memory of the host.
func AsksHostMemory(flag string) bool { return slices.Contains(memoryFlags, flag) }

// Error returns the class with its evidence.
func (e *ExitError) Error() string {
	if e.Evidence == "" {
		return fmt.Sprintf("server failed (%s), exit code %d", e.Class, e.Code)
	}
	return fmt.Sprintf("server failed (%s): %s", e.Class, e.Evidence)
}
