package space

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

func withVariables(t testing.TB) *Space {
	t.Helper()
	s, err := New([]Parameter{
		{Name: "max-num-seqs", Kind: Int, Min: 16, Max: 1024},
		{Name: "VLLM_BACKEND", Kind: Categorical, Choices: []string{Unset, "A", "B"}},
		{Name: "OMP_NUM_THREADS", Kind: Categorical, Choices: []string{Unset, "1", "8"}, When: `VLLM_BACKEND == "A"`},
		{Name: "NCCL_RATIO", Kind: Float, Min: 0, Max: 1, Step: 0.25},
	}, []string{"OMP_NUM_THREADS <= max_num_seqs", `VLLM_BACKEND != "B" or NCCL_RATIO-0.5 > 0`}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestVariablesGoToTheEnvironmentAndFlagsToTheArgs(t *testing.T) {
	s := withVariables(t)
	p := Point{"max-num-seqs": "16", "VLLM_BACKEND": "A", "OMP_NUM_THREADS": Unset, "NCCL_RATIO": "0.5"}
	if args := s.Args(p); !slices.Equal(args, []string{"--max-num-seqs", "16"}) {
		t.Errorf("Args = %q", args)
	}
	if env := p.Env(); !maps.Equal(env, map[string]string{"VLLM_BACKEND": "A", "NCCL_RATIO": "0.5"}) {
		t.Errorf("Env = %v", env)
	}
	if env := (Point{"max-num-seqs": "16", "OMP_NUM_THREADS": Unset}).Env(); env != nil {
		t.Errorf("Env = %v, want nil", env)
	}
	if names := s.Variables(); !slices.Equal(names, []string{"VLLM_BACKEND", "OMP_NUM_THREADS", "NCCL_RATIO"}) {
		t.Errorf("Variables = %v", names)
	}
	if flags := p.WithoutVariables(); flags.String() != "max-num-seqs=16" {
		t.Errorf("WithoutVariables = %s", flags)
	}
}

// A variable that is not set has no value in an expression. A constraint on it counts as kept, and a condition on it
// does not hold.
func TestExpressionsOnVariables(t *testing.T) {
	s := withVariables(t)
	for _, test := range []struct {
		point Point
		legal bool
	}{
		{Point{"max-num-seqs": "16", "VLLM_BACKEND": "A", "OMP_NUM_THREADS": "8"}, true},
		{Point{"max-num-seqs": "16", "VLLM_BACKEND": Unset}, true},
		{Point{"max-num-seqs": "16", "VLLM_BACKEND": Unset, "OMP_NUM_THREADS": "8"}, false},
		{Point{"VLLM_BACKEND": "B", "NCCL_RATIO": "0.25"}, false},
		{Point{"VLLM_BACKEND": "B", "NCCL_RATIO": "0.75"}, true},
		{Point{"VLLM_BACKEND": "C"}, false},
	} {
		if err := s.Check(test.point); (err == nil) != test.legal {
			t.Errorf("Check(%s) = %v, want legal %v", test.point, err, test.legal)
		}
	}
}

// The words that a person can paste in front of a command are parsed to the same point again.
func TestCurrentVariablesRoundTrip(t *testing.T) {
	s := withVariables(t)
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		p := s.Sample([]float64{rng.Float64(), rng.Float64(), rng.Float64(), rng.Float64()})
		words := slices.Concat(EnvWords(p.Env()), s.Args(p))
		maps.DeleteFunc(p, func(_, value string) bool { return value == Unset })
		got, err := s.ParseArgs(words)
		if err != nil || got.String() != p.String() {
			t.Fatalf("ParseArgs(%q) = %s, %v, want %s", words, got, err, p)
		}
	}
}

func TestCutEnv(t *testing.T) {
	for _, test := range []struct{ words, env []string }{
		{nil, nil},
		{[]string{"--a", "X=1"}, nil},
		{[]string{"X=1", "Y=a=b", "--a"}, []string{"X=1", "Y=a=b"}},
		{[]string{"X=1"}, []string{"X=1"}},
		{[]string{"x=1"}, nil},
		{[]string{"X"}, nil},
	} {
		env, rest := CutEnv(test.words)
		if !slices.Equal(env, test.env) || !slices.Equal(slices.Concat(env, rest), test.words) {
			t.Errorf("CutEnv(%q) = %q, %q, want %q", test.words, env, rest, test.env)
		}
	}
}

func TestWhatIsAVariable(t *testing.T) {
	for name, want := range map[string]bool{"A": true, "VLLM_USE_V1": true, "A_": true, "": false, "_A": false, "1A": false, "a": false, "Ab": false, "A-B": false, "Ä": false} {
		if IsVariable(name) != want {
			t.Errorf("IsVariable(%q) = %v", name, !want)
		}
	}
}

func TestNewSaysWhatIsWrongWithAVariable(t *testing.T) {
	for want, p := range map[string]Parameter{
		"parameter X: a variable has no --no- form; write the values that the server reads, such as [0, 1]": {Name: "X", Kind: Bool},
		"parameter X: a choice is empty; write null for a variable that is not set":                         {Name: "X", Kind: Categorical, Choices: []string{""}},
		`parameter X: the choice "a\x00" has a line break or a control character; remove it`:                {Name: "X", Kind: Categorical, Choices: []string{"a\x00"}},
		"parameter X: the range [2, 1] is empty; write [1, 2]":                                              {Name: "X", Kind: Int, Min: 2, Max: 1},
	} {
		if _, err := New([]Parameter{p}, nil, nil, nil); err == nil || err.Error() != want {
			t.Errorf("New says %v, want %s", err, want)
		}
	}
}
