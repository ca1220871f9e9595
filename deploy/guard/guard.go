package guard

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// A Cluster is what the guard may do in a Kubernetes cluster: with one Deployment, the record on it, and the Job of one study.
// Each method that changes something is a single call of the API. It changes nothing, and returns ErrConflict, if its object
// has changed since the last View. An error may also mean that the call took effect and its answer was lost.
type Cluster interface {
	View(ctx context.Context) (View, error)
	CreateRecord(ctx context.Context, r Record) error
	UpdateRecord(ctx context.Context, r Record) error
	DeleteRecord(ctx context.Context) error
	NoteLoan(ctx context.Context, r Record) error
	Scale(ctx context.Context, replicas int32) error
	SetArgs(ctx context.Context, args []string) error
	ResumeStudy(ctx context.Context) error
	NoteOutcome(ctx context.Context, o Outcome) error // suspends the study's Job as well if the GPU is returned early
}

// A Guard keeps one loan.
type Guard struct {
	Cluster  Cluster
	Settings Settings
	// Winner returns the args to apply, once the study is complete. It is nil if production keeps its own args.
	Winner func(ctx context.Context) (Winner, error)
	Stop   <-chan struct{}   // closed when the guard is told to end: it gives the GPU back at once
	Say    func(text string) // tells people what the guard does; the same text twice in a row is told once
}

const (
	pause     = time.Second      // between two looks at the cluster
	mostPause = 10 * time.Second // between two tries if the cluster does not answer
	// patience is how long the guard tries to read the winning args before production keeps its own.
	patience = time.Minute
	// callTimeout is how long a View, or one call that changes something, may take.
	callTimeout = 15 * time.Second
)

// Run keeps the loan until nothing is owed to production. It may be killed at any time: the next Run goes on. The error says
// what was not done as asked; nil means that all was. Run does not give up while the cluster does not answer, because nobody
// else gives the GPU back, nor if it has no right to a call while the GPU is owed.
func (g *Guard) Run(ctx context.Context) error {
	keeper := keeper{Guard: g}
	last := look // the last verb: the same one twice in a row has had no effect
	for failed := time.Duration(0); ; {
		next, err := keeper.step(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, ErrForbidden) && !keeper.owes:
			return err
		case errors.Is(err, ErrConflict):
			failed = 0 // somebody was quicker, so look again
		case err != nil:
			failed = min(max(pause, 2*failed), mostPause)
			keeper.say("the cluster does not do that: " + err.Error() + "; trying again")
		case next.verb == end:
			return next.err
		default:
			failed = 0
		}
		again := err == nil && next.verb == last
		if last = next.verb; err == nil && next.verb != look && !again {
			continue // the cluster has changed, so look at once
		}
		keeper.rest(ctx, max(pause, failed))
	}
}

// A keeper is a Run with what it remembers. A Run that follows it needs none of that.
type keeper struct {
	*Guard
	said    string
	stopped bool
	owes    bool // whether the last View had a record
	winner  *Winner
	asked   time.Time // when the winner was asked for first
}

// step looks at the cluster, and does the next thing.
func (k *keeper) step(ctx context.Context) (step, error) {
	select {
	case <-k.Stop:
		k.stopped = true
	default:
	}
	view, err := k.view(ctx)
	if err != nil {
		return step{}, err
	}
	k.owes = view.Record != nil
	if err := k.ask(ctx, view); err != nil {
		return step{verb: look}, err
	}
	next := decide(view, k.Settings, time.Now(), k.stopped, k.winner)
	k.say(cmp.Or(next.why, string(next.outcome), next.record.Why))
	return next, k.do(ctx, next)
}

// ask asks for the winning args once they are needed. If they cannot be read for a while, production keeps its own.
func (k *keeper) ask(ctx context.Context, v View) error {
	needed := k.Winner != nil && k.winner == nil && v.Record != nil && v.Record.Phase == Tuning && v.Job.State == Complete
	if !needed {
		return nil
	}
	if k.asked.IsZero() {
		k.asked = time.Now()
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	w, err := k.Winner(ctx)
	switch {
	case err == nil:
		k.winner = &w
	case k.stopped || time.Since(k.asked) > patience:
		k.winner = &Winner{Refused: "the best args cannot be read: " + err.Error()}
	default:
		return err
	}
	return nil
}

func (k *keeper) view(ctx context.Context) (View, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return k.Cluster.View(ctx)
}

func (k *keeper) do(ctx context.Context, s step) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	switch s.verb {
	case createRecord:
		return k.Cluster.CreateRecord(ctx, s.record)
	case updateRecord:
		return k.Cluster.UpdateRecord(ctx, s.record)
	case noteLoan:
		return k.Cluster.NoteLoan(ctx, s.record)
	case deleteRecord:
		return k.Cluster.DeleteRecord(ctx)
	case scale:
		return k.Cluster.Scale(ctx, s.replicas)
	case setArgs:
		return k.Cluster.SetArgs(ctx, s.args)
	case resumeStudy:
		return k.Cluster.ResumeStudy(ctx)
	case noteOutcome:
		return k.Cluster.NoteOutcome(ctx, s.outcome)
	}
	return nil
}

func (k *keeper) say(text string) {
	if text != "" && text != k.said && k.Say != nil {
		k.Say(text)
		k.said = text
	}
}

// rest waits for a while, or until the guard is told to end.
func (k *keeper) rest(ctx context.Context, d time.Duration) {
	stop := k.Stop
	if k.stopped {
		stop = nil
	}
	select {
	case <-ctx.Done():
	case <-stop:
	case <-time.After(d):
	}
}
