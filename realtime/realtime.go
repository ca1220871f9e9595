// Package realtime marks the tests for which the race detector is too slow. make test-real-time runs these tests
// without it.
package realtime

import "testing"

// Only skips a test under the race detector. The reason says why the test would prove nothing there or take too long.
func Only(t testing.TB, reason string) {
	t.Helper()
	if RaceDetector {
		t.Skip(reason + ": make test-real-time runs it without the race detector")
	}
}
