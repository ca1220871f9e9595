package vllm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/tuner/space"
)

// A Fault is a failure of the simulated server, with the trigger that starts it. Faults act on the server's start, its
// HTTP API and its end. A simulation in virtual time, without a server, has no faults.
type Fault struct {
	Kind    string
	Trigger string        // the name of the trigger's key: at, request, running or p; empty when the fault acts at a fixed point of the server's life
	At      time.Duration // time since the start of the process
	Request int           // the number of the completion request, from 1; failed requests count
	Running int           // the fault begins at this number of running requests
	P       float64       // chance that a completion request triggers the fault
	Seed    uint64        // seed of the random numbers for P
	For     time.Duration // how long the fault lasts; 0 means until the server ends
	Bytes   int64
	Count   int

	text string // the fault as the user wrote it
	kind *faultKind
}

// String returns the fault as the user wrote it.
func (f Fault) String() string { return f.text }

// Faults are the faults of one server.
type Faults []Fault

// find returns the first fault of a kind.
func (fs Faults) find(kind string) (Fault, bool) {
	if i := slices.IndexFunc(fs, func(f Fault) bool { return f.Kind == kind }); i >= 0 {
		return fs[i], true
	}
	return Fault{}, false
}

// A FaultError says what is wrong with a fault that the user gave.
type FaultError struct{ Text string }

// Error names the mistake and the allowed values.
func (e *FaultError) Error() string { return e.Text }

// A faultKind describes one kind of fault. If the field start is set, the fault acts while the server starts. If the
// field act is set, it acts on the whole server under load. If the field answer or write is set, it acts on single
// requests. The server looks up all other kinds by name.
type faultKind struct {
	name     string
	keys     []string // keys of this kind, without the keys of triggers
	trigger  bool     // the fault accepts at=, request=, running= and p=
	defaults Fault    // the fault if the user gives no keys

	point     startPoint
	start     startAction
	exception string // name of the exception that ends the engine or the API server

	act    func(*faultHandler, Fault)
	answer answerAction
	write  writeAction
}

// defaultRequest is the number of the request that triggers a fault under load by default. When that request comes, the
// server has warmed up.
const defaultRequest = 10

// lasting are the keys of faults that have a duration.
var lasting = []string{"for"}

// defaultLoad is a fault under load with its default trigger.
var defaultLoad = Fault{Trigger: "request", Request: defaultRequest}

// faultKinds are all faults in the order of a server's life. docs/simulator.md describes them.
var faultKinds = []faultKind{
	{name: "model-not-found", point: atBegin, start: raise, exception: "model-not-found"},
	{name: "gated-model", point: atBegin, start: raise, exception: "gated-model"},
	{name: "never-ready", point: whileLoading, keys: lasting, start: delay},
	{name: "slow-start", point: whileLoading, keys: lasting, defaults: Fault{For: 10 * time.Second}, start: delay},
	{name: "die-loading", point: whileLoading, start: killEngine},
	{name: "oom-start", point: whileProfiling, start: raise, exception: "out-of-memory"},
	{name: "die-profiling", point: whileProfiling, start: raise, exception: "profiling"},
	{name: "bind-late", point: beforeListening, keys: lasting, defaults: Fault{For: 5 * time.Second}, start: delay},

	// Without a trigger these faults act during the start; with a trigger they act under load.
	{name: "disk-full", point: whileProfiling, keys: lasting, trigger: true, start: raise,
		act: (*faultHandler).killEngine, exception: "disk-full"},
	{name: "too-many-files", point: whileLoading, keys: lasting, trigger: true, start: raise,
		act: (*faultHandler).killEngine, exception: "too-many-files"},
	{name: "nccl", point: whileLoading, keys: lasting, trigger: true, start: raise,
		act: (*faultHandler).killEngine, exception: "nccl"},

	{name: "oom-load", keys: lasting, trigger: true, defaults: defaultLoad,
		act: (*faultHandler).killEngine, exception: "out-of-memory"},
	{name: "illegal-memory", keys: lasting, trigger: true, defaults: defaultLoad,
		act: (*faultHandler).killEngine, exception: "illegal-access"},
	{name: "engine-death", keys: lasting, trigger: true, defaults: defaultLoad, act: (*faultHandler).killEngine},
	{name: "exit-0", trigger: true, defaults: defaultLoad, act: (*faultHandler).exit},
	{name: "crash", trigger: true, defaults: defaultLoad, act: (*faultHandler).crash},
	{name: "hang", keys: lasting, trigger: true, defaults: defaultLoad, act: (*faultHandler).hang},
	{name: "no-acceptance", keys: lasting, trigger: true, defaults: Fault{Trigger: "at"}, act: (*faultHandler).rejectDrafts},
	{name: "deaf", keys: lasting, trigger: true, defaults: defaultLoad, act: (*faultHandler).ignoreClients},
	{name: "flood", keys: []string{"bytes"}, trigger: true, act: (*faultHandler).flood,
		defaults: Fault{Trigger: "request", Request: defaultRequest, Bytes: 1 << 30}},
	{name: "stop", trigger: true, defaults: defaultLoad, act: (*faultHandler).stopItself},
	{name: "zombies", keys: []string{"n"}, trigger: true, defaults: Fault{Trigger: "at", Count: 8}, act: (*faultHandler).zombies},

	{name: "status-500", keys: lasting, trigger: true, defaults: defaultLoad, answer: internalError},
	{name: "wrong-type", keys: lasting, trigger: true, defaults: defaultLoad, answer: webPage},
	{name: "stop-writing", keys: lasting, trigger: true, defaults: defaultLoad, write: stopWriting},
	{name: "slow-loris", keys: lasting, trigger: true, defaults: defaultLoad, write: writeSlowly},
	{name: "mid-stream-error", keys: lasting, trigger: true, defaults: defaultLoad, write: breakStream},
	{name: "truncated", keys: lasting, trigger: true, defaults: defaultLoad, write: cutStream},

	{name: "daemon", point: atBegin, keys: lasting, defaults: Fault{For: 10 * time.Minute}, start: startDaemon},
	{name: "leak-shm", point: atBegin, keys: []string{"bytes"}, defaults: Fault{Bytes: 16 << 20}, start: leakShm},
	{name: "ignore-term", point: atBegin, start: ignoreTerm},
	{name: "slow-stop", keys: lasting, defaults: Fault{For: 20 * time.Second}},
	{name: "hang-on-connections"},
	{name: "leak-gpu", keys: lasting},
}

// faultNames returns the names of all kinds.
func faultNames() []string {
	names := make([]string, len(faultKinds))
	for i, k := range faultKinds {
		names[i] = k.name
	}
	return names
}

// parseFaults reads faults from a command line, each as KIND or KIND:key=value,key=value. Its error is a *FaultError.
func parseFaults(texts ...string) (Faults, error) {
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
	i := slices.IndexFunc(faultKinds, func(k faultKind) bool { return k.name == name })
	if i < 0 {
		return Fault{}, unknownKind(name)
	}
	k := &faultKinds[i]
	f := k.defaults
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
	return &FaultError{fmt.Sprintf("there is no fault %q; %s", name, space.DidYouMean(name, faultNames()))}
}

func (f *Fault) wrong(format string, args ...any) error {
	return &FaultError{fmt.Sprintf("fault %q: %s", f.text, fmt.Sprintf(format, args...))}
}

// triggers are the keys that say when a fault begins.
var triggers = []string{"at", "request", "running", "p"}

// allowed returns the keys that the fault accepts.
func (f *Fault) allowed() []string {
	if !f.kind.trigger {
		return f.kind.keys
	}
	return slices.Concat(triggers, []string{"seed"}, f.kind.keys)
}

// set sets one key of the fault to a value.
func (f *Fault) set(key, value string) (err error) {
	if allowed := f.allowed(); !slices.Contains(allowed, key) {
		if len(allowed) == 0 {
			return f.wrong("it has no keys, so %q is wrong", key)
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

// byteCount reads a number of bytes, with or without a unit.
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

// check sets the trigger, and refuses keys that exclude each other. The parameter seen lists the keys that the user
// gave.
func (f *Fault) check(seen []string) error {
	given := slices.DeleteFunc(slices.Clone(seen), func(key string) bool { return !slices.Contains(triggers, key) })
	switch {
	case len(given) > 1:
		return f.wrong("%s= and %s= both say when the fault begins; give one of them", given[0], given[1])
	case len(given) == 1:
		f.Trigger = given[0]
	}
	if slices.Contains(seen, "seed") && f.Trigger != "p" {
		return f.wrong("seed= needs p=")
	}
	ofRequests := f.kind.answer != nil || f.kind.write != nil
	if ofRequests && slices.Contains(seen, "for") && f.Trigger != "at" {
		return f.wrong("for= needs at= as well: at= says when the fault begins, and for= how long it lasts")
	}
	if f.kind.start != nil && f.kind.act != nil && slices.Contains(seen, "for") && f.Trigger == "" {
		return f.wrong("for= is how long the API server outlives its engine under load; give a trigger as well, such as request=10")
	}
	return nil
}
