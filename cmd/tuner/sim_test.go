package main

import (
	"strings"
	"testing"
)

func TestSimRefusesAnUnknownFault(t *testing.T) {
	for _, row := range []struct{ name, args, want string }{
		{"a kind that is nearly one", "serve m --sim-fault oom-lod", `tuner: there is no fault "oom-lod"; did you mean "oom-load"?`},
		{"a key that the kind does not have", "serve m --sim-fault hang:bytes=3", `tuner: fault "hang:bytes=3": it has no key "bytes"`},
		{"a version that is not simulated", "serve m --sim-version 0.20.0", "tuner: --sim-version 0.20.0: this version of vLLM is not simulated; choose from 0.14.1, 0.32.0, 0.33.0"},
		{"a leak without a GPU", "serve m --sim-fault leak-gpu", "give --sim-gpu DIR"},
	} {
		_, stderr, code := inProcess(t, append([]string{"sim"}, strings.Fields(row.args)...)...)
		if code != exitUsage || !strings.Contains(stderr, row.want) {
			t.Errorf("%s: exit code %d, %q, want exit code %d with %q", row.name, code, stderr, exitUsage, row.want)
		}
	}
}

// The help of the simulated server is vLLM's own, because the tuner learns vLLM's flags from it.
func TestSimHelpKnowsNothingOfFaults(t *testing.T) {
	if help := command(t, "sim", "serve", "--help=all"); strings.Contains(help, "sim-") || !strings.Contains(help, "--max-num-seqs") {
		t.Errorf("sim serve --help=all prints\n%s", help)
	}
	if help := command(t, "sim", "--help"); strings.Contains(help, "engine") || strings.Contains(help, "nvidia") {
		t.Errorf("sim --help shows commands that no user calls:\n%s", help)
	}
}
