package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
)

// usedMiB returns the MiB in use on the GPU in a directory, and who holds them.
func usedMiB(t *testing.T, dir string) (float64, []memoryUse) {
	t.Helper()
	used, holders, err := (&fakeGPU{dir: dir}).measure(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return used, holders
}

func writeUse(t *testing.T, dir, name string, h memoryUse) {
	t.Helper()
	text, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestWhichHoldingsCount(t *testing.T) {
	own := os.Getpid()
	start, alive, err := processStart(own)
	if err != nil || !alive {
		t.Fatalf("processStart = %v, %v", alive, err)
	}
	later, earlier := time.Now().Add(time.Hour), time.Now().Add(-time.Second)
	for _, row := range []struct {
		name, file string
		h          memoryUse
		want       float64
	}{
		{"a living process", fmt.Sprint(own), memoryUse{PID: own, Start: start, MiB: 100}, 100},
		{"a living process that reuses the PID of a dead one", fmt.Sprint(own), memoryUse{PID: own, Start: start - 1, MiB: 100}, 0},
		{"a PID without a process", "999999999", memoryUse{PID: 999999999, Start: 1, MiB: 100}, 0},
		{"a leak for ever", "leak-by-hand", memoryUse{MiB: 100}, 100},
		{"a leak that ends in an hour", "leak-by-hand", memoryUse{MiB: 100, Until: later}, 100},
		{"a leak that ended a second ago", "leak-by-hand", memoryUse{MiB: 100, Until: earlier}, 0},
		{"a leak of a living process", "1", memoryUse{PID: own, Start: start, MiB: 100, Leak: time.Hour}, 100},
		{"a leak of a dead process", "1", memoryUse{PID: own, Start: start - 1, MiB: 100, Leak: time.Hour}, 100},
		{"a leak of a dead process that has ended", "1", memoryUse{PID: own, Start: start - 1, MiB: 100, Leak: time.Hour, Until: earlier}, 0},
		{"a temporary file", ".new-123", memoryUse{MiB: 100}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := t.TempDir()
			writeUse(t, dir, row.file, row.h)
			if used, _ := usedMiB(t, dir); used != row.want {
				t.Errorf("used = %v MiB, want %v", used, row.want)
			}
		})
	}
	if used, _ := usedMiB(t, filepath.Join(t.TempDir(), "nothing")); used != 0 {
		t.Errorf("a GPU that nobody has used has %v MiB in use", used)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "leak-x"), []byte("100"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := (&fakeGPU{dir: dir}).measure(time.Now()); err == nil || !strings.Contains(err.Error(), "leak-x") {
		t.Errorf("used = %v, want the name of the malformed file", err)
	}
}

func TestAServerHoldsTheGPUUntilItEnds(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		flags []string
		end   os.Signal
	}{
		{"stopped by SIGTERM", nil, syscall.SIGTERM},
		{"killed by SIGKILL", nil, syscall.SIGKILL},
		{"stopped by SIGTERM, with an engine process", []string{"--sim-engine-process"}, syscall.SIGTERM},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := readySim(t, append(row.flags, "--sim-gpu", dir)...)
			used, holders := usedMiB(t, dir)
			if want := 0.9 * 16 * 1024; used != want || len(holders) != 1 || holders[0].PID != s.engine() {
				t.Errorf("%v MiB are held by %v, want %v by the engine", used, holders, want)
			}
			s.signal(row.end)
			s.end()
			if used, _ := usedMiB(t, dir); used != 0 {
				t.Errorf("%v MiB are held after the server's end, want 0", used)
			}
		})
	}
}

func TestAServerRefusesAGPUThatIsNotFree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeUse(t, dir, "leak-other", memoryUse{MiB: 15000})
	s := startSim(t, "--sim-gpu", dir)
	want := "ValueError: Free memory on device cuda:0 (1.35/16.0 GiB) on startup is less than desired GPU memory utilization (0.9, 14.4 GiB). " +
		"Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
	if code := s.end().ExitCode(); code != 1 || inOrder(s.log(), []string{"EngineCore failed to start.", want, "Engine core initialization failed."}) != "" {
		t.Errorf("exit code %d", code)
	}
	if used, _ := usedMiB(t, dir); used != 15000 {
		t.Errorf("%v MiB are held", used)
	}
}

// vLLM's assertion fails when another process releases memory while the engine profiles.
func TestMemoryThatIsFreedDuringTheProfileRun(t *testing.T) {
	dir := t.TempDir()
	writeUse(t, dir, "leak-other", memoryUse{MiB: 4096})
	s := &Server{Profile: profile(t, "small-fast"), GPU: dir}
	m, err := s.claim(sim.Options{GPUMemoryUtilization: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	defer m.release()
	if err := m.hold(2048); err != nil {
		t.Fatal(err)
	}
	if err := m.disturbed(); err != nil {
		t.Errorf("disturbed = %v before any memory was freed", err)
	}
	if err := os.Remove(filepath.Join(dir, "leak-other")); err != nil {
		t.Fatal(err)
	}
	if err := m.disturbed(); err == nil || !strings.Contains(err.Error(), "Initial free memory 12.0 GiB, current free memory 14.0 GiB.") {
		t.Errorf("disturbed = %v, want both sizes of free memory", err)
	}
}

func TestMemoryThatLeaks(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		flags string
		end   os.Signal
		back  bool
	}{
		{"a killed server leaks for a second", "--sim-fault leak-gpu:for=1s", syscall.SIGKILL, true},
		{"a stopped server leaks for a second", "--sim-fault leak-gpu:for=1s --sim-engine-process", syscall.SIGTERM, true},
		{"a killed server leaks for ever", "--sim-fault leak-gpu", syscall.SIGKILL, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := readySim(t, append(strings.Fields(row.flags), "--sim-gpu", dir)...)
			held, _ := usedMiB(t, dir)
			s.signal(row.end)
			s.end()
			first, gpu := time.Now(), &fakeGPU{dir: dir} // the time of the leak begins when the test first looks at the GPU
			for _, look := range []struct {
				after time.Duration
				leaks bool
			}{{0, true}, {999 * time.Millisecond, true}, {time.Second, !row.back}, {1000 * time.Hour, !row.back}} {
				want := 0.0
				if look.leaks {
					want = held
				}
				if used, holders, err := gpu.measure(first.Add(look.after)); err != nil || used != want || len(holders) != 0 {
					t.Errorf("%v after the first look %v MiB are in use by %v, %v; want %v MiB and no process", look.after, used, holders, err, want)
				}
			}
		})
	}
}

func TestNvidiaSMI(t *testing.T) {
	dir := t.TempDir()
	if _, err := openGPU(dir, 16384); err != nil {
		t.Fatal(err)
	}
	own := os.Getpid()
	start, _, err := processStart(own)
	if err != nil {
		t.Fatal(err)
	}
	writeUse(t, dir, fmt.Sprint(own), memoryUse{PID: own, Start: start, MiB: 14745.6})
	writeUse(t, dir, "leak-x", memoryUse{MiB: 100})
	for _, row := range []struct {
		name, args string
		code       int
		want       string // the beginning of the output
	}{
		{"the tuner's query", "--query-gpu=index,uuid,driver_version,memory.total,memory.used,memory.free,mig.mode.current,name --format=csv,noheader,nounits", 0,
			"0, GPU-simulated-0000-0000-0000-000000000000, simulated, 16384, 14846, 1538, Disabled, Simulated GPU\n"},
		{"the processes that hold memory", "--query-compute-apps=pid,used_memory,gpu_uuid --format=csv,noheader,nounits", 0,
			fmt.Sprintf("%d, 14746, GPU-simulated-0000-0000-0000-000000000000\n", own)},
		{"an unknown field", "--query-gpu=index,memory.usd --format=csv,noheader,nounits", 2, "Field \"memory.usd\" is not a valid field to query.\n"},
		{"another format", "--query-gpu=index --format=csv", 2, "The simulated nvidia-smi answers"},
		{"no query", "--format=csv,noheader,nounits", 2, "The simulated nvidia-smi answers"},
		{"an unknown option", "--reset", 2, "flag provided but not defined: -reset\n"},
	} {
		t.Run(row.name, func(t *testing.T) {
			var out bytes.Buffer
			code := NvidiaSMI(t.Context(), strings.Fields(row.args), dir, 1, &out)
			if code != row.code || !strings.HasPrefix(out.String(), row.want) {
				t.Errorf("code %d, %q, want %d, %q", code, out.String(), row.code, row.want)
			}
		})
	}
	query := []string{"--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"}
	var out bytes.Buffer
	if code := NvidiaSMI(t.Context(), query, "", 1, &out); code != 2 || !strings.Contains(out.String(), "TUNER_SIM_GPU_DIR") {
		t.Errorf("without a directory: code %d, %q", code, out.String())
	}
	out.Reset()
	if code := NvidiaSMI(t.Context(), query, filepath.Join(dir, "unused"), 1, &out); code != 0 || out.String() != "0, 1024\n" {
		t.Errorf("a GPU that nobody has used: code %d, %q", code, out.String())
	}
}

// A loop of nvidia-smi shows how a server starts and ends, and the loop ends at SIGTERM.
func TestNvidiaSMIInALoop(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := selfCommand("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "20")
	cmd.Env = append(cmd.Env, "TUNER_SIM_GPU_DIR="+dir, "TUNER_SIM_PROFILE=small-fast")
	var out logBuffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	await(t, "the loop runs", func() bool { return strings.HasPrefix(out.String(), "0\n0\n") })
	s := readySim(t, "--sim-gpu", dir)
	await(t, "the loop shows the server", func() bool { return strings.HasSuffix(out.String(), "\n14746\n") })
	s.signal(syscall.SIGKILL)
	s.end()
	await(t, "the loop shows that the server has ended", func() bool { return strings.HasSuffix(out.String(), "\n0\n") })
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the loop ends with %v", err)
	}
}

// A loop ends when nobody reads its output.
func TestNvidiaSMIEndsWhenNobodyReads(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if code := NvidiaSMI(ctx, []string{"--query-gpu=index", "--format=csv,noheader,nounits", "-lms", "1"}, t.TempDir(), 1, &closedWriter{left: 3}); code != 0 || ctx.Err() != nil {
		t.Errorf("code %d, %v", code, ctx.Err())
	}
}

// A closedWriter accepts as many writes as its field left says, and fails all later writes.
type closedWriter struct{ left int }

func (w *closedWriter) Write(p []byte) (int, error) {
	if w.left--; w.left < 0 {
		return 0, syscall.EPIPE
	}
	return len(p), nil
}
