package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// recordVariable is an environment variable that names a directory. Each command of the scripts stores its output
// there.
const recordVariable = "TUNER_TEST_RECORD"

// recordedMain runs main. If recordVariable is set, it also stores the output.
func recordedMain() {
	dir := os.Getenv(recordVariable)
	if dir == "" {
		main()
		return
	}
	record, err := os.CreateTemp(dir, "record-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "record the output:", err)
		os.Exit(exitFailed)
	}
	var copies sync.WaitGroup
	tee := func(to *os.File) *os.File {
		from, in, err := os.Pipe()
		if err != nil {
			panic(err)
		}
		copies.Go(func() { forward(io.MultiWriter(to, record), from) })
		return in
	}
	stdout, stderr := os.Stdout, os.Stderr
	os.Stdout, os.Stderr = tee(stdout), tee(stderr)
	code := run()
	for _, in := range []*os.File{os.Stdout, os.Stderr} { // the end of the pipes does not mark the end of the output, because a child may keep them open
		_, _ = in.WriteString(endOfText)
	}
	copies.Wait()
	os.Exit(code)
}

// endOfText marks the end of a command's output.
const endOfText = "\x00\n"

// forward copies lines up to endOfText.
func forward(to io.Writer, from io.Reader) {
	for lines := bufio.NewReader(from); ; {
		line, err := lines.ReadString('\n')
		text, ended := strings.CutSuffix(line, endOfText)
		_, _ = io.WriteString(to, text) // an error means that nobody reads the output any more
		if ended || err != nil {
			return
		}
	}
}

// bannedForms are texts that no command may print, each with the text to print instead. Each match of a form contains
// its part. Most lines do not, so they need no regular expression.
var bannedForms = []struct {
	part    string
	form    *regexp.Regexp
	instead string
}{
	{"0 %", regexp.MustCompile(`[+-]0 %`), "0 % without a sign"},
	{"1 ", regexp.MustCompile(`(?:^|[^0-9.,/-])1 (?:probe|trial|stud(?:ie)|request|config|prior|process(?:e)|load|run|file|parameter|commit|verdict|worker)s\b`), "the singular after 1"},
	{"s:", regexp.MustCompile(`\[[0-9]+m?[0-9]*s:[0-9]+m?[0-9]*s\]`), "the remaining time in words"},
	{"s left", regexp.MustCompile(`\b0 ?s left`), "no remaining time below one second"},
	{"s ", regexp.MustCompile(`\b[0-9]+(?:m[0-9]+)?s (?:ago|left)`), "2 min 10 s"},
}

// checkRecorded fails the test for each text of bannedForms in the stored output.
func checkRecorded(t *testing.T, dir string) {
	files, err := os.ReadDir(dir)
	if err != nil || len(files) == 0 {
		t.Errorf("no output was recorded, %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(dir, file.Name()))
		if err != nil {
			t.Error(err)
		}
		for _, complaint := range bannedIn(string(text)) {
			t.Error(complaint)
		}
	}
}

func bannedIn(text string) (all []string) {
	for line := range strings.Lines(text) {
		for _, u := range bannedForms {
			if !strings.Contains(line, u.part) {
				continue
			}
			if found := u.form.FindString(line); found != "" {
				all = append(all, fmt.Sprintf("%q is printed, want %s: %s", found, u.instead, strings.TrimSpace(line)))
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// bannedIn finds each form of bannedForms, and does not complain about similar texts.
func TestBannedFormsAreFound(t *testing.T) {
	for _, text := range []string{"95 %: -0 % to +5 %", "study x, 1 trials done", "(1 probes)", "[34s:0s]", "about 0s left", "0 s left", "stored 2m10s ago"} {
		if len(bannedIn(text)) == 0 {
			t.Errorf("bannedIn(%q) finds nothing", text)
		}
	}
	for _, text := range []string{"0 %", "-10 %", "11 trials", "0.1 requests", "1 trial done", "10 s left", "about 20 s left", "2 min 10 s ago"} {
		if found := bannedIn(text); len(found) > 0 {
			t.Error(found)
		}
	}
}

// thatOf matches "that of" and "those of". To understand these, a reader must look for the noun before them.
var thatOf = regexp.MustCompile(`\b(?:that|those)\s+of\b`)

// The documents and the golden files contain no match of thatOf and no form of bannedForms.
func TestNoTextHasBannedForms(t *testing.T) {
	for _, pattern := range []string{"studies/report/testdata/*.golden", "serverctl/doctor/testdata/*.txt", "docs/*.md", "docs/evidence/*.md", "README.md", "ARCHITECTURE.md", "CHANGELOG.md"} {
		files, err := filepath.Glob(filepath.Join(repo, pattern))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Error(err)
			}
			for _, complaint := range bannedIn(string(text)) {
				t.Errorf("%s: %s", file, complaint)
			}
			if found := thatOf.Find(text); found != nil {
				t.Errorf("%s: %q makes the reader go back; repeat the noun", file, found)
			}
		}
	}
}
