package bench_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/truth"
)

// childEnv returns the environment of a child with a role. The race detector makes every process sleep for a second at
// its end. childEnv shortens this to 20 ms.
func childEnv(t *testing.T, role string, config any) []string {
	t.Helper()
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return append(os.Environ(), roleVariable+"="+role, configVariable+"="+string(text), "GORACE=atexit_sleep_ms=20")
}

// startTruth starts a truth server in a child process and returns its URL. The returned function stop ends the server
// and waits for its end.
func startTruth(t *testing.T, config truth.Config) (url string, stop func()) {
	t.Helper()
	server := exec.Command(os.Args[0])
	server.Env, server.Stderr = childEnv(t, serverRole, config), os.Stderr
	in, err := server.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(2*time.Hour, func() { _ = server.Process.Kill() }) // longer than any run; cleans up after a test that hangs
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		in.Close()
		last := time.AfterFunc(10*time.Second, func() { _ = server.Process.Kill() })
		defer last.Stop()
		defer kill.Stop()
		if err := server.Wait(); err != nil {
			t.Errorf("the truth server ended with %v", err)
		}
	}
	t.Cleanup(stop)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the truth server did not print its URL: %v", err)
	}
	return strings.TrimSpace(line), stop
}

// A cost is the CPU time and memory that a child used.
type cost struct {
	cpu      time.Duration // user and system; runChild gives the CPU time of the whole process, runClient only the CPU time of the run
	memory   int           // peak resident memory in bytes
	readings []cpuReading  // CPU time up to several moments
}

// A cpuReading is the CPU time that a process had used up to a moment.
type cpuReading struct {
	at  time.Time
	cpu time.Duration
}

// between returns the CPU time between two times, accurate to some hundredths of a second.
func (c cost) between(from, to time.Time) time.Duration {
	var first, last time.Duration
	for _, s := range c.readings {
		if s.at.Before(from) {
			first = s.cpu
		}
		if s.at.Before(to) {
			last = s.cpu
		}
	}
	return last - first
}

// runChild runs a command to its end and returns its output and its cost. Many times a second runChild calls watch, if
// it is not nil, with the resident memory in bytes.
func runChild(command *exec.Cmd, watch func(resident int)) ([]byte, cost, error) {
	var out, stderr bytes.Buffer
	command.Stdout, command.Stderr = &out, &stderr
	if err := command.Start(); err != nil {
		return nil, cost{}, err
	}
	exited := make(chan error, 1)
	go func() { exited <- command.Wait() }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var c cost
	for {
		select {
		case err := <-exited:
			c.cpu = command.ProcessState.UserTime() + command.ProcessState.SystemTime()
			if err != nil {
				err = fmt.Errorf("%s: %w: %s", command.Path, err, tail(stderr.Bytes()))
			}
			return out.Bytes(), c, err
		case <-tick.C:
			c.readings = append(c.readings, cpuReading{time.Now(), cpuOf(command.Process.Pid)})
			c.memory = max(c.memory, statusOf(command.Process.Pid, "VmHWM:"))
			if watch != nil {
				watch(statusOf(command.Process.Pid, "VmRSS:"))
			}
		}
	}
}

// tail returns the end of an output, at most 2,000 bytes.
func tail(text []byte) []byte { return bytes.TrimSpace(text[max(0, len(text)-2000):]) }

// statusOf returns a size from /proc/PID/status in bytes, or 0 if the process has ended.
func statusOf(pid int, field string) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, field); ok {
			kilobytes, _ := strconv.Atoi(strings.Fields(value)[0])
			return kilobytes << 10
		}
	}
	return 0
}

// cpuOf returns the CPU time of a process so far, user and system, or 0 if the process has ended. It reads fields 14 and
// 15 of /proc/PID/stat, which are in hundredths of a second (USER_HZ).
func cpuOf(pid int) time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // skip the process name, which may contain spaces
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * time.Second / 100
}

// runClient starts a child process that sends a load.
func runClient(ctx context.Context, t *testing.T, l load, watch func(resident int)) (outcome, cost, error) {
	t.Helper()
	command := exec.CommandContext(ctx, os.Args[0])
	command.Env = childEnv(t, clientRole, l)
	text, c, err := runChild(command, watch)
	if err != nil {
		return outcome{}, c, err
	}
	var o outcome
	if err := json.Unmarshal(text, &o); err != nil {
		return outcome{}, c, fmt.Errorf("the client's outcome: %w", err)
	}
	c.cpu = o.CPU
	return o, c, nil
}

// indexed returns the requests of a report whose ids contain the given text. The key is the number at the end of the
// id. If two requests have the same number, this function takes the later one, because vllm bench serve sends its first
// request twice.
func indexed(r *truth.Report, contains string) map[int]truth.Request {
	byIndex := make(map[int]truth.Request)
	for _, q := range r.Requests {
		at := strings.LastIndexByte(q.ID, '-')
		index, err := strconv.Atoi(q.ID[at+1:])
		if err == nil && strings.Contains(q.ID, contains) {
			byIndex[index] = q
		}
	}
	return byIndex
}

// milliseconds converts latencies to numbers of milliseconds.
func milliseconds(all []time.Duration) []float64 {
	ms := make([]float64, len(all))
	for i, d := range all {
		ms[i] = float64(d) / float64(time.Millisecond)
	}
	return ms
}

func statsOf(all []time.Duration) bench.Stats { return bench.StatsOf(milliseconds(all)) }

// commit returns what git describe calls the code under test.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// machine describes the machine.
func machine() string {
	model := "unknown processor"
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		text, _ := io.ReadAll(f)
		for line := range strings.Lines(string(text)) {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				model = strings.Trim(name, "\t :\n")
				break
			}
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%d cores of %s, Linux %s", runtime.NumCPU(), model, strings.TrimSpace(string(kernel)))
}
