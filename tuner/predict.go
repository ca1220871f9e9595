package tuner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// maxScaled is the number of measured trials after which Predict is not called again. Each call takes seconds. If no
// probe of the first trials can be compared with a simulated one, the probes of later trials cannot either.
const maxScaled = 3

// maxPredicting bounds one call of Predict. The GPU waits during the call, and a trial takes about as long.
const maxPredicting = 10 * time.Minute

// minPredictions is the number of predictions with which a search may end after minPredicted trials.
const minPredictions = 12

// predictions counts the priors that were predicted for the study's present world.
func predictions(study studies.Study) (n int) {
	world := len(study.Worlds())
	for _, t := range study.Prior {
		if t.PredictedFor == world {
			n++
		}
	}
	return n
}

// withoutOldPredictions returns the study without the predictions for earlier worlds. If Predict is nil, the user wants
// no predictions, and withoutOldPredictions drops all of them.
func (s *Study) withoutOldPredictions(study studies.Study) studies.Study {
	world := len(study.Worlds())
	study.Prior = slices.DeleteFunc(slices.Clone(study.Prior), func(t studies.Trial) bool {
		return t.Predicted() && (s.Predict == nil || t.PredictedFor != world)
	})
	return study
}

// needed returns the numbers of the trials whose probes the study needs. These are the trials of Compared. While
// nothing is predicted, they are also the trials that Predict reads.
func (s *Study) needed(study studies.Study) []int {
	numbers := Compared(study)
	if s.Predict != nil && predictions(study) == 0 {
		for _, t := range measuredNow(study) {
			numbers = append(numbers, t.Number)
		}
	}
	return numbers
}

// measuredNow returns the measured trials of the present world. If there are more than maxScaled, it returns none. If
// the latest finished trial is not one of them, it also returns none, because then Predict has nothing new to read.
func measuredNow(study studies.Study) (measured []studies.Trial) {
	latest := false
	for _, t := range study.Present().Trials {
		if t.State != studies.Done {
			continue
		}
		if latest = t.Result.Outcome == trial.Measured; latest {
			measured = append(measured, t)
		}
	}
	if !latest || len(measured) > maxScaled {
		return nil
	}
	return measured
}

// predicted returns the study with the priors of Predict. It calls Predict when one to maxScaled trials are measured
// and the study has no such priors yet. If Predict has no answer, the study goes on without predictions, and says so.
func (s *Study) predicted(ctx context.Context, study studies.Study) (studies.Study, error) {
	if s.Predict == nil || s.unpredictable || predictions(study) > 0 || len(measuredNow(study)) == 0 {
		return study, nil
	}
	last := study.Trials[len(study.Trials)-1]
	s.observe(Event{Kind: Step, Trial: last, Step: "predicting the other points with the simulator"})
	s.settle()
	trials, note, err := s.predict(ctx, study)
	s.Store.Spend(s.books.Settle(trial.Predicting))
	switch {
	case ctx.Err() != nil:
		return study, context.Cause(ctx)
	case errors.Is(err, trial.ErrInterrupted):
		return study, err
	case err != nil:
		s.unpredictable = errors.Is(err, errTooLong)
		s.observe(Event{Kind: Remark, Trial: last, Step: "the simulator predicts nothing: " + err.Error()})
		return study, nil
	}
	source := studies.Predictions(len(study.Worlds()), trials)
	if err := s.Store.AddPriors([]studies.Source{source}); err != nil {
		return study, fmt.Errorf("store %s: %w", render.Count(len(trials), "prediction"), err)
	}
	s.observe(Event{Kind: Remark, Trial: last, Step: note})
	study.Prior = append(study.Prior, source.Trials...)
	return study, nil
}

var errTooLong = fmt.Errorf("it took longer than %s", render.Took(maxPredicting))

// predict calls Predict. It ends when the user ends the study, or after maxPredicting.
func (s *Study) predict(ctx context.Context, study studies.Study) (trials []studies.Trial, note string, err error) {
	err = trial.UnlessFinished(ctx, s.Finish, func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeoutCause(ctx, maxPredicting, errTooLong)
		defer cancel()
		if trials, note, err = s.Predict(ctx, study.Present()); err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return err
	})
	return trials, note, err
}
