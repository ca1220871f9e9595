package serverctl

import (
	"strings"
	"testing"
)

func TestGPUCount(t *testing.T) {
	for _, row := range []struct {
		name, args string
		want       int
	}{
		{"no args", "", 1},
		{"one GPU unless told", "--max-num-seqs 8", 1},
		{"tensor parallel", "--tensor-parallel-size 4", 4},
		{"behind an equals sign", "--tensor-parallel-size=2", 2},
		{"a short name behind an equals sign", "-tp=2 -pp 2", 4},
		{"the last one counts", "-tp 2 --tensor_parallel_size=8", 8},
		{"the last one counts, in either form", "--tensor-parallel-size 8 -tp 2", 2},
		{"replicas", "-tp 2 --data-parallel-size 2", 4},
		{"all sizes multiply", "--pipeline-parallel-size 2 --tensor-parallel-size 2 -dp 2 -pcp 2", 16},
		{"decode context parallelism uses the same GPUs", "-tp 4 --decode-context-parallel-size 2", 4},
		{"no number", "-tp two", 1},
		{"zero is the server's to refuse", "-tp 0", 1},
		{"no value", "--tensor-parallel-size", 1},
		{"a word before the first flag", "2 -tp 2", 1},
	} {
		if got := GPUCount(strings.Fields(row.args)); got != row.want {
			t.Errorf("%s: GPUCount(%s) = %d, want %d", row.name, row.args, got, row.want)
		}
	}
}

func TestSpansMachines(t *testing.T) {
	for _, row := range []struct {
		args string
		want bool
	}{
		{"", false},
		{"-tp 8 -pp 2", false},
		{"--distributed-executor-backend mp", false},
		{"--distributed-executor-backend ray", true},
		{"--data-parallel-backend=ray", true},
		{"--nnodes 2", true},
		{"-dp 4 --data-parallel-size-local 2", true},
		{"-dp 4 --data-parallel-hybrid-lb", true},
	} {
		if got := SpansMachines(strings.Fields(row.args)); got != row.want {
			t.Errorf("SpansMachines(%s) = %v, want %v", row.args, got, row.want)
		}
	}
}
