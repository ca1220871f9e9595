package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// A shop is a cluster in memory with one GPU: production, its record and the study's Job. Time is the bubble's.
type shop struct {
	t          *testing.T
	deployment *Deployment // without Alive and Rollout, which follow from the rest
	record     *Record
	job        Job
	runFor     time.Duration // how long the study's pod must run
	fails      bool          // whether the study fails
	version    int           // changes with each change
	seen       int           // version of the guard's last View

	podsEnd    time.Time // when production's pods end, after a scale-down
	podsBegan  time.Time // when production's pods got the GPU; zero if they have none
	pods       bool      // whether production's pods exist
	studyPod   bool
	podBegan   time.Time
	ran        time.Duration // how long earlier pods of the study ran
	noStudyPod bool          // whether the study's pod cannot run
	begin      time.Time
	podEnds    time.Time // when the pod of a suspended study ends; zero if it need not

	drains time.Duration // how long production's pods take to end
	loads  time.Duration // how long production takes to be ready

	calls  int
	fault  func(call int, name string) fault
	downs  int // how often production was scaled from some replicas to none
	people func(*shop)
}

// A fault is what goes wrong in a call.
type fault int

const (
	none      fault = iota
	refused         // the call fails and does nothing
	lost            // the call takes effect, and its answer is lost
	conflict        // somebody was quicker
	killed          // the guard is killed before the call
	killedToo       // the guard is killed after the call
)

// death is the panic of a killed guard.
type death struct{}

var errLost = errors.New("connection reset by peer")

const (
	crashes = 40 * time.Second
	ends    = 5 * time.Second // of the study's pod
)

var (
	ownArgs  = []string{"--max-num-seqs", "256"}
	bestArgs = []string{"--max-num-seqs", "96"}
	badArgs  = []string{"--max-num-seqs", "0"}
)

func newShop(t *testing.T) *shop {
	return &shop{
		t: t, begin: time.Now(), deployment: &Deployment{UID: "d1", Serves: true, Replicas: 1, Args: ownArgs, ScaledBy: "kubectl-client-side-apply"},
		job: Job{State: Suspended}, runFor: 2 * time.Minute, drains: 7 * time.Second, loads: 9 * time.Second, pods: true, podsBegan: time.Now().Add(-time.Hour),
	}
}

// pass lets time have its effects: pods end and start, and the study ends.
func (s *shop) pass() {
	if s.people != nil {
		s.people(s)
	}
	now := time.Now()
	if s.pods && (s.deployment == nil || s.deployment.Replicas == 0) && !now.Before(s.podsEnd) {
		s.pods, s.podsBegan = false, time.Time{}
	}
	if s.studyPod && !s.podEnds.IsZero() && !now.Before(s.podEnds) {
		s.ran += s.podEnds.Sub(s.podBegan)
		s.studyPod, s.podEnds = false, time.Time{}
	}
	if s.studyPod && s.podEnds.IsZero() && now.Sub(s.podBegan)+s.ran >= s.runFor {
		s.studyPod = false
		if s.job.State = Complete; s.fails {
			s.job.State = Failed
		}
	}
	if s.deployment != nil && s.deployment.Replicas > 0 {
		s.pods = true
		if s.podsBegan.IsZero() && !s.studyPod {
			s.podsBegan = now
		}
	}
	if s.job.State == Running && !s.studyPod && s.podsBegan.IsZero() && !s.noStudyPod {
		s.studyPod, s.podBegan = true, now
	}
}

// wait lets time pass while no guard runs.
func (s *shop) wait(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
		s.pass()
	}
}

// call runs one call of the API, with its fault.
func (s *shop) call(name string, conditional bool, do func()) error {
	s.pass()
	s.calls++
	f := none
	if s.fault != nil {
		f = s.fault(s.calls, name)
	}
	switch {
	case f == killed:
		panic(death{})
	case f == refused:
		return errLost
	case conditional && (s.version != s.seen || f == conflict):
		return ErrConflict
	}
	do()
	if name != "view" {
		s.version++
		s.pass()
	}
	switch f {
	case lost:
		return errLost
	case killedToo:
		panic(death{})
	}
	return nil
}

func (s *shop) View(context.Context) (v View, err error) {
	err = s.call("view", false, func() {
		s.seen = s.version
		v.Job = s.job
		v.Job.Runs = s.studyPod && s.podEnds.IsZero()
		if s.record != nil {
			v.Record = new(*s.record)
		}
		if s.deployment != nil {
			v.Deployment = new(*s.deployment)
			if s.pods {
				v.Deployment.Alive = int(max(1, s.deployment.Replicas))
			}
			v.Deployment.Rollout = s.rollout()
		}
	})
	return v, err
}

func (s *shop) rollout() Rollout {
	up := time.Since(s.podsBegan)
	bad := slices.Equal(s.deployment.Args, badArgs)
	switch {
	case s.deployment.Replicas == 0 || s.podsBegan.IsZero():
		return Rollout{}
	case bad && up >= crashes:
		return Rollout{Failed: "CrashLoopBackOff"}
	}
	return Rollout{Done: !bad && up >= s.loads}
}

func (s *shop) CreateRecord(_ context.Context, r Record) error {
	return s.call("create record", s.record != nil, func() {
		if s.record == nil {
			s.record = &r
		}
	})
}

func (s *shop) UpdateRecord(_ context.Context, r Record) error {
	return s.call("update record", true, func() { s.record = &r })
}

func (s *shop) DeleteRecord(context.Context) error {
	return s.call("delete record", true, func() {
		if s.deployment != nil && s.deployment.Replicas == 0 && s.deployment.UID == s.record.Deployment {
			s.t.Error("the record is deleted while production is down")
		}
		s.record = nil
	})
}

func (s *shop) NoteLoan(_ context.Context, r Record) error {
	return s.call("note loan", true, func() { s.job.Loan = &r })
}

func (s *shop) Scale(_ context.Context, replicas int32) error {
	return s.call(fmt.Sprintf("scale to %d", replicas), true, func() {
		if s.record == nil {
			s.t.Error("production is scaled without a record")
		}
		s.scaleBy("", replicas)
	})
}

// scaleBy changes production's replicas, as the guard or somebody else does.
func (s *shop) scaleBy(who string, replicas int32) {
	if replicas == 0 && s.deployment.Replicas > 0 {
		s.podsEnd = time.Now().Add(s.drains)
		s.downs++
	}
	s.deployment.Replicas, s.deployment.ScaledBy = replicas, who
	s.deployment.Generation++
	s.version++
}

func (s *shop) SetArgs(_ context.Context, args []string) error {
	return s.call("set args", true, func() {
		if s.deployment.Replicas != 0 {
			s.t.Errorf("args are set at %d replicas", s.deployment.Replicas)
		}
		s.deployment.Args = args
		s.deployment.Generation++
	})
}

func (s *shop) ResumeStudy(context.Context) error {
	return s.call("resume study", true, func() {
		if s.pods && s.deployment != nil {
			s.t.Error("the study starts while production's pods live")
		}
		s.job.State = Running
	})
}

func (s *shop) NoteOutcome(_ context.Context, o Outcome) error {
	return s.call("note outcome", true, func() {
		s.job.Outcome = o
		if o.Is(Returned) && s.job.State == Running {
			s.job.State = Suspended
			if s.studyPod {
				s.podEnds = time.Now().Add(ends)
			}
		}
	})
}

// keep runs guards until one of them ends by itself: a killed one is followed by the next.
func (s *shop) keep(ctx context.Context, g Guard) (err error) {
	g.Cluster, g.Settings = s, Settings{Study: "tune-s1", DrainTimeout: time.Minute, StudyTimeout: 5 * time.Minute, RolloutTimeout: 10 * time.Minute}
	for alive := false; !alive; {
		func() {
			defer func() {
				switch r := recover(); r {
				case nil:
					alive = true
					return
				case death{}:
				default:
					panic(r)
				}
				time.Sleep(3 * time.Second) // until the Job controller starts another one
			}()
			err = g.Run(ctx)
		}()
	}
	return err
}

// noScale is a cluster in which the guard may not scale until some time.
type noScale struct {
	*shop
	err   error
	until time.Time
}

func (n noScale) Scale(ctx context.Context, replicas int32) error {
	if time.Now().Before(n.until) {
		return n.err
	}
	return n.shop.Scale(ctx, replicas)
}

// noRecord is a cluster in which the guard may not create a record.
type noRecord struct {
	*shop
	err error
}

func (n noRecord) CreateRecord(context.Context, Record) error { return n.err }
