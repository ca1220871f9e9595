//go:build vllm && linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
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

// A rig is one installed vLLM with its tiny model. serverctl/vllmlab/setup.sh installs it.
type rig struct {
	version string
	dir     string
	others  []process // processes that had the rig's files open before the test began
}

// openRig returns the rig of a version, or skips the test if it is not installed.
func openRig(t *testing.T, version string) *rig {
	t.Helper()
	cache, err := os.UserCacheDir()
	must(t, err)
	r := &rig{version: version, dir: filepath.Join(cache, "tuner-vllm-"+version)}
	if stamps, _ := filepath.Glob(filepath.Join(r.dir, "ok-*")); len(stamps) == 0 {
		t.Skipf("vLLM %s is not installed in %s; VER=%s serverctl/vllmlab/setup.sh installs it", version, r.dir, version)
	}
	r.lock(t)
	if r.others = r.processes(t); len(r.others) > 0 {
		t.Logf("%d other processes of vLLM %s run already, and will distort the figures", len(r.others), version)
	}
	t.Cleanup(func() { // a failed test may have left a server
		for _, p := range r.processes(t) {
			_ = syscall.Kill(p.pid, syscall.SIGKILL) // fails only if the process is gone
		}
	})
	return r
}

// lock waits until no other test uses this rig. Two tests at the same time could not tell which processes of the rig
// are their own, and each test kills the processes that it takes for its own.
func (r *rig) lock(t *testing.T) {
	file, err := os.OpenFile(filepath.Join(r.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	t.Cleanup(func() { must(t, file.Close()) }) // gives the lock back, after every later clean-up
	ctx, cancel := contextOf(t)
	defer cancel()
	for first := true; ; first = false {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			must(t, err)
			return
		}
		if first {
			t.Logf("waiting until another test has done with vLLM %s (%s)", r.version, file.Name())
		}
		select {
		case <-ctx.Done():
			t.Fatalf("another test still holds %s", file.Name())
		case <-time.After(time.Second):
		}
	}
}

// env returns the environment for programs other than the tuner. Each process gets one thread, as in the study file.
func (r *rig) env() []string {
	return append(os.Environ(), "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
		"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1")
}

// A process is identified by its PID and its start time. A later process may have the same PID.
type process struct {
	pid   int
	start string // clock ticks from boot to start
}

// processes returns the processes that have files of the rig mapped. A search by name or by parent would miss some:
// vLLM renames its children, and init adopts orphans.
func (r *rig) processes(t *testing.T) []process {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	must(t, err)
	var all []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil || !bytes.Contains(maps, []byte(r.dir+"/venv/")) {
			continue // the process has ended, is a zombie, belongs to another user, or is not vLLM
		}
		stat := statOf(pid)
		if stat == nil {
			continue
		}
		if p := (process{pid, stat[startTime]}); !slices.Contains(r.others, p) {
			all = append(all, p)
		}
	}
	return all
}

// These are fields of /proc/PID/stat, counted from the field after the name. Their numbers in proc(5) are larger by
// three.
const (
	userTicks   = 11
	systemTicks = 12
	startTime   = 19
)

// statOf returns the fields of /proc/PID/stat after the name, which may contain blanks. It returns nil if the process
// is gone.
func statOf(pid int) []string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
}

// cpuTime returns the CPU time that the processes have used.
func cpuTime(processes []process) time.Duration {
	var ticks int
	for _, p := range processes {
		if stat := statOf(p.pid); stat != nil {
			user, _ := strconv.Atoi(stat[userTicks])
			system, _ := strconv.Atoi(stat[systemTicks])
			ticks += user + system
		}
	}
	return time.Duration(ticks) * tick
}

// tick is the unit in which Linux reports CPU time on all common architectures (USER_HZ).
const tick = time.Second / 100

// machineTime returns two times since boot, summed over all cores: the busy time, and the sum of busy and idle time.
func machineTime(t *testing.T) (busy, all time.Duration) {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	must(t, err)
	line, _, _ := strings.Cut(string(text), "\n")
	for i, word := range strings.Fields(line)[1:9] { // the two fields after these, guest times, are part of the user time
		ticks, err := strconv.Atoi(word)
		if err != nil {
			t.Fatalf("/proc/stat: %v", err)
		}
		all += time.Duration(ticks) * tick
		if i != 3 && i != 4 { // fields 3 and 4 are idle time and time spent waiting for disks
			busy += time.Duration(ticks) * tick
		}
	}
	return busy, all
}

// checkNothingLeft fails the test if a process of the rig still runs after five seconds.
func (r *rig) checkNothingLeft(t *testing.T) {
	t.Helper()
	var left []process
	for range 50 {
		if left = r.processes(t); len(left) == 0 {
			t.Log("no process of vLLM is left")
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Errorf("%d processes of vLLM are left: %v", len(left), left)
}

// serve starts vLLM as a user would, and returns its URL when it is ready. The server is stopped at the end of the
// test.
func (r *rig) serve(t *testing.T, log string, args []string) (url string, server *child) {
	t.Helper()
	port, err := unusedPort()
	must(t, err)
	command := append([]string{"serve", filepath.Join(r.dir, "tiny-qwen2")}, args...)
	command = append(command, "--host", "127.0.0.1", "--port", port)
	server = startChild(t, log, r.env(), filepath.Join(r.dir, "venv/bin/vllm"), command...)
	url = "http://127.0.0.1:" + port
	switch healthy := isHealthy(url, 3*time.Minute, server.exited); {
	case server.done():
		t.Fatalf("vLLM %s ended at its start: %v\n%s", r.version, server.err(), server.output())
	case !healthy:
		t.Fatalf("vLLM %s was not ready within three minutes:\n%s", r.version, server.output())
	}
	return url, server
}

// A child is a process whose output goes to a file. It has its own process group.
type child struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{} // closed when the child has ended
	result error         // the error of Wait; set when exited is closed
}

func startChild(t *testing.T, log string, env []string, name string, args ...string) *child {
	t.Helper()
	out, err := os.Create(log)
	must(t, err)
	defer out.Close()
	c := &child{cmd: exec.Command(name, args...), log: log, exited: make(chan struct{})}
	c.cmd.Env, c.cmd.Stdout, c.cmd.Stderr = env, out, out
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, c.cmd.Start())
	go func() {
		defer close(c.exited)
		c.result = c.cmd.Wait()
	}()
	t.Cleanup(c.stop)
	return c
}

func (c *child) done() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// err waits until the child has ended, and returns the error of Wait.
func (c *child) err() error {
	<-c.exited
	return c.result
}

// kill kills the child but not its group, as the kernel does when memory is short.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // fails only if the child has ended
	<-c.exited
}

// stop asks the child to end, and kills its group after ten seconds, because vLLM may wait for connections for ever. It
// returns when the child has ended. A second call does nothing.
func (c *child) stop() {
	if c.done() {
		return
	}
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails only if the child has ended
	select {
	case <-c.exited:
	case <-time.After(10 * time.Second):
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
		<-c.exited
	}
}

// output returns the last 8 KiB of the child's output.
func (c *child) output() string {
	text, err := os.ReadFile(c.log)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err.Error()
	}
	return string(text[max(0, len(text)-(8<<10)):])
}
