package optuna

import (
	"database/sql"
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

var parameters = []space.Parameter{
	{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.975, Step: 0.01},
	{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
	{Name: "long-prefill-token-threshold", Kind: space.Int, Min: 0, Max: 4096, Step: 512},
	{Name: "enable-chunked-prefill", Kind: space.Bool},
	{Name: "num-speculative-tokens", Kind: space.Categorical, Choices: []string{"0", "2", "4"}},
	{Name: "compilation-config", Kind: space.JSON, Choices: []string{`{"mode":0}`, `{"mode":3}`}},
}

var began = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

// example returns a study with a trial for each outcome.
func example() studies.Study {
	probe := func(seq int, rate, headroom float64) trial.Probe {
		return trial.Probe{Seq: seq, Rate: rate, Verdict: slo.Verdict{Pass: headroom >= 0, Headroom: headroom, Binding: "p99 TPOT"}}
	}
	full := space.Point{
		"gpu-memory-utilization": "0.93", "max-num-seqs": "128", "long-prefill-token-threshold": "1024", "enable-chunked-prefill": "true",
		"num-speculative-tokens": "2", "compilation-config": `{"mode":3}`,
	}
	trials := []studies.Trial{
		{Origin: studies.Default, Point: space.Point{}, Result: trial.Result{Outcome: trial.Measured, GPUTime: 90 * time.Second, Capacity: capacity.Capacity{
			Rate: 2.1, Low: 2, High: 2.4, Bound: capacity.Exact, Binding: "p99 TPOT", InFlight: 60, Lowest: 1.9, Highest: 2.3, StdErr: 0.05}},
			Probes: []trial.Probe{probe(0, 2, 0.1), probe(1, 2.4, -0.1)}},
		{Origin: studies.Sampled, Point: full, Args: []string{"--max-num-seqs", "128"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{
			Rate: 3, Low: 3, Bound: capacity.AtLeast, Binding: "p99 TTFT"}}, Probes: []trial.Probe{probe(0, 3, 0.2)}},
		{Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "1024"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{
			Rate: 0.5, High: 0.5, Bound: capacity.AtMost, Binding: "p99 TTFT"}}},
		{Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "16"}, Result: trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero, Evidence: "none"}},
		{Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "17"}, Result: trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: "CUDA out of memory"}},
		{Origin: studies.Sampled, Point: space.Point{"max-num-seqs": "18"}, Result: trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure}},
		{Origin: studies.Current, Point: space.Point{"max-num-seqs": "2048", "long-prefill-token-threshold": "100", "num-speculative-tokens": "8"}, State: studies.Running},
	}
	for i := range trials {
		t := &trials[i]
		t.Number, t.Began = i, began.Add(time.Duration(i)*time.Hour)
		if t.State == "" {
			t.State, t.Ended = studies.Done, t.Began.Add(time.Minute)
		}
	}
	return studies.Study{ID: "abc", Name: "llama70b", Seed: math.MaxUint64, State: studies.Running, World: map[string]string{"model": "m"}, Trials: trials}
}

func written(t *testing.T, study studies.Study) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "it's a study?.db")
	if err := Write(path, study, study.Each(), parameters); err != nil {
		t.Fatal(err)
	}
	return path
}

// query returns the result of a query for one column.
func query(t *testing.T, path, text string) (all []string) {
	t.Helper()
	db, err := open(path, "mode=ro")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query(text)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var s sql.NullString
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		all = append(all, s.String)
	}
	return all
}

// The rows of each kind of trial and parameter are the same as Optuna would write.
func TestRowsAreLikeOptunas(t *testing.T) {
	path := written(t, example())
	for _, c := range []struct {
		name, query string
		want        []string
	}{
		{"states and times", `SELECT number || ' ' || state || ' ' || coalesce(strftime('%s', datetime_complete) - strftime('%s', datetime_start), '-') FROM trials ORDER BY trial_id`,
			[]string{"0 COMPLETE 60", "1 COMPLETE 60", "2 COMPLETE 60", "3 PRUNED 60", "4 FAIL 60", "5 FAIL 60", "6 RUNNING -"}},
		{"a time is UTC with microseconds", `SELECT datetime_start || '' FROM trials WHERE number=0`, []string{"2026-03-01 12:00:00.123456"}},
		{"the capacity, and 0 if no rate kept the SLO", `SELECT trial_id || ' ' || value || ' ' || value_type FROM trial_values ORDER BY 1`,
			[]string{"1 2.1 FINITE", "2 3.0 FINITE", "3 0.0 FINITE"}},
		{"the rates of the probes", `SELECT trial_id || ' ' || step || ' ' || intermediate_value FROM trial_intermediate_values ORDER BY 1`,
			[]string{"1 0 2.0", "1 1 2.4", "2 0 3.0"}},
		{"each kind of parameter", `SELECT param_value || ' ' || distribution_json FROM trial_params WHERE trial_id=2 ORDER BY param_id`, []string{
			`0.93 {"name":"FloatDistribution","attributes":{"step":0.01,"low":0.7,"high":0.97,"log":false}}`,
			`128.0 {"name":"IntDistribution","attributes":{"step":1,"low":16,"high":1024,"log":true}}`,
			`1024.0 {"name":"IntDistribution","attributes":{"step":512,"low":0,"high":4096,"log":false}}`,
			`1.0 {"name":"CategoricalDistribution","attributes":{"choices":[false,true]}}`,
			`1.0 {"name":"CategoricalDistribution","attributes":{"choices":["0","2","4"]}}`,
			`1.0 {"name":"CategoricalDistribution","attributes":{"choices":["{\"mode\":0}","{\"mode\":3}"]}}`}},
		{"the default has no parameters", `SELECT param_name FROM trial_params WHERE trial_id=1`, nil},
		{"values outside the range or off the step get wider ranges", `SELECT param_value || ' ' || distribution_json FROM trial_params WHERE trial_id=7 ORDER BY param_id`, []string{
			`2048.0 {"name":"IntDistribution","attributes":{"step":1,"low":16,"high":2048,"log":true}}`,
			`100.0 {"name":"IntDistribution","attributes":{"step":1,"low":0,"high":4096,"log":false}}`}},
		{"a value that is not among the choices is an attribute", `SELECT value_json FROM trial_user_attributes WHERE trial_id=7 AND "key"='not_among_choices'`, []string{`{"num-speculative-tokens":"8"}`}},
		{"why a trial failed", `SELECT value_json FROM trial_user_attributes WHERE trial_id=5 AND "key" IN ('class', 'evidence') ORDER BY "key"`, []string{`"oom-start"`, `"CUDA out of memory"`}},
		{"a seed is text, because it may not fit a number", `SELECT value_json FROM study_user_attributes WHERE "key"='seed'`, []string{`"18446744073709551615"`}},
		{"Optuna's versions of the tables", `SELECT version_num || ' ' || schema_version FROM alembic_version, version_info`, []string{"v3.2.0.a 12"}},
		{"one objective", `SELECT direction || ' ' || objective FROM study_directions`, []string{"MAXIMIZE 0"}},
	} {
		if got := query(t, path, c.query); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// driftedStudy returns a study in which the user accepted a change of the world, and a new study file, before trial 3.
// The world is what must stay the same while trials are compared.
func driftedStudy() studies.Study {
	met := func(rate float64) trial.Result {
		return trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast}}
	}
	study := studies.Study{Name: "llama70b", World: map[string]string{"model": "m", "model length": "4096"},
		Events: []studies.Event{{Kind: studies.Drift, Trial: 3, Changes: studies.Changes{{Fact: "model length", Was: new("2048"), Is: new("4096")}}}}}
	for i, one := range []studies.Trial{
		{Result: met(60), Probes: []trial.Probe{{Rate: 60}}},
		{Point: space.Point{"max-num-seqs": "64", "block-size": "16", "scheduler-delay-factor": "0.5", "swap": "none", "enforce-eager": "true"}, Result: met(70)},
		{Point: space.Point{"block-size": "128", "scheduler-delay-factor": "1", "swap": "4", "enforce-eager": "true"}, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{
			Rate: 0.5, High: 0.5, Bound: capacity.AtMost}}},
		{Result: met(2.99)},
		{Point: space.Point{"max-num-seqs": "128"}, Result: met(3)},
	} {
		one.Number, one.State = i, studies.Done
		study.Trials = append(study.Trials, one)
	}
	return study
}

// Optuna finds the same best trial as the tuner. Trials of other worlds stay in the file.
func TestWorldsAreNotCompared(t *testing.T) {
	study := driftedStudy()
	unmet := driftedStudy() // in this study, no trial of the new world met the SLO
	for i := range unmet.Trials[3:] {
		unmet.Trials[3+i].Result.Capacity = capacity.Capacity{Rate: 0.5, High: 0.5, Bound: capacity.AtMost}
	}
	perGPU := driftedStudy()
	perGPU.World = maps.Clone(perGPU.World)
	perGPU.World[studies.ObjectiveKey] = string(studies.CapacityPerGPU)
	perGPU.Trials[4].Args = []string{"--tensor-parallel-size", "4"}
	for _, c := range []struct {
		name  string
		study studies.Study
		query string
		want  []string
	}{
		{"the value is what the study maximises", perGPU, `SELECT trial_id || ' ' || value FROM trial_values ORDER BY value DESC`, []string{"4 2.99", "5 0.75"}},
		{"the capacity is the whole server's", perGPU, `SELECT value_json FROM trial_user_attributes WHERE "key"='capacity_rps' AND trial_id=5`, []string{"3"}},
		{"only the newest world is complete", study, `SELECT state FROM trials ORDER BY number`, []string{"PRUNED", "PRUNED", "PRUNED", "COMPLETE", "COMPLETE"}},
		{"the newest world has the best value", study, `SELECT trial_id || ' ' || value FROM trial_values ORDER BY value DESC`, []string{"5 3.0", "4 2.99"}},
		{"the study lists what was asked for in each world", study, `SELECT value_json FROM study_user_attributes WHERE "key"='worlds'`, []string{`[{"model":"m","model length":"2048"},{"model":"m","model length":"4096"}]`}},
		{"each trial has its world", study, `SELECT value_json FROM trial_user_attributes WHERE "key"='world' ORDER BY trial_id`, []string{"1", "1", "1", "2", "2"}},
		{"each trial has its capacity", study, `SELECT value_json FROM trial_user_attributes WHERE "key"='capacity_rps' ORDER BY trial_id`, []string{"60", "70", "0", "2.99", "3"}},
		{"a trial of an old world has its probes", study, `SELECT intermediate_value || '' FROM trial_intermediate_values WHERE trial_id=1`, []string{"60.0"}},
		{"a world in which no trial met the SLO is not compared", unmet, `SELECT state FROM trials ORDER BY number`, []string{"COMPLETE", "COMPLETE", "COMPLETE", "PRUNED", "PRUNED"}},
		{"a flag of an earlier study file is still a parameter", study, `SELECT param_name || ' ' || param_value || ' ' || distribution_json FROM trial_params WHERE trial_id=2 ORDER BY param_id`, []string{
			`max-num-seqs 64.0 {"name":"IntDistribution","attributes":{"step":1,"low":16,"high":1024,"log":true}}`,
			`block-size 16.0 {"name":"IntDistribution","attributes":{"step":1,"low":16,"high":128,"log":false}}`,
			`enforce-eager 1.0 {"name":"CategoricalDistribution","attributes":{"choices":[false,true]}}`,
			`scheduler-delay-factor 0.5 {"name":"FloatDistribution","attributes":{"step":null,"low":0.5,"high":1,"log":false}}`,
			`swap 1.0 {"name":"CategoricalDistribution","attributes":{"choices":["4","none"]}}`}},
		{"a parameter has one distribution in all trials", study, `SELECT count(DISTINCT distribution_json) || '' FROM trial_params GROUP BY param_name`, []string{"1", "1", "1", "1", "1"}},
	} {
		if got := query(t, written(t, c.study), c.query); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestReadReadsWhatWasWritten(t *testing.T) {
	study := example()
	all, err := Read(written(t, study))
	if err != nil || len(all) != 1 || all[0].Name != study.Name || !slices.Equal(all[0].Directions, []string{"MAXIMIZE"}) || len(all[0].Trials) != len(study.Trials) {
		t.Fatalf("Read = %+v, %v", all, err)
	}
	states := []string{"COMPLETE", "COMPLETE", "COMPLETE", "PRUNED", "FAIL", "FAIL", "RUNNING"}
	if got := string(all[0].User["tuner_study_id"]) + string(all[0].User["world"]); got != `"abc"{"model":"m"}` {
		t.Errorf("the attributes of the study are %s", got)
	}
	for i, got := range all[0].Trials {
		want := study.Trials[i]
		point := want.Point
		if i == 6 { // one value of this trial is not among the choices
			point = space.Point{"max-num-seqs": "2048", "long-prefill-token-threshold": "100"}
		}
		if space.Point(got.Params).String() != point.String() || got.Number != want.Number || got.State != states[i] {
			t.Errorf("trial %d is %+v", i, got)
		}
		if met := want.Met(); met && *got.Value != want.Result.Capacity.Rate {
			t.Errorf("trial %d has %g, want %g", i, *got.Value, want.Result.Capacity.Rate)
		}
		var origin studies.Origin
		if err := json.Unmarshal(got.User["origin"], &origin); err != nil || origin != want.Origin {
			t.Errorf("trial %d is from %q, %v", i, origin, err)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	other := func(name string, change string) string {
		path := filepath.Join(dir, name)
		if err := Write(path, example(), example().Each(), parameters); err != nil {
			t.Fatal(err)
		}
		db, err := open(path, "mode=rw")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := db.Exec(change); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("hash: 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, path, want string }{
		{"another database", other("other.db", `DROP TABLE alembic_version`), "not one of Optuna's"},
		{"an older schema", other("old.db", `UPDATE alembic_version SET version_num='v2.6.0.a'`), "optuna storage upgrade --storage sqlite:///old.db"},
		{"an index beyond the choices", other("choice.db", `UPDATE trial_params SET param_value=7 WHERE param_name='enable-chunked-prefill'`), "trial 1: parameter enable-chunked-prefill: its value is 7, but must be the index of one of its 2 choices"},
		{"a value that is NULL", other("null.db", `UPDATE trial_values SET value=NULL WHERE trial_id=2`), "trial 1: its value is NULL, which is not a finite number: correct it in trial_values"},
		{"a value that is text", other("word.db", `UPDATE trial_values SET value='much' WHERE trial_id=2`), `trial 1: its value is "much", which is not a finite number`},
		{"a value that is infinite", other("inf.db", `UPDATE trial_values SET value=9e999 WHERE trial_id=2`), "trial 1: its value is +Inf, which is not a finite number"},
		{"a parameter that is NULL", other("param.db", `UPDATE trial_params SET param_value=NULL WHERE param_name='max-num-seqs' AND trial_id=2`), "trial 1: parameter max-num-seqs: it is NULL, which"},
		{"a distribution that is NULL", other("dist.db", `UPDATE trial_params SET distribution_json=NULL WHERE trial_id=2`), "trial 1: parameter gpu-memory-utilization: its distribution is not a JSON"},
		{"a trial without a number", other("number.db", `UPDATE trials SET number=NULL WHERE trial_id=2`), "trial_id 2: the trial has no number"},
		{"an id that is text", other("id.db", `UPDATE trial_values SET trial_id='x' WHERE trial_id=2`), "a row that Optuna would not write"},
		{"a distribution that is not JSON", other("json.db", `UPDATE trial_params SET distribution_json='x' WHERE trial_id=2`), "its distribution is not a JSON"},
		{"no file", filepath.Join(dir, "none.db"), "unable to open"},
		{"text", text, "not a database"},
	} {
		if _, err := Read(c.path); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	if is, err := IsSQLite(text); is || err != nil {
		t.Errorf("IsSQLite(text) = %v, %v", is, err)
	}
	if is, err := IsSQLite(filepath.Join(dir, "old.db")); !is || err != nil {
		t.Errorf("IsSQLite(old.db) = %v, %v", is, err)
	}
}

func FuzzDecodeParam(f *testing.F) {
	f.Add(1.0, `{"name": "CategoricalDistribution", "attributes": {"choices": ["a", true, null, 3, 0.5]}}`)
	f.Add(128.0, `{"name": "IntDistribution", "attributes": {"log": true, "step": 1, "low": 16, "high": 1024}}`)
	f.Add(0.5, `{"name": "LogUniformDistribution", "attributes": {"low": 0.1, "high": 1.0}}`)
	f.Add(math.NaN(), `{"name": "CategoricalDistribution", "attributes": {"choices": [[1]]}}`)
	f.Fuzz(func(t *testing.T, value float64, text string) {
		if word, ok, err := decodeParam(value, []byte(text)); err != nil && (ok || word != "") {
			t.Errorf("decodeParam(%g, %s) = %q, %v with %v", value, text, word, ok, err)
		}
	})
}
