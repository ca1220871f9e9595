package sampler

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"vllmtuner/tuner/space"
)

// The sequence without scrambling is that of torch.quasirandom.SobolEngine (torch 2.15), whose points come in the order
// of a Gray code.
func TestTheDirectionNumbersOfSobol(t *testing.T) {
	dimensions := []int{0, 1, 2, 7, 20, 39, 63}
	for index, want := range map[uint32][]uint32{
		1:    {512, 512, 512, 512, 512, 512, 512},
		2:    {256, 768, 768, 256, 768, 768, 256},
		3:    {768, 256, 256, 768, 256, 256, 768},
		5:    {640, 128, 896, 128, 384, 640, 896},
		100:  {152, 792, 712, 600, 344, 600, 584},
		1023: {1023, 261, 749, 303, 557, 293, 607},
	} {
		for i, d := range dimensions {
			if got := directions()[d].coordinate(index) >> 22; got != want[i] {
				t.Errorf("point %d has %d/1024 in dimension %d, want %d/1024", index, got, d, want[i])
			}
		}
	}
	if len(directions()) != 64 {
		t.Errorf("there are %d dimensions, want 64", len(directions()))
	}
}

// The scrambling keeps the evenness: of the first 2^k points, one lies in each of 2^k equal intervals of each
// dimension, and in each equal rectangle of the first two dimensions.
func TestScrambledSobolIsEven(t *testing.T) {
	for seed := range uint64(20) {
		const k = 6
		rows := sobol(64, 1<<k, seed)
		for d := range 64 {
			seen := map[int]bool{}
			for _, u := range rows {
				seen[int(u[d]*(1<<k))] = true
			}
			if len(seen) != 1<<k {
				t.Errorf("seed %d: %d points lie in %d intervals of dimension %d", seed, len(rows), len(seen), d)
			}
		}
		for width := range k + 1 {
			seen := map[string]bool{}
			for _, u := range rows {
				seen[fmt.Sprint(int(u[0]*float64(int(1)<<width)), int(u[1]*float64(int(1)<<(k-width))))] = true
			}
			if len(seen) != 1<<k {
				t.Errorf("seed %d: %d points lie in %d rectangles of width 2^-%d", seed, len(rows), len(seen), width)
			}
		}
	}
}

// Over the seeds, each point is uniform in the cube, and two dimensions are independent.
func TestScrambledSobolIsUniformOverTheSeeds(t *testing.T) {
	const seeds = 4000
	for _, at := range []int{0, 1, 13} {
		mean, product := 0.0, 0.0
		for seed := range uint64(seeds) {
			u := sobol(2, at+1, seed)[at]
			mean += u[0] / seeds
			product += (u[0] - 0.5) * (u[1] - 0.5) * 12 / seeds
		}
		// The standard errors are 0.0046 and 0.016.
		if mean < 0.48 || mean > 0.52 || product < -0.065 || product > 0.065 {
			t.Errorf("point %d: mean %.3f, correlation of two dimensions %.3f; want 0.5 and 0", at, mean, product)
		}
	}
}

// If more points are taken, the sequence begins with the same points. Another seed has other points.
func TestSobolGrows(t *testing.T) {
	short, long, other := sobol(3, 10, 1), sobol(3, 100, 1), sobol(3, 10, 2)
	for i := range short {
		if !slices.Equal(short[i], long[i]) || slices.Equal(short[i], other[i]) {
			t.Errorf("point %d is %v, later %v, with another seed %v", i, short[i], long[i], other[i])
		}
	}
}

func TestSobolRefusesTooManyParameters(t *testing.T) {
	var many []space.Parameter
	for i := range 65 {
		many = append(many, space.Parameter{Name: fmt.Sprintf("flag-%d", i), Kind: space.Bool})
	}
	if _, err := New("sobol", spaceOf(t, many), 1, 30); err == nil || !strings.Contains(err.Error(), "at most 64 parameters, not 65") {
		t.Errorf("New = %v, want a limit of 64 parameters", err)
	}
	newSampler(t, "sobol", spaceOf(t, many[:64]), 1, 30)
}
