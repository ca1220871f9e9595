package proc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// roleVariable makes the test binary play a process instead of running the tests.
const roleVariable = "PROC_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(role); err != nil {
			fmt.Println("role", role, "failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// lifetime ends every role by itself, so that a failing test leaves nothing behind for long.
const lifetime = time.Minute

func play(role string) error {
	role, arg, _ := strings.Cut(role, " ")
	switch role {
	case "polite": // SIGTERM ends it, as it does by default
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
	case "exit":
		code, err := strconv.Atoi(arg)
		fmt.Println("last words")
		if err == nil {
			os.Exit(code)
		}
		return err
	case "family": // has a stubborn child in the same session and one that left it
		if err := errors.Join(bear("stubborn", false), bear("stubborn", true)); err != nil {
			return err
		}
	case "abandon": // dies and leaves a stubborn child
		return bear("stubborn", false)
	case "listen":
		l, err := net.Listen("tcp", "127.0.0.1:"+arg)
		if err != nil {
			return err
		}
		defer l.Close()
	case "own": // is a tuner that will be killed
		p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ("family"), Output: os.Stderr})
		if err != nil {
			return err
		}
		time.Sleep(500 * time.Millisecond) // the family is complete
		if err := json.NewEncoder(os.Stdout).Encode(p.Record()); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	time.Sleep(lifetime)
	return nil
}

// bear starts a child that plays a role and waits until it is ready.
func bear(role string, ownSession bool) error {
	cmd := exec.Command(os.Args[0])
	cmd.Env = environ(role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: ownSession}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, err = bufio.NewReader(out).ReadString('\n')
	return err
}

// environ is that of a role. With the race detector a child would wait for a second at its end.
func environ(role string) []string {
	return append(os.Environ(), roleVariable+"="+role, "GORACE=atexit_sleep_ms=0")
}

// output collects what a process writes.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// start starts a role and waits until it has said want.
func start(t *testing.T, role, want string) *Process {
	t.Helper()
	var out output
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ(role), Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(context.Background(), 0) })
	eventually(t, "process says "+want, func() bool { return strings.Contains(out.String(), want) })
	return p
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s for: %s", what)
		}
	}
}

func alive(pid int) bool {
	s, err := readStat(pid)
	return err == nil && !s.dead()
}

func TestStopReturnsWhenNoMemberLives(t *testing.T) {
	for _, row := range []struct {
		name    string
		role    string
		ready   string
		members int // before the stop
		grace   time.Duration
		within  time.Duration
	}{
		{"a polite process ends by SIGTERM, long before the grace is over", "polite", "ready", 1, 20 * time.Second, 5 * time.Second},
		{"a process that ignores SIGTERM is killed", "stubborn", "ready", 1, 100 * time.Millisecond, 5 * time.Second},
		{"children are killed, the one that left the session too", "family", "ready", 3, 100 * time.Millisecond, 5 * time.Second},
		{"a child outlives its leader by a second at most", "abandon", "", 1, 20 * time.Second, 5 * time.Second},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			p := start(t, row.role, row.ready)
			var before []int
			eventually(t, fmt.Sprintf("%d members", row.members), func() bool {
				var err error
				if before, err = p.Members(); err != nil {
					t.Fatal(err)
				}
				if row.role == "abandon" && alive(p.PID()) {
					return false
				}
				return len(before) == row.members
			})
			begin := time.Now()
			if err := p.Stop(t.Context(), row.grace); err != nil {
				t.Fatalf("Stop() = %v", err)
			}
			if took := time.Since(begin); took > row.within {
				t.Errorf("Stop took %v, want less than %v", took, row.within)
			}
			for _, pid := range before {
				if alive(pid) {
					t.Errorf("process %d of %v lives after Stop", pid, before)
				}
			}
			if err := p.Stop(t.Context(), row.grace); err != nil {
				t.Errorf("a second Stop() = %v", err)
			}
		})
	}
}

func TestStopKillsAtOnceWhenTheContextEnds(t *testing.T) {
	p := start(t, "stubborn", "ready")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	begin := time.Now()
	if err := p.Stop(ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 5*time.Second || alive(p.PID()) {
		t.Errorf("Stop took %v, alive %v; want it dead at once", took, alive(p.PID()))
	}
}

func TestExitIsReportedWithCodeAndLastWords(t *testing.T) {
	var out output
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ("exit 7"), Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Exited()
	if p.ExitCode() != 7 || !strings.Contains(out.String(), "last words") {
		t.Errorf("exit code %d with output %q, want 7 with its last words", p.ExitCode(), out.String())
	}
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
}

// A full disk must not stop the server, and must not pass unseen.
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
	if err == nil || !strings.Contains(err.Error(), "start /no/such/vllm:") {
		t.Errorf("Start() = %v, want the program in it", err)
	}
	if _, err := Start(Spec{}); err == nil {
		t.Error("Start without a program succeeds")
	}
}

// The parent-death signal comes when the thread that forked dies, not when the process dies.
func TestTheChildOutlivesTheThreadThatAskedForIt(t *testing.T) {
	var p *Process
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread dies with the goroutine
		var err error
		p, err = Start(Spec{Argv: []string{os.Args[0]}, Env: environ("polite")})
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	defer p.Stop(context.Background(), 0)
	select {
	case <-p.Exited():
		t.Error("the child died with the thread")
	case <-time.After(300 * time.Millisecond):
	}
}

func TestReclaimAfterTheOwnerWasKilled(t *testing.T) {
	owner := exec.Command(os.Args[0])
	owner.Env = environ("own")
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	var record Record
	if err := json.NewDecoder(out).Decode(&record); err != nil {
		t.Fatal(err)
	}
	left, err := record.members()
	if err != nil || len(left) != 3 {
		t.Fatalf("members = %v, %v; want the leader and two children", left, err)
	}
	owner.Process.Kill()
	owner.Wait()
	eventually(t, "the leader dies with its owner", func() bool { return !alive(record.PID) })

	stranger := start(t, "polite", "ready")
	killed, err := Reclaim(record)
	left = slices.DeleteFunc(left, func(pid int) bool { return pid == record.PID })
	if err != nil || !slices.Equal(killed, left) {
		t.Errorf("Reclaim() = %v, %v; want %v", killed, err, left)
	}
	if !alive(stranger.PID()) {
		t.Error("Reclaim killed a stranger")
	}
	if killed, err := Reclaim(record); err != nil || len(killed) > 0 {
		t.Errorf("a second Reclaim() = %v, %v; want nothing to do", killed, err)
	}
}

func TestReclaimSparesWhatIsNotTheRecordedServer(t *testing.T) {
	stranger := start(t, "polite", "ready")
	mine := stranger.Record()
	for _, row := range []struct {
		name   string
		record Record
	}{
		{"another process got the number", Record{PID: mine.PID, StartTime: mine.StartTime - 1, BootID: mine.BootID, Token: "other"}},
		{"the machine was booted since", Record{PID: mine.PID, StartTime: mine.StartTime, BootID: "earlier", Token: mine.Token}},
	} {
		t.Run(row.name, func(t *testing.T) {
			if killed, err := Reclaim(row.record); err != nil || len(killed) > 0 || !alive(mine.PID) {
				t.Errorf("Reclaim() = %v, %v, alive %v; want it spared", killed, err, alive(mine.PID))
			}
		})
	}
	if _, err := Reclaim(Record{}); err == nil || !strings.Contains(err.Error(), "names no process") {
		t.Errorf("Reclaim(empty) = %v, want an error", err)
	}
	killed, err := Reclaim(Record{PID: mine.PID, StartTime: mine.StartTime, BootID: mine.BootID, Token: "lost"})
	if err != nil || !slices.Equal(killed, []int{mine.PID}) {
		t.Errorf("Reclaim by session = %v, %v; want %d killed", killed, err, mine.PID)
	}
}

func TestListensTellsOurListenerFromAnothers(t *testing.T) {
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
