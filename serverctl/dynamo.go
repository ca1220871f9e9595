package serverctl

import (
	"slices"
	"strings"
)

// dynamoModule is the module of a worker of NVIDIA Dynamo: `python3 -m dynamo.vllm` runs vLLM's engine in Dynamo's
// own runtime, without vLLM's HTTP server.
const dynamoModule = "dynamo.vllm"

// vllmModule is the module of vLLM's command line (vllm/entrypoints/cli/main.py). The worker's Python interpreter runs
// it.
const vllmModule = "vllm.entrypoints.cli.main"

// dynamoFlags lists Dynamo's own flags, and whether a value follows each flag. All other flags are vLLM's. The list
// comes from components/src/dynamo/vllm/{args,backend_args}.py and
// components/src/dynamo/common/configuration/groups/runtime_args.py, of 0.9 and later.
var dynamoFlags = map[string]bool{
	"--namespace": true, "--endpoint": true, "--kv-state-endpoint": true, "--discovery-backend": true, "--store-kv": true,
	"--request-plane": true, "--response-plane": true, "--event-plane": true, "--connector": true, "--migration-limit": true,
	"--dyn-tool-call-parser": true, "--dyn-reasoning-parser": true, "--dyn-default-thinking-mode": true,
	"--dyn-structural-tag": true, "--dyn-structural-tag-scope": true, "--dyn-structural-tag-schema": true,
	"--dyn-endpoint-types": true, "--endpoint-types": true, "--custom-jinja-template": true, "--dump-config-to": true,
	"--sleep-mode-level": true, "--mm-prompt-template": true, "--model-express-url": true, "--engine-config-json": true,
	"--health-check-payload": true, "--engine-request-limit": true, "--disaggregation-mode": true,
	"--benchmark-mode": true, "--multimodal-embedding-cache-capacity-gb": true, "--output-modalities": true,
	"--is-prefill-worker": false, "--is-decode-worker": false, "--use-vllm-tokenizer": false, "--enable-local-indexer": false,
	"--enable-multimodal": false, "--multimodal-processor": false, "--multimodal-encode-worker": false,
	"--multimodal-worker": false, "--multimodal-decode-worker": false, "--route-to-encoder": false, "--frontend-decoding": false,
	"--fpm-trace": false, "--dyn-enable-structural-tag": false, "--gms-shadow-mode": false, "--enable-rl": false, "--omni": false,
	"--durable-kv-events": false, "--exclude-tools-when-tool-choice-none": false,
}

// A Worker is the parsed command of a Dynamo worker.
type Worker struct {
	Command []string // command that serves the same model over HTTP with the same image
	Model   string   // value of --model; empty when --model is not given
	Args    []string // the flags of vLLM
	Dynamo  []string // the flags of Dynamo as given; they are added again when the best flags are applied
}

// DynamoWorker parses a command, and reports whether it starts a Dynamo worker.
func DynamoWorker(command []string) (w Worker, ok bool) {
	i := slices.Index(command, dynamoModule)
	if i < 2 || command[i-1] != "-m" {
		return Worker{}, false
	}
	w.Command = slices.Concat(command[:i-1], []string{"-m", vllmModule, "serve"})
	w.Args, w.Dynamo = SplitDynamo(command[i+1:])
	w.Args, w.Model = takeFlag(w.Args, "--model")
	return w, true
}

// SplitDynamo separates Dynamo's own flags and their values from vLLM's.
func SplitDynamo(args []string) (vllm, dynamo []string) {
	for i := 0; i < len(args); i++ {
		n := 1
		for i+n < len(args) && flagName(args[i+n]) == "" { // counts the values that follow the flag
			n++
		}
		name := flagName(args[i])
		takesValue, own := dynamoFlags[name]
		if positive, found := strings.CutPrefix(name, "--no-"); found && !own {
			_, own = dynamoFlags["--"+positive]
		}
		if !own {
			vllm = append(vllm, args[i:i+n]...)
			i += n - 1
			continue
		}
		if !takesValue || strings.Contains(args[i], "=") {
			n = 1
		}
		dynamo = append(dynamo, args[i:i+n]...)
		i += n - 1
	}
	return vllm, dynamo
}

// takeFlag removes a flag and its value from args.
func takeFlag(args []string, name string) (rest []string, value string) {
	for i := 0; i < len(args); i++ {
		switch {
		case flagName(args[i]) != name:
			rest = append(rest, args[i])
		case strings.Contains(args[i], "="):
			_, value, _ = strings.Cut(args[i], "=")
		case i+1 < len(args):
			i++
			value = args[i]
		}
	}
	return rest, value
}
