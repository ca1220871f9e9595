//go:build vllm && linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// everyKind is a study with a parameter of each kind.
const everyKind = `version: 1
name: kinds
model: m
server: {command: [vllm, serve]}
slo: {ttft_p99: 1000ms}
workload: {kind: phase1}
parameters:
  gpu-memory-utilization: {float: [0.70, 0.97], step: 0.01}
  swap-space: {float: [0.5, 8], log: true}
  max-num-seqs: {int: [16, 1024], log: true}
  long-prefill-token-threshold: {int: [0, 4096], step: 512}
  enable-chunked-prefill: bool
  num-speculative-tokens: [0, 2, 4]
  compilation-config: {json: ['{"mode":0}', '{"mode":3}']}
speculative_config: {method: ngram, prompt_lookup_max: 4}
allow_meaningless_speculation: true
`

// everyState stores a study below root and returns it. The study has a trial of each state.
func everyState(t *testing.T, root string) studies.Study {
	t.Helper()
	dir := filepath.Join(root, "kinds")
	store, _, err := studies.Open(t.Context(), dir, studies.New{Name: "kinds", Seed: math.MaxUint64, File: everyKind, World: map[string]string{"model": "m"}}, studies.Options{})
	must(t, err)
	measured := func(c capacity.Capacity) trial.Result {
		return trial.Result{Outcome: trial.Measured, Capacity: c, GPUTime: time.Minute}
	}
	point := func(seqs string) space.Point {
		return space.Point{"gpu-memory-utilization": "0.93", "swap-space": "1.25", "max-num-seqs": seqs, "long-prefill-token-threshold": "1024",
			"enable-chunked-prefill": "true", "num-speculative-tokens": "2", "compilation-config": `{"mode":3}`}
	}
	for i, one := range []studies.Trial{
		{Origin: studies.Default, Result: measured(capacity.Capacity{Rate: 2.125, Low: 2, High: 2.4, Bound: capacity.Exact, Binding: "p99 TTFT"})},
		{Origin: studies.Current, Point: space.Point{"max-num-seqs": "2048"}, Result: measured(capacity.Capacity{Rate: 2.25, Low: 2.25, Bound: capacity.AtLeast})},
		{Origin: studies.Sampled, Point: point("128"), Result: measured(capacity.Capacity{Rate: 3.5, Low: 3.4, High: 3.6, Bound: capacity.Exact})},
		{Origin: studies.Sampled, Point: point("64"), Result: measured(capacity.Capacity{Rate: 0.5, High: 0.5, Bound: capacity.AtMost})},
		{Origin: studies.Sampled, Point: point("32"), Result: trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero, Evidence: "none was accepted"}},
		{Origin: studies.Sampled, Point: point("1024"), Result: trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: "CUDA out of memory"}},
		{Origin: studies.Sampled, Point: point("512"), Result: trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure}},
		{Origin: studies.Sampled, Point: point("256"), State: studies.Running},
	} {
		one.Number = i
		must(t, store.Begin(one))
		for seq, rate := range []float64{2, 2.75} {
			p := trial.Probe{Seq: seq, Rate: rate, HitRate: -1, Verdict: slo.Verdict{Pass: seq == 0, Headroom: 0.1, Binding: "p99 TTFT"}}
			must(t, store.Record(i, p))
		}
		if one.State == studies.Running {
			continue
		}
		must(t, store.Finish(i, one.Result))
	}
	must(t, store.Close())
	return snapshot(t, dir)
}

// An optunaTrial is a trial as Optuna's Python API returns it.
type optunaTrial struct {
	Number        int
	State         string
	Value         *float64
	Params        map[string]any
	Distributions map[string]struct {
		Name       string
		Attributes struct {
			Low, High float64
			Step      *float64
			Log       bool
			Choices   []any
		}
	}
	Intermediate map[string]float64
	User         map[string]any
	Timed        bool // the trial has a start time, and an end time if it is finished
}

// Optuna reads an exported study correctly and can continue it. Optuna's dashboard shows it.
func TestOptuna(t *testing.T) {
	dir, python := clientPython(t)
	script, err := filepath.Abs("../../serverctl/vllmlab/optuna_client.py")
	must(t, err)
	root := t.TempDir()
	command(t, "demo", "--root", root)
	for _, study := range []studies.Study{snapshot(t, filepath.Join(root, "demo-gp-1")), everyState(t, root)} {
		file := filepath.Join(t.TempDir(), "study.db")
		command(t, "export", filepath.Join(root, study.Name), "--format", "optuna", "-o", file)
		t.Run("dashboard "+study.Name, func(t *testing.T) {
			checkDashboard(t, filepath.Join(dir, "venv/bin/optuna-dashboard"), file, study)
		})
		t.Run("optuna "+study.Name, func(t *testing.T) {
			text, err := exec.CommandContext(t.Context(), python, script, file).Output()
			if exit, ok := err.(*exec.ExitError); ok {
				t.Fatalf("%v\n%s", err, exit.Stderr)
			} else if err != nil {
				t.Fatal(err)
			}
			checkOptuna(t, text, study)
		})
	}
}

// Optuna chooses the points of the example. A study that stops in between, and goes on, has the same points.
func TestOptunaChooses(t *testing.T) {
	_, python := clientPython(t)
	t.Setenv("PATH", firstInPath(filepath.Dir(python), os.Getenv("PATH")))
	const path, budget = "../../docs/examples/optuna-ask.yaml", "budget: {trials: 12}"
	text, err := os.ReadFile(path)
	must(t, err)
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS(filepath.Dir(path))))
	file := filepath.Join(dir, filepath.Base(path))
	run := func(root, trials string) []string {
		if !strings.Contains(string(text), budget) {
			t.Fatalf("%s has another budget than %s", path, budget)
		}
		must(t, os.WriteFile(file, []byte(strings.Replace(string(text), budget, trials, 1)), 0o644))
		command(t, "run", file, "--root", root)
		var points []string
		for _, one := range snapshot(t, filepath.Join(root, "optuna-ask")).Trials {
			if one.Origin == studies.Sampled {
				points = append(points, one.Point.String())
			}
		}
		return points
	}
	const search = "budget: {trials: 12, confirm: 0}"
	whole, broken := run(t.TempDir(), search), t.TempDir()
	run(broken, "budget: {trials: 5, confirm: 0}")
	if resumed := run(broken, search); len(whole) < 8 || !slices.Equal(resumed, whole) {
		t.Errorf("Optuna chose\n%s\nand with an interruption\n%s", strings.Join(whole, "\n"), strings.Join(resumed, "\n"))
	}
	t.Logf("Optuna chose\n%s", strings.Join(whole, "\n"))
}

func checkOptuna(t *testing.T, text []byte, study studies.Study) {
	t.Helper()
	var got struct {
		Name, Direction string
		Best, Rows      int
		User            map[string]any
		Trials          []optunaTrial
		Columns         []string
		Asked           map[string]any
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	best := bestOfSearch(t, study)
	if got.Name != study.Name || got.Direction != "MAXIMIZE" || got.Best != best || got.Rows != len(study.Trials) || len(got.Trials) != len(study.Trials) {
		t.Fatalf("study %s, %s, has trial %d as the best of %d; want %s with trial %d of %d", got.Name, got.Direction, got.Best, len(got.Trials), study.Name, best, len(study.Trials))
	}
	if got.User["seed"] != fmt.Sprint(study.Seed) || got.User["file"] != study.File || len(got.Asked) == 0 || !slices.Contains(got.Columns, "params_max-num-seqs") {
		t.Errorf("seed %v, asked %v, columns %q", got.User["seed"], got.Asked, got.Columns)
	}
	parameters := parametersOf(t, study)
	for i, is := range got.Trials {
		checkOptunaTrial(t, parameters, is, study.Trials[i])
	}
}

// bestOfSearch returns the number of the best trial. It ignores confirmations, because an export leaves them out of the
// ranking.
func bestOfSearch(t *testing.T, study studies.Study) int {
	t.Helper()
	study.Trials = slices.DeleteFunc(slices.Clone(study.Trials), func(t studies.Trial) bool { return t.Origin == studies.Confirmed })
	best, ok := report.Best(study)
	if !ok {
		t.Fatal("no trial of the search has met the SLO")
	}
	return best.Trial.Number
}

// parametersOf returns the parameters in the study's own file.
func parametersOf(t *testing.T, study studies.Study) *space.Space {
	t.Helper()
	file, err := studyfile.Parse(study.Name, []byte(study.File))
	must(t, err)
	s, err := file.Space()
	must(t, err)
	return s
}

func checkOptunaTrial(t *testing.T, s *space.Space, is optunaTrial, want studies.Trial) {
	t.Helper()
	state := map[trial.Outcome]string{trial.Measured: "COMPLETE", trial.Dropped: "PRUNED", trial.Infeasible: "FAIL", trial.Unknown: "FAIL", "": "RUNNING"}[want.Result.Outcome]
	if want.Origin == studies.Confirmed {
		state = "PRUNED"
	}
	if is.Number != want.Number || is.State != state || !is.Timed || is.User["origin"] != string(want.Origin) {
		t.Errorf("trial %d has the number %d, state %s, timed %t, origin %v; want state %s, origin %s", want.Number, is.Number, is.State, is.Timed, is.User["origin"], state, want.Origin)
	}
	if want.Met() && state == "COMPLETE" && (is.Value == nil || *is.Value != want.Result.Capacity.Rate) {
		t.Errorf("trial %d has the value %v, want %g", want.Number, is.Value, want.Result.Capacity.Rate)
	}
	if state == "COMPLETE" && !want.Met() && (is.Value == nil || *is.Value != 0) || state == "FAIL" && is.Value != nil {
		t.Errorf("trial %d, %s, has the value %v; want 0 if COMPLETE, none if FAIL", want.Number, state, is.Value)
	}
	rates := map[string]float64{}
	for _, p := range want.Probes {
		rates[fmt.Sprint(p.Seq)] = p.Rate
	}
	if !maps.Equal(is.Intermediate, rates) {
		t.Errorf("trial %d has the intermediate values %v, want the rates %v", want.Number, is.Intermediate, rates)
	}
	point := space.Point{}
	for name, value := range is.Params {
		p, d := s.Parameter(name), is.Distributions[name]
		point[name] = fmt.Sprint(value)
		if f, ok := value.(float64); ok {
			point[name] = fmt.Sprintf("%v", f)
		}
		kind := map[space.Kind]string{space.Float: "FloatDistribution", space.Int: "IntDistribution"}[p.Kind]
		if p.Kind == space.Bool && !reflect.DeepEqual(d.Attributes.Choices, []any{false, true}) {
			t.Errorf("%s has the choices %v", name, d.Attributes.Choices)
		}
		if kind != "" && (d.Name != kind || d.Attributes.Log != p.Log || d.Attributes.Low != p.Min || d.Attributes.High < p.Max) {
			t.Errorf("trial %d: %s is %+v, want %s of %+v", want.Number, name, d, kind, p)
		}
		if p.Step > 0 && (d.Attributes.Step == nil || *d.Attributes.Step != p.Step) {
			t.Errorf("trial %d: %s has the step %v, want %g", want.Number, name, d.Attributes.Step, p.Step)
		}
	}
	if point.String() != want.Point.String() {
		t.Errorf("trial %d has the point %s, want %s", want.Number, point, want.Point)
	}
}

// checkDashboard serves the file with Optuna's dashboard, and requests the data of its pages.
func checkDashboard(t *testing.T, program, file string, study studies.Study) {
	t.Helper()
	port, err := unusedPort()
	must(t, err)
	child := startChild(t, filepath.Join(t.TempDir(), "dashboard.log"), nil, program, "sqlite:///"+file, "--host", "127.0.0.1", "--port", port, "--server", "wsgiref")
	url := "http://127.0.0.1:" + port
	var list struct {
		Studies []struct {
			ID   int    `json:"study_id"`
			Name string `json:"study_name"`
		} `json:"study_summaries"`
	}
	deadline := time.Now().Add(time.Minute)
	for get(url+"/api/studies", &list) != nil && time.Now().Before(deadline) {
		time.Sleep(100 * time.Millisecond)
	}
	if len(list.Studies) != 1 || list.Studies[0].Name != study.Name {
		t.Fatalf("the dashboard lists %+v, want %s:\n%s", list, study.Name, child.output())
	}
	var detail struct {
		Trials []struct {
			Number       int
			State        string
			Values       []any
			Intermediate []any `json:"intermediate_values"`
			Params       []any
		}
		Best         []struct{ Number int } `json:"best_trials"`
		Union        []any                  `json:"union_search_space"`
		Intermediate bool                   `json:"has_intermediate_values"`
	}
	if err := get(fmt.Sprintf("%s/api/studies/%d", url, list.Studies[0].ID), &detail); err != nil {
		t.Fatalf("%v\n%s", err, child.output())
	}
	best := bestOfSearch(t, study)
	if len(detail.Trials) != len(study.Trials) || len(detail.Best) != 1 || detail.Best[0].Number != best || len(detail.Union) == 0 || !detail.Intermediate {
		t.Errorf("the dashboard shows %d trials, the best %+v, %d parameters; want %d and trial %d", len(detail.Trials), detail.Best, len(detail.Union), len(study.Trials), best)
	}
	for i, is := range detail.Trials {
		want := study.Trials[i]
		if is.Number != want.Number || len(is.Intermediate) != len(want.Probes) || want.Met() && want.Origin != studies.Confirmed && len(is.Values) != 1 {
			t.Errorf("the dashboard shows trial %d as %+v", want.Number, is)
		}
	}
	var importance struct {
		Param [][]struct{ Name string } `json:"param_importances"`
	}
	if err := get(fmt.Sprintf("%s/api/studies/%d/param_importances", url, list.Studies[0].ID), &importance); err != nil {
		t.Logf("the dashboard gives no importances: %v", err)
	}
	t.Logf("importances %+v", importance)
	var page string
	if err := get(url+"/dashboard/studies/"+fmt.Sprint(list.Studies[0].ID), &page); err != nil || !strings.Contains(strings.ToLower(page), "<html") {
		t.Errorf("the page is %.200q, %v", page, err)
	}
}

// get requests a document and decodes it as JSON into target. If target is a *string, get stores the text instead.
func get(url string, target any) error {
	answer, err := http.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, answer.Status, body)
	}
	if page, ok := target.(*string); ok {
		*page = string(body)
		return nil
	}
	return json.Unmarshal(body, target)
}
