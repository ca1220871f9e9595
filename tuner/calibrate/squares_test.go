package calibrate

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/mat"
)

// decays returns a problem whose measurements are a sum of exponential decays. The slice truth has the factors of the
// decays. The residuals have random errors with the standard deviation noise.
func decays(truth []float64, noise float64) problem {
	n := len(truth)
	p := problem{step: 1e-3, low: make([]float64, n), high: make([]float64, n)}
	for k := range truth {
		p.low[k], p.high[k] = -5, 5
	}
	p.residuals = func(_ context.Context, logs []float64) ([]float64, error) {
		draw := rand.New(rand.NewPCG(1, 1))
		var residuals []float64
		for x := 0.0; x < 8; x += 0.25 {
			is, was := 0.0, 0.0
			for k := range truth {
				is += math.Exp(logs[k]) * math.Exp(-x*float64(k))
				was += truth[k] * math.Exp(-x*float64(k))
			}
			residuals = append(residuals, (is-was)/0.01+noise*draw.NormFloat64())
		}
		return residuals, nil
	}
	return p
}

func TestMinimiseFindsTheMinimum(t *testing.T) {
	truth := []float64{0.5, 4, 2}
	logs := []float64{0, 0, 0}
	residuals, converged, err := decays(truth, 0).minimise(t.Context(), logs, []int{0, 1, 2})
	if err != nil || !converged || cost(residuals) > 0.1 {
		t.Fatalf("minimise leaves a cost of %g, %v, %v", cost(residuals), converged, err)
	}
	for k := range truth {
		if math.Abs(math.Exp(logs[k])/truth[k]-1) > 0.01 {
			t.Errorf("constant %d is %g, want %g", k, math.Exp(logs[k]), truth[k])
		}
	}
}

func TestMinimiseMovesOnlyFreeConstants(t *testing.T) {
	logs := []float64{0, 0, 0}
	if _, _, err := decays([]float64{0.5, 4, 2}, 0).minimise(t.Context(), logs, []int{0}); err != nil || logs[1] != 0 || logs[2] != 0 || logs[0] == 0 {
		t.Errorf("logs are %g, %v; want only the first moved", logs, err)
	}
}

// The Huber loss of a residual above huberAt is linear: it grows by huberAt for each standard deviation.
func TestCostIsHuberLoss(t *testing.T) {
	for r, want := range map[float64]float64{0: 0, 1: 0.5, -2: 2, 3: 4.5, 10: 25.5} {
		if got := cost([]float64{r}); math.Abs(got-want) > 1e-12 {
			t.Errorf("cost of %g = %g, want %g", r, got, want)
		}
	}
}

func slopeOf(columns ...[]float64) slope {
	j := slope{mat.NewDense(len(columns[0]), len(columns), nil), make([]float64, len(columns))}
	for k, column := range columns {
		j.SetCol(k, column)
	}
	return j
}

func TestSeparate(t *testing.T) {
	for _, row := range []struct {
		name    string
		slope   slope
		anchors []bool
		known   []bool
		visible []bool
		group   []int // expected group of the first constant
	}{
		{"independent constants", slopeOf([]float64{100, 0, 0}, []float64{0, 100, 0}), []bool{false, false}, []bool{true, true}, []bool{true, true}, nil},
		{"only the sum is known: the smaller effect is held", slopeOf([]float64{20, 20, 20}, []float64{100, 100, 100}), []bool{false, false}, []bool{false, true}, []bool{true, true}, []int{1}},
		{"an anchor is held first", slopeOf([]float64{100, 100, 100}, []float64{20, 20, 20}), []bool{true, false}, []bool{false, true}, []bool{true, true}, []int{1}},
		{"an invisible constant is not known", slopeOf([]float64{1, 0, 0}, []float64{0, 100, 0}), []bool{false, false}, []bool{false, true}, []bool{false, true}, nil},
	} {
		r := separate(row.slope, row.anchors)
		for k := range row.known {
			if r.known[k] != row.known[k] || r.visible[k] != row.visible[k] {
				t.Errorf("%s: constant %d: known %v, visible %v, want %v and %v", row.name, k, r.known[k], r.visible[k], row.known[k], row.visible[k])
			}
		}
		if len(r.groups[0]) != len(row.group) || len(row.group) > 0 && r.groups[0][0] != row.group[0] {
			t.Errorf("%s: the first is grouped with %v, want %v", row.name, r.groups[0], row.group)
		}
	}
}

// The error of a known constant includes the uncertainty of a held constant with the same effect.
func TestErrorsIncludeHeldConstants(t *testing.T) {
	r := separate(slopeOf([]float64{2000, 2000, 2000}, []float64{10000, 10000, 10000}), []bool{false, false})
	if r.errors[1] < 0.1 || r.errors[1] > 0.2 || r.errors[0] < 0.5 {
		t.Errorf("errors are %g, want a fifth of ln 2 for the larger and nearly all of it for the smaller", r.errors)
	}
}

// Two columns of a slope cannot be separated if their jumps are as large as the difference between the columns.
func TestARoughSlopeCannotSeparate(t *testing.T) {
	j := slopeOf([]float64{100, 100, 100, 120}, []float64{100, 100, 120, 100})
	if sharp := separate(j, []bool{false, false}); !sharp.known[0] || !sharp.known[1] {
		t.Errorf("with a sharp slope %v are known, want both", sharp.known)
	}
	j.rough = []float64{400, 400}
	if rough := separate(j, []bool{false, false}); rough.known[0] == rough.known[1] {
		t.Errorf("with a rough slope %v are known, want one of two", rough.known)
	}
}
