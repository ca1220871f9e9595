//go:build vllm && linux

package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl"
)

// shortFaults is the number of faults that the short form of the test uses: the first ones of realFaults.
const shortFaults = 2

// realFaults are the faults that a test can cause in real vLLM without a GPU.
var realFaults = []fault{
	{name: "the engine is killed, its API server lives", strike: signals(engineName, syscall.SIGKILL),
		class: serverctl.Infrastructure, cause: serverctl.Killed, within: 3 * time.Second},
	{name: "gets SIGTERM under load", strike: func(t *testing.T, r *faulty) {
		requests(8)(t, r)
		kills(false, syscall.SIGTERM)(t, r)
	}, class: serverctl.Infrastructure, cause: serverctl.Terminated, within: deafLimit},
	{name: "the API server is killed, its engine lives", strike: kills(false, syscall.SIGKILL), class: serverctl.Infrastructure, cause: serverctl.Killed, within: atOnce},
	{name: "the engine crashes, its API server lives", strike: signals(engineName, syscall.SIGSEGV),
		class: serverctl.CrashLoad, cause: serverctl.Segfault, within: 3 * time.Second},
	{name: "an unknown flag", flags: []string{"--no-such-flag", "1"}, class: serverctl.FlagsRejected, within: atOnce},
	{name: "a value that is not a number", flags: []string{"--max-num-seqs", "abc"}, class: serverctl.FlagsRejected, within: atOnce},
	{name: "flags that contradict each other", flags: []string{"--max-num-seqs", "4096"}, class: serverctl.FlagsRejected, within: atOnce},
	{name: "the KV cache holds no single request", flags: []string{"--max-model-len", "4000000"}, class: serverctl.KVTooSmall, within: atOnce,
		config: func(c *serverctl.Config) { c.Env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1" }},
	{name: "the model is not there", class: serverctl.ModelNotFound, within: atOnce,
		config: func(c *serverctl.Config) { c.Model = "/no/such/model" }},
	{name: "the engine is killed while it loads", class: serverctl.Infrastructure, cause: serverctl.Killed, within: 15 * time.Second,
		config: func(c *serverctl.Config) {
			seen, log := sync.Once{}, c.Log.(*outputBuffer)
			c.Log = writerFunc(func(b []byte) (int, error) {
				n, err := log.Write(b)
				if text := log.String(); strings.Contains(text, "Starting to load model") {
					seen.Do(func() { _ = syscall.Kill(processOf(text, engineName), syscall.SIGKILL) })
				}
				return n, err
			})
		}},
	{name: "the engine is stopped under load", class: serverctl.Hang, cause: serverctl.NoToken, within: 10 * time.Second,
		config: func(c *serverctl.Config) { c.HangTimeout = 4 * time.Second },
		strike: func(t *testing.T, r *faulty) {
			signals(engineName, syscall.SIGSTOP)(t, r)
			requests(4)(t, r)
		}},
	{name: "the API server is stopped", strike: kills(false, syscall.SIGSTOP), class: serverctl.Hang, cause: serverctl.Deaf, within: deafLimit},
	{name: "is stopped with open streams", flags: []string{"--max-num-seqs", "8"}, strike: func(t *testing.T, r *faulty) {
		requests(8)(t, r)
		time.Sleep(500 * time.Millisecond) // the requests are being served
	}, config: func(c *serverctl.Config) { c.StopTimeout = 5 * time.Second }, keepStreams: true},
}

// A writerFunc is an io.Writer whose Write is a function.
type writerFunc func(b []byte) (int, error)

func (w writerFunc) Write(b []byte) (int, error) { return w(b) }

// engineName matches the engine's name in the log: EngineCore_DP0 in 0.14.1, EngineCore in 0.32.0.
const engineName = `EngineCore(?:_DP0)?`

// noProcess is a PID that no process or group has. It is not 0: for PID 0, kill(2) signals our own group.
const noProcess = 1 << 30

// processOf returns the PID of the process whose log lines begin with a name, or noProcess.
func processOf(log, name string) int {
	found := regexp.MustCompile(`\(` + name + ` pid=(\d+)\)`).FindStringSubmatch(log)
	if found == nil {
		return noProcess
	}
	pid, err := strconv.Atoi(found[1])
	if err != nil {
		return noProcess
	}
	return pid
}

// signals sends a signal to the process whose log lines begin with a name.
func signals(name string, signal syscall.Signal) func(*testing.T, *faulty) {
	return func(t *testing.T, r *faulty) {
		if err := syscall.Kill(processOf(r.log.String(), name), signal); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

// real returns the config of real vLLM.
func (r *faulty) real(rig *rig) serverctl.Config {
	env := map[string]string{}
	for _, variable := range rig.env() {
		if name, value, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "VLLM_") || strings.Contains(name, "OFFLINE") || name == "OMP_NUM_THREADS" {
			env[name] = value
		}
	}
	return serverctl.Config{
		Command: []string{filepath.Join(rig.dir, "venv/bin/vllm"), "serve"}, Model: filepath.Join(rig.dir, "tiny-qwen2"),
		Args: append([]string{"--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048",
			"--max-num-batched-tokens", "2048", "--enforce-eager"}, r.flags...),
		Env: env, StartTimeout: 3 * time.Minute,
	}
}

// TestVLLMFaults runs the matrix of faults on real vLLM.
func TestVLLMFaults(t *testing.T) {
	for _, version := range []string{"0.14.1", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			rig, shm := openRig(t, version), fmt.Sprint(shmNames(t))
			table := lifeTable{title: "vLLM " + version + " on CPU"}
			faults := realFaults
			if testing.Short() {
				faults = faults[:shortFaults]
			}
			for _, f := range faults {
				t.Run(f.name, func(t *testing.T) {
					r := newFaulty(t, f)
					r.row = table.row(f)
					r.run(t, r.real(rig))
					rig.checkNothingLeft(t)
				})
			}
			if left := fmt.Sprint(shmNames(t)); left != shm {
				t.Errorf("/dev/shm had %s and has %s", shm, left)
			}
			table.write(t)
		})
	}
}
