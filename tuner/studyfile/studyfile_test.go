package studyfile

import (
	"errors"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"

	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

var update = flag.Bool("update", false, "write what is seen into the golden files")

// TestBadFiles parses each wrong study file in testdata/bad, and compares the error with the expected one in the same
// file.
func TestBadFiles(t *testing.T) {
	paths, err := filepath.Glob("testdata/bad/*.txtar")
	if err != nil || len(paths) < 15 {
		t.Fatalf("%d cases, %v", len(paths), err)
	}
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if len(archive.Comment) < 10 || len(archive.Files) != 2 {
				t.Fatalf("%s needs a line on why it exists, study.yaml and want", path)
			}
			_, err = Parse("study.yaml", archive.Files[0].Data)
			if _, ok := errors.AsType[*Error](err); !ok {
				t.Fatalf("Parse says %v (%T), want an *Error", err, err)
			}
			got := err.Error() + "\n"
			if *update {
				archive.Files[1].Data = []byte(got)
				if err := os.WriteFile(path, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if want := string(archive.Files[1].Data); got != want {
				t.Errorf("Parse says\n%swant\n%s", got, want)
			}
		})
	}
}

func TestTemplateIsAStudy(t *testing.T) {
	f, err := Parse("study.yaml", []byte(Template()))
	if err != nil {
		t.Fatal(err)
	}
	silent := defaults()
	if !reflect.DeepEqual(f.Sampler, silent.Sampler) || f.Budget != silent.Budget || f.Probe != silent.Probe || f.Cache != silent.Cache {
		t.Errorf("the template's settings are not the defaults:\n%+v\n%+v", f, silent)
	}
	if s, err := f.Space(); err != nil || len(s.Parameters()) != 3 {
		t.Errorf("Space = %v, %v; want three parameters", s, err)
	}
}

// TestTemplateWithEveryOption parses the template without the comment marks in front of its options.
func TestTemplateWithEveryOption(t *testing.T) {
	text := strings.NewReplacer(
		"  # current:", "  current:", "    # HF_TOKEN", "    HF_TOKEN",
		"kind: production ", "kind: jsonl ", "  # path:", "  path:", "  # output_tokens:", "  output_tokens:", "  # requests:", "  requests:",
		"  # vocab_size", "  vocab_size", "  # long-prefill", "  long-prefill", "  # kv-cache", "  kv-cache", "  # num-spec", "  num-spec",
		"# speculative_config", "speculative_config", "allow_quality_change: false", "allow_quality_change: true", "  # protocol", "  protocol",
		"# sweep:", "sweep:", "#   configs", "  configs", "#   rates", "  rates",
	).Replace(Template())
	f, err := Parse("study.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Parameters) != 6 || f.Cache.Protocol != trial.Steady || f.Workload.Path != "data.jsonl" || f.Server.Env["HF_TOKEN"] != "${HF_TOKEN}" || f.Sweep == nil || len(f.Sweep.Configs) != 2 {
		t.Errorf("read %+v", f)
	}
}

const full = `
version: 1
name: full
model: meta/llama
server:
  command: [python3, -m, vllm.entrypoints.cli.main, serve]
  args: [--max-model-len, 16384, --no-enable-prefix-caching, --served-model-name, a, b]
  current: [--gpu_memory_utilization=0.90, --speculative-config, '{"method":"ngram","num_speculative_tokens":2}']
  env: {HF_TOKEN: "${HF_TOKEN}", HOME_OF: "${A}/x-${B}", LEVEL: 3, TOKENIZERS_PARALLELISM: false}
  start_timeout: 90s
  port: 8123
slo: {ttft_p99: 1s, tpot_p50: 30.5ms, itl_p99.9: 0.2s, e2e_p95: 2m, error_rate: 1%}
objective: capacity_per_gpu
workload: {kind: sharegpt, path: data/real.json, endpoint: chat, output_tokens: 64, requests: 200}
parameters:
  gpu-memory-utilization: {float: [0.80, 0.97], step: 0.01}
  max_num_seqs: {int: [16, 1024], log: true}
  max-num-batched-tokens: {int: [1024, 32768], log: true}
  num-speculative-tokens: [0, 1, 2, 3, 5]
  async-scheduling: bool
  enable-chunked-prefill: {bool: , when: max-num-batched-tokens > 4096}
  kv-cache-dtype: {choices: [auto, fp8]}
  compilation-config: {json: ['{"mode":3}', {mode: 0, pass_config: {fuse: true}, sizes: [1, 2.5]}]}
speculative_config: {method: ngram}
constraints: [max-num-batched-tokens >= max-num-seqs, "max-num-seqs < max-model-len"]
allow_quality_change: true
sampler: {name: random, seed: 7}
budget: {trials: 12, gpu_time: 90m}
probe: {seconds: 15.5, min_requests: 100, lead_in: 0s, start_rate: 0, min_rate: 0.1, max_rate: 20, tolerance: 0.1, max_probes: 6, worst_case: false, precision: 5%}
advice: {margin: 0.8}
cache: {protocol: reset, prime_rate: 1.5}
speculation: {min_acceptance: 5%, min_drafted: 2000}
`

func parse(t *testing.T, text string) *File {
	t.Helper()
	f, err := Parse("dir/study.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestEverySettingIsRead(t *testing.T) {
	f := parse(t, full)
	server := f.Server
	server.Current, server.Env = nil, nil // these are compared below, through CurrentPoint and Environment
	current, err := f.CurrentPoint()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name      string
		got, want any
	}{
		{"server", server, Server{
			Command:      []string{"python3", "-m", "vllm.entrypoints.cli.main", "serve"},
			Args:         []string{"--max-model-len", "16384", "--no-enable-prefix-caching", "--served-model-name", "a", "b"},
			StartTimeout: 90 * time.Second, StopTimeout: 30 * time.Second, HangTimeout: time.Minute, GPUMemoryTimeout: time.Minute, Port: 8123,
		}},
		{"SLO", f.SLO, slo.SLO{MaxErrorRate: 0.01, Limits: []slo.Limit{
			{Metric: slo.TTFT, Percentile: 99, Max: time.Second}, {Metric: slo.TPOT, Percentile: 50, Max: 30500 * time.Microsecond},
			{Metric: slo.ITL, Percentile: 99.9, Max: 200 * time.Millisecond}, {Metric: slo.E2E, Percentile: 95, Max: 2 * time.Minute}}}},
		{"WorkloadSpec", f.WorkloadSpec(), workload.Spec{Kind: "sharegpt", Path: "dir/data/real.json", Endpoint: "chat", OutputTokens: 64, Requests: 200}},
		{"probe", f.Probe, Probe{15500 * time.Millisecond, 100, 0, 0, 0.1, 20, 0.1, 6, false, 0.05}},
		{"sampler", f.Sampler, Sampler{"random", 7, true, nil, 5 * time.Minute}}, {"budget", f.Budget, Budget{12, 90 * time.Minute, 0.01, 2}},
		{"cache", f.Cache, Cache{trial.Reset, 1.5}}, {"advice", f.Advice, Advice{0.8}}, {"speculation", f.Speculation, Speculation{0.05, 2000}},
		{"CurrentPoint", current, space.Point{"gpu-memory-utilization": "0.9", "num-speculative-tokens": "2"}},
	} {
		if !reflect.DeepEqual(row.got, row.want) {
			t.Errorf("%s = %+v, want %+v", row.name, row.got, row.want)
		}
	}
}

func TestParametersAreRead(t *testing.T) {
	f := parse(t, full)
	var got []string
	for _, p := range f.Parameters {
		got = append(got, p.Name+": "+describe(p))
	}
	want := []string{
		"gpu-memory-utilization: float 0.8 to 0.97 in steps of 0.01",
		"max-num-seqs: int 16 to 1024, logarithmic",
		"max-num-batched-tokens: int 1024 to 32768, logarithmic",
		"num-speculative-tokens: categorical 0, 1, 2, 3, 5",
		"async-scheduling: bool",
		"enable-chunked-prefill: bool, when max-num-batched-tokens > 4096",
		"kv-cache-dtype: categorical auto, fp8",
		`compilation-config: json {"mode":3}, {"mode":0,"pass_config":{"fuse":true},"sizes":[1,2.5]}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("parameters\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	s, err := f.Space()
	if err != nil {
		t.Fatal(err)
	}
	if s.Defaults["max-model-len"] != "16384" || s.Defaults["enable-prefix-caching"] != "false" {
		t.Errorf("the fixed args are %v", s.Defaults)
	}
	if err := s.Check(space.Point{"max-num-seqs": "64", "max-num-batched-tokens": "32"}); err == nil || !strings.Contains(err.Error(), "max-num-batched-tokens >= max-num-seqs") {
		t.Errorf("Check says %v, want the broken constraint", err)
	}
}

func TestEnvironmentExpandsReferences(t *testing.T) {
	f := parse(t, full)
	outside := map[string]string{"HF_TOKEN": "hf_1", "A": "a", "B": "b"}
	lookupEnv := func(name string) (string, bool) { v, ok := outside[name]; return v, ok }
	env, err := f.Environment(lookupEnv)
	if want := map[string]string{"HF_TOKEN": "hf_1", "HOME_OF": "a/x-b", "LEVEL": "3", "TOKENIZERS_PARALLELISM": "false"}; err != nil || !maps.Equal(env, want) {
		t.Errorf("Environment = %v, %v; want %v", env, err, want)
	}
	delete(outside, "HF_TOKEN")
	_, err = f.Environment(lookupEnv)
	want := "dir/study.yaml: server.env.HF_TOKEN: HF_TOKEN is not set; export it, or remove the key"
	if err == nil || err.Error() != want {
		t.Errorf("Environment says %v, want %s", err, want)
	}
}

func TestNoSecretIsShown(t *testing.T) {
	for _, text := range []string{
		"server:\n  env: {HF_TOKEN: hf_verysecret}\n",
		"server:\n  env:\n    AWS_SECRET_ACCESS_KEY: hf_verysecret\n",
		"server:\n  env: {my_password: hf_verysecret, X: [1]}\n",
		"server:\n  env: {API_KEYS: hf_verysecret}\n",
		"server:\n  env: {HF_TOKEN: hf_verysecret\n",
		"server:\n\tenv: {HF_TOKEN: hf_verysecret}\n",
		"server:\n  env: {HF_TOKEN: ${X}hf_verysecret}\n",
		"server:\n  env:\n    HF_TOKEN:\n      hf_verysecret\n",
		"server:\n  env:\n    HF_TOKEN: |\n      hf_verysecret\n",
		"server:\n  env:\n    HF_TOKEN:\n      hf_verysecret: [\n",
		"server:\n  env:\n    HF_TOKEN:\n    - hf_verysecret\n",
		"server:\n  args: [--api-key, hf_verysecret]\n",
		"server:\n  args:\n  - --api-key\n  - hf_verysecret\n",
		"server:\n  args: [--hf-token=hf_verysecret]\n",
		"server:\n  env: {PASSPHRASE: verysecret}\n",
		"server:\n  env: {X: {PASSPHRASE: verysecret}}\n",
		"server:\n  env: {DATABASE_URL: \"postgres://me:verysecret@db/x\"}\n",
		"server:\n  wrong: {DATABASE_URL: \"postgres://me:verysecret@db/x\"}\n",
		"server:\n  command: [env, PGPASS=verysecret, vllm, serve]\n",
		"server:\n  command: [vllm, serve, --api, 'Bearer verysecret']\n",
	} {
		_, err := Parse("study.yaml", []byte(text))
		if err == nil || strings.Contains(err.Error(), "verysecret") {
			t.Errorf("%q: Parse says %v", text, err)
		}
	}
}

func TestWorldChangesWithWhatMatters(t *testing.T) {
	tests := []struct {
		name    string
		old     string
		new     string
		changed []string
	}{
		{"another model", "meta/llama", "meta/llama2", []string{"model"}},
		{"another limit", "ttft_p99: 1s", "ttft_p99: 2s", []string{"slo"}},
		{"another range", "[16, 1024]", "[16, 512]", []string{"parameter max-num-seqs"}},
		{"another window", "seconds: 15.5", "seconds: 16", []string{"probe"}},
		{"another workload", "requests: 200", "requests: 300", []string{"workload"}},
		{"another protocol", "protocol: reset", "protocol: primed", []string{"cache"}},
		{"another seed", "seed: 7", "seed: 8", []string{"sampler"}},
		{"another environment", "LEVEL: 3", "LEVEL: 4", []string{"server env LEVEL"}},
		{"another speculation", "speculative_config: {method: ngram}", "speculative_config: {method: eagle}", []string{"speculative config"}},
		{"another precision", "precision: 5%", "precision: 10%", []string{"probe"}},
		{"another margin is the same world", "margin: 0.8", "margin: 0.7", nil},
		{"another acceptance", "min_acceptance: 5%", "min_acceptance: 1%", []string{"speculation"}},
		{"more trials are the same world", "trials: 12", "trials: 24", nil},
		{"more patience is the same world", "start_timeout: 90s", "start_timeout: 9m", nil},
		{"another port is the same world", "port: 8123", "port: 0", nil},
	}
	before := parse(t, full).World()
	for _, test := range tests {
		text := strings.Replace(full, test.old, test.new, 1)
		if test.name == "another speculation" {
			text = strings.Replace(text, `"method":"ngram"`, `"method":"eagle"`, 1)
		}
		after := parse(t, text).World()
		var changed []string
		for _, name := range slices.Sorted(maps.Keys(before)) {
			if name != "server current" && before[name] != after[name] {
				changed = append(changed, name)
			}
		}
		if !slices.Equal(changed, test.changed) || len(after) != len(before) {
			t.Errorf("%s: changed %v, want %v", test.name, changed, test.changed)
		}
	}
}

// A setting with its default value is not in the world (the settings that must not change). So a study that an older
// tuner began without this setting can be resumed.
func TestTheWorldLeavesDefaultsOut(t *testing.T) {
	byDefault := strings.NewReplacer("worst_case: false", "worst_case: true", "speculation: {min_acceptance: 5%, min_drafted: 2000}\n", "",
		"objective: capacity_per_gpu", "objective: capacity").Replace(full)
	before, after := parse(t, full).World(), parse(t, byDefault).World()
	for _, name := range []string{"worst case", "speculation", "objective"} {
		if before[name] == "" || after[name] != "" {
			t.Errorf("%s: the world has %q, and %q at the default, want nothing", name, before[name], after[name])
		}
	}
}

func TestVariablesAreRead(t *testing.T) {
	const text = "version: 1\nname: a\nmodel: m\nserver: {command: [vllm], env: {OTHER: a}, current: [VLLM_SWITCH=1, --max-num-seqs, '16']}\n" +
		"slo: {ttft_p99: 1s}\nworkload: {kind: random}\nparameters:\n  max-num-seqs: {int: [16, 64]}\n  VLLM_BACKEND: [null, A_B]\n" +
		"  VLLM_SWITCH: {bool: , when: max-num-seqs > 8}\n  OMP_NUM_THREADS: {int: [1, 16]}\n  VLLM_TEXT: ['true', 'false']\n" +
		"constraints: ['OTHER == \"a\"', 'VLLM_SWITCH == 1 or OMP_NUM_THREADS < 8']\n"
	f := parse(t, text)
	world := f.World()
	for key, want := range map[string]string{
		"parameter VLLM_BACKEND": "categorical unset, A_B", "parameter VLLM_SWITCH": "categorical 0, 1, when max-num-seqs > 8",
		"parameter OMP_NUM_THREADS": "int 1 to 16", "parameter VLLM_TEXT": "categorical true, false", "server current": "VLLM_SWITCH=1 --max-num-seqs 16",
	} {
		if world[key] != want {
			t.Errorf("World[%s] = %q, want %q", key, world[key], want)
		}
	}
	if p, err := f.CurrentPoint(); err != nil || p.String() != "VLLM_SWITCH=1 max-num-seqs=16" {
		t.Errorf("CurrentPoint = %s, %v", p, err)
	}
	if f.NoPrediction() != "" {
		t.Errorf("NoPrediction = %q", f.NoPrediction())
	}
	if only := parse(t, strings.NewReplacer("  max-num-seqs: {int: [16, 64]}\n", "", ", --max-num-seqs, '16'", "", ", when: max-num-seqs > 8", "").Replace(text)); only.NoPrediction() == "" {
		t.Error("a study of variables alone is predicted")
	}
}

func TestVocabularyComesFromTheModel(t *testing.T) {
	dir := t.TempDir()
	for _, test := range []struct {
		name, config string
		want         int
	}{
		{"no config", "", 0},
		{"a text model", `{"vocab_size": 128256}`, 128256},
		{"a multimodal model", `{"text_config": {"vocab_size": 500}}`, 500},
		{"a broken config", `{`, 0},
	} {
		if test.config != "" {
			if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(test.config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		f := File{Model: dir}
		if got := f.WorkloadSpec().VocabSize; got != test.want {
			t.Errorf("%s: the vocabulary has %d tokens, want %d", test.name, got, test.want)
		}
	}
}

func TestReadMissingFile(t *testing.T) {
	_, err := Read("nowhere/study.yaml")
	want := "read study file: nowhere/study.yaml: no such file; check the path, or let `tuner init > nowhere/study.yaml` write one"
	if err == nil || err.Error() != want {
		t.Errorf("Read says %v, want %s", err, want)
	}
	if _, ok := errors.AsType[*Error](err); ok {
		t.Error("a missing file is no wrong file")
	}
}

func TestReadRefusesHugeFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "study.yaml")
	if err := os.WriteFile(path, []byte(strings.Repeat("# comment\n", 20000)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Read(path)
	want := path + ":1:1: the file is longer than 64 KiB; a study file has about a hundred lines"
	if err == nil || err.Error() != want+"\n    # comment\n    ^" {
		t.Errorf("Read says %v, want %s", err, want)
	}
}

func TestHostileShapesEndSoon(t *testing.T) {
	for _, piece := range []string{"[", "{", "- ", "? ", "&a ", "!a ", "a: ", "[a,", "[]\n", "a: [1]\n", "'", "|\n", "\t", "# ", "\"\\"} {
		text := strings.Repeat(piece, 8<<10/len(piece))
		if _, err := Parse("study.yaml", []byte(text)); err == nil {
			t.Errorf("%q many times is a study", piece)
		}
	}
}

// FuzzParse parses any bytes. The result must be a study, or an *Error with line numbers and printable text.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte(Template()))
	paths, err := filepath.Glob("testdata/bad/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range paths {
		archive, err := txtar.ParseFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(archive.Files[0].Data)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := Parse("study.yaml", text)
		if err == nil {
			if _, err := file.Space(); err != nil {
				t.Errorf("Parse accepts what Space refuses: %v", err)
			}
			if _, err := file.CurrentPoint(); err != nil {
				t.Errorf("Parse accepts what CurrentPoint refuses: %v", err)
			}
			file.World()
			return
		}
		wrong, ok := errors.AsType[*Error](err)
		if !ok || len(wrong.Problems) == 0 {
			t.Fatalf("Parse says %v (%T), want an *Error", err, err)
		}
		for _, p := range wrong.Problems {
			if p.Line < 1 || p.Column < 1 || p.What == "" || printable(p.What) != p.What {
				t.Errorf("problem %+v has no place or no text", p)
			}
		}
	})
}

// Errors of other packages name the place of a key.
func TestPlace(t *testing.T) {
	f := parse(t, full)
	for key, want := range map[string]string{
		"parameters.max-num-seqs": "dir/study.yaml:17:3: parameters.max-num-seqs", "server.args": "dir/study.yaml:7:3: server.args", "sweep": "dir/study.yaml: sweep",
	} {
		if got := f.Place(key); got != want {
			t.Errorf("Place(%s) = %s, want %s", key, got, want)
		}
	}
}
