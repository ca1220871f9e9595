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
)

// lifeVariable names the file for the tables of faults. make soak-server and make test-vllm-faults set it.
const lifeVariable = "SERVER_LIFE"

// A lifeTable has the result of each fault on one kind of server.
type lifeTable struct {
	title string
	mu    sync.Mutex
	rows  []*lifeRow
}

type lifeRow struct {
	fault
	noticed time.Duration // 0 when there was nothing to notice
	stopped time.Duration // 0 when the server was never ready
}

// row adds a fault.
func (l *lifeTable) row(f fault) *lifeRow {
	l.mu.Lock()
	defer l.mu.Unlock()
	row := &lifeRow{fault: f}
	l.rows = append(l.rows, row)
	return row
}

const lifeTitle = `# Faults of servers

Written by ` + "`make soak-server` and `make test-vllm-faults VER=…`" + `. Each fault happens in a server that the tuner has started. Noticed: from the
fault, or in a start from the end of the server's first process, until the tuner knows its class; of a start timeout, beyond the timeout.
Stop: from the request until no process, no port, no shared memory and no GPU memory of it is left.
`

// write puts the table into the file, and replaces the one with the same title.
func (l *lifeTable) write(t *testing.T) {
	t.Helper()
	file := os.Getenv(lifeVariable)
	if file == "" {
		return
	}
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	commit, err := exec.CommandContext(t.Context(), "git", "describe", "--always", "--dirty").Output()
	must(t, err)
	parts := strings.Split(string(before), "\n## ")[1:]
	parts = slices.DeleteFunc(parts, func(part string) bool { return strings.HasPrefix(part, l.title+"\n") })
	parts = append(parts, l.markdown(strings.TrimSpace(string(commit))))
	slices.Sort(parts)
	text := strings.TrimRight(lifeTitle, "\n")
	for _, part := range parts {
		text += "\n\n## " + strings.TrimSpace(part)
	}
	must(t, os.WriteFile(file, []byte(text+"\n"), 0o644))
}

func (l *lifeTable) markdown(commit string) string {
	var b strings.Builder
	var crashes []float64
	fmt.Fprintf(&b, "%s\n\nCommit %s, %s.\n\n| fault | class | cause | noticed | at most | stop |\n|---|---|---|---|---|---|\n", l.title, commit, time.Now().Format(time.DateOnly))
	for _, r := range l.rows {
		most := ""
		if r.class != "" {
			most = seconds(r.within)
		}
		if r.class != "" && r.within <= 3*time.Second {
			crashes = append(crashes, r.noticed.Seconds())
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", r.name, r.class, r.cause, seconds(r.noticed), most, seconds(r.stopped))
	}
	if len(crashes) > 0 {
		mean := 0.0
		for _, c := range crashes {
			mean += c / float64(len(crashes))
		}
		fmt.Fprintf(&b, "\nCrashes are noticed after %.2f s in the mean of %d, %.2f s at most.\n", mean, len(crashes), slices.Max(crashes))
	}
	return b.String()
}

// seconds writes a duration in seconds; "" for 0.
func seconds(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}
