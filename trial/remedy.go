package trial

import (
	"errors"
	"fmt"

	"vllmtuner/serverctl"
)

// A RemedyError is an error with advice for the user. They are stored apart, and joined only where they are shown.
type RemedyError struct {
	Err    error
	Remedy string
}

func (e *RemedyError) Error() string { return e.Err.Error() + "; " + e.Remedy }

func (e *RemedyError) Unwrap() error { return e.Err }

// Prefixed says in an error what failed. Advice for the user stays apart from the error.
func Prefixed(what string, err error) error {
	if advised, ok := errors.AsType[*RemedyError](err); ok {
		return &RemedyError{Prefixed(what, advised.Err), advised.Remedy}
	}
	return fmt.Errorf("%s: %w", what, err)
}

// WithRemedy adds the advice for failures of this class and cause to err, if there is any.
func WithRemedy(err error, class serverctl.Class, cause serverctl.Cause) error {
	if remedy := serverctl.Remedy(class, cause); remedy != "" {
		return &RemedyError{err, remedy}
	}
	return err
}
