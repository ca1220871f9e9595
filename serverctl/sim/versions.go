package sim

import (
	"fmt"
	"strings"
)

// Versions are the versions of vLLM that can be simulated. The first is the default.
var Versions = []string{"0.14.1", "0.32.0", "0.33.0"}

// A VersionError names a version of vLLM that is not simulated.
type VersionError struct{ Version string }

// Error lists the simulated versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("--sim-version %s: this version of vLLM is not simulated; choose from %s", e.Version, strings.Join(Versions, ", "))
}
