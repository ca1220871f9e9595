package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"vllmtuner/realtime"
)

// The picture in README.md shows what the demo prints. The figures may differ, the words may not. `make picture` draws
// a new picture.
func TestPictureOfTheREADME(t *testing.T) {
	realtime.Only(t, "a whole demo")
	path := filepath.Join(repo, "docs", "demo.svg")
	printed := "$ tuner demo\n" + demoTranscript(t)
	if os.Getenv("UPDATE_PICTURE") != "" {
		must(t, os.WriteFile(path, terminalPicture(printed), 0o644))
	}
	picture, err := os.ReadFile(path)
	must(t, err)
	if shown := pictureText(t, picture); form(shown) != form(printed) {
		t.Errorf("docs/demo.svg shows\n%s\nand the demo prints\n%s\n`make picture` makes it again", shown, printed)
	}
	readme, err := os.ReadFile(filepath.Join(repo, "README.md"))
	must(t, err)
	if !bytes.Contains(readme, []byte("(docs/demo.svg)")) {
		t.Error("README.md does not show docs/demo.svg")
	}
}

// terminalPicture returns an SVG of a terminal of 80 columns. The SVG has a background, so that it can be read on light
// and on dark pages. Each line has a fixed length, because viewers have different fonts.
func terminalPicture(text string) []byte {
	const columns, charWidth, lineHeight, margin = 80, 7.83, 18, 16
	lines := strings.Split(text, "\n")
	width, height := columns*charWidth+2*margin, len(lines)*lineHeight+2*margin
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %d" width="%g" height="%d" role="img" aria-label="what tuner demo prints">
<rect x="0.5" y="0.5" width="%g" height="%d" rx="8" fill="#0d1117" stroke="#6e7681"/>
<g fill="#e6edf3" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace" font-size="13">
`, width, height, width, height, width-1, height-1)
	for i, line := range lines {
		if line == "" {
			continue
		}
		fmt.Fprintf(&out, `<text x="%d" y="%d" textLength="%g" lengthAdjust="spacingAndGlyphs" xml:space="preserve">`,
			margin, margin+i*lineHeight+13, float64(utf8.RuneCountInString(line))*charWidth)
		_ = xml.EscapeText(&out, []byte(line)) // writing to a bytes.Buffer never fails
		out.WriteString("</text>\n")
	}
	out.WriteString("</g>\n</svg>\n")
	return out.Bytes()
}

// pictureText returns the lines of text in an SVG.
func pictureText(t *testing.T, picture []byte) string {
	t.Helper()
	var svg struct {
		Lines []string `xml:"g>text"`
	}
	must(t, xml.Unmarshal(picture, &svg))
	return strings.Join(svg.Lines, "\n")
}

// demoTranscript returns what `tuner demo` prints into a pipe, but only its first four trials.
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
		if progressLine.MatchString(line) { // the number of these lines depends on the machine's speed
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
	progressLine = regexp.MustCompile(`^[0-9]+ of [0-9]+ trials done.*: trial `)
	timeLeft     = regexp.MustCompile(` \(about [^)]* left\)`)
	digits       = regexp.MustCompile(`[+-]?[0-9]+(\.[0-9]+)?`)
	spaces       = regexp.MustCompile(`\s+`)
)

// form returns a text without its figures and its line breaks. The width of the figures decides where lines break.
func form(text string) string {
	text = strings.ReplaceAll(text, " *\n", "\n") // a star marks the best trial so far, which depends on the figures
	return spaces.ReplaceAllString(digits.ReplaceAllString(text, "N"), " ")
}
