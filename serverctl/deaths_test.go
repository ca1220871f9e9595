package serverctl

import (
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

// culprit returns who caused a death: the user, the point (the server's flags) or nobody.
func culprit(e *ExitError) string {
	switch {
	case e.Fatal():
		return "user"
	case e.Class.PointsFault():
		return "point"
	}
	return "nobody"
}

// explain passes the log of a case to a logbook, and returns the death that the logbook finds.
func explain(when, exit, log string) *ExitError {
	l := &logbook{logState: logState{loaded: when == "load"}}
	l.Write([]byte(log))
	l.close()
	code, err := strconv.Atoi(exit)
	switch {
	case err != nil: // the server is alive
		return l.death(exitState{code: -1})
	case code < 0:
		return l.death(exitState{-1, syscall.Signal(-code), "signal: " + syscall.Signal(-code).String()})
	}
	return l.death(exitState{code: code, words: "exit status " + exit})
}

// For each log in testdata, the logbook must find the class and cause of the death, and who caused it. deaths.txtar
// says how to read the files.
func TestDeathsAreRecognised(t *testing.T) {
	for _, file := range []string{"testdata/deaths.txtar", "testdata/heldout.txtar", "testdata/composed.txtar", "testdata/lines.txtar"} {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		wrong := 0
		for _, f := range archive.Files {
			head, log, _ := strings.Cut(string(f.Data), "\n\n")
			want := map[string]string{}
			for line := range strings.Lines(head) {
				key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
				want[key] = value
			}
			e := explain(want["when"], want["exit"], log)
			cause := string(e.Cause)
			if cause == "" {
				cause = "-"
			}
			got := string(e.Class) + " " + cause + " " + culprit(e)
			if got != want["is"] || !strings.Contains(e.Evidence, want["shows"]) || pointer().MatchString(e.Evidence) {
				wrong++
				t.Errorf("%s: %s\n  is    %s: %q\n  wants %s: %q", file, f.Name, got, e.Evidence, want["is"], want["shows"])
			}
		}
		t.Logf("%s: %d of %d are right", file, len(archive.Files)-wrong, len(archive.Files))
	}
}
