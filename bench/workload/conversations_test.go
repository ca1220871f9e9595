package workload

import (
	"encoding/csv"
	"math"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
)

func open(t *testing.T, spec Spec, seed uint64) Source {
	t.Helper()
	source, err := Open(spec, seed)
	if err != nil {
		t.Fatal(err)
	}
	return source
}

// lengths returns the sorted lengths of the first n requests of a stream.
func lengths(source Source, stream Stream, n int) (prompts, outputs []float64) {
	for i := range n {
		r := source.Request(stream, i)
		prompts = append(prompts, float64(r.PromptTokens))
		outputs = append(outputs, float64(r.OutputTokens))
	}
	slices.Sort(prompts)
	slices.Sort(outputs)
	return prompts, outputs
}

func quantile(sorted []float64, q float64) float64 { return sorted[int(q*float64(len(sorted)-1))] }

func mean(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	return sum / float64(len(x))
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got/want-1) <= tolerance) {
		t.Errorf("%s = %.1f, want %.1f within %g %%", what, got, want, 100*tolerance)
	}
}

func TestPhase1HasTheDocumentedMeansForEverySeed(t *testing.T) {
	for seed := range uint64(10) {
		source := open(t, Spec{Kind: "phase1"}, seed)
		if source.Len() != 300 {
			t.Fatalf("Len() = %d, want 300", source.Len())
		}
		prompts, outputs := lengths(source, WindowStream, 300)
		if m := mean(prompts); m != 5806 {
			t.Errorf("seed %d: mean prompt = %v tokens, want exactly 5806", seed, m)
		}
		near(t, "mean output", mean(outputs), 515, 0.001)
		if prompts[0] < 3200 {
			t.Errorf("seed %d: shortest prompt = %v tokens, want at least 3200", seed, prompts[0])
		}
		if longest := source.Longest(); longest < 8000 || longest > 25000 {
			t.Errorf("seed %d: Longest() = %d, want the longest of the 300", seed, longest)
		}
	}
}

// The calibrated trace is one random draw from the same population. So the quantiles over many draws must lie near the
// quantiles of that trace.
func TestPhase1HasTheQuantilesOfTheCalibratedTrace(t *testing.T) {
	f, err := os.Open("testdata/trace_h200.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var wantPrompts, wantOutputs, prompts, outputs []float64
	for _, row := range rows[1:] {
		prompt, err1 := strconv.ParseFloat(row[6], 64)
		output, err2 := strconv.ParseFloat(row[7], 64)
		if err1 != nil || err2 != nil {
			t.Fatalf("row %v has no lengths", row)
		}
		wantPrompts, wantOutputs = append(wantPrompts, prompt), append(wantOutputs, output)
	}
	for seed := range uint64(10) {
		p, o := lengths(open(t, Spec{Kind: "phase1"}, seed), WindowStream, 300)
		prompts, outputs = append(prompts, p...), append(outputs, o...)
	}
	for _, sorted := range [][]float64{wantPrompts, wantOutputs, prompts, outputs} {
		slices.Sort(sorted)
	}
	for _, q := range []float64{0.05, 0.25, 0.5, 0.75, 0.95, 0.99} {
		name := strconv.FormatFloat(q, 'f', -1, 64)
		near(t, "prompt quantile "+name, quantile(prompts, q), quantile(wantPrompts, q), 0.06)
		near(t, "output quantile "+name, quantile(outputs, q), quantile(wantOutputs, q), 0.10)
	}
}

func TestProductionHasTheQuantilesOfTheDashboard(t *testing.T) {
	for seed := range uint64(2) {
		prompts, outputs := lengths(open(t, Spec{Kind: "production"}, seed), WindowStream, 20*300)
		near(t, "prompt p50", quantile(prompts, 0.5), 5900, 0.03)
		near(t, "prompt p95", quantile(prompts, 0.95), 12700, 0.03)
		near(t, "output p50", quantile(outputs, 0.5), 978, 0.03)
		near(t, "output p95", quantile(outputs, 0.95), 1720, 0.03)
		if most := prompts[len(prompts)-1] + outputs[len(outputs)-1]; most > 16384 {
			t.Errorf("longest prompt + longest output = %v, want at most Longest() = 16384", most)
		}
	}
}

func TestEachTurnIsAPrefixOfTheNext(t *testing.T) {
	for _, kind := range []string{"phase1", "production"} {
		source := open(t, Spec{Kind: kind, VocabSize: 1000}, 3)
		talks := make(map[int][turns]*Request)
		for i := range 300 {
			r := source.Request(PrimeStream, i)
			talk := talks[r.Conversation]
			talk[r.Turn-1] = r
			talks[r.Conversation] = talk
			if slices.Min(r.Tokens) < 3 || slices.Max(r.Tokens) > 999 || len(r.Tokens) != r.PromptTokens || r.OutputTokens < 1 {
				t.Fatalf("%s: request %d has ids outside [3, 1000) or wrong lengths", kind, i)
			}
		}
		if len(talks) != 60 {
			t.Errorf("%s: %d conversations in 300 requests, want 60", kind, len(talks))
		}
		firsts := make(map[int32]int)
		for c, talk := range talks {
			for turn := range turns - 1 {
				now, next := talk[turn].Tokens, talk[turn+1].Tokens
				if len(next) <= len(now) || !slices.Equal(now, next[:len(now)]) {
					t.Fatalf("%s: turn %d of conversation %d is not a proper prefix of the next", kind, turn+1, c)
				}
			}
			if same := talks[(c+10)%60]; !slices.Equal(same[0].Tokens, talk[0].Tokens) {
				t.Errorf("%s: conversations %d and %d do not share their starter", kind, c, (c+10)%60)
			} else if slices.Equal(same[1].Tokens, talk[1].Tokens) {
				t.Errorf("%s: conversations %d and %d share their second turn", kind, c, (c+10)%60)
			}
			firsts[talk[0].Tokens[0]<<16|talk[0].Tokens[1]]++
		}
		if len(firsts) != 10 {
			t.Errorf("%s: %d starters, want 10", kind, len(firsts))
		}
	}
}

func TestProductionKeepsItsStartersFromEpochToEpoch(t *testing.T) {
	source := open(t, Spec{Kind: "production"}, 1)
	begin := make(map[int][]int32)
	for i := range 3 * 300 {
		r := source.Request(WindowStream, i)
		if r.Turn != 1 {
			continue
		}
		known, ok := begin[r.Conversation%10]
		if ok && !slices.Equal(known, r.Tokens) {
			t.Fatalf("request %d of epoch %d begins with another starter", i, i/300)
		}
		begin[r.Conversation%10] = r.Tokens
	}
}

func TestRequestIsAFunctionOfStreamAndIndex(t *testing.T) {
	specs := []Spec{{Kind: "phase1"}, {Kind: "production"}, {Kind: "random", InputTokens: 20, RangeRatio: 0.5}, {Kind: "random", InputTokens: 20, Requests: 7}}
	for _, spec := range specs {
		one, two := open(t, spec, 5), open(t, spec, 5)
		other := open(t, spec, 6)
		different, differs := false, false
		for _, i := range []int{0, 299, 300, 2999, 1, 0} {
			a, b := one.Request(WindowStream, i), two.Request(WindowStream, i)
			if !slices.Equal(a.Tokens, b.Tokens) || a.OutputTokens != b.OutputTokens {
				t.Errorf("%s: request %d differs between two sources of one seed", one.Name(), i)
			}
			different = different || !slices.Equal(a.Tokens, one.Request(leadInStream, i).Tokens)
			differs = differs || !slices.Equal(a.Tokens, other.Request(WindowStream, i).Tokens)
			if n := one.Len(); n > 0 && one.Request(WindowStream, i) != one.Request(WindowStream, i+n) {
				t.Errorf("%s: requests %d and %d are not the same", one.Name(), i, i+n)
			}
		}
		if !different || !differs {
			t.Errorf("%s: another stream differs: %v, another seed differs: %v, want both", one.Name(), different, differs)
		}
	}
}

func TestAnEndlessSourceHasBoundedMemoryAndManyReaders(t *testing.T) {
	source := open(t, Spec{Kind: "random", InputTokens: 8, OutputTokens: 8, RangeRatio: 0.9}, 1)
	var readers sync.WaitGroup
	for reader := range 4 {
		readers.Go(func() {
			for i := range 20 * randomEpoch {
				if r := source.Request(Stream(reader+1), i); len(r.Tokens) == 0 {
					t.Errorf("request %d is empty", i)
				}
			}
		})
	}
	readers.Wait()
	if kept := len(source.(*endless).kept); kept != keptEpochs {
		t.Errorf("%d epochs are kept, want %d", kept, keptEpochs)
	}
}

func TestRandomLengthsAreUniformInTheirRange(t *testing.T) {
	source := open(t, Spec{Kind: "random", InputTokens: 10, OutputTokens: 3, RangeRatio: 0.25}, 1)
	prompts, outputs := lengths(source, WindowStream, 5000)
	counts := make(map[float64]int)
	for _, n := range prompts {
		counts[n]++
	}
	for n := 7.0; n <= 13; n++ {
		near(t, "prompts of one length", float64(counts[n]), 5000.0/7, 0.15)
	}
	if len(counts) != 7 || outputs[0] != 2 || outputs[4999] != 4 {
		t.Errorf("%d prompt lengths, outputs from %v to %v, want 7 from 7 to 13, and from 2 to 4", len(counts), outputs[0], outputs[4999])
	}
	if source.Longest() != 17 {
		t.Errorf("Longest() = %d, want 13 + 4", source.Longest())
	}
}
