package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"vllmtuner/deploy/guard"
	"vllmtuner/studies"
	"vllmtuner/studies/logs"
	"vllmtuner/trial"
	"vllmtuner/trial/live"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/sweep"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// The exit codes. A Kubernetes Job fails at once on 2 and 6, and retries on 3 and 130.
const (
	exitFailed      = 1   // something went wrong
	exitUsage       = 2   // the command line, the study file or the study's directory is wrong; a retry would fail too
	exitOwned       = 3   // another tuner owns the study or runs the same sweep, or the disk does not answer
	exitNothingMet  = 4   // no trial met the SLO
	exitSpent       = 5   // the budget was spent before any trial met the SLO
	exitWorld       = 6   // model, workload, machine or server has changed, and the study was not resumed
	exitInterrupted = 130 // interrupted; everything is stored
)

// errStoppedNow is the cause of the context's end after a second signal.
var errStoppedNow = errors.New("stopped at once")

// errNothingMet and errSpent are results of a study, not failures of the tuner.
var (
	errNothingMet = errors.New("no trial met the SLO; `tuner status` shows why, trial by trial")
	errSpent      = errors.New("the budget was spent before any trial met the SLO; trials before an accepted change do not count")
)

// An unmetError says why a study has no winner.
type unmetError string

func (e unmetError) Error() string { return string(e) + "; see `tuner status`" }

// Is gives the error the exit code of errNothingMet.
func (unmetError) Is(target error) bool { return target == errNothingMet }

// A usageError is a mistake in the command line or in a file that it names.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// An interruptedError says that the user stopped the command, and what this means for the stored data.
type interruptedError string

func (e interruptedError) Error() string { return string(e) }

// Is gives the error the exit code of an interruption.
func (interruptedError) Is(target error) bool { return target == context.Canceled }

// A codeError is the exit code that the simulated vLLM wants the process to end with. It has no message.
type codeError int

func (codeError) Error() string { return "" }

// exitCode turns the error of a command into its exit code.
func exitCode(err error) int {
	if code, ok := errors.AsType[codeError](err); ok {
		return int(code)
	}
	if contains[usageError](err) || contains[plan.InputError](err) || contains[*live.RecordError](err) || contains[*studyfile.Error](err) {
		return exitUsage
	}
	for _, known := range []struct {
		err  error
		code int
	}{
		{nil, 0},
		{studies.ErrOwned, exitOwned},
		{studies.ErrLocked, exitOwned},
		{guard.ErrHeld, exitOwned},
		{studies.ErrSilent, exitOwned},
		{studies.ErrWorldChanged, exitWorld},
		{studies.ErrUnusable, exitUsage},
		{studyfile.ErrUnreadable, exitUsage},
		{logs.ErrNoLog, exitUsage},
		{errNothingMet, exitNothingMet},
		{loadtest.ErrNoRunKept, exitNothingMet},
		{sweep.ErrNoConfigKept, exitNothingMet},
		{errSpent, exitSpent},
		{trial.ErrInterrupted, exitInterrupted},
		{guard.ErrStopped, exitInterrupted},
		{errStoppedNow, exitInterrupted},
		{context.Canceled, exitInterrupted},
	} {
		if errors.Is(err, known.err) {
			return known.code
		}
	}
	return exitFailed
}

// contains reports whether err is an error of type E, or wraps one.
func contains[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// inPod reports whether this process runs in a pod of Kubernetes.
func inPod() bool { return os.Getenv("KUBERNETES_SERVICE_HOST") != "" }

// outcome returns nil for the errors of exit codes 4 and 5 in a pod. Kubernetes would run the study again after such an
// exit code. If keepError is true, outcome returns each error as it is.
func outcome(err error, keepError bool) error {
	if inPod() && !keepError && (errors.Is(err, errNothingMet) || errors.Is(err, errSpent)) {
		return nil
	}
	return err
}
