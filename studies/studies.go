// Package studies keeps studies, trials and probes in SQLite on a shared disk, so that a killed study resumes where it
// stopped. It never chooses a point and never judges a measurement.
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

// ErrLocked is returned by Lock when another process has the lock.
var ErrLocked = errors.New("another tuner uses this folder")

// ErrSilent is returned when the study's disk has not answered for so long that others may take the study over.
var ErrSilent = fence.ErrSilent

// ErrWorldChanged is returned by Open when the study was begun in another world, and the user has not accepted the
// change. A world is all that must not change while trials are compared.
var ErrWorldChanged = errors.New("these values changed since the study began")

// ErrUnusable is wrapped by errors that come back at the next try: the study does not exist, is damaged or comes from a
// newer tuner, or its directory is full or not writable for this user.
var ErrUnusable = errors.New("it cannot be used as it is")

// A State says how far a study or a trial has come.
type State string

// The states.
const (
	Running State = "running" // a tuner works on it, or was killed
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
	Preset  Origin = "preset"  // a point that does well on many servers
	Sampled Origin = "sampler" // the study's sampler
	// Confirmed is a point that the search found best, measured once more with fresh requests.
	Confirmed Origin = "confirm"

	Prior Origin = "prior" // an imported trial, measured elsewhere before this study
)

// A Study is one study with all its trials.
type Study struct {
	ID      string // random, made once
	Name    string
	Seed    uint64
	File    string            // text of the study file, as its last owner had it
	World   map[string]string // what was asked for and must not change: model, server args, workload, SLO, …
	Found   map[string]string // facts of the machine that must not change: GPU, image, …; a fact that becomes known later is no change
	Noted   map[string]string // what may change: host, driver, server version, …
	State   State
	Note    string // one line that explains the state; see Explanation
	Remedy  string // what the user can do about the state Failed; "" if that is not known
	Created time.Time
	Updated time.Time // time of the last commit
	Commits int64     // number of commits
	Behind  string    // if this is an older snapshot, why the newest cannot be read; "" otherwise
	Events  []Event   // what happened to the study, the oldest first
	Trials  []Trial   // sorted by number
	// Spent has the time of all runs of the study, by parts. It is empty for a study of an older tuner.
	Spent trial.Spent
	Prior []Trial // imported trials in the order of their import: hints for the search, and never its winner

	// OldCache says how older tuners treated the prefix cache in the trials of this study. The results of those trials
	// do not say it. "" means that it is not known.
	OldCache trial.Protocol

	// Only ReadLive sets Life and Unseen, for a study that was published as Running.
	Life   fence.Life
	Unseen string // why nothing is known of the owner; "" if Life has what is known
}

// Explanation returns the Note and the Remedy as one line for a person.
func (s Study) Explanation() string {
	if s.Remedy == "" {
		return s.Note
	}
	return s.Note + remedyMark + s.Remedy
}

// remedyMark stands between a note and a remedy.
const remedyMark = "; "

// An Event is something that happened to a study: docs/schema.md lists the kinds.
type Event struct {
	Time    time.Time
	Kind    string
	Note    string  // text for people; "" if Changes describe the event
	Trial   int     // number of the first trial that began after the event
	Changes Changes // the changes of an event of the kinds drift and noted; nil for other kinds
}

// Text describes the event for a person: the Note, or a line for each of the Changes.
func (e Event) Text() string {
	if len(e.Changes) > 0 {
		return e.Changes.String()
	}
	return e.Note
}

// Kinds of Event.
const (
	Drift    = "drift"    // the user accepted a change of the world; trials before it were measured in another world
	Restored = "restored" // the study went on from a snapshot, because the database was damaged or lost

	remedyEvent = "remedy" // what the user can do about the failure in the event before it
)

// A Trial is one point with its measurements.
type Trial struct {
	Number int
	Origin Origin
	Source string // what a Prior trial was read from, such as the path of a result file; "" for the study's own
	// PredictedFor is the number of the world, from 1, for which the simulator predicted the trial. 0 means that the
	// trial was measured.
	PredictedFor int
	Point        space.Point
	Args         []string // all args of the server after the model, the fixed ones first
	State        State    // Running or Done
	// Version is the version of the server that measured the probes; "" before a server has reported it.
	Version string
	Began   time.Time
	Ended   time.Time // zero while Running
	Probes  []trial.Probe
	Result  trial.Result // zero while Running
}

// Predicted reports whether the trial was never measured, because the simulator predicted it.
func (t Trial) Predicted() bool { return t.PredictedFor > 0 }

// Met reports whether the trial is finished and a rate kept the SLO.
func (t Trial) Met() bool {
	return t.State == Done && t.Result.Outcome == trial.Measured && t.Result.Capacity.Met()
}
