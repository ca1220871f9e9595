// Package studies keeps studies, trials and probes in SQLite on a shared disk, so that a killed study goes on where it was.
// It never chooses a point and never judges a measurement.
package studies

import (
	"errors"
	"time"

	"vllmtuner/studies/fence"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// ErrOwned is returned by Open when another tuner owns the study.
var ErrOwned = fence.ErrOwned

// ErrSilent is returned when the study's disk does not answer for so long that others may have taken the study over.
var ErrSilent = fence.ErrSilent

// ErrWorldChanged is returned by Open when the study was begun in another world and the drift was not accepted.
var ErrWorldChanged = errors.New("the world changed since the study began")

// ErrUnusable is wrapped by errors that trying again does not mend: of a study that is not there, is damaged or is of a newer tuner, and of a
// directory that is full or that this user may not write to.
var ErrUnusable = errors.New("it cannot be used as it is")

// A State says how far a study or a trial has come.
type State string

// The states.
const (
	Running State = "running" // someone is, or was when killed, at work on it
	Done    State = "done"    // finished
	Stopped State = "stopped" // study only: interrupted and safely stored
	Spent   State = "spent"   // study only: the budget ended before an answer
	Failed  State = "failed"  // study only: could not go on; see Note

	NotBegun State = "not begun" // study only: its first run ended before its first trial; see Note
)

// An Origin says who chose a trial's point.
type Origin string

// The origins.
const (
	Default Origin = "default" // trial 0: the server's own default
	Current Origin = "current" // trial 1: the user's current args
	Sampled Origin = "sampler" // the study's sampler
	Prior   Origin = "prior"   // another tool, or another study, that measured it before this study began
)

// A Study is all that is known of one study, as readers see it.
type Study struct {
	ID      string // random, made once
	Name    string
	Seed    uint64
	File    string            // text of the study file as its last owner had it
	World   map[string]string // what must not change, as it was asked for: model, server args, workload, SLO, …
	Found   map[string]string // likewise, as the machine has it: GPU, image, … Where nothing was known it may appear.
	Noted   map[string]string // what may change: host, driver, server version, …
	State   State
	Note    string // one line that explains the state
	Created time.Time
	Updated time.Time // of the last commit
	Commits int64     // how many there were
	Behind  string    // why this is not what was published last, which cannot be read; empty where it is
	Events  []Event   // what happened to the study, in its order
	Trials  []Trial   // by number
	Prior   []Trial   // what was measured before and elsewhere, in the order in which it was added: a hint to the search, and never its winner

	// Only ReadLive knows these, of a study that was published as Running.
	Life   fence.Life
	Unseen string // why nothing is known of its owner
}

// An Event is something that happened to a study: docs/schema.md lists the kinds.
type Event struct {
	Time    time.Time
	Kind    string
	Text    string  // for a person; of Changes a line for each
	Trial   int     // number of the first trial that began after it
	Changes Changes // of Drift, and of noted facts
}

// Kinds of Event.
const (
	Drift    = "drift"    // a change of the world was accepted: what was measured before was measured in another
	Restored = "restored" // from a snapshot, as the database was damaged or lost
)

// A Trial is one point with what was found.
type Trial struct {
	Number int
	Origin Origin
	Source string // what a Prior trial was read from, such as the path of a result file; "" of the study's own
	Point  space.Point
	Args   []string // all args of the server after the model, fixed ones first
	State  State    // Running or Done
	// Version is of the server that its probes were measured on; "" while none has said it.
	Version string
	Began   time.Time
	Ended   time.Time // zero while Running
	Probes  []trial.Probe
	Result  trial.Result // zero while Running
}

// Met reports whether the trial is finished and some rate kept the SLO.
func (t Trial) Met() bool {
	return t.State == Done && t.Result.Outcome == trial.Measured && t.Result.Capacity.Met()
}
