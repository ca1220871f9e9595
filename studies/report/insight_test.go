package report

import (
	"testing"
)

// Each part of an insight has one short text. If nothing is known of a part, it has no text.
func TestInsightTexts(t *testing.T) {
	mattered := func(unknown string, flags ...FlagShare) *Mattered { return &Mattered{Unknown: unknown, Flags: flags} }
	for _, c := range []struct {
		name    string
		insight *Insight
		want    []named
	}{
		{"no insight", nil, nil},
		{"nothing is known", &Insight{}, nil},
		{"no flag is compared", &Insight{Mattered: mattered("few points are legal"), Flat: &Flat{}}, nil},
		{"the flags are not told apart", &Insight{Mattered: mattered("9 trials do not tell the flags apart", FlagShare{Flag: "a", Share: 0.6}, FlagShare{Flag: "b"})},
			[]named{{"mattered", "not known: 9 trials do not tell the flags apart"}}},
		{"one flag matters", &Insight{Mattered: mattered("", FlagShare{Flag: "a", Share: 0.6, Lowest: 0.2, Highest: 0.9, Matters: true}, FlagShare{Flag: "b"})},
			[]named{{"mattered", "a 60 % (95 %: 20 to 90 %) of the variation"}}},
		{"many flags are flat", &Insight{Flat: &Flat{Within: 0.02, Sure: 0.8, Flags: []FlatFlag{
			{Flag: "a", Part: 1}, {Flag: "b", Part: 1}, {Flag: "c", Part: 1}, {Flag: "d", Part: 1}, {Flag: "e", Part: 1}, {Flag: "f", Part: 1}}}},
			[]named{{"flat", "any a, any b, any c, any d, 2 more: 80 % likely within 2 % of the best, each alone"}}},
		{"a narrow region", &Insight{Flat: &Flat{Within: 0.02, Sure: 0.8, Flags: []FlatFlag{{Flag: "a", Best: "1", Lowest: "1", Highest: "2", Part: 0.01}}}}, nil},
		{"one flag is flat", &Insight{Flat: &Flat{Within: 0.02, Sure: 0.8, Flags: []FlatFlag{{Flag: "a", Best: "3", Lowest: "1", Highest: "9", Part: 0.3}}}},
			[]named{{"flat", "a 1 to 9: 80 % likely within 2 % of the best"}}},
		{"the default is nearly as good", &Insight{Nearly: &Nearly{Trial: 0, Best: 2, Rate: 2.5, Ratio: 0.99}},
			[]named{{"nearly", "trial 0, which sets nothing (2.5 req/s, -1 % as measured)"}}},
		{"smaller changes", &Insight{Nearly: &Nearly{Trial: 4, Args: []string{"--a", "1"}, Changes: 1, Best: 1, Rate: 2.5, Ratio: 1.01}},
			[]named{{"nearly", "trial 4, nearer to the default: --a 1 (2.5 req/s, +1 % as measured)"}}},
	} {
		got := c.insight.texts()
		if len(got) != len(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
			continue
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%s: %q, want %q", c.name, got[i], c.want[i])
			}
		}
	}
}
