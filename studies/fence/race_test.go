//go:build race

package fence

// raceEnabled is whether the race detector is on.
const raceEnabled = true
