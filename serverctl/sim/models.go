package sim

import "slices"

// modelled are the flags that change the capacity of a simulated server.
var modelled = []string{"gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-model-len", "enable-prefix-caching",
	"enforce-eager", "speculative-config"}

// harmless are the flags that change the capacity neither of a simulated server nor of a real one.
var harmless = []string{"api-key", "chat-template", "disable-log-requests", "disable-log-stats", "download-dir", "enable-log-requests", "host", "load-format",
	"port", "seed", "served-model-name", "tokenizer", "trust-remote-code", "uvicorn-log-level"}

// Modelled returns the flags that change the capacity of a simulated server, without their leading dashes.
func Modelled() []string { return slices.Clone(modelled) }

// Models reports whether a flag, named without its leading dashes, changes the capacity of a simulated server. Other
// flags do not change its measurements.
func Models(flag string) bool { return slices.Contains(modelled, flag) }

// Ignores reports whether a flag could change the capacity of a real server, but has no effect on a simulated server.
func Ignores(flag string) bool { return !Models(flag) && !slices.Contains(harmless, flag) }
