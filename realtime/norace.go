//go:build !race

package realtime

// RaceDetector is whether the race detector is on.
const RaceDetector = false
