package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/studyfile"
)

// `check` refuses whatever `run` refuses before a server starts, with the same message and exit code. After a refused
// run, list shows no running study.
func TestCheckRefusesWhatRunRefuses(t *testing.T) {
	unweighted, whole := t.TempDir(), t.TempDir() // two models; only the second one has weights
	script := filepath.Join(t.TempDir(), "vllm")
	must(t, os.WriteFile(filepath.Join(unweighted, "config.json"), []byte("{}"), 0o644),
		os.WriteFile(filepath.Join(whole, "config.json"), []byte("{}"), 0o644),
		os.WriteFile(filepath.Join(whole, "model.safetensors"), []byte("weights"), 0o644),
		os.WriteFile(script, []byte("#!/bin/sh\necho '  --max-num-seqs N'\n"), 0o755))
	const simulated = "server: {simulate: small-fast}\nmodel: m\n"
	real := "model: " + unweighted + "\nserver: {command: [" + script + "], gpu: none}\n"
	for _, c := range []struct {
		name string
		file string                         // lines of the study file; the test adds the lines that all rows share
		set  func(t *testing.T, dir string) // prepares the study's directory
		edit func(text string) string       // changes the study file
		want string
		code int
	}{
		{name: "a model's directory without weights", file: real, want: "--load-format, dummy", code: exitUsage},
		{name: "a model that is not there", file: strings.Replace(real, unweighted, unweighted+"/none", 1), want: "holds no config.json", code: exitUsage},
		{name: "no server", file: strings.Replace(real, script, "/no/such/vllm", 1), want: "/no/such/vllm", code: exitUsage},
		{name: "a copy within the model", file: strings.NewReplacer(unweighted, whole, "gpu: none", "gpu: none, model_copy: "+whole+"/copy").Replace(real), want: "inside the model's own folder", code: exitUsage},
		{name: "an unknown flag", file: strings.NewReplacer(unweighted, whole, "gpu: none", "gpu: none, args: [--max-num-sex, \"3\"]").Replace(real), want: "max-num-sex", code: exitUsage},
		{name: "the root is a file", file: simulated, set: func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Dir(dir), nil, 0o644))
		}, want: "a part of its path is a file, not a directory", code: exitUsage},
		{name: "a record that cannot be read", file: simulated, set: func(t *testing.T, dir string) {
			must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "server.json"), []byte("no record"), 0o644))
		}, want: "names the server that a killed run may have left", code: exitUsage},
		{name: "a directory of the study is a link", file: simulated, set: func(t *testing.T, dir string) {
			must(t, os.MkdirAll(dir, 0o755), os.Symlink(t.TempDir(), filepath.Join(dir, "fence")))
		}, want: "is a link", code: exitUsage},
		{name: "another world", file: simulated, set: measuredStudy, want: "these values changed since the study began", code: exitWorld},
		{name: "another owner", file: simulated, set: func(t *testing.T, dir string) {
			store, _, err := studies.Open(context.Background(), dir, studies.New{Name: "s"}, studies.Options{})
			must(t, err)
			t.Cleanup(func() { must(t, store.Close()) })
		}, want: "another tuner owns this study", code: exitOwned},
		{name: "too few requests", file: simulated, edit: func(text string) string {
			return strings.Replace(text, "kind: random, requests: 200", "kind: random, requests: 20, repeat: error", 1)
		}, want: "`repeat: error` forbids reuse", code: exitUsage},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "root")
			dir := filepath.Join(root, "s")
			if c.set != nil {
				must(t, os.MkdirAll(filepath.Dir(root), 0o755))
				c.set(t, dir)
			}
			text := "version: 1\nname: s\n" + c.file + "slo: {ttft_p99: 1000ms}\nworkload: {kind: random, requests: 200}\n" +
				"parameters: {max-num-seqs: {int: [16, 64]}}\nbudget: {confirm: 0, trials: 2}\nprobe: {seconds: 5, min_requests: 100, lead_in: 1s}\n"
			if c.edit != nil {
				text = c.edit(text)
			}
			before, _ := os.ReadDir(dir)
			refusal := func(do func(*studyfile.File) error) string {
				file, err := studyfile.Parse("s.yaml", []byte(text))
				must(t, err)
				err = do(file)
				if err == nil {
					return "nothing"
				}
				if code := exitCode(err); code != c.code {
					t.Errorf("exit code %d, want %d: %v", code, c.code, err)
				}
				return err.Error()
			}
			byCheck := refusal(func(f *studyfile.File) error { return check(t.Context(), io.Discard, io.Discard, f, root, true) })
			byRun := refusal(func(f *studyfile.File) error {
				return runStudy(t.Context(), f, runOptions{root: root, stdout: io.Discard, stderr: io.Discard})
			})
			for who, said := range map[string]string{"check": byCheck, "run": byRun} {
				if !strings.Contains(said, c.want) {
					t.Errorf("%s refuses with %q, want %q in it", who, said, c.want)
				}
			}
			if after, _ := os.ReadDir(dir); len(after) != len(before) && c.set == nil {
				t.Errorf("the refused run left a study: %v", after)
			}
		})
	}
}

// measuredStudy makes a study with results from another world: its model is another one, and a study's model must not
// change.
func measuredStudy(t *testing.T, dir string) {
	t.Helper()
	store, _, err := studies.Open(context.Background(), dir, studies.New{Name: "s", World: map[string]string{"model": "another"}}, studies.Options{})
	must(t, err)
	must(t, store.Begin(studies.Trial{}), store.Record(0, trial.Probe{}), store.Close())
}
