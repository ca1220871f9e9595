package asktell

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// everyKind has a parameter of each kind.
func everyKind(t testing.TB) *space.Space {
	t.Helper()
	s, err := space.New([]space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.8, Max: 0.976, Step: 0.01},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 1024, Max: 32768, Log: true},
		{Name: "long-prefill-token-threshold", Kind: space.Int, Min: 0, Max: 4096, Step: 512, When: "max-num-batched-tokens > 4096"},
		{Name: "enable-chunked-prefill", Kind: space.Bool},
		{Name: "block-size", Kind: space.Categorical, Choices: []string{"16", "32"}},
		{Name: "compilation-config", Kind: space.JSON, Choices: []string{`{"mode":0}`, `{"mode":3}`}},
	}, []string{"max-num-batched-tokens >= max-num-seqs"}, nil, map[string]string{"max-num-seqs": "2048"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSpaceMessage(t *testing.T) {
	line, err := encode(message{Space: newSpaceMessage(Config{
		Study: "s", Space: everyKind(t), Constraints: []string{"max-num-batched-tokens >= max-num-seqs"}, Seed: math.MaxUint64, Trials: 16, Objective: studies.CapacityPerGPU,
	})})
	want := `{"space":{"protocol":1,"study":"s","seed":18446744073709551615,"trials":16,` +
		`"objective":{"name":"capacity_per_gpu","unit":"requests per second and GPU","direction":"maximize"},"parameters":[` +
		`{"name":"gpu-memory-utilization","kind":"float","low":0.8,"high":0.97,"step":0.01},` +
		`{"name":"max-num-batched-tokens","kind":"int","low":1024,"high":32768,"log":true},` +
		`{"name":"long-prefill-token-threshold","kind":"int","low":0,"high":4096,"step":512,"when":"max-num-batched-tokens > 4096"},` +
		`{"name":"enable-chunked-prefill","kind":"bool"},{"name":"block-size","kind":"categorical","choices":["16","32"]},` +
		`{"name":"compilation-config","kind":"json","choices":["{\"mode\":0}","{\"mode\":3}"]}],` +
		`"constraints":["max-num-batched-tokens >= max-num-seqs"],"fixed":{"max-num-seqs":"2048"}}}` + "\n"
	if err != nil || string(line) != want {
		t.Errorf("the space is %s (%v), want %s", line, err, want)
	}
}

// A trial that is told to the program has the value that an optimiser maximises.
func TestTellMessage(t *testing.T) {
	for _, row := range []struct {
		name   string
		result trial.Result
		want   string
	}{
		{"a capacity", trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 2.1, Low: 2, High: 2.2, Lowest: 1.9, Highest: 2.3, StdErr: 0.05, Bound: capacity.Exact, Binding: "p99 TTFT"}},
			`"outcome":"measured","value":2.1,"bound":"exact","passed_rps":2,"failed_rps":2.2,"lowest_rps":1.9,"highest_rps":2.3,"std_err":0.05,"binding":"p99 TTFT"`},
		{"a lower bound", trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 60, Low: 60, Bound: capacity.AtLeast}},
			`"outcome":"measured","value":60,"bound":"at least","passed_rps":60`},
		{"no rate kept the SLO", trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 0.05, High: 0.05, Bound: capacity.AtMost}},
			`"outcome":"measured","value":0,"bound":"at most","failed_rps":0.05`},
		{"a loser of a race", trial.Result{Outcome: trial.Dropped, Class: serverctl.DroppedByRace, Capacity: capacity.Capacity{Rate: 1.5, High: 2, StdErr: 0.1, Bound: capacity.Estimated}},
			`"outcome":"dropped","value":1.5,"bound":"estimated","failed_rps":2,"std_err":0.1,"class":"dropped-by-race"`},
		{"a loser with an upper bound", trial.Result{Outcome: trial.Dropped, Class: serverctl.DroppedByRace, Capacity: capacity.Capacity{Rate: 2, High: 2, Bound: capacity.AtMost}},
			`"outcome":"dropped","value":null,"bound":"at most","failed_rps":2,"class":"dropped-by-race"`},
		{"a loser without an estimate", trial.Result{Outcome: trial.Dropped}, `"outcome":"dropped","value":null`},
		{"a crash", trial.Result{Outcome: trial.Infeasible, Class: "oom-start", Evidence: "CUDA \x1b[31mout of memory"},
			`"outcome":"infeasible","value":null,"class":"oom-start","evidence":"CUDA out of memory"`},
		{"figures that JSON does not have", trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: math.Inf(1), StdErr: math.NaN(), Bound: capacity.Exact}},
			`"outcome":"measured","value":null,"bound":"exact"`},
	} {
		point := space.Point{"gpu-memory-utilization": "0.9", "enable-chunked-prefill": "true", "block-size": "16", "former": "1"}
		line, err := encode(message{Tell: newTellMessage(everyKind(t), studies.Trial{Number: 3, Origin: studies.Current, State: studies.Done, Point: point, Result: row.result})})
		want := `{"tell":{"number":3,"origin":"current","point":{"block-size":"16","enable-chunked-prefill":true,"former":"1","gpu-memory-utilization":0.9},` + row.want + "}}\n"
		if err != nil || string(line) != want {
			t.Errorf("%s: told %s (%v), want %s", row.name, line, err, want)
		}
	}
}

func TestReadPoint(t *testing.T) {
	s := everyKind(t)
	for _, row := range []struct{ name, answer, want string }{
		{"every kind", `{"gpu-memory-utilization": 0.9, "max-num-batched-tokens": 8192, "long-prefill-token-threshold": 512, "enable-chunked-prefill": false, "block-size": "16", "compilation-config": "{\"mode\":3}"}`,
			`block-size=16 compilation-config={"mode":3} enable-chunked-prefill=false gpu-memory-utilization=0.9 long-prefill-token-threshold=512 max-num-batched-tokens=8192`},
		{"other JSON types", `{"gpu-memory-utilization": "0.90", "max-num-batched-tokens": 8192.0, "enable-chunked-prefill": "true", "block-size": 32, "compilation-config": {"mode": 0}}`,
			`block-size=32 compilation-config={"mode":0} enable-chunked-prefill=true gpu-memory-utilization=0.9 max-num-batched-tokens=8192`},
		{"between two steps", `{"gpu-memory-utilization": 0.8149, "max-num-batched-tokens": 2048.4}`, "gpu-memory-utilization=0.81 max-num-batched-tokens=2048"},
		{"rounding errors", `{"gpu-memory-utilization": 0.97600000000000009}`, "gpu-memory-utilization=0.97"},
		{"a parameter that is not active", `{"max-num-batched-tokens": 2048, "long-prefill-token-threshold": 512}`, "max-num-batched-tokens=2048"},
		{"null", `{"block-size": null}`, ""},
		{"no object", `[1]`, "error: the point is not an object"},
		{"out of range", `{"gpu-memory-utilization": 0.99}`, "error: gpu-memory-utilization=0.99 is outside the range [0.8, 0.976]"},
		{"not a number", `{"gpu-memory-utilization": true}`, "error: gpu-memory-utilization=true is not a number"},
		{"no choice", `{"block-size": 64}`, "error: block-size=64 is not one of 16, 32"},
		{"no bool", `{"enable-chunked-prefill": 1}`, "error: enable-chunked-prefill=1 is not true or false"},
		{"an unknown name", `{"blok-size": 16}`, `error: unknown parameter "blok-size"; did you mean "block-size"?`},
		{"a broken constraint", `{"max-num-batched-tokens": 1024}`, `error: constraint "max-num-batched-tokens >= max-num-seqs" is broken`},
	} {
		p, err := readPoint(s, json.RawMessage(row.answer))
		got := p.String()
		if err != nil {
			got = "error: " + err.Error()
		}
		if got != row.want && !(strings.HasPrefix(row.want, "error") && strings.HasPrefix(got, row.want)) {
			t.Errorf("%s: readPoint = %s, want %s", row.name, got, row.want)
		}
	}
}

// Whatever the program writes, the point is legal or there is an error.
func FuzzReadPoint(f *testing.F) {
	s := everyKind(f)
	f.Add(`{"point": {"gpu-memory-utilization": 1e400, "block-size": "16"}}`)
	f.Add(`{"point": {"max-num-batched-tokens": "0x10", "compilation-config": [}}`)
	f.Add(`{"point": null, "exhausted": 1}`)
	f.Fuzz(func(t *testing.T, line string) {
		var a answer
		if a.decode(line) != nil || a.Point == nil {
			return
		}
		if p, err := readPoint(s, a.Point); err == nil && s.Check(p) != nil {
			t.Errorf("%q gives %v, which is not legal", line, p)
		}
	})
}

// A searched variable is no fixed flag, although its default is known.
func TestASearchedVariableIsNotFixed(t *testing.T) {
	s, err := space.New([]space.Parameter{{Name: "VLLM_X", Kind: space.Categorical, Choices: []string{space.Unset, "1"}}}, nil, nil,
		map[string]string{"VLLM_X": space.Unset, "max-num-seqs": "8"})
	if err != nil {
		t.Fatal(err)
	}
	if fixed := newSpaceMessage(Config{Space: s}).Fixed; len(fixed) != 1 || fixed["max-num-seqs"] != "8" {
		t.Errorf("fixed = %v, want max-num-seqs alone", fixed)
	}
}
