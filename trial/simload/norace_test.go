//go:build !race

package simload

// raceEnabled is whether the race detector is on.
const raceEnabled = false
