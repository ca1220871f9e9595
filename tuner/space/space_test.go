package space

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// realistic returns a space with every kind of parameter, a constraint and two conditions. One of the conditions
// depends on the other.
func realistic(t testing.TB) *Space {
	t.Helper()
	s, err := New([]Parameter{
		{Name: "long-prefill-token-threshold", Kind: Int, Min: 0, Max: 4096, Step: 512, When: "enable-chunked-prefill and max-num-batched-tokens > 4096"},
		{Name: "enable-chunked-prefill", Kind: Bool, When: `kv-cache-dtype == "auto"`},
		{Name: "gpu-memory-utilization", Kind: Float, Min: 0.80, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: Int, Min: 16, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: Int, Min: 1024, Max: 32768, Step: 1024, Log: true},
		{Name: "num-speculative-tokens", Kind: Categorical, Choices: []string{"0", "1", "2", "3", "5"}},
		{Name: "kv-cache-dtype", Kind: Categorical, Choices: []string{"auto", "fp8"}},
		{Name: "compilation-config", Kind: JSON, Choices: []string{`{"mode":3}`, `{"mode": 0, "pass_config": {"enable_fusion": true}}`}},
		{Name: "watermark", Kind: Float, Min: 0.001, Max: 0.5, Log: true},
		{Name: "fraction", Kind: Float, Min: -1, Max: 1},
	}, []string{"max-num-batched-tokens >= max-num-seqs", "max-num-batched-tokens <= 2 * max-model-len"},
		map[string]any{"prompt_lookup_max": 4, "method": "ngram"}, map[string]string{"max-model-len": "16384"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNewSaysWhatIsWrong(t *testing.T) {
	seqs := Parameter{Name: "max-num-seqs", Kind: Int, Min: 16, Max: 1024}
	tests := []struct {
		name        string
		parameters  []Parameter
		constraints []string
		want        string
	}{
		{"an empty range", []Parameter{{Name: "a", Kind: Int, Min: 5, Max: 3}}, nil,
			"parameter a: the range [5, 3] is empty; write [3, 5]"},
		{"a logarithm of zero", []Parameter{{Name: "a", Kind: Int, Min: 0, Max: 3, Log: true}}, nil,
			"parameter a: a logarithmic scale needs a range above 0, not [0, 3]; raise the lower end or remove log"},
		{"a step larger than the range", []Parameter{{Name: "a", Kind: Float, Min: 0, Max: 1, Step: 2}}, nil,
			"parameter a: the step 2 is larger than the range [0, 1]; write a smaller step"},
		{"a negative step", []Parameter{{Name: "a", Kind: Float, Min: 0, Max: 1, Step: -0.5}}, nil,
			"parameter a: the step -0.5 is negative; write 0.5"},
		{"a fraction for an int", []Parameter{{Name: "a", Kind: Int, Min: 0.5, Max: 3}}, nil,
			"parameter a: 0.5 is not a whole number; write whole numbers, or float"},
		{"the same name twice", []Parameter{seqs, seqs}, nil,
			"parameter max-num-seqs: the name is given twice; remove one"},
		{"a name with its dashes", []Parameter{{Name: "--a", Kind: Bool}}, nil,
			`parameter --a: "--a" is not the name of a flag; write it in lower case without leading dashes, such as num-speculative-tokens, or a variable in capitals`},
		{"no choices", []Parameter{{Name: "a", Kind: Categorical}}, nil,
			"parameter a: the list of choices is empty; add at least one"},
		{"a choice twice, written differently", []Parameter{{Name: "a", Kind: Categorical, Choices: []string{"0.9", "0.90"}}}, nil,
			"parameter a: the choice 0.90 is given twice; remove one"},
		{"a broken JSON choice", []Parameter{{Name: "a", Kind: JSON, Choices: []string{`{"mode":`}}}, nil,
			`parameter a: the choice {"mode": is not JSON (unexpected EOF)`},
		{"a misspelt flag in a constraint", []Parameter{seqs}, []string{"max-num-seq > 3"},
			`constraint 1: unknown flag "max-num-seq"; did you mean "max-num-seqs"?`},
		{"a far word in a constraint", []Parameter{seqs}, []string{"max-num-seqs > elephants"},
			`constraint 1: unknown flag "elephants"; use one of max-num-seqs`},
		{"a value without quotes", []Parameter{{Name: "dtype", Kind: Categorical, Choices: []string{"auto", "half"}}}, []string{"dtype == half"},
			`constraint 1: "half" is a value, not a flag; put it in quotes`},
		{"a number compared with a word", []Parameter{seqs}, []string{`max-num-seqs > "auto"`},
			`constraint 1: cannot read "max-num-seqs > \"auto\"": invalid operation: > (mismatched types int and string); write a comparison such as max-num-batched-tokens >= max-num-seqs`},
		{"a constraint that is no comparison", []Parameter{seqs}, []string{"max-num-seqs"},
			`constraint 1: cannot read "max-num-seqs": expected bool, but got int; write a comparison such as max-num-batched-tokens >= max-num-seqs`},
		{"a circle of conditions", []Parameter{
			{Name: "a", Kind: Bool, When: "b"}, {Name: "b", Kind: Bool, When: "c"}, {Name: "c", Kind: Bool, When: "a"}}, nil,
			"parameter a: when: the conditions depend on each other (a → b → c → a); remove one of them"},
		{"a condition on itself", []Parameter{{Name: "a", Kind: Bool, When: "a"}}, nil,
			"parameter a: when: the conditions depend on each other (a → a); remove one of them"},
		{"an unknown flag in a condition", []Parameter{seqs, {Name: "b", Kind: Bool, When: "max_num_seq > 3"}}, nil,
			`parameter b: when: unknown flag "max_num_seq"; did you mean "max-num-seqs"?`},
		{"speculation without its config", []Parameter{{Name: SpeculativeTokens, Kind: Int, Max: 3}}, nil,
			"parameter num-speculative-tokens: the keys of vLLM's --speculative-config are missing; add speculative_config: {method: ngram, prompt_lookup_max: 4}"},
		{"speculation with half a token", []Parameter{{Name: SpeculativeTokens, Kind: Categorical, Choices: []string{"0", "0.5"}}}, nil,
			"parameter num-speculative-tokens: the values must be whole numbers of tokens; write [0, 1, 2, 3]"},
		{"everything at once", []Parameter{{Name: "a", Kind: Bool, When: "x > 1"}, {Name: "bb", Kind: Bool}}, []string{"bb", "a >", "y"},
			`parameter a: when: unknown flag "x"; did you mean "a"?` + "\n" +
				`constraint 2: cannot read "a >": unexpected token EOF; write a comparison such as max-num-batched-tokens >= max-num-seqs` + "\n" +
				`constraint 3: unknown flag "y"; did you mean "a"?`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := New(test.parameters, test.constraints, nil, nil)
			if err == nil || err.Error() != test.want {
				t.Errorf("New says\n%v, want\n%s", err, test.want)
			}
		})
	}
}

func TestExpressions(t *testing.T) {
	tests := []struct {
		text  string
		holds bool
	}{
		{"max-num-batched-tokens >= max-num-seqs", true},
		{"max_num_batched_tokens-max_num_seqs == 8192-64", true},
		{"max-num-batched-tokens-max-num-seqs < 0", false},
		{"max-num-seqs * 2 + 1 == 129 and not enable-chunked-prefill", false},
		{"max-num-seqs / 128 == 0.5 or 1 > 2", true},
		{"max-num-batched-tokens % 256 == 0", true},
		{`kv-cache-dtype == "auto" && max(max-num-seqs, 100) == 100`, true},
		{`kv-cache-dtype in ["fp8", 'max-num-seqs']`, false},
		{"num-speculative-tokens > 0", true},
		{"gpu-memory-utilization * 100 > 92.5", true},
		{"max-model-len >= 16384", true},
	}
	p := Point{"max-num-batched-tokens": "8192", "max-num-seqs": "64", "enable-chunked-prefill": "true",
		"kv-cache-dtype": "auto", "num-speculative-tokens": "3", "gpu-memory-utilization": "0.93"}
	s := realistic(t)
	words := newVocabulary(s.parameters, s.Defaults)
	for _, test := range tests {
		e, err := words.compile(test.text)
		if err != nil {
			t.Errorf("%s: %v", test.text, err)
			continue
		}
		holds, known, err := e.holds(s.constraintValue(p))
		if err != nil || !known || holds != test.holds {
			t.Errorf("%s = %v (known %v, error %v), want %v", test.text, holds, known, err, test.holds)
		}
	}
}

func TestCheckSaysWhatIsBroken(t *testing.T) {
	tests := []struct {
		name string
		p    Point
		want string
	}{
		{"the default is legal", Point{}, ""},
		{"a legal point", Point{"max-num-seqs": "128", "max-num-batched-tokens": "8192", "gpu-memory-utilization": "0.93"}, ""},
		{"a constraint with an absent flag holds", Point{"max-num-seqs": "1024"}, ""},
		{"unknown", Point{"max-num-seq": "1"}, `unknown parameter "max-num-seq"; did you mean "max-num-seqs"?`},
		{"below", Point{"gpu-memory-utilization": "0.79"}, "gpu-memory-utilization=0.79 is below the range [0.8, 0.97]"},
		{"above", Point{"max-num-seqs": "1025"}, "max-num-seqs=1025 is above the range [16, 1024]"},
		{"off the step", Point{"gpu-memory-utilization": "0.935"}, "gpu-memory-utilization=0.935 is not a multiple of the step 0.01 above 0.8"},
		{"no whole number", Point{"max-num-seqs": "16.5"}, "max-num-seqs=16.5 is not a whole number"},
		{"no number", Point{"max-num-seqs": "many"}, "max-num-seqs=many is not a number"},
		{"NaN is no number", Point{"fraction": "NaN"}, "fraction=NaN is not a number"},
		{"no choice", Point{"kv-cache-dtype": "fp9"}, "kv-cache-dtype=fp9 is not one of auto, fp8"},
		{"no bool", Point{"kv-cache-dtype": "auto", "enable-chunked-prefill": "yes"}, "enable-chunked-prefill=yes is not true or false"},
		{"not active", Point{"kv-cache-dtype": "fp8", "enable-chunked-prefill": "true"},
			`enable-chunked-prefill=true is not active, because its condition does not hold: kv-cache-dtype == "auto"`},
		{"not active, for its condition's flag is absent", Point{"enable-chunked-prefill": "true"},
			`enable-chunked-prefill=true is not active, because its condition does not hold: kv-cache-dtype == "auto"`},
		{"a broken constraint", Point{"max-num-seqs": "1024", "max-num-batched-tokens": "1024"}, ""},
		{"two things at once", Point{"max-num-seqs": "2048", "max-num-batched-tokens": "1024"},
			"max-num-seqs=2048 is above the range [16, 1024]\n" +
				`constraint "max-num-batched-tokens >= max-num-seqs" is broken by max-num-batched-tokens=1024, max-num-seqs=2048`},
	}
	s := realistic(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := s.Check(test.p); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("Check(%v) says\n%s, want\n%s", test.p, got, test.want)
			}
		})
	}
}

func TestConstraintsSeeTheFixedArgs(t *testing.T) {
	s := realistic(t)
	s.Defaults = map[string]string{"max-model-len": "2048", "max-num-seqs": "1024"}
	err := s.Check(Point{"max-num-batched-tokens": "8192"})
	want := `constraint "max-num-batched-tokens <= 2 * max-model-len" is broken by max-model-len=2048, max-num-batched-tokens=8192`
	if err == nil || err.Error() != want {
		t.Errorf("Check says %v, want %s", err, want)
	}
}

// TestSampleAndUnitAreInverse tests random legal points, and the points with all u = 0 and all u = 1.
func TestSampleAndUnitAreInverse(t *testing.T) {
	s := realistic(t)
	s.constraints = nil // Sample ignores constraints
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 2000 {
		u := make([]float64, len(s.Parameters()))
		for i := range u {
			switch n {
			case 0:
			case 1:
				u[i] = 1
			default:
				u[i] = r.Float64()
			}
		}
		p := s.Sample(u)
		if err := s.Check(p); err != nil {
			t.Fatalf("Sample(%v) = %v: %v", u, p, err)
		}
		back, active := s.Unit(p)
		if q := s.Sample(back); !maps.Equal(p, q) {
			t.Fatalf("Sample(Unit(%v)) = %v", p, q)
		}
		for i, parameter := range s.Parameters() {
			if _, ok := p[parameter.Name]; ok != active[i] || back[i] < 0 || back[i] > 1 {
				t.Fatalf("Unit(%v)[%s] = %v, active %v", p, parameter.Name, back[i], active[i])
			}
		}
	}
}

func TestEveryValueHasItsShare(t *testing.T) {
	tests := []struct {
		name string
		p    Parameter
		want []string // expected values, each equally often
	}{
		{"both ends of an int", Parameter{Kind: Int, Min: 0, Max: 3}, []string{"0", "1", "2", "3"}},
		{"an int in steps that do not reach the end", Parameter{Kind: Int, Min: 1, Max: 10, Step: 4}, []string{"1", "5", "9"}},
		{"a float in steps", Parameter{Kind: Float, Min: 0.9, Max: 0.93, Step: 0.01}, []string{"0.9", "0.91", "0.92", "0.93"}},
		{"a bool", Parameter{Kind: Bool}, []string{"false", "true"}},
		{"choices", Parameter{Kind: Categorical, Choices: []string{"a", "b", "c"}}, []string{"a", "b", "c"}},
		{"one value", Parameter{Kind: Int, Min: 7, Max: 7}, []string{"7"}},
		{"one value on a logarithmic scale", Parameter{Kind: Int, Min: 7, Max: 7, Log: true}, []string{"7"}},
	}
	const draws = 1200
	for _, test := range tests {
		counts := map[string]int{}
		for i := range draws {
			counts[test.p.valueAt((float64(i)+0.5)/draws)]++
		}
		if got := slices.Sorted(maps.Keys(counts)); !slices.Equal(got, test.want) {
			t.Errorf("%s: values %v, want %v", test.name, got, test.want)
		}
		for text, n := range counts {
			if n != draws/len(test.want) {
				t.Errorf("%s: %s comes %d times, want %d", test.name, text, n, draws/len(test.want))
			}
		}
	}
}

func TestALogScaleFavoursSmallValuesAlike(t *testing.T) {
	p := Parameter{Kind: Int, Min: 1, Max: 1024, Log: true}
	below := 0
	for i := range 1000 {
		v, err := p.Number(p.valueAt((float64(i) + 0.5) / 1000))
		if err != nil {
			t.Fatal(err)
		}
		if v < 32 {
			below++
		}
	}
	if below < 480 || below > 540 {
		t.Errorf("%d of 1000 values are below the middle of the logarithmic scale, want about half", below)
	}
	if p.valueAt(0) != "1" || p.valueAt(1) != "1024" {
		t.Errorf("the ends are %s and %s, want 1 and 1024", p.valueAt(0), p.valueAt(1))
	}
}

func TestUnitClampsAndLeavesUnknownOut(t *testing.T) {
	s := realistic(t)
	u, active := s.Unit(Point{"max-num-seqs": "4096", "gpu-memory-utilization": "0.5", "kv-cache-dtype": "int4", "fraction": "7", "num-speculative-tokens": "5.0"})
	got := map[string]string{}
	for i, p := range s.Parameters() {
		if active[i] {
			got[p.Name] = p.valueAt(u[i])
		}
	}
	want := map[string]string{"max-num-seqs": "1024", "gpu-memory-utilization": "0.8", "fraction": "1", "num-speculative-tokens": "5"}
	if !maps.Equal(got, want) {
		t.Errorf("Unit means %v, want %v", got, want)
	}
}

func TestLevels(t *testing.T) {
	tests := []struct {
		name string
		p    Parameter
		n    int
		want string
	}{
		{"both ends and the middle", Parameter{Kind: Float, Min: 0.8, Max: 0.97, Step: 0.01}, 3, "0.8 0.89 0.97"},
		{"a logarithmic scale", Parameter{Kind: Int, Min: 16, Max: 1024, Log: true}, 4, "16 64 256 1024"},
		{"fewer values than levels", Parameter{Kind: Int, Min: 1, Max: 3}, 9, "1 2 3"},
		{"a continuum", Parameter{Kind: Float, Min: 0, Max: 1}, 5, "0 0.25 0.5 0.75 1"},
		{"one level is the middle", Parameter{Kind: Int, Min: 0, Max: 10}, 1, "5"},
		{"all choices", Parameter{Kind: Categorical, Choices: []string{"a", "b", "c"}}, 2, "a b c"},
		{"a bool", Parameter{Kind: Bool}, 1, "false true"},
	}
	for _, test := range tests {
		if got := strings.Join(test.p.Levels(test.n), " "); got != test.want {
			t.Errorf("%s: Levels(%d) = %s, want %s", test.name, test.n, got, test.want)
		}
	}
}

// A value is possible if at least one legal point has it. The values that are not given may be any values.
func TestPossible(t *testing.T) {
	s, err := New([]Parameter{
		{Name: "tensor-parallel-size", Kind: Int, Min: 1, Max: 8, When: "max-num-seqs > 64"},
		{Name: "pipeline-parallel-size", Kind: Int, Min: 1, Max: 4, When: "tensor-parallel-size == 1"},
		{Name: "max-num-seqs", Kind: Int, Min: 16, Max: 1024},
	}, []string{"tensor-parallel-size * pipeline-parallel-size <= 8", "max-num-seqs <= 1000"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		point Point
		want  bool
	}{
		{Point{"tensor-parallel-size": "8"}, true}, // max-num-seqs may be above 64
		{Point{"tensor-parallel-size": "8", "max-num-seqs": "32"}, false},
		{Point{"tensor-parallel-size": "2", "pipeline-parallel-size": "2"}, false},
		{Point{"tensor-parallel-size": "1", "pipeline-parallel-size": "4"}, true},
		{Point{"max-num-seqs": "1001"}, false},
	} {
		if got := s.Possible(row.point); got != row.want {
			t.Errorf("Possible(%v) = %v, want %v", row.point, got, row.want)
		}
	}
}
