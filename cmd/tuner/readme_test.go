package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"vllmtuner/realtime"
)

// What README shows of the demo is what the command prints: the figures may be others, the lines may not. `make transcript` writes it anew.
func TestTranscriptOfTheREADME(t *testing.T) {
	realtime.Only(t, "a whole demo")
	path := filepath.Join(repo, "README.md")
	readme, err := os.ReadFile(path)
	must(t, err)
	head, rest, begun := strings.Cut(string(readme), "```\ngmu ")
	shown, tail, ended := strings.Cut(rest, "\n```\n")
	if !begun || !ended {
		t.Fatal("README.md has no transcript of the demo")
	}
	shown = "gmu " + shown
	is := demoTranscript(t)
	if os.Getenv("UPDATE_README") != "" {
		must(t, os.WriteFile(path, []byte(head+"```\n"+is+"\n```\n"+tail), 0o644))
		return
	}
	if form(shown) != form(is) {
		t.Errorf("README.md shows\n%s\nand the demo prints\n%s\n`make transcript` writes it anew", shown, is)
	}
}

// demoTranscript is what `tuner demo` prints in a pipe, without most of its trials.
func demoTranscript(t *testing.T) string {
	t.Helper()
	home := t.TempDir()
	cmd := exec.CommandContext(t.Context(), tunerPath(t), "demo")
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "TUNER_ROOT=") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	cmd.Env = append(cmd.Env, "HOME="+home, "XDG_STATE_HOME=", "COLUMNS=80")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	const firstTrials = 4
	var lines []string
	trials := 0
	for line := range strings.Lines(strings.ReplaceAll(out.String(), home, "~")) {
		if signLine.MatchString(line) { // a sign of life, as often as the machine is slow
			continue
		}
		if strings.HasPrefix(line, "trial ") && !strings.HasPrefix(line, "trial     ") {
			if trials++; trials == firstTrials+1 {
				line = "...\n"
			} else if trials > firstTrials {
				continue
			}
		}
		lines = append(lines, line)
	}
	return strings.TrimSpace(timeLeft.ReplaceAllString(strings.Join(lines, ""), ""))
}

var (
	signLine = regexp.MustCompile(`^[0-9]+ of [0-9]+ trials done.*: trial `)
	timeLeft = regexp.MustCompile(` \(about [^)]* left\)`)
	digits   = regexp.MustCompile(`[+-]?[0-9]+(\.[0-9]+)?`)
	spaces   = regexp.MustCompile(`\s+`)
)

// form is a text without its figures, and without its line breaks, which they move.
func form(text string) string {
	text = strings.ReplaceAll(text, " *\n", "\n") // which trial is the best yet is a figure too
	return spaces.ReplaceAllString(digits.ReplaceAllString(text, "N"), " ")
}
