package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"vllmtuner/realtime"
)

// buildTags are the Makefile's tags. With the same tags, SQLite is already in the build cache.
const buildTags = "netgo osusergo sqlite_omit_load_extension"

// A suite runs all tests and then removes the plain tuner, which they share. The plain tuner is this test binary
// without the race detector.
type suite struct{ *testing.M }

// Run lets eight tests run at a time, unless -parallel is given. The parallel tests here mostly wait for their
// children.
func (s suite) Run() int {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
	}
	defer removePlainTuner()
	return s.M.Run()
}

var (
	plainTests sync.Map // names of the tests that called plainTuner
	plainDir   string   // directory of the plain tuner; empty until a test needs it

	// buildPlainTuner builds this test binary without the race detector.
	buildPlainTuner = sync.OnceValues(func() (string, error) {
		dir, err := os.MkdirTemp("", "plain-tuner")
		if err != nil {
			return "", err
		}
		plainDir = dir
		path := filepath.Join(dir, "tuner")
		build := exec.Command("go", "test", "-c", "-race=false", "-trimpath", "-tags", buildTags, "-ldflags", "-s -w", "-o", path, ".")
		if out, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", build, err, out)
		}
		return path, nil
	})
)

func removePlainTuner() {
	if plainDir != "" {
		_ = os.RemoveAll(plainDir) // no test uses it any more
	}
}

// plainTuner makes the children of a test run without the race detector. With the race detector, a simulated study
// takes five times the CPU time. The given reason says which other test would find a race in the same code.
func plainTuner(t testing.TB, reason string) {
	t.Helper()
	if reason == "" {
		t.Fatal("plainTuner without a reason")
	}
	plainTests.Store(t.Name(), true)
}

// runsPlain reports whether the test, or a test that contains it, has called plainTuner.
func runsPlain(t testing.TB) bool {
	for name := t.Name(); ; {
		if _, ok := plainTests.Load(name); ok {
			return true
		}
		cut := strings.LastIndexByte(name, '/')
		if cut < 0 {
			return false
		}
		name = name[:cut]
	}
}

// tunerPath returns the path of a program that is the tuner: a link to the test binary, or the plain tuner.
func tunerPath(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("tuner") // testscript.Main has put a link into PATH
	if err == nil && realtime.RaceDetector && runsPlain(t) {
		path, err = buildPlainTuner()
	}
	if err == nil {
		path, err = filepath.Abs(path)
	}
	must(t, err)
	return path
}

// tunerCommand returns a command that runs tuner. A study whose server is also tuner starts the same program, because
// its directory comes first in PATH.
func tunerCommand(ctx context.Context, t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	path := tunerPath(t)
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "PATH="+firstInPath(filepath.Dir(path), os.Getenv("PATH")))
	return cmd
}

func firstInPath(dir, path string) string { return dir + string(os.PathListSeparator) + path }

// must fails the test if one of the errors is not nil.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// unusedPort returns a TCP port of 127.0.0.1 on which nothing listens.
func unusedPort() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return fmt.Sprint(listener.Addr().(*net.TCPAddr).Port), listener.Close()
}

// isHealthy waits until the server at the URL is healthy. It returns false at the limit, or when the server has exited.
func isHealthy(url string, limit time.Duration, exited <-chan struct{}) bool {
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
		if answer, err := http.Get(url + "/health"); err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return true
			}
		}
		select {
		case <-exited:
			return false
		case <-time.After(50 * time.Millisecond):
		}
	}
	return false
}

// command runs tuner to its end and returns its standard output.
func command(t testing.TB, args ...string) string {
	t.Helper()
	cmd := tunerCommand(t.Context(), t, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tuner %s: %v\n%s%s", strings.Join(args, " "), err, out, &stderr)
	}
	return string(out)
}

// runPlainTuner makes the rest of a script use the plain tuner. A script does so if others run the same goroutines with
// the race detector.
func runPlainTuner(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: plain")
	}
	if !realtime.RaceDetector {
		return
	}
	path, err := buildPlainTuner()
	ts.Check(err)
	ts.Setenv("PATH", firstInPath(filepath.Dir(path), ts.Getenv("PATH")))
}
