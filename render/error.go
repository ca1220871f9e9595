package render

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// Error writes an error for a person. It leaves out the names of functions and system calls that Go's library adds.
func Error(err error) string {
	text := err.Error()
	visitAll(err, func(err error) {
		words := ""
		switch e := err.(type) {
		case *fs.PathError:
			words = e.Path + ": " + e.Err.Error()
		case *os.LinkError:
			words = e.Old + " to " + e.New + ": " + e.Err.Error()
		case *os.SyscallError:
			words = e.Err.Error()
		case *net.OpError:
			words = e.Err.Error()
			if e.Addr != nil {
				words = e.Addr.String() + ": " + words
			}
		case *exec.Error:
			words = e.Name + ": " + e.Err.Error()
			if errors.Is(e, exec.ErrNotFound) {
				words = "there is no program " + e.Name + " in PATH"
			}
		case *strconv.NumError:
			words = strconv.Quote(e.Num) + " is not a number in range"
		default:
			return
		}
		text = strings.ReplaceAll(text, err.Error(), words)
	})
	return text
}

// visitAll calls visit with an error, and then with each error that the first one wraps.
func visitAll(err error, visit func(error)) {
	if err == nil {
		return
	}
	visit(err)
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		visitAll(e.Unwrap(), visit)
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			visitAll(one, visit)
		}
	}
}
