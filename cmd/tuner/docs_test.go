package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/tuner/studyfile"
)

const repo = "../.."

// A block is one fenced block of a document.
type block struct {
	file, language, text string
}

func docBlocks(t *testing.T) []block {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repo, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	fence := regexp.MustCompile("(?ms)^ *```([a-z]+)\n(.*?)^ *```")
	var all []block
	for _, file := range append(files, filepath.Join(repo, "README.md")) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range fence.FindAllStringSubmatch(string(text), -1) {
			all = append(all, block{file, m[1], m[2]})
		}
	}
	return all
}

// Every study file in the documents and examples is one, and its workload can be opened.
func TestStudyFilesOfTheDocuments(t *testing.T) {
	found := 0
	try := func(name, text string) {
		found++
		f, err := studyfile.Parse(name, []byte(text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if _, err := workload.Open(f.WorkloadSpec(), 1); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, b := range docBlocks(t) {
		if b.language == "yaml" && strings.HasPrefix(b.text, "version: 1") {
			try(filepath.Join(repo, "study.yaml"), b.text) // paths are as seen from the root
		}
	}
	err := filepath.WalkDir(filepath.Join(repo, "docs", "examples"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		try(path, string(text))
		return err
	})
	if err != nil || found < 3 {
		t.Errorf("%d study files are there, %v; want at least three", found, err)
	}
}

// Every command of the documents exists with its flags.
func TestCommandsOfTheDocuments(t *testing.T) {
	line := regexp.MustCompile(`(?m)^ *(?:\$ |kubectl .* -- |)(?:/tuner/|bin/)?tuner ([a-z]+)(.*)$`)
	found := 0
	for _, b := range docBlocks(t) {
		for _, m := range line.FindAllStringSubmatch(b.text, -1) {
			list := commands(nil)
			i := slices.IndexFunc(list, func(c *cli.Command) bool { return c.Name == m[1] })
			if i < 0 {
				t.Errorf("%s: there is no command %q", b.file, m[1])
				continue
			}
			found++
			words, _, _ := strings.Cut(m[2], "#")
			for word := range strings.FieldsSeq(words) {
				name, isFlag := strings.CutPrefix(word, "-")
				known := slices.ContainsFunc(list[i].Flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), strings.TrimLeft(name, "-")) })
				if isFlag && !known && list[i].Name != "sim" {
					t.Errorf("%s: tuner %s has no flag %s", b.file, m[1], word)
				}
			}
		}
	}
	if found < 10 {
		t.Errorf("%d commands were found, want at least ten", found)
	}
}

// The console blocks are run from a copy of the documents, line by line, and must end well.
func TestConsoleBlocksOfTheDocuments(t *testing.T) {
	t.Parallel()
	plainTuner(t, "the race detector sees these commands in the scripts, on smaller studies")
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "docs"), os.DirFS(filepath.Join(repo, "docs"))); err != nil {
		t.Fatal(err)
	}
	path, root, out := tunerPath(t), filepath.Join(t.TempDir(), "studies"), t.TempDir()
	ran := 0
	for _, b := range docBlocks(t) {
		if b.language != "console" {
			continue
		}
		for line := range strings.Lines(b.text) {
			words, ok := strings.CutPrefix(strings.TrimSpace(line), "$ tuner ")
			if !ok {
				continue
			}
			cmd := exec.CommandContext(t.Context(), path, strings.Fields(strings.ReplaceAll(words, "$OUT", out))...)
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "TUNER_ROOT="+root)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %s: %v\n%s", b.file, strings.TrimSpace(line), err, out)
			}
			ran++
		}
	}
	if ran < 4 {
		t.Errorf("%d lines were run, want at least four", ran)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("beside the documents they leave %v, %v; want all of it below TUNER_ROOT", left, err)
	}
}
