package container

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// initFault is where the init process writes why it cannot become the command.
const initFault = 3

// becomeCommand builds the container around this process and executes its command. It returns only an error, which the
// shim reads from the pipe.
func becomeCommand(dir string) error {
	runtime.LockOSThread() // rights belong to a thread, and the thread that executes the command must be the restricted one
	unix.CloseOnExec(initFault)
	fault := os.NewFile(initFault, "fault")
	err := becomeContainer(dir)
	_, writeErr := fault.WriteString(err.Error())
	return errors.Join(err, writeErr)
}

// becomeContainer tells the story of the init process. It returns only an error.
func becomeContainer(dir string) error {
	var spec Spec
	if err := readJSON(filepath.Join(dir, specFile), &spec); err != nil {
		return err
	}
	if err := enterTree(dir, spec); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return fmt.Errorf("set the host name %s: %w", spec.Hostname, err)
	}
	return runCommand(spec)
}

// runCommand replaces this process by the command, which has only the rights that the spec gives. It returns only an error.
func runCommand(spec Spec) error {
	if err := os.Chdir(spec.WorkingDir); err != nil {
		return err
	}
	// The command is looked up in the container's own PATH.
	for _, variable := range spec.Env {
		if path, ok := strings.CutPrefix(variable, "PATH="); ok {
			if err := os.Setenv("PATH", path); err != nil {
				return err
			}
		}
	}
	program, err := exec.LookPath(spec.Args[0])
	if err != nil {
		return err
	}
	if err := restrict(spec); err != nil {
		return err
	}
	return fmt.Errorf("exec %s: %w", program, unix.Exec(program, spec.Args, spec.Env))
}
