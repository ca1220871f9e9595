package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestSimRefusesAnUnknownFault(t *testing.T) {
	for _, row := range []struct{ name, args, want string }{
		{"a kind that is nearly one", "serve m --sim-fault oom-lod", `tuner: there is no fault "oom-lod"; did you mean "oom-load"?`},
		{"a key that the kind does not have", "serve m --sim-fault hang:bytes=3", `tuner: fault "hang:bytes=3": it has no key "bytes"`},
		{"a version that is not simulated", "serve m --sim-version 0.20.0", "tuner: --sim-version 0.20.0: this version of vLLM is not simulated; choose from 0.14.1, 0.32.0, 0.33.0"},
		{"a leak without a GPU", "serve m --sim-fault leak-gpu", "give --sim-gpu DIR"},
	} {
		_, stderr, code := inProcess(t, append([]string{"sim"}, strings.Fields(row.args)...)...)
		if code != exitUsage || !strings.Contains(stderr, row.want) {
			t.Errorf("%s: exit code %d, %q, want exit code %d with %q", row.name, code, stderr, exitUsage, row.want)
		}
	}
}

// The help of the simulated server is vLLM's own, because the tuner learns vLLM's flags from it.
func TestSimHelpKnowsNothingOfFaults(t *testing.T) {
	if help := command(t, "sim", "serve", "--help=all"); strings.Contains(help, "sim-") || !strings.Contains(help, "--max-num-seqs") {
		t.Errorf("sim serve --help=all prints\n%s", help)
	}
	if help := command(t, "sim", "--help"); strings.Contains(help, "engine") || strings.Contains(help, "nvidia") {
		t.Errorf("sim --help shows commands that no user calls:\n%s", help)
	}
}

// The tuner's own binary runs as the simulated server, its engine, its daemon and its nvidia-smi.
func TestSimIsItsOwnEngineAndNvidiaSMI(t *testing.T) {
	port := unusedPort(t)
	gpu := filepath.Join(t.TempDir(), "gpu")
	t.Setenv("TUNER_SIM_GPU_DIR", gpu)
	smi := func() string {
		return command(t, "sim", "nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits", "--sim-profile=small-fast")
	}
	if out := smi(); out != "Simulated GPU, 0, 16384\n" {
		t.Errorf("before the server starts, nvidia-smi prints %q", out)
	}
	logPath := filepath.Join(t.TempDir(), "log")
	log, err := os.Create(logPath)
	must(t, err)
	defer log.Close()
	cmd := exec.Command(tunerPath(t), "sim", "serve", "m", "--sim-profile=small-fast", "--port", port, "--sim-engine-process",
		"--sim-fault=zombies:n=2", "--sim-fault=daemon:for=1m")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, cmd.Start())
	defer func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its process group includes the engine
		_ = cmd.Wait()                                      // its error says only that the server was killed
	}()
	loggedPID := func(pattern string) int {
		text, err := os.ReadFile(logPath)
		must(t, err)
		m := regexp.MustCompile(pattern).FindSubmatch(text)
		if m == nil {
			t.Fatalf("the log has no %s:\n%s", pattern, text)
		}
		n, err := strconv.Atoi(string(m[1]))
		must(t, err)
		return n
	}
	if !isHealthy("http://127.0.0.1:"+port, 30*time.Second, nil) {
		t.Fatal("the server is not ready after 30 s")
	}
	daemon := loggedPID(`Fault daemon: process (\d+)`)
	defer syscall.Kill(daemon, syscall.SIGKILL)
	engine := loggedPID(`EngineCore_DP0 pid=(\d+)`)
	if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", engine)); err != nil || !strings.Contains(string(args), "sim\x00engine\x00") {
		t.Errorf("the engine is %q, %v", args, err)
	}
	if out := smi(); out != "Simulated GPU, 14746, 16384\n" {
		t.Errorf("while the server runs, nvidia-smi prints %q", out)
	}
	if out := command(t, "sim", "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"); out != fmt.Sprintln(engine) {
		t.Errorf("the processes with GPU memory are %q, want %d", out, engine)
	}
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("the server ends with %v", err)
	}
	if out := smi(); out != "Simulated GPU, 0, 16384\n" {
		t.Errorf("after the server has ended, nvidia-smi prints %q", out)
	}
}
