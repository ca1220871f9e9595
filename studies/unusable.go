package studies

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"vllmtuner/studies/fence"
)

// unusable makes an error wrap ErrUnusable without changing its text.
type unusable struct{ error }

func (e unusable) Unwrap() error { return e.error }

func (unusable) Is(target error) bool { return target == ErrUnusable }

func unusablef(format string, args ...any) error { return unusable{fmt.Errorf(format, args...)} }

// lastingErrors lists errors of system calls. Each of them comes back when the call is tried again.
var lastingErrors = []error{unix.EACCES, unix.EPERM, unix.EROFS, unix.ENOSPC, unix.EDQUOT, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.ENAMETOOLONG}

// markUnusable makes an error wrap ErrUnusable if it would come back at the next try.
func markUnusable(err error) error {
	if err == nil || errors.Is(err, ErrUnusable) || errors.Is(err, ErrOwned) {
		return err
	}
	_, newer := errors.AsType[newerError](err)
	_, damaged := errors.AsType[fence.DamagedError](err)
	lasts := newer || damaged || isDamage(err)
	for _, e := range lastingErrors {
		lasts = lasts || errors.Is(err, e)
	}
	if lasts {
		return unusable{err}
	}
	return err
}
