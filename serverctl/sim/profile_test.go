package sim

import (
	"reflect"
	"strings"
	"testing"
)

func TestEveryBuiltInProfileStartsWithItsDefaults(t *testing.T) {
	for _, name := range ProfileNames() {
		p := profile(t, name)
		o := p.Defaults
		o.MaxModelLen = min(o.MaxModelLen, 8192)
		if _, err := NewEngine(p, o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, c := range p.Constants {
			if c.Source == "" || c.Unit == "" {
				t.Errorf("%s: %s has no source or no unit", name, c.Path)
			}
		}
	}
}

func TestAProfileIsReadAsItWasWritten(t *testing.T) {
	for _, name := range ProfileNames() {
		p := profile(t, name)
		again, err := ParseProfile("profiles/"+name+".yaml", []byte(p.Text()))
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, p.Text())
		}
		if !reflect.DeepEqual(p, again) {
			t.Errorf("%s: read as\n%+v\nwant\n%+v", name, again, p)
		}
	}
}

func TestSetChangesOneProfile(t *testing.T) {
	p := profile(t, "l4-qwen0.5b")
	copied := *p
	if !copied.Set("step.weights", []float64{7}, "fit", "a study") || !copied.Set("speculation.acceptance", []float64{0.5, 0.25}, "measured", "a study") {
		t.Fatal("Set does not know step.weights or speculation.acceptance")
	}
	if copied.Set("step.weight", []float64{7}, "fit", "") || copied.Set("step.fixed", []float64{1, 2}, "fit", "") || copied.Value("speculation.acceptance") != nil {
		t.Error("Set or Value accepts an unknown constant, or two numbers for one constant")
	}
	if *copied.Value("step.weights") != 7 || reflect.DeepEqual(p, &copied) || !reflect.DeepEqual(p, profile(t, "l4-qwen0.5b")) {
		t.Errorf("the copy has %g and the original is %+v, want 7 and no change", *copied.Value("step.weights"), p)
	}
	read, err := ParseProfile("profiles/l4-qwen0.5b.yaml", []byte(copied.Text()))
	if err != nil || read.Step.Weights != 7 || !reflect.DeepEqual(read.Speculation.Acceptance, []float64{0.5, 0.25}) {
		t.Errorf("written and read it is %+v, %v", read, err)
	}
}

func TestAWrongProfileNamesTheLine(t *testing.T) {
	good := profile(t, "small-fast").Text()
	change := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("the profile has no %q", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	for _, row := range []struct{ name, text, want string }{
		{"a wrong unit", change(`weights: {value: 4, unit: "ms"`, `weights: {value: 4, unit: "s"`), `p.yaml:13: step.weights has the unit "s", want "ms"`},
		{"a missing constant", change("  kv_per_token:", "  kv_per_tokem:"), "p.yaml:3: memory.kv_per_token is missing; add kv_per_token: {value: …, unit: B/token"},
		{"a misspelt constant", change("  kv_per_token:", "  kv_per_tokem:"), `unknown key memory.kv_per_tokem; did you mean "memory.kv_per_token"?`},
		{"a word for a number", change("value: 16,", "value: big,"), `p.yaml:3: memory.gpu: "big" is not a number`},
		{"a negative value", change("value: 16,", "value: -1,"), "p.yaml:3: memory.gpu is -1, want at least 0"},
		{"no value", change("value: 16, ", ""), "p.yaml:3: memory.gpu has no value; write {value: 1.5, unit: GiB"},
		{"a list", change("value: 16,", "value: [1, 2],"), "p.yaml:3: memory.gpu is a list, want one number"},
		{"a chance above 1", change("value: [0.7", "value: [7"), "speculation.acceptance is 7, want at most 1"},
		{"an unknown confidence", change("confidence: made up", "confidence: sure"), `has the confidence "sure"; write one of given, solved, measured, fit, assumed, made up`},
		{"no source", change(`source: "no measurement"`, `source: ""`), "has no source; say where the value comes from"},
		{"a missing default", change("max_num_seqs: 256, ", ""), "defaults.max_num_seqs is missing; add max_num_seqs: … under defaults"},
		{"a default that is no whole number", change("max_num_seqs: 256", "max_num_seqs: 2.5"), "defaults.max_num_seqs is 2.5, want a whole number"},
		{"defaults that exclude each other", change("max_num_seqs: 256", "max_num_seqs: 4096"), "defaults: max_num_batched_tokens (2048) must be"},
		{"MiB for GiB", change("value: 16,", "value: 16384,"), "memory.gpu is 16384, want at most 4096 GiB"},
		{"a stall without a gap", change("start_up:", "noise: {stall: {value: 5, unit: ms, confidence: assumed, source: x}}\nstart_up:"), "the time between stalls is missing; add noise.stall_gap"},
		{"no name of the model", change("name: \"example/small-fast\"", "name: \"\""), "model.name is missing"},
		{"two documents", good + "---\n" + good, "p.yaml: the file holds 2 YAML documents"},
		{"a context longer than any model's", change("max_model_len: 8192", "max_model_len: 1000000000000"), "defaults.max_model_len is 1000000000000, want at most"},
		{"invalid YAML", "a: [", "p.yaml: "},
		{"an empty file", "", "p.yaml: the file is empty"},
	} {
		_, err := ParseProfile("p.yaml", []byte(row.text))
		if err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: %v\nwant %s", row.name, err, row.want)
		}
	}
}

func FuzzParseProfile(f *testing.F) {
	p, err := LoadProfile("small-fast")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p.Text())
	f.Add("a: {b: [1, {c: d}]}\n---\nx")
	f.Fuzz(func(t *testing.T, text string) {
		if p, err := ParseProfile("p.yaml", []byte(text)); (p == nil) == (err == nil) {
			t.Errorf("profile %v with error %v", p, err)
		}
	})
}
