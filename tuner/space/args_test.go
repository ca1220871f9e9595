package space

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

func TestArgs(t *testing.T) {
	s := realistic(t)
	got := s.Args(Point{
		"compilation-config": `{"mode":3}`, "enable-chunked-prefill": "false", "gpu-memory-utilization": "0.93",
		"num-speculative-tokens": "3", "kv-cache-dtype": "fp8", "elephants": "7",
	})
	want := []string{"--no-enable-chunked-prefill", "--gpu-memory-utilization", "0.93",
		"--speculative-config", `{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}`,
		"--kv-cache-dtype", "fp8", "--compilation-config", `{"mode":3}`}
	if !slices.Equal(got, want) {
		t.Errorf("Args = %q, want %q", got, want)
	}
	if got := s.Args(Point{"num-speculative-tokens": "0", "enable-chunked-prefill": "true"}); !slices.Equal(got, []string{"--enable-chunked-prefill"}) {
		t.Errorf("Args without speculation = %q, want the bool alone", got)
	}
	if len(s.speculative) != 2 {
		t.Errorf("Args left %v in the speculative config", s.speculative)
	}
}

func TestParseArgs(t *testing.T) {
	tests := []struct {
		name string
		args string // words, separated by spaces
		want Point
		err  string
	}{
		{"all forms", "--gpu_memory_utilization 0.90 --max-num-seqs=2048 --enable-chunked-prefill --kv-cache-dtype=fp8",
			Point{"gpu-memory-utilization": "0.9", "max-num-seqs": "2048", "enable-chunked-prefill": "true", "kv-cache-dtype": "fp8"}, ""},
		{"a bool that is off", "--no_enable_chunked_prefill", Point{"enable-chunked-prefill": "false"}, ""},
		{"a negative value", "--fraction -0.5", Point{"fraction": "-0.5"}, ""},
		{"vLLM's thousands", "--max-num-batched-tokens 8k --max-num-seqs 1K", Point{"max-num-batched-tokens": "8000", "max-num-seqs": "1024"}, ""},
		{"the last one counts", "--max-num-seqs 1 --max-num-seqs 2", Point{"max-num-seqs": "2"}, ""},
		{"speculation", `--speculative-config {"num_speculative_tokens":3,"prompt_lookup_max":4,"method":"ngram"}`,
			Point{"num-speculative-tokens": "3"}, ""},
		{"JSON that is equal to a choice", `--compilation-config {"pass_config":{"enable_fusion":true},"mode":0}`,
			Point{"compilation-config": `{"mode": 0, "pass_config": {"enable_fusion": true}}`}, ""},
		{"a choice out of the list", "--kv-cache-dtype int8", Point{"kv-cache-dtype": "int8"}, ""},
		{"a flag that is not searched", "--enforce-eager", nil,
			"--enforce-eager is not searched; move it to server.args, or search it under parameters"},
		{"a misspelt flag", "--max-num-seq 4", nil,
			"--max-num-seq is not searched; did you mean --max-num-seqs? If not, move it to server.args, or search it under parameters"},
		{"no value", "--max-num-seqs --enable-chunked-prefill", nil, "--max-num-seqs has 0 values (); write one after it"},
		{"a bool with a value", "--enable-chunked-prefill true", nil, `--enable-chunked-prefill takes no value; remove "true"`},
		{"no number", "--max-num-seqs many", nil, "--max-num-seqs many is not a number; write one, such as 16"},
		{"a word before any flag", "model --max-num-seqs 4", nil, `"model" belongs to no flag; write --name before it`},
		{"other speculation", `--speculative-config {"num_speculative_tokens":3,"method":"eagle"}`, nil,
			`--speculative-config is {"method":"eagle"}, but speculative_config is {"method":"ngram","prompt_lookup_max":4}; make them equal`},
		{"speculation with no tokens", `--speculative-config {"num_speculative_tokens":0}`, nil,
			"--speculative-config needs num_speculative_tokens with a whole number above 0; add it, or remove the flag"},
		{"speculation that is no JSON", `--speculative-config ngram`, nil,
			`--speculative-config needs one JSON object, such as '{"method":"ngram","num_speculative_tokens":3}'`},
		{"the tokens are no flag of vLLM", "--num-speculative-tokens 3", nil,
			"--num-speculative-tokens is not searched; move it to server.args, or search it under parameters"},
		{"two errors", "--x --y", nil, "--x is not searched; move it to server.args, or search it under parameters\n" +
			"--y is not searched; move it to server.args, or search it under parameters"},
	}
	s := realistic(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p, err := s.ParseArgs(strings.Fields(test.args))
			got := ""
			if err != nil {
				got = err.Error()
			}
			if got != test.err || !maps.Equal(p, test.want) {
				t.Errorf("ParseArgs(%s) = %v, %s\nwant %v, %s", test.args, p, got, test.want, test.err)
			}
		})
	}
}

// FuzzExpression compiles any text as an expression. No text may cause a panic, and every expression that compiles can
// be evaluated.
func FuzzExpression(f *testing.F) {
	for _, text := range []string{"max-num-batched-tokens >= max-num-seqs", `kv-cache-dtype == "auto" and not b`, "1 % 0 == 1",
		"((((", "max-num-seqs ?? 1", "'", "max(1,", "-max-num-seqs--max-num-seqs", "1/0 > 2", "max-num-seqs in 1..1000000000", "\"é\" == 'x'"} {
		f.Add(text)
	}
	words := newVocabulary([]Parameter{
		{Name: "max-num-seqs", Kind: Int}, {Name: "max-num-batched-tokens", Kind: Int}, {Name: "b", Kind: Bool},
		{Name: "kv-cache-dtype", Kind: Categorical, Choices: []string{"auto", "fp8"}},
	}, map[string]string{"max-model-len": "8192"})
	values := map[string]any{"max-num-seqs": 64, "max-num-batched-tokens": 2048, "b": true, "kv-cache-dtype": "auto", "max-model-len": 8192}
	f.Fuzz(func(t *testing.T, text string) {
		e, err := words.compile(text)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error says nothing")
			}
			return
		}
		// An error is allowed, for example for a remainder by zero.
		_, known, _ := e.holds(func(name string) (any, bool) { v, ok := values[name]; return v, ok })
		if !known {
			t.Errorf("%q names a flag that the vocabulary does not have: %v", text, e.names)
		}
	})
}

// FuzzParseArgs parses any command line. The args of the parsed point must give the same point again.
func FuzzParseArgs(f *testing.F) {
	f.Add("--max-num-seqs\n64\n--enable-chunked-prefill")
	f.Add("--speculative-config={\"method\":\"ngram\",\"prompt_lookup_max\":4,\"num_speculative_tokens\":2}")
	f.Add("--kv-cache-dtype=--x")
	s := realistic(f)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := s.ParseArgs(strings.Split(text, "\n"))
		if err != nil {
			return
		}
		for name, value := range p {
			if IsFlag(value) || name == SpeculativeTokens && value == "0" {
				return // --name=--value cannot be written as two words
			}
		}
		q, err := s.ParseArgs(s.Args(p))
		if err != nil || !maps.Equal(p, q) {
			t.Errorf("ParseArgs(Args(%v)) = %v, %v", p, q, err)
		}
	})
}
