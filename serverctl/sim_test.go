package serverctl

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
	"vllmtuner/serverctl/sim/vllm"
)

// serverctl reads the facts, the phases and the args of a start from the log of each version's simulated server.
func TestTheLogOfEachSimulatedVersionIsRead(t *testing.T) {
	for _, version := range sim.Versions {
		p, err := sim.LoadProfile("small-fast")
		if err != nil {
			t.Fatal(err)
		}
		p.StartUp = sim.StartUp{Weights: 0.01, Profile: 0.01, Compile: 0.01, Graphs: 0.01}
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(free.Addr().String())
		free.Close()
		log := new(transcript)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() {
			s := &vllm.Server{Profile: p, Version: version, Out: log}
			done <- s.Serve(ctx, []string{"/m", "--max-num-seqs", "8", "--port", port, "--api-key", "sk-secret-secret"})
		}()
		await(t, "the server is ready", func() bool { return strings.Contains(log.all(), "Application startup complete") })
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		var l logbook
		l.begin(time.Now())
		fmt.Fprint(&l, log.all())
		f := l.snapshot().facts
		tokens, concurrency := f.KVCacheTokens, f.MaxConcurrency
		if f.Version != version || !f.Simulated || tokens == 0 || concurrency == 0 || f.KVCacheGiB == 0 || f.ModelGiB != 8 || f.GraphGiB == 0 {
			t.Errorf("%s: the facts are %+v", version, f)
		}
		if args := l.snapshot().args; args["max-num-seqs"] != "8" || args["model"] != "/m" || args["api-key"] != "" {
			t.Errorf("%s: the args are %v", version, args)
		}
		var phases []string
		for _, part := range l.endStart(time.Now()) {
			phases = append(phases, part.Name)
		}
		if want := []string{firstPhase, loadingPhase, "profiling memory", "compiling", "capturing graphs and warming up", "starting the HTTP server"}; !slices.Equal(phases, want) {
			t.Errorf("%s: the phases are %q, want %q", version, phases, want)
		}
	}
}

// parseHelp reads all flags from the help of each version, and takes nothing else for a flag.
func TestTheHelpOfEachSimulatedVersionIsRead(t *testing.T) {
	for _, version := range sim.Versions {
		help, ok := (&vllm.Server{Version: version}).Help([]string{"--help=all"})
		if !ok {
			t.Fatal("no help")
		}
		text, err := os.ReadFile(filepath.Join("sim", "versions", version, "flags.json"))
		if err != nil {
			t.Fatal(err)
		}
		var flags []struct{ Names, Choices []string }
		if err := json.Unmarshal(text, &flags); err != nil {
			t.Fatal(err)
		}
		want := map[string]bool{}
		for _, f := range flags {
			for _, name := range f.Names {
				want[name] = true
			}
		}
		read := parseHelp(help)
		for name := range want {
			if !read.has(name) {
				t.Errorf("%s: %s was not read", version, name)
			}
		}
		for name := range maps.Keys(read) {
			if !want[name] {
				t.Errorf("%s: %s was read, and is no flag", version, name)
			}
		}
		// The help of 0.33.0 shows a list in place of the value, but its argparse does not check values against this
		// list. So the list must not be read as choices.
		if choices := read["--kv-cache-dtype"]; slices.Contains(choices, "fp8") == (version == "0.33.0") {
			t.Errorf("%s: the choices of --kv-cache-dtype are %v", version, choices)
		}
	}
}
