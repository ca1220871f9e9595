// Package guard borrows the GPU of a production Deployment for a study, and gives it back whatever happens. It decides from
// what it sees in the cluster alone, so it can be killed after any call and go on. It never measures.
package guard

import (
	"errors"
	"slices"
	"strings"
	"time"
)

// A Phase says what the guard owes to production.
type Phase string

// The phases of a loan. A loan without a record has not begun, or is over.
const (
	Tuning      Phase = "Tuning"      // production is scaled down or about to be, and the study runs
	Verifying   Phase = "Verifying"   // production gets the winning args, and is watched
	RollingBack Phase = "RollingBack" // production goes back to its args of before
	Returning   Phase = "Returning"   // production gets its GPU before the study's end
)

// A Record says what production had before the guard took its GPU. The guard creates it before it touches production. Its
// creation is also the lock: only one study can borrow from a Deployment.
type Record struct {
	Version    int       `json:"version"`
	Study      string    `json:"study"`          // name of the study's Job
	Deployment string    `json:"deployment_uid"` // another Deployment of the same name is not touched
	Replicas   int32     `json:"replicas"`
	Container  string    `json:"container"`         // the container that serves
	Args       []string  `json:"args"`              // of this container
	Applied    []string  `json:"applied,omitempty"` // the winning args; nil before they are applied
	Phase      Phase     `json:"phase"`
	Since      time.Time `json:"since"`              // when the phase began
	Why        string    `json:"why,omitempty"`      // why the phase began
	Generation int64     `json:"generation"`         // of the Deployment, before the guard scaled it down. If it has replicas at another one, somebody has scaled it up
	Resisted   int       `json:"resisted,omitempty"` // how often a controller scaled production up, and the guard took it down again
	Starting   bool      `json:"starting,omitempty"` // whether the guard is about to start the study; false once it was seen to run
	Started    int       `json:"started,omitempty"`  // how often the guard started the study
	Waiting    time.Time `json:"waiting,omitzero"`   // since when no pod of the study runs; zero if one does
}

// recordVersion is the version of the format of a Record.
const recordVersion = 1

// in returns the record in another phase.
func (r Record) in(p Phase, now time.Time, why string) Record {
	r.Phase, r.Since, r.Why = p, now, why
	return r
}

// A Deployment is production, as far as the guard must know it.
type Deployment struct {
	UID        string
	Generation int64    // Kubernetes counts it up with each change of the specification
	Replicas   int32    // wanted
	Serves     bool     // whether it has the container that serves
	Args       []string // of this container
	ScaledBy   string   // field manager that owns Replicas; "" if nobody does, as after `kubectl scale`
	Rollout    Rollout
	Alive      int // pods that have not ended, old ones too
}

func (d Deployment) has(args []string) bool { return slices.Equal(d.Args, args) }

// A Rollout says whether all wanted pods of a Deployment run with its present args.
type Rollout struct {
	Done   bool
	Failed string // why it will not be done; "" if that is not known
}

// A JobState is the state of the study's Job.
type JobState string

// The states of the study's Job.
const (
	Missing   JobState = "missing"
	Suspended JobState = "suspended"
	Running   JobState = "running"
	Complete  JobState = "complete"
	Failed    JobState = "failed"
)

// A Job is the study's Job, as far as the guard must know it.
type Job struct {
	State   JobState
	Loan    *Record // a copy of the record as its phase Tuning or Verifying began, in case somebody deletes it; nil before
	Outcome Outcome // how the loan ended, once the guard has noted it; "" before
	Runs    bool    // whether one of its pods runs, and was not told to end
}

// over reports whether the study needs the GPU no longer. A pod of it may still end: the scheduler lets production wait for
// the GPU until then.
func (j Job) over() bool { return j.State == Complete || j.State == Failed || j.State == Missing }

// An Outcome says how a loan ended: a word, a colon and the reason. The guard notes it on the study's Job before it deletes
// the record, so a guard that starts again later still knows it.
type Outcome string

// The words of an Outcome.
const (
	Applied    = "applied"     // production runs with the winning args
	Kept       = "kept"        // production runs with its own args, although the winning args were to be applied
	RolledBack = "rolled back" // the winning args did not run, so production has its own again
	Returned   = "returned"    // the GPU was given back before the study's end; the study does not begin again by itself
)

func outcome(word, why string) Outcome { return Outcome(word + ": " + why) }

// Is reports whether the Outcome has a word.
func (o Outcome) Is(word string) bool { return strings.HasPrefix(string(o), word+":") }

// A View is what the guard sees of the cluster at one moment.
type View struct {
	Record     *Record     // nil if there is none
	Deployment *Deployment // nil if there is none
	Job        Job
}

// The errors of a Cluster.
var (
	// ErrConflict says that the object changed since the last View, so nothing was written.
	ErrConflict = errors.New("the object has changed")
	// ErrForbidden says that the guard has no right to a call. It names the rule that grants it.
	ErrForbidden = errors.New("no permission")
)

// The ends of a guard that did not do what it was asked to do.
var (
	ErrNoDeployment    = errors.New("there is no such Deployment")
	ErrNoContainer     = errors.New("the Deployment has no container of that name")
	ErrNothingToBorrow = errors.New("the Deployment has 0 replicas, so it has no GPU to borrow; start the study's Job without a guard")
	ErrNoStudy         = errors.New("the study's Job is gone")
	ErrStudyFailed     = errors.New("the study failed; production has its replicas back")
	ErrStopped         = errors.New("told to end")
	ErrHeld            = errors.New("another study has borrowed this Deployment")
)

// An OutcomeError is an Outcome that the user did not ask for.
type OutcomeError struct{ Outcome Outcome }

func (e *OutcomeError) Error() string { return string(e.Outcome) }
