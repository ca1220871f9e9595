//go:build nfs

package studies

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestNFS runs tuners and readers while real NFS fails. Each script of nfslab runs in an emulated machine of its own.
func TestNFS(t *testing.T) {
	if out, err := exec.CommandContext(t.Context(), "nfslab/run.sh", "--setup").CombinedOutput(); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 77 {
			t.Skip("real NFS cannot be set up here: ", strings.TrimSpace(string(out)))
		}
		t.Fatalf("%v: %s", err, out)
	}
	self, err := os.Executable()
	try(t, err)
	binary := filepath.Join(t.TempDir(), "studies.test")
	try(t, os.Link(self, binary))
	command := filepath.Join(t.TempDir(), "tuner")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", "netgo osusergo sqlite_omit_load_extension", "-o", command, "vllmtuner/cmd/tuner").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	usualKills, cutOffs := 6, 8 // cutOffs is the number of scenarios of a round of cutoff.sh
	if testing.Short() {
		usualKills, cutOffs = 3, 6
	}
	kills, cuts, rounds := fromEnv(t, "NFS_KILLS", usualKills), fromEnv(t, "NFS_POWER_CUTS", 1), fromEnv(t, "NFS_ROUNDS", 1)
	often := []string{"--env", fmt.Sprint("KILLS=", kills), "--env", fmt.Sprint("CRASHES=", cuts), "--env", fmt.Sprint("ROUNDS=", rounds)}
	if testing.Short() {
		often = append(often, "--env", "SHORT=yes")
	}
	for _, tt := range []struct {
		name, script string
		scenarios    int
	}{
		{"cut off in mid-commit, with plain SQLite and with a study", "cutoff.sh", cutOffs * rounds},
		{"restarted, cut off, killed", "life.sh", 7},
		{"a disk that is full, and one that was restored", "disk.sh", 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, code := inMachine(t, slices.Concat(often, []string{"--add", binary, "--add", command, "--", "nfslab/" + tt.script})...)
			if ok := strings.Count("\n"+out, "\nok "); code != 0 || ok != tt.scenarios || strings.Contains(out, "FAIL") {
				t.Errorf("exit code %d; %d of %d scenarios are ok", code, ok, tt.scenarios)
			}
		})
	}
	t.Run("power cuts", func(t *testing.T) {
		t.Parallel()
		cutPower(t, binary, cuts)
	})
}

// cutPower cuts the power of an emulated machine during a write, several times. After each cut it checks that all
// acknowledged probes are stored.
func cutPower(t *testing.T, binary string, cuts int) {
	disk, list := filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "acked")
	var acked bytes.Buffer
	for n := range cuts + 1 {
		try(t, os.WriteFile(list, acked.Bytes(), 0o644))
		args, want := []string{"--kill-after", strconv.Itoa(1 + n%3)}, 99
		if n == cuts {
			args, want = []string{"--env", "LAST=yes"}, 0
		}
		out, code := inMachine(t, append(args, "--disk", disk, "--add", binary, "--add", list, "--", "nfslab/power.sh")...)
		if code != want {
			t.Fatalf("cut %d of %d: exit code %d, want %d", n+1, cuts, code, want)
		}
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, "ack ") && strings.HasSuffix(line, "\n") {
				acked.WriteString(line)
			}
		}
	}
	if acked.Len() == 0 {
		t.Error("no probe was acknowledged")
	}
	t.Logf("\nok power cut %d times: all %d acknowledged probes were stored each time", cuts, bytes.Count(acked.Bytes(), []byte("\n")))
}

// inMachine runs a script in an emulated machine (nfslab/run.sh), and returns its output and exit code.
func inMachine(t *testing.T, args ...string) (out string, code int) {
	began := time.Now()
	lab := exec.CommandContext(t.Context(), "nfslab/run.sh", append([]string{"--timeout", "1500", "--add", "nfslab/lib.sh"}, args...)...)
	lab.Cancel = func() error { return lab.Process.Signal(syscall.SIGTERM) } // on SIGTERM, run.sh ends its machine
	lab.WaitDelay = 10 * time.Second
	var stderr strings.Builder
	lab.Stderr = &stderr
	stdout, err := lab.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	} else if ok {
		code = exit.ExitCode()
	}
	t.Logf("%s, exit code %d\n%s%s", time.Since(began).Round(time.Second), code, withoutAcks(string(stdout)), stderr.String())
	return string(stdout), code
}

// withoutAcks removes the lines of acknowledged probes from an output.
func withoutAcks(out string) string {
	var rest strings.Builder
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "ack ") {
			rest.WriteString(line)
		}
	}
	return rest.String()
}
