package main

import (
	"errors"
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
	"vllmtuner/realtime"
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
	must(t, err)
	fence := regexp.MustCompile("(?ms)^( *)```([a-z]+)\n(.*?)^ *```")
	var all []block
	for _, file := range append(files, filepath.Join(repo, "README.md")) {
		text, err := os.ReadFile(file)
		must(t, err)
		for _, m := range fence.FindAllStringSubmatch(string(text), -1) {
			text := strings.ReplaceAll("\n"+m[3], "\n"+m[1], "\n")[1:] // removes the indentation of a list item
			all = append(all, block{file, m[2], text})
		}
	}
	return all
}

// Every study file in the documents and examples is valid, and its workload can be opened.
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
			try(filepath.Join(repo, "study.yaml"), b.text) // paths are relative to the repository
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
		t.Errorf("%d study files were found (%v), want at least three", found, err)
	}
}

// Every link between the documents leads to a file, and to a heading if it names one.
func TestLinksOfTheDocuments(t *testing.T) {
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/evidence/*.md"} {
		some, err := filepath.Glob(filepath.Join(repo, pattern))
		must(t, err)
		pages = append(pages, some...)
	}
	link, heading, noAnchor := regexp.MustCompile(`\]\(([^():# ]*)(#[^() ]+)?\)`), regexp.MustCompile("(?m)^#+ (.*)$"), regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, page := range pages {
		text, err := os.ReadFile(page)
		must(t, err)
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			target := page
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(page), m[1])
			}
			body, err := os.ReadFile(target)
			if info, statErr := os.Stat(target); statErr != nil || err != nil && !info.IsDir() {
				t.Errorf("%s: the link %s leads nowhere: %v", page, m[0], errors.Join(statErr, err))
				continue
			}
			named := m[2] == ""
			for _, h := range heading.FindAllStringSubmatch(string(body), -1) {
				anchor := strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-") // GitHub makes anchors in this way
				named = named || "#"+anchor == m[2]
			}
			if !named {
				t.Errorf("%s: %s has no heading for the link %s", page, target, m[0])
			}
		}
	}
}

// Each page explains the special words that it uses, so that a reader may begin with any page.
func TestPagesExplainTheirWords(t *testing.T) {
	words := []struct{ word, explained *regexp.Regexp }{
		{regexp.MustCompile(`TTFT`), regexp.MustCompile(`time to first\s+token`)},
		{regexp.MustCompile(`TPOT`), regexp.MustCompile(`time\s+per\s+output\s+token`)},
		{regexp.MustCompile(`\bSLO\b`), regexp.MustCompile(`latency\s+limits|the limits, such as`)},
		{regexp.MustCompile(`\b[Hh]eadroom`), regexp.MustCompile(`ln\(limit / `)},
		{regexp.MustCompile(`\b[Pp]riors?\b`), regexp.MustCompile(`hints?\s+for\s+the\s+search`)},
	}
	pages, err := filepath.Glob(filepath.Join(repo, "docs", "*.md"))
	must(t, err)
	for _, page := range pages {
		text, err := os.ReadFile(page)
		must(t, err)
		for _, w := range words {
			if used := w.word.Find(text); used != nil && !w.explained.Match(text) {
				t.Errorf("%s uses the word %s and does not explain it (%s)", page, used, w.explained)
			}
		}
	}
}

// Every command in the documents exists, and has the flags that the documents use.
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

// Every command line of the console blocks succeeds in a copy of the documents, and leaves no file there.
func TestConsoleBlocksOfTheDocuments(t *testing.T) {
	realtime.Only(t, "a whole demo and two sweeps")
	t.Parallel()
	plainTuner(t, "the scripts run these commands under the race detector, on smaller studies")
	dir := t.TempDir()
	must(t, os.CopyFS(filepath.Join(dir, "docs"), os.DirFS(filepath.Join(repo, "docs"))))
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
		t.Errorf("%d command lines were run, want at least four", ran)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("the commands leave %v (%v) beside the documents, want all files below TUNER_ROOT", left, err)
	}
}
