package container

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
)

// try tells whether this machine can build the file tree of a container. It starts itself once more, in namespaces as a
// container has them.
func try(dir string) error {
	if syscall.Getpid() == 1 {
		return enterTree(dir, Spec{})
	}
	cmd := exec.Command(self, "try", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: namespaces,
		Pdeathsig:  syscall.SIGKILL,
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make a container: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return nil
}
