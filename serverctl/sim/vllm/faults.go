package vllm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xrash/smetrics"

	"vllmtuner/serverctl/sim"
)

// A Fault is one thing that goes wrong with a simulated server, and when. Faults are a layer around the server's start, its
// HTTP face and its end; the engine in virtual time knows none of them.
type Fault struct {
	Kind    string
	Trigger string        // at, request, running or p; empty when its place in the server's life sets it off
	At      time.Duration // since the start of the process
	Request int           // number of the completion request, from 1, whatever becomes of it
	Running int           // requests in the engine's batch
	P       float64       // chance of each completion request
	Seed    uint64        // of that chance
	For     time.Duration // how long it lasts; 0 means to the end
	Bytes   int64
	Count   int

	text string // as it was given
	kind *kind
}

// String returns the fault as it was given.
func (f Fault) String() string { return f.text }

// Faults are those of one server.
type Faults []Fault

// find returns the first fault of a kind.
func (fs Faults) find(kind string) (Fault, bool) {
	if i := slices.IndexFunc(fs, func(f Fault) bool { return f.Kind == kind }); i >= 0 {
		return fs[i], true
	}
	return Fault{}, false
}

// A FaultError is a fault that cannot be: the user's mistake.
type FaultError struct{ Text string }

// Error names the mistake and what is allowed.
func (e *FaultError) Error() string { return e.Text }

// A kind is all that is known of one kind of fault. What it has decides where it strikes: start on the way to readiness, act
// on the whole server under load, answer or write on single requests. The others are looked up where the server stops.
type kind struct {
	name    string
	keys    []string // those it understands beside triggers
	trigger bool     // at=, request=, running= and p= set it off
	usual   Fault    // what it has without keys

	point point
	start startAction
	last  func(*sim.Profile, sim.Options) string // the exception of which the engine, or the API server, dies

	act    func(*gate, Fault)
	answer answerAction
	write  writeAction
}

// usualRequest sets off the faults of a load when nothing else is said: whoever starts a server has warmed it up by then.
const usualRequest = 10

// lasting are the keys of what has a length.
var lasting = []string{"for"}

// usualLoad is the usual trigger.
var usualLoad = Fault{Trigger: "request", Request: usualRequest}

// kinds are all faults, in the order of a server's life. docs/simulator.md says what each does.
var kinds = []kind{
	{name: "model-not-found", point: atBegin, start: dies, last: modelNotFound},
	{name: "gated-model", point: atBegin, start: dies, last: gatedModel},
	{name: "never-ready", point: whileLoading, keys: lasting, start: lingers},
	{name: "slow-start", point: whileLoading, keys: lasting, usual: Fault{For: 10 * time.Second}, start: lingers},
	{name: "die-loading", point: whileLoading, start: vanishes},
	{name: "oom-start", point: whileProfiling, start: dies, last: outOfMemory},
	{name: "die-profiling", point: whileProfiling, start: dies, last: disturbed},
	{name: "bind-late", point: beforeListening, keys: lasting, usual: Fault{For: 5 * time.Second}, start: lingers},

	// Without a trigger these strike on the way to readiness, with one under load.
	{name: "disk-full", point: whileProfiling, keys: lasting, trigger: true, start: dies,
		act: (*gate).killEngine, last: diskFull},
	{name: "too-many-files", point: whileLoading, keys: lasting, trigger: true, start: dies,
		act: (*gate).killEngine, last: tooManyFiles},
	{name: "nccl", point: whileLoading, keys: lasting, trigger: true, start: dies,
		act: (*gate).killEngine, last: ncclFailed},

	{name: "oom-load", keys: lasting, trigger: true, usual: usualLoad, act: (*gate).killEngine, last: outOfMemory},
	{name: "illegal-memory", keys: lasting, trigger: true, usual: usualLoad, act: (*gate).killEngine, last: illegalAccess},
	{name: "engine-death", keys: lasting, trigger: true, usual: usualLoad, act: (*gate).killEngine},
	{name: "exit-0", trigger: true, usual: usualLoad, act: (*gate).exit},
	{name: "crash", trigger: true, usual: usualLoad, act: (*gate).crash},
	{name: "hang", keys: lasting, trigger: true, usual: usualLoad, act: (*gate).hang},
	{name: "no-acceptance", keys: lasting, trigger: true, usual: Fault{Trigger: "at"}, act: (*gate).refuseDrafts},
	{name: "deaf", keys: lasting, trigger: true, usual: usualLoad, act: (*gate).deaf},
	{name: "flood", keys: []string{"bytes"}, trigger: true, act: (*gate).flood,
		usual: Fault{Trigger: "request", Request: usualRequest, Bytes: 1 << 30}},
	{name: "stop", trigger: true, usual: usualLoad, act: (*gate).stopItself},
	{name: "zombies", keys: []string{"n"}, trigger: true, usual: Fault{Trigger: "at", Count: 8}, act: (*gate).zombies},

	{name: "status-500", keys: lasting, trigger: true, usual: usualLoad, answer: internalError},
	{name: "wrong-type", keys: lasting, trigger: true, usual: usualLoad, answer: webPage},
	{name: "stop-writing", keys: lasting, trigger: true, usual: usualLoad, write: stopWriting},
	{name: "slow-loris", keys: lasting, trigger: true, usual: usualLoad, write: writeSlowly},
	{name: "mid-stream-error", keys: lasting, trigger: true, usual: usualLoad, write: breakStream},
	{name: "truncated", keys: lasting, trigger: true, usual: usualLoad, write: cutStream},

	{name: "daemon", point: atBegin, keys: lasting, usual: Fault{For: 10 * time.Minute}, start: bearsDaemon},
	{name: "leak-shm", point: atBegin, keys: []string{"bytes"}, usual: Fault{Bytes: 16 << 20}, start: leaksShm},
	{name: "ignore-term", point: atBegin, start: ignoresTerm},
	{name: "slow-stop", keys: lasting, usual: Fault{For: 20 * time.Second}},
	{name: "hang-on-connections"},
	{name: "leak-gpu", keys: lasting},
}

// FaultKinds returns the names of all kinds.
func FaultKinds() []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	return names
}

// ParseFaults reads faults as they are given on a command line, each as KIND or KIND:key=value,key=value. Its error is a
// *FaultError.
func ParseFaults(texts ...string) (Faults, error) {
	var faults Faults
	for _, text := range texts {
		f, err := parseFault(text)
		if err != nil {
			return nil, err
		}
		faults = append(faults, f)
	}
	return faults, nil
}

func parseFault(text string) (Fault, error) {
	name, rest, keyed := strings.Cut(text, ":")
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
	if i < 0 {
		return Fault{}, unknownKind(name)
	}
	k := &kinds[i]
	f := k.usual
	f.Kind, f.text, f.kind = name, text, k
	var seen []string
	if keyed {
		for pair := range strings.SplitSeq(rest, ",") {
			key, value, _ := strings.Cut(pair, "=")
			if slices.Contains(seen, key) {
				return Fault{}, f.wrong("%s= is given twice", key)
			}
			seen = append(seen, key)
			if err := f.set(key, value); err != nil {
				return Fault{}, err
			}
		}
	}
	return f, f.check(seen)
}

func unknownKind(name string) error {
	best, least := "", len(name)/4+2
	for _, known := range FaultKinds() {
		if d := smetrics.WagnerFischer(name, known, 1, 1, 1); d < least {
			best, least = known, d
		}
	}
	hint := ""
	if best != "" {
		hint = fmt.Sprintf("did you mean %q? ", best)
	}
	return &FaultError{fmt.Sprintf("there is no fault %q; %sknown are %s", name, hint, strings.Join(FaultKinds(), ", "))}
}

func (f *Fault) wrong(format string, args ...any) error {
	return &FaultError{fmt.Sprintf("fault %q: %s", f.text, fmt.Sprintf(format, args...))}
}

// triggers are the keys that say when a fault begins.
var triggers = []string{"at", "request", "running", "p"}

// allowed are the keys that the fault understands.
func (f *Fault) allowed() []string {
	if !f.kind.trigger {
		return f.kind.keys
	}
	return slices.Concat(triggers, []string{"seed"}, f.kind.keys)
}

// set takes one key.
func (f *Fault) set(key, value string) (err error) {
	if allowed := f.allowed(); !slices.Contains(allowed, key) {
		if len(allowed) == 0 {
			return f.wrong("it has no keys, and not %q", key)
		}
		return f.wrong("it has no key %q; it has %s=", key, strings.Join(allowed, "=, "))
	}
	want := "a number from 1"
	switch key {
	case "at", "for":
		want = "a time with its unit, such as 5s or 300ms"
		var d time.Duration
		if d, err = time.ParseDuration(value); err == nil && (d < 0 || d == 0 && key == "for") {
			err = strconv.ErrRange
		}
		if key == "at" {
			f.At = d
		} else {
			f.For = d
		}
	case "request":
		f.Request, err = count(value)
	case "running":
		f.Running, err = count(value)
	case "n":
		f.Count, err = count(value)
	case "p":
		want = "a chance above 0 and at most 1"
		if f.P, err = strconv.ParseFloat(value, 64); err == nil && !(f.P > 0 && f.P <= 1) {
			err = strconv.ErrRange
		}
	case "seed":
		want = "a whole number from 0"
		f.Seed, err = strconv.ParseUint(value, 10, 64)
	case "bytes":
		want = "a number of bytes from 1, such as 4096 or 64MiB"
		f.Bytes, err = byteCount(value)
	}
	if err != nil {
		return f.wrong("%s=%s: it must be %s", key, value, want)
	}
	return nil
}

func count(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err == nil && n < 1 {
		err = strconv.ErrRange
	}
	return n, err
}

// byteCount reads a number of bytes, with a unit or without.
func byteCount(text string) (int64, error) {
	factor := int64(1)
	for unit, size := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if number, ok := strings.CutSuffix(text, unit); ok {
			text, factor = number, size
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err == nil && (n < 1 || n > 1<<62/factor) {
		err = strconv.ErrRange
	}
	return n * factor, err
}

// check settles the trigger once all keys are read.
func (f *Fault) check(seen []string) error {
	given := slices.DeleteFunc(slices.Clone(seen), func(key string) bool { return !slices.Contains(triggers, key) })
	switch {
	case len(given) > 1:
		return f.wrong("%s= and %s= both say when it begins; give one", given[0], given[1])
	case len(given) == 1:
		f.Trigger = given[0]
	}
	if slices.Contains(seen, "seed") && f.Trigger != "p" {
		return f.wrong("seed= is of p=, which is not given")
	}
	ofRequests := f.kind.answer != nil || f.kind.write != nil
	if ofRequests && slices.Contains(seen, "for") && f.Trigger != "at" {
		return f.wrong("for= is of requests that come at a time; give at= as well")
	}
	if f.kind.start != nil && f.kind.act != nil && slices.Contains(seen, "for") && f.Trigger == "" {
		return f.wrong("for= is how long the API server outlives its engine under load; say when that dies, as by request=10")
	}
	return nil
}
