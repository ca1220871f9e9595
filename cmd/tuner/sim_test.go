package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
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
		{"a key that the kind has not", "serve m --sim-fault hang:bytes=3", `tuner: fault "hang:bytes=3": it has no key "bytes"`},
		{"a version that is not simulated", "serve m --sim-version 0.20.0", "tuner: --sim-version 0.20.0: this version of vLLM is not simulated; choose from 0.14.1, 0.32.0, 0.33.0"},
		{"a leak of no GPU", "serve m --sim-fault leak-gpu", "give --sim-gpu DIR"},
	} {
		cmd := exec.CommandContext(t.Context(), tunerPath(t), append([]string{"sim"}, strings.Fields(row.args)...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		err := cmd.Run()
		if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != exitUsage || !strings.Contains(stderr.String(), row.want) {
			t.Errorf("%s: %v, %q, want exit code %d with %q", row.name, err, stderr.String(), exitUsage, row.want)
		}
	}
}

// The help of the simulated server is vLLM's: the tuner learns the flags from it.
func TestSimHelpKnowsNothingOfFaults(t *testing.T) {
	if help := command(t, "sim", "serve", "--help=all"); strings.Contains(help, "sim-") || !strings.Contains(help, "--max-num-seqs") {
		t.Errorf("sim serve --help=all prints\n%s", help)
	}
	if help := command(t, "sim", "--help"); strings.Contains(help, "engine") || strings.Contains(help, "nvidia") {
		t.Errorf("sim --help shows what nobody calls:\n%s", help)
	}
}

// The command's own binary also runs as the engine, as the child of a fault, and as nvidia-smi.
func TestSimIsItsOwnEngineAndNvidiaSMI(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	_, port, _ := net.SplitHostPort(address)
	gpu := filepath.Join(t.TempDir(), "gpu")
	t.Setenv("TUNER_SIM_GPU_DIR", gpu)
	smi := func() string {
		return command(t, "sim", "nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits", "--sim-profile=small-fast")
	}
	if out := smi(); out != "Simulated GPU, 0, 16384\n" {
		t.Errorf("before the server nvidia-smi prints %q", out)
	}
	logPath := filepath.Join(t.TempDir(), "log")
	log, err := os.Create(logPath)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(tunerPath(t), "sim", "serve", "m", "--sim-profile=small-fast", "--port", port, "--sim-engine-process",
		"--sim-fault=zombies:n=2", "--sim-fault=daemon:for=1m")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its process group includes the engine
		_ = cmd.Wait()                                      // it was killed
	}()
	number := func(pattern string) int {
		text, err := os.ReadFile(logPath)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(pattern).FindSubmatch(text)
		if m == nil {
			t.Fatalf("the log has no %s:\n%s", pattern, text)
		}
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	within(t, "the server is ready", func() bool {
		resp, err := http.Get("http://" + address + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	daemon := number(`Fault daemon: process (\d+)`)
	defer syscall.Kill(daemon, syscall.SIGKILL)
	engine := number(`EngineCore_DP0 pid=(\d+)`)
	if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", engine)); err != nil || !strings.Contains(string(args), "sim\x00engine\x00") {
		t.Errorf("the engine is %q, %v", args, err)
	}
	if out := smi(); out != "Simulated GPU, 14746, 16384\n" {
		t.Errorf("beside the server nvidia-smi prints %q", out)
	}
	if out := command(t, "sim", "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"); out != fmt.Sprintln(engine) {
		t.Errorf("the memory is held by %q, want %d", out, engine)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the server ends with %v", err)
	}
	if out := smi(); out != "Simulated GPU, 0, 16384\n" {
		t.Errorf("after the server nvidia-smi prints %q", out)
	}
}

// within waits for a condition, for half a minute.
func within(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited half a minute in vain: %s", what)
		}
	}
}
