// Package realtime marks the tests for which the race detector is too slow. The command `make test-real-time` runs
// these tests without the race detector.
package realtime

import (
	"os"
	"testing"
)

// Only lets the test t run without the race detector, and skips it under the race detector. The reason says why the
// test would prove nothing there or take too long.
func Only(t testing.TB, reason string) {
	t.Helper()
	if RaceDetector {
		t.Skip(reason + ": make test-real-time runs it without the race detector")
	}
}

// Long does what Only does. It also skips the test with -short, as in CI. It is for the longest tests.
func Long(t testing.TB, reason string) {
	t.Helper()
	Only(t, reason)
	if testing.Short() {
		t.Skip(reason + ": make test-real-time runs it")
	}
}

// Rounds returns how often a test repeats what it does, for example with how many seeds. `make soak-real-time` sets the
// environment variable SOAK_REAL_TIME, and then it is the number long.
func Rounds(ordinary, long int) int {
	if Soak() {
		return long
	}
	return ordinary
}

// Soak reports whether `make soak-real-time` runs the tests.
func Soak() bool { return os.Getenv("SOAK_REAL_TIME") != "" }
