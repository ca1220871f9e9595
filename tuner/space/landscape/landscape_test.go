package landscape

import (
	"math"
	"testing"

	"vllmtuner/tuner/space"
)

func TestAt(t *testing.T) {
	l, err := H200()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name string
		p    space.Point
		want float64
	}{
		{"the server's default", space.Point{}, 2.275},
		{"the best entry", space.Point{"gpu-memory-utilization": "0.97", "max-num-seqs": "96", "max-num-batched-tokens": "1024"}, 2.81},
		{"half way between 0.9 and 0.92 at 128 sequences", space.Point{"gpu-memory-utilization": "0.91", "max-num-seqs": "128"}, (2.39 + 2.48) / 2},
	} {
		got, err := l.Capacity(row.p)
		if err != nil || math.Abs(got-row.want) > 0.006 {
			t.Errorf("%s: At = %g, %v, want %g", row.name, got, err, row.want)
		}
	}
	if r, err := l.Regret(space.Point{}); err != nil || math.Abs(r-0.19) > 0.005 {
		t.Errorf("the default's regret is %g, %v, want 0.19", r, err)
	}
	if _, err := l.Capacity(space.Point{"max-num-seqs": "many"}); err == nil {
		t.Error("a word is taken for a number")
	}
}
