package workload

import (
	"math"
	"slices"
	"testing"
)

func TestPrefixRepetitionHasVLLMsShape(t *testing.T) {
	source := open(t, Spec{Kind: "prefix-repetition", Requests: 200}, 1)
	if want := "prefix-repetition 10 × 256+256/128 (200 requests)"; source.Name() != want || source.Longest() != 640 {
		t.Errorf("%q, longest %d, want %q, 640", source.Name(), source.Longest(), want)
	}
	prefixes, suffixes := make(map[int32]int), make(map[int32]bool)
	for i := range 200 {
		r := source.Request(WindowStream, i)
		if r.PromptTokens != 512 || len(r.Tokens) != 512 || r.OutputTokens != 128 {
			t.Fatalf("request %d has %d tokens and asks for %d, want 512 and 128", i, r.PromptTokens, r.OutputTokens)
		}
		prefixes[r.Tokens[0]<<16|r.Tokens[255]]++
		suffixes[r.Tokens[256]<<16|r.Tokens[511]] = true
	}
	for prefix, n := range prefixes {
		if n != 20 {
			t.Errorf("prefix %d has %d requests, want 20 as all others", prefix, n)
		}
	}
	if len(prefixes) != 10 || len(suffixes) != 200 {
		t.Errorf("%d prefixes and %d suffixes, want 10 and 200", len(prefixes), len(suffixes))
	}
}

// hitRate returns the hit rate of a large prefix cache with blocks of 16 tokens: the share of prompt tokens found in
// the cache. The first n requests only fill the cache.
func hitRate(source Source, n int) float64 {
	const block = 16
	known := make(map[[block]int32]bool)
	hit, total := 0, 0
	for i := range 2 * n {
		ids := source.Request(WindowStream, i).Tokens
		prefix := true
		for at := 0; at+block <= len(ids); at += block {
			key := [block]int32(ids[at : at+block])
			if prefix = prefix && known[key]; prefix && i >= n {
				hit += block
			}
			known[key] = true
		}
		if i >= n {
			total += len(ids)
		}
	}
	return float64(hit) / float64(total)
}

func TestSharedPrefixesHaveTheirHitRate(t *testing.T) {
	tests := []struct {
		name string
		spec Spec
		want float64
	}{
		{"half of each prompt is shared by all", Spec{HitPercent: 50}, 0.5},
		{"and in groups", Spec{HitPercent: 50, Groups: 7}, 0.5},
		{"a fifth", Spec{HitPercent: 20, InputTokens: 2000}, 0.2},
		{"with varying lengths", Spec{HitPercent: 60, InputTokens: 2000, Groups: 3, InputRangeRatio: 0.5}, 0.6},
	}
	for _, test := range tests {
		test.spec.Kind = "shared-prefix"
		if got := hitRate(open(t, test.spec, 3), 100); math.Abs(got-test.want) > 0.015 { // only whole blocks hit, so a part of a block is lost
			t.Errorf("%s: %.3f of the prompt tokens hit, want %.2f", test.name, got, test.want)
		}
	}
	if got := hitRate(open(t, Spec{Kind: "random"}, 3), 100); got != 0 {
		t.Errorf("random: %.3f of the prompt tokens hit, want none", got)
	}
}

func TestRandomHasAPrefixAndItsOwnSpreads(t *testing.T) {
	spec := Spec{Kind: "random", PrefixTokens: 40, InputTokens: 100, OutputTokens: 10, OutputRangeRatio: 0.5}
	source := open(t, spec, 1)
	if want := "random 40+100/10 ±0/50 % (endless)"; source.Name() != want || source.Longest() != 155 {
		t.Errorf("%q, longest %d, want %q, 155", source.Name(), source.Longest(), want)
	}
	prompts, outputs := lengths(source, WindowStream, 500)
	if prompts[0] != 140 || prompts[499] != 140 || outputs[0] != 5 || outputs[499] != 15 {
		t.Errorf("prompts %v to %v, answers %v to %v, want 140, and 5 to 15", prompts[0], prompts[499], outputs[0], outputs[499])
	}
	a, b := source.Request(WindowStream, 0).Tokens, source.Request(leadInStream, 70).Tokens
	if !slices.Equal(a[:40], b[:40]) || slices.Equal(a[40:], b[40:]) {
		t.Error("two requests share more or less than the prefix")
	}
}
