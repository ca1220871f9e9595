package workload

import (
	"slices"
	"strings"
	"testing"
)

func TestSaltedRepetitionsMissTheCache(t *testing.T) {
	for _, spec := range []Spec{{Kind: "phase1"}, {Kind: "random", InputTokens: 20, Requests: 30}, {Kind: "trace", Path: examples + "mooncake.jsonl"}} {
		plain := open(t, spec, 1)
		spec.Repeat = Salt
		salted := open(t, spec, 1)
		n := plain.Len()
		if !strings.Contains(salted.Name(), "repeated with salt") {
			t.Errorf("%q does not say that it is salted", salted.Name())
		}
		begins := make(map[int32]bool)
		for _, i := range []int{0, n - 1, n, 2*n - 1, 2 * n} {
			a, b := plain.Request(WindowStream, i), salted.Request(WindowStream, i)
			if len(a.Tokens) != len(b.Tokens) || a.OutputTokens != b.OutputTokens || !slices.Equal(a.Tokens[saltTokens:], b.Tokens[saltTokens:]) {
				t.Errorf("%s: request %d differs from the one without salt in more than its salt", salted.Name(), i)
			}
			if same := slices.Equal(a.Tokens, b.Tokens); same != (i < n) {
				t.Errorf("%s: request %d equals the one without salt: %v", salted.Name(), i, same)
			}
			if i >= n {
				begins[b.Tokens[0]<<16|b.Tokens[1]] = true
			}
		}
		if len(begins) != 2 {
			t.Errorf("%s: %d beginnings in two repetitions, want one in each", salted.Name(), len(begins))
		}
		if r := salted.Request(leadInStream, n); begins[r.Tokens[0]<<16|r.Tokens[1]] {
			t.Errorf("%s: two streams have the same salt", salted.Name())
		}
	}
}

func TestSaltIsInFrontOfTexts(t *testing.T) {
	for _, endpoint := range []string{Completions, Chat} {
		spec := Spec{Kind: "jsonl", Path: examples + "questions.jsonl", Endpoint: endpoint, Repeat: Salt}
		source := open(t, spec, 1)
		text := func(i int) string {
			r := source.Request(WindowStream, i)
			if endpoint == Chat {
				return r.Messages[0].Content
			}
			return r.Text
		}
		first, second, third := text(0), text(60), text(120)
		if len(second) != len(first)+11 || !strings.HasSuffix(second, "] "+first) || second[:10] == third[:10] {
			t.Errorf("%s: repetitions ask %q, %q and %q", endpoint, first, second, third)
		}
		if text(0) != first {
			t.Errorf("%s: the salt has changed the population", endpoint)
		}
	}
}

func TestARunMayNeedMoreRequestsThanThereAre(t *testing.T) {
	file := Spec{Kind: "jsonl", Path: examples + "questions.jsonl"} // 60 requests
	tests := []struct {
		name    string
		repeat  string
		n       int
		repeats int
		refused bool
	}{
		{"as many as there are", "", 60, 0, false},
		{"ten more", "", 70, 10, false},
		{"ten more with salt", Salt, 70, 0, false},
		{"ten more where that is an error", ErrorEnded, 70, 10, true},
		{"as many where that is an error", ErrorEnded, 60, 0, false},
	}
	for _, test := range tests {
		file.Repeat = test.repeat
		source := open(t, file, 1)
		if got := Repeats(source, test.n); got != test.repeats {
			t.Errorf("%s: Repeats() = %d, want %d", test.name, got, test.repeats)
		}
		err := Enough(source, test.n)
		if (err != nil) != test.refused {
			t.Errorf("%s: Enough() = %v", test.name, err)
		}
		if err != nil && !strings.Contains(err.Error(), "jsonl questions.jsonl (60 requests): the run needs 70 requests, more than the file has, and `repeat: error` forbids reuse") {
			t.Errorf("%s: Enough() = %v", test.name, err)
		}
	}
	if endless := open(t, Spec{Kind: "production"}, 1); Repeats(endless, 36_000) != 0 || Enough(endless, 1e9) != nil {
		t.Error("an endless source repeats")
	}
}
