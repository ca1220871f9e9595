package main

import (
	"database/sql"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	_ "github.com/mattn/go-sqlite3"
	"github.com/rogpeppe/go-internal/testscript"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
	"vllmtuner/trial/vllmserve/fakevllm"
)

// TestMain makes the test binary act as the command too. Scripts and tests run it under the name tuner.
func TestMain(m *testing.M) {
	proc.Main()
	os.Setenv("GORACE", quickExit) // for the children only: this process has read the variable at its start
	if os.Getenv(everyStep) != "" {
		render.LogEvery, render.DrawEvery = 0, 20*time.Millisecond
	}
	testscript.Main(suite{m}, map[string]func(){"tuner": recordedMain, "fake-vllm": fakevllm.Main})
}

// quickExit shortens the race detector's sleep at the end of each command from a second to 10 ms.
const quickExit = "atexit_sleep_ms=10"

// TestScripts runs the command as a user does.
func TestScripts(t *testing.T) {
	t.Parallel()
	recorded := t.TempDir()
	t.Cleanup(func() { checkRecorded(t, recorded) }) // t.Cleanup waits for the scripts, which run in parallel
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits":     exits,
			"freeport":  freePort,
			"waitready": waitReady,
			"serve":     serveFile,
			"harm":      harmDatabases,
			"plain":     runPlainTuner,
		},
		Setup: func(e *testscript.Env) error {
			e.Setenv("GORACE", quickExit)
			e.Setenv(recordVariable, recorded)
			return nil
		},
		UpdateScripts: os.Getenv("UPDATE_SCRIPTS") != "",
	})
}

// exits is the script command exits CODE COMMAND …: it runs a command and expects the exit code CODE. The script's next
// lines can check stdout and stderr.
func exits(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND [ARGS]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	code := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%s does not run: %v", args[1], err)
	}
	if code != want {
		ts.Fatalf("%s exits with %d, want %d", strings.Join(args[1:], " "), code, want)
	}
}

// harmDatabases is the script command harm GLOB SQL: it changes SQLite files, as a faulty disk may.
func harmDatabases(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: harm glob sql")
	}
	found, err := filepath.Glob(ts.MkAbs(args[0]))
	ts.Check(err)
	if len(found) == 0 {
		ts.Fatalf("there is no %s", args[0])
	}
	for _, path := range found {
		db, err := sql.Open("sqlite3", path)
		ts.Check(err)
		_, err = db.Exec(args[1])
		ts.Check(errors.Join(err, db.Close()))
	}
}
