package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
)

// lifeVariable is an environment variable that names the file for the tables of faults. make soak-server and make
// test-vllm-faults set it.
const lifeVariable = "SERVER_LIFE"

// A lifeTable holds the result of each fault on one kind of server.
type lifeTable struct {
	title string
	mu    sync.Mutex
	rows  []*lifeRow
}

type lifeRow struct {
	fault
	noticed time.Duration // how long the tuner took to notice the fault; 0 if the fault does not end the server
	stopped time.Duration // how long Stop took; 0 if the server was never ready
}

// row adds a row for a fault.
func (l *lifeTable) row(f fault) *lifeRow {
	l.mu.Lock()
	defer l.mu.Unlock()
	row := &lifeRow{fault: f}
	l.rows = append(l.rows, row)
	return row
}

const lifeTitle = `# Faults of servers

Look up here how soon the tuner notices each fault of a server, how it classifies the fault, and how long the server then takes to stop.

Written by ` + "`make soak-server` and `make test-vllm-faults VER=…`" + `. Each fault happens in a server that the tuner has started.

- Noticed: the time from the fault until the tuner knows its class. If the server fails in its start, the time begins when its
  first process ends. For a start timeout, it begins when the timeout is over.
- Stop: the time from the request to stop until the server has left no process, port, shared memory or GPU memory.
`

// write writes the table to the file that lifeVariable names. It replaces the table with the same title in that file.
func (l *lifeTable) write(t *testing.T) {
	t.Helper()
	if file := os.Getenv(lifeVariable); file != "" {
		replacePart(t, file, lifeTitle, l.title, l.markdown(commitOf(t)))
	}
}

// replacePart replaces one part of a document, and writes the document again. The document is the text head and then
// its parts. Each part begins with its title; replacePart writes "## " before each part, so that the title is a
// heading.
func replacePart(t *testing.T, file, head, title, part string) {
	t.Helper()
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	parts := strings.Split(string(before), "\n## ")[1:]
	parts = slices.DeleteFunc(parts, func(part string) bool { return strings.HasPrefix(part, title+"\n") })
	parts = append(parts, part)
	slices.Sort(parts)
	text := strings.TrimRight(head, "\n")
	for _, part := range parts {
		text += "\n\n## " + strings.TrimSpace(part)
	}
	must(t, os.WriteFile(file, []byte(text+"\n"), 0o644))
}

// commitOf returns git's short name for the commit under test.
func commitOf(t *testing.T) string {
	t.Helper()
	commit, err := exec.CommandContext(t.Context(), "git", "describe", "--always", "--dirty").Output()
	must(t, err)
	return strings.TrimSpace(string(commit))
}

func (l *lifeTable) markdown(commit string) string {
	var b strings.Builder
	var crashes []float64
	fmt.Fprintf(&b, "%s\n\nCommit %s, %s.\n\n| fault | class | cause | noticed | at most | stop |\n|---|---|---|---|---|---|\n", l.title, commit, time.Now().Format(time.DateOnly))
	for _, r := range l.rows {
		limit := ""
		if r.class != "" {
			limit = seconds(r.within)
		}
		if r.class != "" && r.within <= 3*time.Second {
			crashes = append(crashes, r.noticed.Seconds())
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", r.name, r.class, r.cause, seconds(r.noticed), limit, seconds(r.stopped))
	}
	if len(crashes) > 0 {
		fmt.Fprintf(&b, "\nThe %d crashes were noticed after %.2f s on average, and after %.2f s at most.\n", len(crashes), lo.Mean(crashes), slices.Max(crashes))
	}
	return b.String()
}

// seconds returns a duration in seconds, and "" for 0.
func seconds(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}
