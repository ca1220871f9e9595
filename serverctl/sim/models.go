package sim

import "slices"

// modelled are the flags that change what a simulated server can carry.
var modelled = []string{"gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-model-len", "enable-prefix-caching",
	"enforce-eager", "speculative-config"}

// harmless are flags that change nothing of it on a real server either.
var harmless = []string{"api-key", "chat-template", "disable-log-requests", "disable-log-stats", "download-dir", "enable-log-requests", "host", "load-format",
	"port", "seed", "served-model-name", "tokenizer", "trust-remote-code", "uvicorn-log-level"}

// Models reports whether a flag, named without its leading dashes, changes what a simulated server can carry. Every value of one
// that does not measures the same.
func Models(flag string) bool { return slices.Contains(modelled, flag) }

// Ignores reports whether a flag would change what a real server can carry, and is taken by a simulated one without effect.
func Ignores(flag string) bool { return !Models(flag) && !slices.Contains(harmless, flag) }
