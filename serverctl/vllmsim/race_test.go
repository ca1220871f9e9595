//go:build race

package vllmsim

// raceEnabled is whether the race detector is on.
const raceEnabled = true
