package sim

import (
	"fmt"
	"slices"
	"strings"
)

// Versions are the versions of vLLM that can be simulated. The first is the default.
var Versions = []string{"0.14.1", "0.32.0", "0.33.0"}

// CheckVersion returns an error for a version that is not simulated.
func CheckVersion(version string) error {
	if slices.Contains(Versions, version) {
		return nil
	}
	return fmt.Errorf("--sim-version %s: this version of vLLM is not simulated; choose from %s",
		version, strings.Join(Versions, ", "))
}
