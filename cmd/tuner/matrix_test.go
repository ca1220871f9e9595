package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/proc"
)

// A fault is one way in which a server fails, with the expected result.
type fault struct {
	name   string
	flags  []string                      // flags for the simulated server
	config func(c *serverctl.Config)     // changes the default settings; may be nil
	strike func(t *testing.T, r *faulty) // makes the fault happen once the server is ready; nil if it happens by itself

	class  serverctl.Class // expected class; empty if the server does not fail and the test is about stopping it
	cause  serverctl.Cause
	within time.Duration                                        // the limit for noticing the fault
	ended  func(t *testing.T, ended serverctl.Ended, err error) // checks the result of Stop; may be nil

	slack       time.Duration // added to both limits: for noticing the fault and for Stop
	keepStreams bool          // stop the server while its clients still wait for answers
}

const (
	atOnce    = time.Second      // the limit for noticing a crash
	deafLimit = 35 * time.Second // the limit for a server that does not answer: five checks of 5 s each, half a second apart
	busySlack = time.Minute      // added to each limit by TestFaultMatrix, which must pass on a busy machine
)

// requests sends n requests at the same time, and does not wait for their answers.
func requests(n int) func(*testing.T, *faulty) {
	return func(t *testing.T, r *faulty) {
		for range n {
			r.ask(t)
		}
	}
}

// kills sends a signal to the engine, which is the process with GPU memory, or to the API server.
func kills(engine bool, signal syscall.Signal) func(*testing.T, *faulty) {
	return func(t *testing.T, r *faulty) {
		pid := r.record.PID
		if engine {
			pid = r.enginePID(t)
		}
		must(t, syscall.Kill(pid, signal))
	}
}

var faults = []fault{
	{name: "memory runs out in the start", flags: []string{"--sim-fault=oom-start"}, class: serverctl.OOMStart, within: atOnce},
	{name: "the KV cache holds no single request", flags: []string{"--max-model-len=60000"},
		class: serverctl.KVTooSmall, within: atOnce},
	{name: "an unknown flag", flags: []string{"--no-such-flag=1"}, class: serverctl.FlagsRejected, within: atOnce},
	{name: "flags that contradict each other", flags: []string{"--max-num-seqs=4096", "--max-num-batched-tokens=256"},
		class: serverctl.FlagsRejected, within: atOnce},
	{name: "never ready", flags: []string{"--sim-fault=never-ready"}, class: serverctl.StartTimeout, within: 6 * time.Second,
		config: func(c *serverctl.Config) { c.StartTimeout = 3 * time.Second }},
	{name: "ready late, within its limit", flags: []string{"--sim-fault=slow-start:for=2s"}},
	{name: "the port is bound late", flags: []string{"--sim-fault=bind-late:for=2s"}},
	{name: "dies while loading", flags: []string{"--sim-fault=die-loading"}, class: serverctl.Infrastructure, cause: serverctl.Killed, within: atOnce},
	{name: "another process frees memory while this one measures it", flags: []string{"--sim-fault=die-profiling"},
		class: serverctl.Infrastructure, cause: serverctl.Profiling, within: atOnce},
	{name: "the model is not there", flags: []string{"--sim-fault=model-not-found"}, class: serverctl.ModelNotFound, within: atOnce},
	{name: "the model is gated", flags: []string{"--sim-fault=gated-model"},
		class: serverctl.ModelNotFound, cause: serverctl.GatedModel, within: atOnce},
	{name: "the disk is full in the start", flags: []string{"--sim-fault=disk-full"},
		class: serverctl.Infrastructure, cause: serverctl.DiskFull, within: atOnce},
	{name: "no more file descriptors", flags: []string{"--sim-fault=too-many-files"},
		class: serverctl.Infrastructure, cause: serverctl.TooManyFiles, within: atOnce},
	{name: "the GPUs cannot talk to each other", flags: []string{"--sim-fault=nccl"},
		class: serverctl.Infrastructure, cause: serverctl.NCCL, within: atOnce},
	{name: "stopped in its start", flags: []string{"--sim-fault=stop:at=0s"}, class: serverctl.StartTimeout, within: 10 * time.Second, // after its start timeout a server has 5 s to end
		config: func(c *serverctl.Config) { c.StartTimeout = 3 * time.Second }},
	{name: "floods its log", flags: []string{fmt.Sprintf("--sim-fault=flood:bytes=%d", 256<<20)}},
	{name: "leaves zombies", flags: []string{"--sim-fault=zombies"}},

	{name: "dies at the first request", flags: []string{"--sim-fault=crash:request=2"}, strike: requests(1),
		class: serverctl.CrashLoad, cause: serverctl.Segfault, within: atOnce},
	{name: "ends with 0 under load", flags: []string{"--sim-fault=exit-0:request=2"}, strike: requests(1),
		class: serverctl.Infrastructure, cause: serverctl.ExitZero, within: atOnce},
	{name: "memory runs out under load", flags: []string{"--sim-fault=oom-load:request=2"}, strike: requests(1),
		class: serverctl.OOMLoad, within: 2 * time.Second},
	{name: "an illegal memory access under load", flags: []string{"--sim-fault=illegal-memory:request=2"}, strike: requests(1),
		class: serverctl.CrashLoad, cause: serverctl.IllegalAccess, within: 2 * time.Second},
	{name: "the engine dies, its API server lives", flags: []string{"--sim-fault=engine-death:request=2"}, strike: requests(1),
		class: serverctl.Infrastructure, cause: serverctl.Killed, within: 2 * time.Second},
	{name: "the disk is full under load", flags: []string{"--sim-fault=disk-full:request=2"}, strike: requests(1),
		class: serverctl.Infrastructure, cause: serverctl.DiskFull, within: 2 * time.Second},
	{name: "the engine is killed", flags: []string{"--sim-engine-process"}, strike: kills(true, syscall.SIGKILL),
		class: serverctl.Infrastructure, cause: serverctl.Killed, within: 2 * time.Second},
	{name: "the API server is killed, its engine lives", flags: []string{"--sim-engine-process"}, strike: kills(false, syscall.SIGKILL),
		class: serverctl.Infrastructure, cause: serverctl.Killed, within: atOnce},
	{name: "generates no token though requests run", flags: []string{"--sim-fault=hang:request=2"}, strike: requests(3),
		class: serverctl.Hang, cause: serverctl.NoToken, within: 5 * time.Second,
		config: func(c *serverctl.Config) { c.HangTimeout = 2 * time.Second }},
	{name: "stops reading", flags: []string{"--sim-fault=deaf:request=2"}, strike: requests(1),
		class: serverctl.Hang, cause: serverctl.Deaf, within: deafLimit},
	{name: "stopped under load", strike: kills(false, syscall.SIGSTOP), class: serverctl.Hang, cause: serverctl.Deaf, within: deafLimit},

	{name: "ignores SIGTERM", flags: []string{"--sim-fault=ignore-term"},
		config: func(c *serverctl.Config) { c.StopTimeout = time.Second }},
	{name: "stops slowly", flags: []string{"--sim-fault=slow-stop:for=1s"}},
	{name: "waits for its connections", flags: []string{"--sim-fault=hang-on-connections"}, strike: requests(2), keepStreams: true,
		config: func(c *serverctl.Config) { c.StopTimeout = time.Second }},
	{name: "has a daemon in a session of its own", flags: []string{"--sim-fault=daemon"},
		config: func(c *serverctl.Config) { c.StopTimeout = time.Second }},
	{name: "frees its GPU memory late", flags: []string{"--sim-fault=leak-gpu:for=5s"},
		ended: func(t *testing.T, ended serverctl.Ended, err error) {
			if err != nil || ended.GPUWait < time.Second {
				t.Errorf("Stop() = %+v, %v; want it to wait for the memory", ended, err)
			}
		}},
	{name: "never frees its GPU memory", flags: []string{"--sim-fault=leak-gpu"},
		config: func(c *serverctl.Config) { c.GPUMemoryTimeout = time.Second },
		ended: func(t *testing.T, _ serverctl.Ended, err error) {
			if _, ok := errors.AsType[*serverctl.MemoryError](err); !ok {
				t.Errorf("Stop() = %v, want a MemoryError", err)
			}
		}},
	{name: "leaves shared memory", flags: []string{"--sim-fault=leak-shm", "--sim-fault=ignore-term"},
		config: func(c *serverctl.Config) { c.StopTimeout = 500 * time.Millisecond },
		ended: func(t *testing.T, ended serverctl.Ended, err error) {
			if err != nil || len(ended.Shm) != 1 || !strings.HasPrefix(ended.Shm[0], "psm_") {
				t.Errorf("Stop() = %+v, %v; want one file removed from /dev/shm", ended, err)
			}
		}},
	{name: "nothing is wrong", strike: requests(2)},
}

// A faulty is a server in which a fault happens.
type faulty struct {
	fault
	server *serverctl.Server
	record proc.Record
	gpus   *gpu.NvidiaSMI
	dir    string // directory with the state of the simulated GPU
	log    outputBuffer
	row    *lifeRow
	asked  sync.WaitGroup
	died   chan time.Time     // receives the time when the server's first process ended
	ctx    context.Context    // the requests' context
	cancel context.CancelFunc // cancels ctx
}

// ask sends a request for a stream of tokens and ignores the answer.
func (r *faulty) ask(t *testing.T) {
	body := fmt.Appendf(nil, `{"model":%q,"prompt":"Hello","max_tokens":200,"ignore_eos":true,"stream":true}`, r.server.ModelID())
	r.asked.Go(func() {
		request, err := http.NewRequestWithContext(r.ctx, http.MethodPost, r.server.URL()+"/v1/completions", bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		request.Header.Set("Content-Type", "application/json")
		answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
		if err != nil {
			return // a dying server may not answer
		}
		defer answer.Body.Close()
		_, _ = io.Copy(io.Discard, answer.Body) // the error does not matter: the fault decides how the stream ends
	})
}

// enginePID returns the process that holds the simulated GPU's memory.
func (r *faulty) enginePID(t *testing.T) int {
	t.Helper()
	holders, err := r.gpus.Processes(t.Context())
	if err != nil || len(holders) != 1 {
		t.Fatalf("the GPU is held by %v, %v; want one process", holders, err)
	}
	if holders[0].PID == r.record.PID {
		t.Fatal("the engine runs in the API server's process")
	}
	return holders[0].PID
}

// TestFaultMatrix makes each fault happen in a server. The tuner must notice the fault in time, name it, and leave
// nothing behind.
func TestFaultMatrix(t *testing.T) {
	t.Parallel()
	plainTuner(t, "package serverctl/sim/vllm runs its servers with the race detector; this test watches them with it")
	faultMatrix(t, busySlack)
}

// TestFaultsAreNoticedInTime runs the fault matrix without busySlack.
func TestFaultsAreNoticedInTime(t *testing.T) {
	realtime.Only(t, "limits of a second")
	t.Parallel()
	faultMatrix(t, 0)
}

func faultMatrix(t *testing.T, slack time.Duration) {
	t.Helper()
	shm := shmNames(t)
	table := lifeTable{title: "tuner sim serve"}
	t.Run("faults", func(t *testing.T) {
		for _, f := range faults {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				if f.within == deafLimit && os.Getenv(cyclesVariable) == "" {
					t.Skip("a server that does not answer is noticed after 27 s: make soak-server")
				}
				f.slack = slack
				r := newFaulty(t, f)
				r.row = table.row(f)
				r.run(t, r.simulated(t))
			})
		}
	})
	if left := shmNames(t); !slices.Equal(left, shm) {
		t.Errorf("/dev/shm had %v and has %v", shm, left)
	}
	table.write(t)
}

func newFaulty(t *testing.T, f fault) *faulty {
	r := &faulty{fault: f, log: outputBuffer{keep: 64 << 10}}
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(t.Context()))
	return r
}

// simulated returns the config of a simulated server with a simulated GPU.
func (r *faulty) simulated(t *testing.T) serverctl.Config {
	t.Helper()
	r.dir = t.TempDir()
	stub := filepath.Join(t.TempDir(), "nvidia-smi")
	text := fmt.Sprintf("#!/bin/sh\nTUNER_SIM_GPU_DIR=%s exec %s sim nvidia-smi \"$@\"\n", r.dir, tunerPath(t))
	syscall.ForkLock.RLock() // a process forked during the write would hold the file open, and a file that is open for writing cannot be executed
	err := os.WriteFile(stub, []byte(text), 0o755)
	syscall.ForkLock.RUnlock()
	must(t, err)
	r.gpus = &gpu.NvidiaSMI{Path: stub}
	return serverctl.Config{
		Command: []string{tunerPath(t), "sim", "serve", "--sim-profile=small-fast", "--sim-gpu=" + r.dir},
		Model:   "example/small-fast", Args: append([]string{"--max-model-len", "2048"}, r.flags...),
		Env: map[string]string{}, GPU: r.gpus,
	}
}

// run starts the server, makes the fault happen, and compares the result with the expected one.
func (r *faulty) run(t *testing.T, config serverctl.Config) {
	defer r.asked.Wait()
	defer r.cancel()
	config.Log = &r.log
	config.StartTimeout, config.StopTimeout, config.GPUMemoryTimeout = cmp.Or(config.StartTimeout, time.Minute), 10*time.Second, 10*time.Second
	config.OnRecord = func(p proc.Record) error {
		r.record, r.died = p, make(chan time.Time, 1)
		go r.awaitDeath(p.PID)
		return nil
	}
	if r.config != nil {
		r.config(&config)
	}
	before := r.reading(t)
	timeout := time.Now().Add(config.StartTimeout)
	var err error
	r.server, err = serverctl.Start(t.Context(), config)
	if r.server == nil {
		r.startFailed(t, timeout, err)
	} else {
		r.lived(t, config)
	}
	r.nothingLeft(t, before)
}

// awaitDeath waits until a process has ended, and sends the time to died. It does not matter whether the parent has
// reaped the process.
func (r *faulty) awaitDeath(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil { // an error means that the process is gone
		defer unix.Close(fd)
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		}
	}
	r.died <- time.Now()
}

// startFailed compares a failed start with the expected result.
func (r *faulty) startFailed(t *testing.T, timeout time.Time, err error) {
	t.Helper()
	failed, struck := time.Now(), timeout
	if r.class != serverctl.StartTimeout {
		struck = <-r.died
	}
	r.judge(t, err, failed.Sub(struck))
	if r.class == "" || r.strike != nil {
		t.Fatalf("Start() = %v\n%s", err, &r.log)
	}
}

// lived makes the fault happen in a ready server, waits until it is noticed, and ends the server.
func (r *faulty) lived(t *testing.T, config serverctl.Config) {
	t.Helper()
	struck := time.Now()
	if r.strike != nil {
		r.strike(t, r)
	}
	if r.class != "" {
		select {
		case <-r.server.Exited():
			r.judge(t, r.server.Err(), time.Since(struck))
		case <-time.After(r.within + busySlack):
			t.Errorf("%s was not noticed within %v\n%s", r.class, r.within+busySlack, &r.log)
		}
	}
	if !r.keepStreams {
		r.cancel()
		r.asked.Wait()
	}
	begin := time.Now()
	ended, err := r.server.Stop(t.Context())
	r.row.stopped = ended.Took
	if took, limit := time.Since(begin), config.StopTimeout+10*time.Second+r.slack; took > limit {
		t.Errorf("Stop took %v, want at most %v", took, limit)
	}
	switch {
	case r.ended != nil:
		r.ended(t, ended, err)
	case err != nil:
		t.Errorf("Stop() = %v", err)
	}
}

// judge compares a failure with the expected one, and prints how long the tuner took to notice it.
func (r *faulty) judge(t *testing.T, err error, took time.Duration) {
	t.Helper()
	exit, ok := errors.AsType[*serverctl.ExitError](err)
	if !ok || exit.Class != r.class || exit.Cause != r.cause {
		t.Errorf("the server failed with %v, want class %q and cause %q", err, r.class, r.cause)
		return
	}
	if exit.Evidence == "" || len(exit.Tail) == 0 && r.class != serverctl.FlagsRejected {
		t.Errorf("the error has no evidence: %+v", exit)
	}
	t.Logf("noticed after %v: %s: %.100s", took.Round(time.Millisecond), exit.Class, exit.Evidence)
	r.row.noticed = max(took, time.Millisecond)
	if limit := r.within + r.slack; took > limit {
		t.Errorf("it was noticed after %v, want at most %v", took, limit)
	}
}

// nothingLeft checks that no process, port or GPU memory of the server is left.
func (r *faulty) nothingLeft(t *testing.T, before gpu.Reading) {
	t.Helper()
	if r.record.PID != 0 {
		if left, err := proc.Reclaim(r.record); err != nil || len(left) > 0 {
			t.Errorf("processes %v were left running, %v", left, err)
		}
		if err := syscall.Kill(r.record.PID, 0); err == nil {
			t.Errorf("the server's first process, %d, still runs", r.record.PID)
		}
	}
	if _, after, found := strings.Cut(r.log.String(), "daemon pid "); found {
		pid := 0
		if fmt.Sscan(after, &pid); pid == 0 || syscall.Kill(pid, 0) == nil {
			t.Errorf("the daemon, process %d, still runs", pid)
		}
	}
	if r.server != nil {
		if conn, err := net.DialTimeout("tcp", strings.TrimPrefix(r.server.URL(), "http://"), time.Second); err == nil {
			conn.Close()
			t.Errorf("a process still listens at %s", r.server.URL())
		}
	}
	after := r.reading(t)
	for i := range after.GPUs {
		if !strings.Contains(strings.Join(r.flags, " "), "leak-gpu") && *after.GPUs[i].UsedMiB > *before.GPUs[i].UsedMiB {
			t.Errorf("the GPU uses more memory than before the server: %+v, before %+v", after.GPUs[i], before.GPUs[i])
		}
	}
}

// reading returns the present state of the GPUs; it is empty on a machine without GPUs.
func (r *faulty) reading(t *testing.T) gpu.Reading {
	t.Helper()
	if r.gpus == nil {
		return gpu.Reading{}
	}
	reading, err := r.gpus.Query(context.WithoutCancel(t.Context()))
	must(t, err)
	return reading
}

// shmNames returns the files in /dev/shm that servers make.
func shmNames(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/dev/shm")
	must(t, err)
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "psm_") || strings.HasPrefix(e.Name(), "sem.mp-") {
			names = append(names, e.Name())
		}
	}
	return names
}
