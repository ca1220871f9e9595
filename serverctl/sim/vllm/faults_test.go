package vllm

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
)

func TestParseFaults(t *testing.T) {
	for _, row := range []struct {
		name, text string
		want       Fault  // the test compares only the trigger and its values
		wrong      string // part of the error; empty when the fault is valid
	}{
		{"a kind alone has its default trigger", "oom-load", Fault{Trigger: "request", Request: 10}, ""},
		{"a fault of the start has no trigger", "oom-start", Fault{}, ""},
		{"a given trigger replaces the default one", "oom-load:running=4,for=1s", Fault{Trigger: "running", Request: 10, Running: 4, For: time.Second}, ""},
		{"a time after the start", "hang:at=1m30s", Fault{Trigger: "at", Request: 10, At: 90 * time.Second}, ""},
		{"a chance with its seed", "status-500:p=0.25,seed=7", Fault{Trigger: "p", Request: 10, P: 0.25, Seed: 7}, ""},
		{"bytes with a unit", "flood:bytes=64MiB", Fault{Trigger: "request", Request: 10, Bytes: 64 << 20}, ""},
		{"bytes without a unit", "leak-shm:bytes=4096", Fault{Bytes: 4096}, ""},
		{"a number of processes", "zombies:n=3,at=0s", Fault{Trigger: "at", Count: 3}, ""},
		{"disk-full acts at the start", "disk-full", Fault{}, ""},
		{"disk-full with a trigger acts under load", "disk-full:request=5", Fault{Trigger: "request", Request: 5}, ""},
		{"all requests of two seconds", "wrong-type:at=1s,for=2s", Fault{Trigger: "at", Request: 10, At: time.Second, For: 2 * time.Second}, ""},

		{"a misspelt kind", "oom-lod", Fault{}, `there is no fault "oom-lod"; did you mean "oom-load"?`},
		{"an unknown kind", "meteorite", Fault{}, `there is no fault "meteorite"; use one of model-not-found, gated-model, `},
		{"an empty text", "", Fault{}, `there is no fault ""`},
		{"an unknown key", "hang:after=3s", Fault{}, `it has no key "after"; it has at=, request=, running=, p=, seed=, for=`},
		{"a key of another kind", "hang:bytes=3", Fault{}, `it has no key "bytes"`},
		{"a trigger for a fault of the start", "oom-start:request=3", Fault{}, `it has no keys, so "request" is wrong`},
		{"a key without value", "hang:for", Fault{}, "for=: it must be a time with its unit"},
		{"a time without unit", "hang:for=3", Fault{}, "for=3: it must be a time with its unit"},
		{"a duration of 0", "slow-start:for=0s", Fault{}, "for=0s: it must be a time"},
		{"a negative time", "hang:at=-1s", Fault{}, "at=-1s: it must be a time"},
		{"requests are counted from 1", "hang:request=0", Fault{}, "request=0: it must be a number from 1"},
		{"a chance above 1", "hang:p=1.5", Fault{}, "p=1.5: it must be a chance above 0 and at most 1"},
		{"a chance that is not a number", "hang:p=NaN", Fault{}, "p=NaN: it must be a chance"},
		{"more bytes than 64 bits can count", "flood:bytes=9999999999GiB", Fault{}, "it must be a number of bytes"},
		{"two triggers", "hang:at=1s,request=3", Fault{}, "at= and request= both say when the fault begins; give one of them"},
		{"a key twice", "hang:at=1s,at=2s", Fault{}, "at= is given twice"},
		{"a seed without a chance", "hang:seed=3", Fault{}, "seed= needs p="},
		{"a duration for a single request", "truncated:request=3,for=2s", Fault{}, "for= needs at= as well: at= says when the fault begins, and for= how long it lasts"},
		{"a duration for an engine that does not start", "nccl:for=2s", Fault{}, "give a trigger as well"},
	} {
		t.Run(row.name, func(t *testing.T) {
			faults, err := parseFaults(row.text)
			if row.wrong != "" {
				if _, ours := errors.AsType[*FaultError](err); !ours || !strings.Contains(err.Error(), row.wrong) {
					t.Errorf("parseFaults(%q) = %v, want %q", row.text, err, row.wrong)
				}
				return
			}
			if err != nil || len(faults) != 1 {
				t.Fatalf("parseFaults(%q) = %v, %v", row.text, faults, err)
			}
			got := faults[0]
			if got.String() != row.text || got.Kind != got.kind.name {
				t.Errorf("parseFaults(%q) is %q of kind %s", row.text, got, got.Kind)
			}
			got.Kind, got.kind, got.text = "", nil, ""
			if got != row.want {
				t.Errorf("parseFaults(%q) = %+v, want %+v", row.text, got, row.want)
			}
		})
	}
}

func TestFromArgsTakesItsOwnFlagsOut(t *testing.T) {
	env := map[string]string{"TUNER_SIM_PROFILE": "h200-llama70b-fp8", "TUNER_SIM_FAULTS": "oom-start; hang:at=5s ;", "TUNER_SIM_GPU_DIR": "/gpu"}
	getenv := func(name string) string { return env[name] }
	args := strings.Fields("my/model --sim-profile small-fast --max-num-seqs 8 --sim-fault=daemon --sim-fault flood:bytes=1KiB --sim-engine-process --sim-gpu=/other --port 1")
	s, rest, err := FromArgs(args, getenv)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Fields("my/model --max-num-seqs 8 --port 1"); !slices.Equal(rest, want) {
		t.Errorf("the remaining args are %q, want %q", rest, want)
	}
	if want := strings.Fields("--sim-profile=small-fast --sim-gpu=/other --sim-fault=oom-start --sim-fault=hang:at=5s --sim-fault=daemon --sim-fault=flood:bytes=1KiB"); !slices.Equal(s.ownArgs(), want) || !s.EngineProcess {
		t.Errorf("ownArgs = %q, want %q; EngineProcess is %v, want true", s.ownArgs(), want, s.EngineProcess)
	}
	if s, rest, err = FromArgs([]string{"--port", "1", "--sim-gpu"}, func(string) string { return "" }); err != nil || s.Profile.Name != defaultProfile || s.GPU != "" || len(rest) != 3 {
		t.Errorf("a flag without its value: %+v, %q, %v; want it left for vLLM to refuse", s, rest, err)
	}
	if _, _, err = FromArgs(nil, getenv); err != nil {
		t.Error(err)
	}
	env["TUNER_SIM_FAULTS"] = "hnag"
	if _, _, err = FromArgs(nil, getenv); err == nil || !strings.Contains(err.Error(), `did you mean "hang"`) {
		t.Errorf("FromArgs = %v, want the nearest kind", err)
	}
}

func TestFaultsThatNeedMoreSaySo(t *testing.T) {
	for _, row := range []struct {
		name   string
		server Server
		want   string
	}{
		{"a leak without a GPU", Server{Faults: parsed(t, "leak-gpu"), Reexec: []string{"x"}}, "give --sim-gpu"},
		{"a daemon of a program that cannot start itself", Server{Faults: parsed(t, "daemon")}, "needs Server.Reexec"},
		{"zombies of a program that cannot start itself", Server{Faults: parsed(t, "zombies")}, "needs Server.Reexec"},
		{"an engine process of a program that cannot start itself", Server{EngineProcess: true}, "needs Server.Reexec"},
	} {
		err := row.server.Serve(t.Context(), nil)
		if _, ours := errors.AsType[*FaultError](err); !ours || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: Serve = %v, want %q", row.name, err, row.want)
		}
	}
}

func parsed(t *testing.T, texts ...string) Faults {
	t.Helper()
	faults, err := parseFaults(texts...)
	if err != nil {
		t.Fatal(err)
	}
	return faults
}

// The seed of a fault decides which requests the fault hits, so every run hits the same requests.
func TestASeedDecidesWhichRequestsAFaultHits(t *testing.T) {
	small := profile(t, "small-fast")
	engine, err := sim.NewEngine(small, small.Defaults)
	if err != nil {
		t.Fatal(err)
	}
	hits := func(text string) (numbers []int) {
		g := newFaultHandler(&Server{Faults: parsed(t, text)}, nil, newLive(engine), nil, time.Now())
		for number := range 1000 {
			if g.enter() != nil {
				numbers = append(numbers, number)
			}
		}
		return numbers
	}
	first := hits("status-500:p=0.3,seed=7")
	if n := len(first); n < 250 || n > 350 {
		t.Errorf("%d of 1,000 requests are hit at p=0.3", n)
	}
	if !slices.Equal(first, hits("status-500:p=0.3,seed=7")) {
		t.Error("the same seed hits other requests")
	}
	if slices.Equal(first, hits("status-500:p=0.3,seed=8")) {
		t.Error("another seed hits the same requests")
	}
	if n := len(hits("status-500:p=1")); n != 1000 {
		t.Errorf("%d of 1,000 requests are hit at p=1", n)
	}
}

func TestTheDocumentHasEveryFault(t *testing.T) {
	text, err := os.ReadFile("../../../docs/simulator.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range faultNames() {
		if !strings.Contains(string(text), "\n| `"+kind+"` |") {
			t.Errorf("docs/simulator.md has no row for %s", kind)
		}
	}
}
