//go:build race

package realtime

// RaceDetector reports whether the race detector is on.
const RaceDetector = true
