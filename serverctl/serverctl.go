// Package serverctl owns one inference server: its start, readiness, facts, the class of its death, and its end.
// It never measures load.
package serverctl

import (
	"fmt"
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
	Evidence string        // the log line that gave the class, or what was seen
	Code     int           // exit code; -1 when it still ran or died of a signal
	Tail     []string      // last lines of its log
	Took     time.Duration // from the start to the failure, where the clock on the wall does not say it

	KVNeededGiB    float64 // of KVTooSmall: what one request of max-model-len needs; 0 when the server did not say
	KVAvailableGiB float64 // of KVTooSmall: what there was; it may be negative
}

// Error returns the class with its evidence.
func (e *ExitError) Error() string {
	if e.Evidence == "" {
		return fmt.Sprintf("server failed (%s), exit code %d", e.Class, e.Code)
	}
	return fmt.Sprintf("server failed (%s): %s", e.Class, e.Evidence)
}
