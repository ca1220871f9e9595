package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestStopLeavesNothing(t *testing.T) { inBothWays(t, testStopLeavesNothing) }

func testStopLeavesNothing(t *testing.T) {
	const short = 100 * time.Millisecond // grace for a process that does not end by SIGTERM
	for _, row := range []struct {
		name    string
		role    string
		ready   string
		members int // members before the stop; 0 when their number changes
		freeze  bool
		grace   time.Duration
	}{
		{"a polite process ends by SIGTERM, long before the grace is over", "polite", "ready", 1, false, time.Hour},
		{"a process that ignores SIGTERM is killed", "stubborn", "ready", 1, false, short},
		{"children are killed, also one that left the session", "family", "ready", 3, false, short},
		{"a child outlives its leader by the grace for orphans at most", "abandon", "", 1, false, time.Hour},
		{"a daemon that left the session, its parent and its environment is killed", "daemonise", "ready", 2, false, short},
		{"a daemon whose parent is alive is killed", "nest", "ready", 3, false, short},
		{"children that the leader never waited for are reaped", "zombies", "ready", 1, false, short},
		{"a stopped leader does not react to SIGTERM and is killed", "polite", "ready", 1, true, short},
		{"stopped members are killed", "family", "ready", 3, true, short},
		{"a process whose main thread has ended is no zombie", "headless", "ready", 1, false, short},
		{"processes that live for a few milliseconds are caught", "hoppers", "ready", 0, false, short},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := start(t, row.role, row.ready)
			if row.members > 0 {
				eventually(t, fmt.Sprintf("%d members", row.members), func() bool {
					return len(members(t, p)) == row.members && (row.role != "abandon" || !alive(p.record.PID))
				})
			}
			if row.freeze {
				freeze(t, members(t, p)...)
			}
			if err := stop(t, p, t.Context(), row.grace); err != nil {
				t.Fatalf("Stop() = %v", err)
			}
			nothingLeft(t)
			if dir := p.Record().Cgroup; exists(dir) {
				t.Errorf("the cgroup %s is left", dir)
			}
			if err := p.Stop(t.Context(), row.grace); err != nil {
				t.Errorf("a second Stop() = %v", err)
			}
		})
	}
}

// stop calls Stop, and fails the test when Stop hangs.
func stop(t *testing.T, p *Process, ctx context.Context, grace time.Duration) error {
	t.Helper()
	stopped := make(chan error, 1)
	go func() { stopped <- p.Stop(ctx, grace) }() // this goroutine ends with the processes at the latest
	select {
	case err := <-stopped:
		return err
	case <-time.After(waitLimit):
		t.Fatalf("Stop hangs: it has not returned after %v", waitLimit)
		return nil
	}
}

// freeze stops processes with SIGSTOP and waits until they have stopped.
func freeze(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		eventually(t, fmt.Sprintf("process %d stops", pid), func() bool {
			s, err := readStat(pid)
			return err == nil && s.state == 'T'
		})
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestStopKillsAtOnceWhenTheContextEnds(t *testing.T) {
	p := start(t, "stubborn", "ready")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := stop(t, p, ctx, time.Hour); err != nil {
		t.Fatal(err)
	}
	if state := p.State(); state.String() != "signal: killed" || state.ExitCode() != -1 {
		t.Errorf("it ended with %v, exit code %d; want SIGKILL and -1", state, state.ExitCode())
	}
	if alive(p.record.PID) {
		t.Error("it is alive after Stop")
	}
}

func TestExitIsReportedWithCodeAndLastWords(t *testing.T) {
	var out output
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ("exit 7"), Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Exited()
	if p.State().ExitCode() != 7 || !strings.Contains(out.String(), "last words") {
		t.Errorf("it ended with %v and output %q, want 7 with its last words", p.State(), out.String())
	}
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
}

// A full disk must neither stop the server nor go unnoticed.
func TestAnOutputThatFailsIsReportedByStop(t *testing.T) {
	r, w := io.Pipe()
	r.CloseWithError(errors.New("disk full"))
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ("exit 0"), Output: w})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Exited()
	if err := p.Stop(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("Stop() = %v, want the writer's error", err)
	}
}

func TestStartErrorsNameTheProgram(t *testing.T) {
	_, err := Start(Spec{Argv: []string{"/no/such/vllm", "serve"}})
	if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "start /no/such/vllm:") {
		t.Errorf("Start() = %v, want the missing file with the program's name", err)
	}
	if _, err := Start(Spec{}); err == nil {
		t.Error("Start without a program succeeds")
	}
}

// The kernel sends the parent-death signal as soon as the thread that forked dies, even if the process lives on. In
// this test the threads that call Start die, and Go ends and starts other threads; the child must survive. The test
// lasts 0.7 s, because a failure comes by chance.
func TestTheChildOutlivesTheThreadsThatComeAndGo(t *testing.T) {
	end := time.Now().Add(700 * time.Millisecond)
	var churn sync.WaitGroup
	churn.Go(func() {
		var threads sync.WaitGroup
		for time.Now().Before(end) {
			for i := range 50 {
				threads.Go(func() {
					runtime.LockOSThread()
					if i%2 == 0 {
						runtime.UnlockOSThread() // otherwise the thread dies with the goroutine
					}
				})
			}
			threads.Wait()
			runtime.GC()
		}
	})
	var children [10]*Process
	var callers sync.WaitGroup
	for i := range children {
		callers.Go(func() {
			runtime.LockOSThread() // the goroutine never unlocks the thread, so the thread dies with the goroutine
			var err error
			if children[i], err = startReady("polite"); err != nil {
				t.Error(err)
			}
		})
	}
	callers.Wait()
	churn.Wait()
	for _, p := range children {
		if p == nil {
			continue
		}
		if !alive(p.record.PID) {
			t.Errorf("child %d died with a thread", p.record.PID)
		}
		if err := p.Stop(t.Context(), 0); err != nil {
			t.Error(err)
		}
	}
}

// A server that logs without end costs us 32 KiB of memory. It can be stopped even if the writer is slow.
func TestAFloodOfOutputIsHeldInBoundedMemory(t *testing.T) {
	const mebibytes = 128
	var received atomic.Int64
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ(fmt.Sprint("flood ", mebibytes)), Output: writerFunc(func(b []byte) {
		received.Add(int64(len(b)))
	})})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Exited()
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	const line = len("all work and no play\n")
	if want := int64(mebibytes * (1 << 20 / line * line)); received.Load() != want {
		t.Errorf("received %d bytes, want %d", received.Load(), want)
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > 8<<20 {
		t.Errorf("reading %d MiB took %d KiB of memory, want at most 8 MiB", mebibytes, took>>10)
	}
}

func TestAFloodIntoASlowWriterIsStopped(t *testing.T) {
	var begun atomic.Bool
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ("flood forever"), Output: writerFunc(func([]byte) {
		begun.Store(true)
		time.Sleep(50 * time.Millisecond) // a slow disk
	})})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the flood begins", begun.Load)
	if err := stop(t, p, t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

// The test runs sixty cycles, so that a leak of one thing per cycle stands out.
func TestNothingLeaks(t *testing.T) {
	program, err := exec.LookPath("true")
	argv := []string{program}
	if err != nil {
		argv = []string{os.Args[0], "-test.list=^$"} // lists no tests, and ends
	}
	groups := map[string]bool{}
	cycle := func() {
		p, err := Start(Spec{Argv: argv, Env: []string{quickExit}})
		if err != nil {
			t.Fatal(err)
		}
		if group := p.Record().Cgroup; group != "" {
			groups[group] = true
		}
		if err := p.Stop(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // no garbage collection, which would close files that we forgot to close
	cycle()                                          // the first cycle starts what lives as long as we do: the watchdog, Go's signal loop and poller
	const cycles = 60
	goroutines, fds := runtime.NumGoroutine(), openFiles(t)
	for range cycles {
		cycle()
	}
	eventually(t, "the goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
	if now := openFiles(t); now != fds {
		t.Errorf("%d files are open, but %d were open before", now, fds)
	}
	for group := range groups {
		if exists(group) {
			t.Errorf("the cgroup %s is left", group)
		}
	}
	if CgroupSupport() == nil && len(groups) != cycles+1 {
		t.Errorf("there were %d cgroups for %d processes", len(groups), cycles+1)
	}
	nothingLeft(t)
}

func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestListensKnowsWhoseListenerItIs(t *testing.T) {
	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).Port
	free.Close()
	p := start(t, fmt.Sprintf("listen %d", port), "ready")
	for _, row := range []struct {
		name string
		port int
		want bool
	}{
		{"the process listens", port, true},
		{"another process listens", foreign.Addr().(*net.TCPAddr).Port, false},
		{"nobody listens", 1, false},
	} {
		if got, err := p.Listens(row.port); err != nil || got != row.want {
			t.Errorf("%s: Listens(%d) = %v, %v, want %v", row.name, row.port, got, err, row.want)
		}
	}
}
