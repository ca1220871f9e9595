package deploy

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// survivesEveryNvidiaSMI checks that tuner doctor reports the GPUs, or that there are none, with any nvidia-smi in PATH. The tuner
// runs nvidia-smi because a static binary that loads NVIDIA's library dies of SIGSEGV on machines with a GPU.
func survivesEveryNvidiaSMI(t *testing.T, binary string) {
	for _, row := range []struct {
		name   string
		script string // shell script that is nvidia-smi; "" means that there is no nvidia-smi
		gpus   string // value of --gpus; 0 also lets a machine with few cores pass
		code   int
		want   string // part of the report
	}{
		{"a GPU is reported", `case "$1" in
--query-gpu=*) echo "0, GPU-1, 580.173.02, 143771, 0, 143158, 0, 76.12, 700.00, 345, 3201, 29, 0x1, Disabled, NVIDIA H200" ;;
esac`, "0", 0, "139.8 GiB of 140.4 GiB free"},
		{"without nvidia-smi there is no GPU", "", "0", 0, "GPUs        none: there is no nvidia-smi in PATH"},
		{"without a device there is no GPU", "echo No devices were found; exit 9", "0", 0, "No devices were found"},
		// tuner doctor gives nvidia-smi ten seconds to answer.
		{"an nvidia-smi that hangs and ignores SIGTERM is ended", `trap "" TERM INT HUP; while :; do sleep 1; done`, "1", 1, "no answer within 10s"},
		{"garbage is reported as such", `printf '\377\000\033[2J,,,\n'`, "1", 1, "its answer makes no"},
		{"a crash is reported", "kill -SEGV $$", "1", 1, "signal: segmentation fault"},
		{"an endless answer is ended", "yes", "1", 1, "over 1 MiB"},
		{"a driver of two versions is reported", "echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "1", 1, "version mismatch"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			path := "/usr/bin:/bin"
			if row.script == "" {
				path = dir
			} else {
				if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte("#!/bin/sh\n"+row.script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
				path = dir + ":" + path
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			doctor := exec.CommandContext(ctx, binary, "doctor", "--gpus", row.gpus)
			doctor.Env = []string{"PATH=" + path}
			var stdout, stderr bytes.Buffer
			doctor.Stdout, doctor.Stderr = &stdout, &stderr
			begin := time.Now()
			_ = doctor.Run() // the exit code says how tuner doctor ended
			code := doctor.ProcessState.ExitCode()
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("tuner doctor took %v, want at most 30 s", took)
			}
			report := strings.Join(strings.Fields(stdout.String()), " ") // the width decides where lines break
			if code != row.code || !strings.Contains(report, strings.Join(strings.Fields(row.want), " ")) {
				t.Errorf("tuner doctor exits with %d, want %d and %q\n%s%s", code, row.code, row.want, &stdout, &stderr)
			}
			for line := range strings.Lines(stdout.String()) {
				if strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }) {
					t.Errorf("a control character reaches the terminal: %q", line)
				}
			}
		})
	}
}
