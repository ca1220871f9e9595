package serverctl

import (
	"slices"
	"strings"
	"testing"
)

func TestADynamoWorkerIsTakenApart(t *testing.T) {
	w, ok := DynamoWorker(strings.Fields("python3 -m dynamo.vllm --model meta/llama --is-decode-worker --connector kvbm nixl " +
		"--max-num-seqs 64 --no-enable-local-indexer --namespace=prod --tensor-parallel-size 2 --enable-multimodal"))
	if !ok {
		t.Fatal("the worker is not recognised")
	}
	for _, row := range []struct {
		name, got, want string
	}{
		{"command", strings.Join(w.Command, " "), "python3 -m vllm.entrypoints.cli.main serve"},
		{"model", w.Model, "meta/llama"},
		{"vLLM's flags", strings.Join(w.Args, " "), "--max-num-seqs 64 --tensor-parallel-size 2"},
		{"Dynamo's flags", strings.Join(w.Dynamo, " "), "--is-decode-worker --connector kvbm nixl --no-enable-local-indexer --namespace=prod --enable-multimodal"},
	} {
		if row.got != row.want {
			t.Errorf("%s: %q, want %q", row.name, row.got, row.want)
		}
	}
}

func TestOtherCommandsAreNoDynamoWorkers(t *testing.T) {
	for _, command := range []string{"vllm serve", "python3 -m vllm.entrypoints.openai.api_server", "dynamo.vllm", "python3 dynamo.vllm x"} {
		if w, ok := DynamoWorker(strings.Fields(command)); ok {
			t.Errorf("DynamoWorker(%q) = %+v", command, w)
		}
	}
	args := strings.Fields("--max-num-seqs 8 --no-enable-prefix-caching --speculative-config {}")
	if vllm, dynamo := SplitDynamo(args); !slices.Equal(vllm, args) || dynamo != nil {
		t.Errorf("SplitDynamo(%q) = %q, %q", args, vllm, dynamo)
	}
}
