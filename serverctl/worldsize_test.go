package serverctl

import (
	"strings"
	"testing"
)

func TestWorldSize(t *testing.T) {
	for _, row := range []struct {
		name, args string
		want       int
	}{
		{"one GPU unless told", "--max-num-seqs 8", 1},
		{"tensor parallel", "--tensor-parallel-size 4", 4},
		{"a short name behind an equals sign", "-tp=2 -pp 2", 4},
		{"the last one counts", "-tp 2 --tensor_parallel_size=8", 8},
		{"replicas", "-tp 2 --data-parallel-size 2", 4},
		{"no number", "-tp two", 1},
	} {
		if got := worldSize(strings.Fields(row.args)); got != row.want {
			t.Errorf("%s: worldSize(%s) = %d, want %d", row.name, row.args, got, row.want)
		}
	}
}
