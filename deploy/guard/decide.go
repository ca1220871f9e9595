package guard

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"vllmtuner/render"
)

// A verb is one call that changes the cluster, or none.
type verb int

const (
	look         verb = iota // nothing to do; look again soon
	createRecord             // step.record is new
	noteLoan                 // the study's Job gets a copy of step.record
	updateRecord             // step.record has another phase or count
	deleteRecord             // the loan is over
	scale                    // production gets step.replicas
	setArgs                  // production gets step.args
	resumeStudy              // the study's Job may start its pod
	noteOutcome              // the study's Job gets step.outcome; it is suspended if the GPU is returned early
	end                      // the guard has nothing left to do
)

// A step is what the guard does next, and why.
type step struct {
	verb     verb
	why      string
	record   Record
	replicas int32
	args     []string
	outcome  Outcome
	err      error // with end: why the guard did not do what it was asked to do
}

// Settings are the user's choices.
type Settings struct {
	Study          string        // name of the study's Job
	Container      string        // of the Deployment, the container that serves
	StopReason     string        // why the guard gives the GPU back if it is told to end; "" means that it was told to
	DrainTimeout   time.Duration // how long production's pods may take to end
	StudyTimeout   time.Duration // how long the study may be without a pod that runs
	RolloutTimeout time.Duration // how long production may take to run with the winning args
}

// A Winner has the args to apply to production once the study is complete.
type Winner struct {
	Args    []string
	Refused string // why they are not applied, such as a snapshot that contradicts the pod's message; "" if they are
}

const (
	// maxResisted is how often the guard takes production down again after a controller has scaled it up.
	maxResisted = 3
	// maxStarts is how often the guard starts a study that somebody else suspends, as `kubectl apply -k` does.
	maxStarts = 4
	// fresh is how old a record may be when production is scaled down. Otherwise its time is set anew: production's pods have
	// their whole time to end.
	fresh = time.Minute
)

// decide returns the next step. It depends on its arguments alone. stop says that the guard was told to end: production gets
// its GPU back at once. winner is nil if production keeps its own args.
func decide(v View, s Settings, now time.Time, stop bool, winner *Winner) step {
	r, d := v.Record, v.Deployment
	switch {
	case r == nil:
		return begin(v, s, now, stop)
	case r.Study != s.Study:
		return step{verb: end, err: &HeldError{*r}}
	case d == nil || d.UID != r.Deployment:
		return withoutDeployment(v, stop)
	}
	switch r.Phase {
	case Verifying:
		return verify(v, s, now, stop)
	case RollingBack:
		return rollBack(v)
	case Returning:
		return giveBack(v)
	}
	return tune(v, s, now, stop, winner)
}

// A HeldError says that another study has borrowed from the Deployment.
type HeldError struct{ Record Record }

func (e *HeldError) Error() string {
	return fmt.Sprintf("study %s has borrowed this Deployment since %s; wait for its end; if its Job and its guard are gone, run tuner restore", e.Record.Study, e.Record.Since.Format(time.RFC3339))
}

// Is makes the error an ErrHeld.
func (*HeldError) Is(target error) bool { return target == ErrHeld }

// begin takes the loan, or finds that it is over. A study whose Job has ended is over: without this rule a guard that was killed
// after its last call would take production down again.
func begin(v View, s Settings, now time.Time, stop bool) step {
	d, j := v.Deployment, v.Job
	switch {
	case lateScale(d, j):
		again := j.Loan.in(Returning, now, strings.TrimPrefix(string(j.Outcome), Returned+": "))
		return step{verb: createRecord, why: "production was scaled to 0 after the GPU had been given back", record: again}
	case j.Outcome.Is(Applied):
		return step{verb: end, why: string(j.Outcome)}
	case j.Outcome != "":
		return step{verb: end, err: &OutcomeError{j.Outcome}}
	case lostRecord(d, j):
		return step{verb: createRecord, why: "somebody has deleted the record, so it is written again", record: *j.Loan}
	case j.State == Complete:
		return step{verb: end, why: "the study is complete, and production has its GPU"}
	case j.State == Failed:
		return step{verb: end, err: ErrStudyFailed}
	case j.State == Missing:
		return step{verb: end, err: ErrNoStudy}
	case j.Loan != nil && (d == nil || d.UID != j.Loan.Deployment): // Kubernetes deletes the record with its Deployment
		return studyAlone(j, stop)
	case stop:
		return step{verb: end, err: ErrStopped}
	case d == nil:
		return step{verb: end, err: ErrNoDeployment}
	case !d.Serves:
		return step{verb: end, err: ErrNoContainer}
	case d.Replicas == 0:
		return step{verb: end, err: ErrNothingToBorrow}
	}
	return step{verb: createRecord, why: "notes what production has", record: Record{
		Version: recordVersion, Study: s.Study, Deployment: d.UID, Replicas: d.Replicas, Container: s.Container, Args: slices.Clone(d.Args), Phase: Tuning, Since: now, Generation: d.Generation,
	}}
}

// lostRecord reports whether somebody has deleted the record of a loan that is not over.
func lostRecord(d *Deployment, j Job) bool {
	switch {
	case j.Loan == nil || d == nil || d.UID != j.Loan.Deployment:
		return false
	case j.Loan.Phase == Verifying:
		return true // this phase ends with an Outcome
	}
	return !j.over() || d.Replicas == 0
}

// withoutDeployment follows a loan whose Deployment was deleted. The study goes on, and nothing is owed.
func withoutDeployment(v View, stop bool) step {
	if v.Record.Phase != Tuning || v.Job.over() || v.Job.Outcome != "" {
		return step{verb: deleteRecord, why: noDeployment}
	}
	return studyAlone(v.Job, stop)
}

const noDeployment = "the Deployment was deleted, so nothing is owed"

// studyAlone lets a study go on that has borrowed from a Deployment that was deleted.
func studyAlone(j Job, stop bool) step {
	switch {
	case stop:
		return step{verb: end, err: ErrStopped}
	case j.State == Suspended:
		return step{verb: resumeStudy, why: noDeployment}
	}
	return step{verb: look, why: noDeployment}
}

// lateScale reports whether a scale-down by a guard took effect after another guard, or tuner restore, had ended the loan. A
// guard may be stopped between its look and its call for any time.
func lateScale(d *Deployment, j Job) bool {
	return d != nil && d.Replicas == 0 && j.Outcome.Is(Returned) && j.Loan != nil && d.UID == j.Loan.Deployment && d.Generation == j.Loan.Generation+1
}

// tune takes production down, lets the study run, and gives the GPU back.
func tune(v View, s Settings, now time.Time, stop bool, winner *Winner) step {
	r, d, j := *v.Record, *v.Deployment, v.Job
	early := func(why string) step { return step{verb: updateRecord, record: r.in(Returning, now, why)} }
	scaledUp := d.Replicas != 0 && d.Generation != r.Generation
	switch {
	case j.over():
		return afterStudy(v, now, winner)
	case j.Loan == nil && j.State != Missing:
		return step{verb: noteLoan, record: r}
	case stop:
		return early(cmp.Or(s.StopReason, "the guard was told to end"))
	case j.Outcome != "":
		return early("another guard had given the GPU back")
	case scaledUp && !isController(d.ScaledBy):
		return early(fmt.Sprintf("%s scaled production to %d", cmp.Or(d.ScaledBy, "somebody"), d.Replicas))
	case scaledUp && r.Resisted >= maxResisted:
		return early(fmt.Sprintf("%s scaled production up %d times; tell it to leave the replicas alone", d.ScaledBy, r.Resisted+1))
	case scaledUp:
		next := r
		next.Resisted, next.Generation, next.Since = r.Resisted+1, d.Generation, now
		return step{verb: updateRecord, why: d.ScaledBy + " has scaled production up", record: next}
	case d.Replicas != 0 && now.Sub(r.Since) > fresh:
		next := r
		next.Since = now
		return step{verb: updateRecord, why: "takes the GPU", record: next}
	case d.Replicas != 0:
		return step{verb: scale, why: "takes the GPU", replicas: 0}
	case d.Alive > 0 && j.State == Suspended && now.Sub(r.Since) > s.DrainTimeout:
		return early("production's pods did not end within " + render.Took(s.DrainTimeout))
	case d.Alive > 0 && j.State == Suspended:
		return step{verb: look, why: "production's pods end: " + render.Count(d.Alive, "pod") + " left"}
	case j.State == Suspended && r.Starting && now.Sub(r.Waiting) > s.StudyTimeout:
		return early("somebody suspended the study each time for " + render.Took(s.StudyTimeout))
	case j.State == Suspended && r.Starting:
		return step{verb: resumeStudy, why: "production's pods have ended"}
	case j.State == Suspended && r.Started >= maxStarts:
		return early(fmt.Sprintf("somebody suspended the study %d times", r.Started))
	case j.State == Suspended:
		next := r
		next.Starting, next.Started, next.Waiting = true, r.Started+1, now
		return step{verb: updateRecord, why: "production's pods have ended", record: next}
	}
	return whileStudy(v, s, now, early)
}

// whileStudy watches the study. Without a pod that runs, production would be down for nothing.
func whileStudy(v View, s Settings, now time.Time, early func(string) step) step {
	r, j := *v.Record, v.Job
	next := r
	switch {
	case j.Runs && (r.Starting || !r.Waiting.IsZero()):
		next.Starting, next.Waiting = false, time.Time{}
		return step{verb: updateRecord, why: "the study runs", record: next}
	case j.Runs:
		return step{verb: look, why: "the study runs"}
	case r.Waiting.IsZero():
		next.Waiting = now
		return step{verb: updateRecord, why: "the study waits for its pod", record: next}
	case now.Sub(r.Waiting) > s.StudyTimeout:
		return early("no pod of the study ran for " + render.Took(s.StudyTimeout))
	}
	return step{verb: look, why: "the study waits for its pod"}
}

// afterStudy gives the GPU back when the study needs it no longer, with the winning args if they are wanted.
func afterStudy(v View, now time.Time, winner *Winner) step {
	r, d, j := *v.Record, *v.Deployment, v.Job
	wanted := j.State == Complete && winner != nil
	switch {
	case wanted && winner.Refused == "" && d.Replicas == 0 && d.has(r.Args) && !slices.Equal(winner.Args, r.Args):
		next := r.in(Verifying, now, "the study is complete")
		next.Applied = slices.Clone(winner.Args)
		return step{verb: updateRecord, why: "the study is complete: its best args are applied", record: next}
	case d.Replicas == 0:
		return step{verb: scale, why: "gives the GPU back", replicas: r.Replicas}
	case wanted:
		return conclude(v, outcome(Kept, whyKept(*winner, r, d)))
	}
	return step{verb: deleteRecord, why: "production has its GPU"}
}

func whyKept(w Winner, r Record, d Deployment) string {
	switch {
	case w.Refused != "":
		return w.Refused
	case slices.Equal(w.Args, r.Args):
		return "production has the best args already"
	case !d.has(r.Args):
		return "somebody else has changed production's args meanwhile"
	}
	return "somebody else has scaled production up before the best args could be applied"
}

// giveBack gives the GPU back before the study's end. Production comes first. Then the study is ended for good, so that
// nothing takes the GPU again. A number of replicas that somebody else has set stays.
func giveBack(v View) step {
	if v.Deployment.Replicas == 0 {
		return step{verb: scale, why: v.Record.Why + ": gives the GPU back", replicas: v.Record.Replicas}
	}
	return conclude(v, outcome(Returned, v.Record.Why))
}

// verify rolls the winning args out, at 0 replicas: a new pod beside the old one would wait forever for the one GPU.
func verify(v View, s Settings, now time.Time, stop bool) step {
	r, d, j := *v.Record, *v.Deployment, v.Job
	switch {
	case j.State != Missing && j.Outcome == "" && (j.Loan == nil || j.Loan.Phase != Verifying):
		return step{verb: noteLoan, record: r}
	case d.Replicas == 0 && d.has(r.Args):
		return step{verb: setArgs, why: "applies the best args", args: r.Applied}
	case d.Replicas == 0:
		return step{verb: scale, why: "gives the GPU back", replicas: r.Replicas}
	case !d.has(r.Applied):
		return conclude(v, outcome(Kept, "somebody else has changed production's args meanwhile"))
	case d.Rollout.Done:
		return conclude(v, outcome(Applied, "production runs with the best args"))
	case d.Rollout.Failed != "":
		return step{verb: updateRecord, record: r.in(RollingBack, now, "the best args do not run: "+d.Rollout.Failed)}
	case now.Sub(r.Since) > s.RolloutTimeout:
		return step{verb: updateRecord, record: r.in(RollingBack, now, "production was not ready with the best args within "+render.Took(s.RolloutTimeout))}
	case stop:
		return step{verb: end, err: ErrStopped}
	}
	return step{verb: look, why: "production starts with the best args"}
}

// conclude notes how the loan ended, and then ends it.
func conclude(v View, o Outcome) step {
	if v.Job.State != Missing && v.Job.Outcome == "" {
		return step{verb: noteOutcome, outcome: o}
	}
	return step{verb: deleteRecord, why: string(o)}
}

// rollBack gives production its own args, through 0 replicas.
func rollBack(v View) step {
	r, d := *v.Record, *v.Deployment
	switch {
	case d.Replicas != 0 && !d.has(r.Applied):
		return conclude(v, outcome(RolledBack, r.Why))
	case !d.has(r.Applied):
		return step{verb: scale, why: "gives the GPU back", replicas: r.Replicas}
	case d.Replicas != 0:
		return step{verb: scale, why: r.Why + ": takes them out of service", replicas: 0}
	}
	return step{verb: setArgs, why: "gives production its own args", args: r.Args}
}

// controllers are parts of the names of field managers that scale a Deployment by themselves.
var controllers = []string{"argocd", "kustomize-controller", "helm-controller", "keda", "kube-controller-manager"}

// isController reports whether a field manager is a program that scales by itself. Anybody else is taken for a human, whose
// wish the guard obeys.
func isController(manager string) bool {
	return slices.ContainsFunc(controllers, func(part string) bool { return strings.Contains(manager, part) })
}
