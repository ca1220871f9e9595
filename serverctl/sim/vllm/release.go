package vllm

import (
	"cmp"

	"vllmtuner/serverctl/sim"
)

// A release has the differences between versions of vLLM that a client or a reader of the log sees. They were compared
// with the logs and answers of 0.14.1 and 0.32.0 on a CPU (testdata/recordings). What only a GPU produces, and 0.33.0,
// were compared with the sources.
type release struct {
	version  string
	since032 bool   // 0.32.0 or later
	since033 bool   // 0.33.0 or later
	engine   string // the engine's name in the log
}

var releases = map[string]*release{
	"0.14.1": {version: "0.14.1", engine: "EngineCore_DP0"},
	"0.32.0": {version: "0.32.0", since032: true, engine: "EngineCore"},
	"0.33.0": {version: "0.33.0", since032: true, since033: true, engine: "EngineCore"},
}

// releaseOf returns the release that the options name; options without a version mean the first.
func releaseOf(o sim.Options) *release {
	return releases[cmp.Or(o.Version, sim.Versions[0])]
}

// fingerprint returns the system fingerprint, which is nil before 0.32.0 (vllm/entrypoints/serve/utils/fingerprint.py).
// vLLM's fingerprint ends with a hash of its configuration; here the hash is always 0.
func (f *release) fingerprint() *string {
	if !f.since032 {
		return nil
	}
	text := "vllm-" + f.version + "-00000000"
	return &text
}
