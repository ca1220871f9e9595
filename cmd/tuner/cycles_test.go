package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl"
)

// cyclesVariable sets how many servers TestServersLeaveNothing starts and stops. make soak-server sets it.
const cyclesVariable = "SERVER_CYCLES"

const defaultCycles = 10

// A resourceCount counts the resources of this process.
type resourceCount struct{ goroutines, files, children int }

func countResources(t *testing.T) resourceCount {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return resourceCount{runtime.NumGoroutine(), len(files), len(children(t))}
}

// children returns the PIDs and names of this process's children, zombies included.
func children(t *testing.T) []string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	var all []string
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // the process has ended
		}
		line := string(text)
		fields := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
		if len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) {
			all = append(all, line[:strings.LastIndexByte(line, ')')+1])
		}
	}
	return all
}

// exceeds reports whether c counts more of any resource than an earlier count does. It may count fewer, because a
// connection may have ended.
func (c resourceCount) exceeds(earlier resourceCount) bool {
	return c.goroutines > earlier.goroutines || c.files > earlier.files || c.children > earlier.children
}

// ownProcess is an environment variable that is set in a process that runs only one test.
const ownProcess = "TUNER_TEST_ALONE"

// inOwnProcess reports whether this test runs alone in its process. If not, inOwnProcess runs the test in a new
// process, whose resources all belong to the test.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcess) != "" {
		return true
	}
	program, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), program, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), ownProcess+"=1")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Errorf("in a process of its own: %v", err)
	}
	return false
}

// Repeated starts and stops of a server leave no goroutine, no descriptor and no process.
func TestServersLeaveNothing(t *testing.T) {
	t.Parallel()
	if !inOwnProcess(t) {
		return
	}
	cycles := defaultCycles
	if text := os.Getenv(cyclesVariable); text != "" {
		var err error
		if cycles, err = strconv.Atoi(text); err != nil {
			t.Fatalf("%s: %v", cyclesVariable, err)
		}
	}
	r := newFaulty(t, fault{name: "nothing is wrong"})
	config := r.simulated(t)
	cycle := func() {
		s, err := serverctl.Start(t.Context(), config)
		must(t, err)
		if _, err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	cycle() // the first cycle also creates the resources that a process creates only once
	before := countResources(t)
	begin := time.Now()
	for range cycles {
		cycle()
	}
	t.Logf("%d starts and stops, %v each", cycles, (time.Since(begin) / time.Duration(cycles)).Round(time.Millisecond))
	after := countResources(t)
	for deadline := time.Now().Add(45 * time.Second); after.exceeds(before) && time.Now().Before(deadline); after = countResources(t) {
		time.Sleep(100 * time.Millisecond) // goroutines of closed connections are still ending
	}
	t.Logf("held before %+v, after %+v", before, after)
	if after.exceeds(before) {
		t.Errorf("held before %+v, after %+v; children: %q", before, after, children(t))
	}
}

// Reading a server's counters and its GPU once a second costs less than 1 % of a core.
func TestWatchingIsCheap(t *testing.T) {
	if os.Getenv(cyclesVariable) == "" {
		t.Skip("make soak-server measures this CPU time without the race detector, on a quiet machine")
	}
	const stretch = 30 * time.Second
	r := newFaulty(t, fault{name: "nothing is wrong"})
	s, err := serverctl.Start(t.Context(), r.simulated(t))
	must(t, err)
	defer s.Stop(t.Context())
	end := s.Observe(time.Now())
	before := ownTime(t)
	time.Sleep(stretch)
	spent := ownTime(t) - before
	series := end()
	share := spent.Seconds() / stretch.Seconds()
	t.Logf("watched for %v: %.2f %% of a core, %d rows of counters", stretch, 100*share, len(series.At))
	if share > 0.01 {
		t.Errorf("watching takes %.2f %% of a core, want at most 1 %%", 100*share)
	}
	if n := len(series.At); n < 25 || n > 35 {
		t.Errorf("%d rows of counters in %v, want one a second", n, stretch)
	}
}

// ownTime returns the CPU time of this process.
func ownTime(t *testing.T) time.Duration {
	t.Helper()
	var usage syscall.Rusage
	must(t, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
