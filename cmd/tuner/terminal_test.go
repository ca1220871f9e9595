package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rivo/uniseg"

	"vllmtuner/studies"
	"vllmtuner/trial"
)

// A screen emulates a terminal. Lines that have scrolled away stay in rows.
type screen struct {
	width   int
	rows    [][]string // each row has a character for each column; "" is the second half of a wide character
	row     int
	col     int
	wrapped []string // lines that were longer than the screen's width
	pages   int      // how often the alternate screen was entered, minus how often it was left
}

func (s *screen) write(text string) {
	for len(text) > 0 {
		if after, ok := strings.CutPrefix(text, "\x1b["); ok {
			n := strings.IndexFunc(after, func(r rune) bool { return r >= '@' && r <= '~' })
			if n < 0 {
				return
			}
			s.control(after[:n+1])
			text = after[n+1:]
			continue
		}
		var cluster string
		var width int
		cluster, text, width, _ = uniseg.FirstGraphemeClusterInString(text, -1)
		switch cluster {
		case "\r\n":
			s.row, s.col = s.row+1, 0
		case "\n":
			s.row++
		case "\r":
			s.col = 0
		default:
			s.put(cluster, width)
		}
	}
}

// control executes a control sequence. The sequence comes without its first two characters, ESC and [.
func (s *screen) control(sequence string) {
	switch sequence {
	case "K":
		for len(s.rows) > s.row && len(s.rows[s.row]) > s.col {
			s.rows[s.row] = s.rows[s.row][:s.col]
		}
	case "J":
		s.control("K")
		s.rows = s.rows[:min(len(s.rows), s.row+1)]
	case "H":
		s.row, s.col = 0, 0
	case "?1049h":
		s.pages++
	case "?1049l":
		s.pages--
		s.rows, s.row, s.col = nil, 0, 0
	}
}

func (s *screen) put(cluster string, width int) {
	if width == 0 {
		return
	}
	if s.col+width > s.width {
		s.wrapped = append(s.wrapped, s.line(s.row))
		s.row, s.col = s.row+1, 0
	}
	for len(s.rows) <= s.row {
		s.rows = append(s.rows, nil)
	}
	for len(s.rows[s.row]) < s.col+width {
		s.rows[s.row] = append(s.rows[s.row], " ")
	}
	for i := range width {
		s.rows[s.row][s.col+i] = ""
	}
	s.rows[s.row][s.col] = cluster
	s.col += width
}

func (s *screen) line(row int) string {
	if row >= len(s.rows) {
		return ""
	}
	return strings.TrimRight(strings.Join(s.rows[row], ""), " ")
}

func (s *screen) String() string {
	var all []string
	for i := range s.rows {
		all = append(all, s.line(i))
	}
	return strings.Join(all, "\n")
}

// On a terminal of any width, no line of a run is wider than the terminal, and the progress line is removed completely.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{80, 40, 20} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			t.Parallel()
			if columns != 80 {
				plainTuner(t, "the case of 80 columns runs with the race detector")
			}
			file := filepath.Join(t.TempDir(), "s.yaml")
			must(t, os.WriteFile(file, []byte(terminalStudy), 0o644))
			text, code := onTerminal(t, "xterm", columns, io.Discard, "run", file, "--root", t.TempDir()).end(t)
			shown := screen{width: columns}
			shown.write(text)
			if code != 0 {
				t.Errorf("exit code %d\n%s", code, &shown)
			}
			if len(shown.wrapped) > 0 {
				t.Errorf("lines are wrapped: %q", shown.wrapped)
			}
			if !strings.Contains(text, " of 3 tr") {
				t.Error("no progress line was drawn")
			}
			if strings.Contains(shown.String(), " of 3") {
				t.Errorf("a progress line stays between the rows:\n%s", &shown)
			}
			if strings.Contains(text, "0s left") || strings.Contains(text, " 0 s left") {
				t.Error("the progress line says that 0 s are left")
			}
		})
	}
}

// An error that is too long for a terminal is broken between words.
func TestAnErrorOnATerminal(t *testing.T) {
	t.Parallel()
	text, code := onTerminal(t, "xterm", 40, io.Discard, "run", "s.yaml", "--nosuchflag").end(t)
	shown := screen{width: 40}
	shown.write(text)
	if code != exitUsage || len(shown.wrapped) > 0 || !strings.Contains(strings.Join(strings.Fields(text), " "), "--nosuchflag: there is no such flag; use one of --accept-drift, ") {
		t.Errorf("exit code %d, wrapped %q:\n%s", code, shown.wrapped, &shown)
	}
}

const terminalStudy = `version: 1
name: s
model: m
server: {simulate: small-fast}
slo: {ttft_p99: 1000ms}
workload: {kind: random, requests: 200}
parameters: {max-num-seqs: {int: [16, 64]}, max-num-batched-tokens: {int: [512, 8192]}, gpu-memory-utilization: {float: [0.8, 0.97]}}
budget: {confirm: 0, trials: 3}
probe: {seconds: 5, min_requests: 100, lead_in: 1s}
`

// ownedStudy returns a running study that this process owns, and the study's root directory.
func ownedStudy(t *testing.T) (store *studies.Store, root string) {
	t.Helper()
	root = t.TempDir()
	store, _, err := studies.Open(context.Background(), filepath.Join(root, "s"), studies.New{Name: "s", File: terminalStudy}, studies.Options{})
	must(t, err, store.Begin(studies.Trial{Origin: studies.Default}), store.Record(0, trial.Probe{Rate: 2}))
	return store, root
}

// A watched study is drawn on the alternate screen. When the study ends, its last status stays on the normal screen.
func TestWatchEndsWithTheStudy(t *testing.T) {
	t.Parallel()
	store, root := ownedStudy(t)
	s := onTerminal(t, "xterm", 80, nil, "status", "s", "--watch", "--root", root)
	s.waitFor(t, "running: 0 of 3 trials done")
	s.waitFor(t, "1 probe; the last failed")
	must(t, store.SetState(studies.Failed, "the model is gone"), store.Close())
	text, code := s.end(t)
	shown := screen{width: 80}
	shown.write(text)
	if code != 0 || shown.pages != 0 || len(shown.wrapped) > 0 || !strings.Contains(shown.String(), "failed: 0 of 3 trials done, the model is gone") || strings.Contains(shown.String(), "running") {
		t.Errorf("exit code %d, %d alternate screens not left, wrapped lines %q, and the screen has\n%s", code, shown.pages, shown.wrapped, &shown)
	}
	if n := strings.Count(text, "\x1b[2J"); n > 0 {
		t.Errorf("status --watch clears the whole screen %d times, which flickers", n)
	}
}

// Ctrl-C ends `status --watch` but not the study. The command mentions no unfinished work and restores the terminal.
func TestWatchIsEndedByCtrlC(t *testing.T) {
	t.Parallel()
	store, root := ownedStudy(t)
	defer func() { must(t, store.Close()) }()
	s := onTerminal(t, "xterm", 80, nil, "status", "s", "--watch", "--root", root)
	// Wait for the whole page. On Ctrl-C a terminal drops the text that it has not shown yet, perhaps half of a control
	// sequence.
	s.waitFor(t, "running: 0 of 3 trials done")
	s.waitFor(t, "\x1b[J")
	if _, err := io.WriteString(s.tty, "\x03"); err != nil {
		t.Fatal(err)
	}
	text, code := s.end(t)
	shown := screen{width: 80}
	shown.write(text)
	if code != 0 || shown.pages != 0 || strings.Contains(text, "tuner:") || !strings.Contains(shown.String(), "running: 0 of 3 trials done") {
		t.Errorf("exit code %d, %d alternate screens not left, and the screen has\n%s", code, shown.pages, &shown)
	}
}

// In a pipe `status --watch` writes plain text, and writes it again only when the study has changed.
func TestWatchInAPipe(t *testing.T) {
	t.Parallel()
	store, root := ownedStudy(t)
	s := launch(t, tunerCommand(t.Context(), t, "status", "s", "--watch", "--root", root))
	s.waitFor(t, "study     s")
	must(t, store.SetState(studies.Failed, "the model is gone"), store.Close())
	text, _ := s.end(t)
	if strings.ContainsRune(text, '\x1b') || strings.Count(text, "study     s") != 2 || !strings.Contains(text, "failed: 0 of 3 trials done") {
		t.Errorf("status --watch writes\n%q", text)
	}
}

// On a terminal that cannot draw, a run writes no progress line and no control character.
func TestADumbTerminalIsNotDrawnOn(t *testing.T) {
	t.Parallel()
	plainTuner(t, "TestProgressOnATerminal runs the same study with the race detector")
	file := filepath.Join(t.TempDir(), "s.yaml")
	must(t, os.WriteFile(file, []byte(terminalStudy), 0o644))
	text, code := onTerminal(t, "dumb", 80, nil, "run", file, "--root", t.TempDir()).end(t)
	if code != 0 || strings.ContainsRune(text, '\x1b') || !strings.Contains(text, "trial  2") {
		t.Errorf("the run ends with %d and writes\n%q", code, text)
	}
}
