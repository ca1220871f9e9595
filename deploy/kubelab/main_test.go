package kubelab

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

// TestMain lets all tests run at the same time, because they mostly wait for pods.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "32"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	m.Run()
}

// TestBuilt builds the programs, so that the time limit of the other tests does not apply to that.
func TestBuilt(t *testing.T) {
	b := Built(t)
	t.Logf("control plane %s, node agent %s, tuner %s", b.ControlPlane, b.NodeAgent, b.Tuner)
}
