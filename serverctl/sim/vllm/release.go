package vllm

import (
	"cmp"

	"vllmtuner/serverctl/sim"
)

// A release says how one version of vLLM differs from the others for a client or a reader of the log. The differences
// were compared with the logs and answers of each version on a CPU (testdata/recordings). The recording of 0.33.0 used
// its Python sources with the compiled code of 0.32.0. Texts that only a GPU produces were compared with the sources.
type release struct {
	version  string
	since032 bool   // 0.32.0 or later
	engine   string // the engine's name in the log
}

var releases = map[string]*release{
	"0.14.1": {version: "0.14.1", engine: "EngineCore_DP0"},
	"0.32.0": {version: "0.32.0", since032: true, engine: "EngineCore"},
	"0.33.0": {version: "0.33.0", since032: true, engine: "EngineCore"},
}

// releaseOf returns the release that the options name. Options without a version mean the first of sim.Versions.
func releaseOf(o sim.Options) *release {
	return releases[cmp.Or(o.Version, sim.Versions[0])]
}
