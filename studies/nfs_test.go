//go:build nfs

package studies

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestNFS has tuners and readers live through what happens to them on real NFS: see nfslab/smoke.sh.
func TestNFS(t *testing.T) {
	self, err := os.Executable()
	try(t, err)
	binary := filepath.Join(t.TempDir(), "studies.test")
	try(t, os.Link(self, binary))
	kills := os.Getenv("NFS_KILLS")
	if kills == "" {
		kills = "6"
	}
	lab := exec.CommandContext(t.Context(), "nfslab/run.sh", "--timeout", "1500", "--add", binary, "--env", "KILLS="+kills, "--", "nfslab/smoke.sh")
	out, err := lab.CombinedOutput()
	t.Logf("%s", out)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 77 {
		t.Skip("real NFS cannot be set up here: ", strings.TrimSpace(string(out)))
	}
	if err != nil || strings.Count(string(out), "\nok ") < 7 {
		t.Errorf("%v; a scenario failed, or not all of them ran", err)
	}
}
