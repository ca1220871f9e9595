package searchbench

import (
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/tuner/space"
)

// smallTruths has the true capacity of every point of smallWorld. UPDATE_SMALL=1 writes it anew.
const smallTruths = "testdata/small-truths.csv"

// smallWorld is a world on the other engine with 20 points.
func smallWorld(t *testing.T) world {
	t.Helper()
	machine := otherWorlds()[0]
	file, _, _ := strings.Cut(machine.file, "parameters:")
	_, rest, _ := strings.Cut(machine.file, "constraints:")
	machine.file = file + "parameters:\n  max-num-seqs: [16, 32, 64, 128, 256]\n  max-num-batched-tokens: [512, 2048, 8192, 16384]\nconstraints:" + rest
	machine.name = "small"
	return machine
}

// smallPoints returns all points of smallWorld.
func smallPoints() (points []space.Point) {
	for _, seqs := range []int{16, 32, 64, 128, 256} {
		for _, tokens := range []int{512, 2048, 8192, 16384} {
			points = append(points, space.Point{"max-num-seqs": strconv.Itoa(seqs), "max-num-batched-tokens": strconv.Itoa(tokens)})
		}
	}
	return points
}

func readSmallTruths(t *testing.T) (capacities map[string]float64, best float64) {
	t.Helper()
	file, err := os.Open(smallTruths)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rows, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	capacities = map[string]float64{}
	for _, row := range rows[1:] {
		if capacities[row[0]], err = strconv.ParseFloat(row[1], 64); err != nil {
			t.Fatal(err)
		}
		best = max(best, capacities[row[0]])
	}
	return capacities, best
}

// The tuner was developed with one simulated engine. This study runs on another engine, which shares no code and no
// equation with the first.
func TestAStudyOnTheOtherEngineEndsNearTheBest(t *testing.T) {
	realtime.Only(t, "runs a whole study, and the samplers' own tests find the same defects")
	capacities, best := readSmallTruths(t)
	f, err := runStudy(smallWorld(t), "gp", none, 1, 8)
	if err != nil {
		t.Fatal(err)
	}
	if f.Best == nil {
		t.Fatal("no point met the limits")
	}
	truth := capacities[f.Best.Point.String()]
	if truth < 0.9*best {
		t.Errorf("the study ends at %s with a capacity of %.3g req/s; the best point has %.3g", f.Best.Point, truth, best)
	}
	if total := f.Spent.total(); max(total, f.Counted) > min(total, f.Counted)*101/100 {
		t.Errorf("the study counts %s of GPU time, the meter %s", f.Counted, total)
	}
}

func TestSmallTruths(t *testing.T) {
	realtime.Only(t, "measures capacities for half a minute")
	w := smallWorld(t)
	update := os.Getenv("UPDATE_SMALL") != ""
	e, points, capacities := effort{1000, 60 * time.Second, 4, 8, 0.02, 0, 0}, smallPoints(), map[string]float64{}
	if update {
		e = fullEffort
	} else {
		capacities, _ = readSmallTruths(t)
		points = append(points[:3], points[len(points)-3:]...)
	}
	var b strings.Builder
	b.WriteString("point,capacity in req/s,standard error of its logarithm,limit that breaks first\n")
	for _, p := range points {
		got, err := w.truth(p, 2, 0, e)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s,%.4g,%.2g,%s\n", p, got.Capacity, got.StdErr, got.Limit)
		if want := capacities[p.String()]; !update && math.Abs(logRatio(got.Capacity, want)) > 4*got.StdErr+0.05 {
			t.Errorf("%s: capacity %.4g, want %.4g", p, got.Capacity, want)
		}
	}
	if update {
		if err := os.WriteFile(smallTruths, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
