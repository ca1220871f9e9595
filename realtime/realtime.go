// Package realtime keeps apart the tests for which the race detector is too slow: make test-real-time runs them without it.
package realtime

import "testing"

// Only skips a test under the race detector, with the reason why it would say nothing there or take too long. The test must be one of those
// that make test-real-time names.
func Only(t testing.TB, reason string) {
	t.Helper()
	if RaceDetector {
		t.Skip(reason + ": make test-real-time runs it without the race detector")
	}
}
