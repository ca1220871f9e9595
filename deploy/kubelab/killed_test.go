package kubelab

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// victim is a variable of the environment. If it is set, TestAKilledTestLeavesNothing is the test that is killed.
const victim = "KUBELAB_TEST_VICTIM"

// TestAKilledTestLeavesNothing kills a test that has a cluster with a node and a pod.
func TestAKilledTestLeavesNothing(t *testing.T) {
	if os.Getenv(victim) != "" {
		c := pods{Start(t)}
		c.tick(t, c.AddNode(t, "victim", 0, NodeOptions{}), "victim")
		t.Log(victim)
		<-t.Context().Done() // the other process kills this one
		return
	}
	t.Parallel()
	Built(t)
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestAKilledTestLeavesNothing$", "-test.v", "-test.timeout", "5m")
	// The path of its files is in the command lines of all its processes.
	cmd.Env = append(os.Environ(), victim+"=1", "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var said strings.Builder
	for lines := bufio.NewScanner(output); lines.Scan() && !strings.Contains(lines.Text(), victim); {
		said.WriteString(lines.Text() + "\n")
	}
	if !runs(dir) || !runs(word("victim")) {
		t.Errorf("the other test has no cluster:\n%s", &said)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	must(t, await(t.Context(), podLimit, "the end of the cluster", func(context.Context) error {
		if runs(dir) || runs(word("victim")) {
			return errors.New("a process is left")
		}
		return nil
	}))
}
