package vllm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
)

// The tests of faults run servers as processes, because they test signals, exit codes and orphans. The tests take about
// ten seconds, most of it for waiting. TestAnEngineThatIsKilled alone waits for watchdogTime, which is five seconds.

// The test binary is also the simulated server: `vllm.test sim serve …` acts as `tuner sim serve …`. An argument
// selects this role. An environment variable would not do, because one of the server's processes has an empty
// environment.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "sim" {
		os.Exit(playSim(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// playSim acts as the command tuner sim, with a profile that takes no time to start.
func playSim(words []string) int {
	if words[0] == "child" {
		return report(RunChild(words[1:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	s, args, err := FromArgs(words[1:], os.Getenv)
	if err != nil {
		return report(err)
	}
	s.Profile.StartUp = sim.StartUp{}
	if args, err = takeWatchdog(s, args); err != nil {
		return report(err)
	}
	if ms, err := strconv.ParseFloat(os.Getenv(steadyVariable), 64); err == nil {
		steady(s.Profile, ms)
	}
	s.Reexec, s.Out, s.Err = []string{os.Args[0], "sim"}, os.Stdout, os.Stderr
	switch words[0] {
	case "nvidia-smi":
		return NvidiaSMI(ctx, args, s.GPU, s.Profile.Memory.GPUGiB, os.Stdout)
	case "engine":
		err = s.RunEngine(ctx, args)
	default:
		err = s.Serve(ctx, args)
	}
	if _, ours := errors.AsType[*FaultError](err); ours {
		return report(err)
	}
	if ctx.Err() != nil {
		return 0
	}
	return ExitCode(err)
}

// watchdogFlag is a flag of the test binary. It sets how long an API server outlives its engine.
const watchdogFlag = "--test-watchdog="

// takeWatchdog removes watchdogFlag from the args and sets its value in the server.
func takeWatchdog(s *Server, args []string) (rest []string, err error) {
	for _, arg := range args {
		value, ok := strings.CutPrefix(arg, watchdogFlag)
		if !ok {
			rest = append(rest, arg)
		} else if s.watchdog, err = time.ParseDuration(value); err != nil {
			return nil, err
		}
	}
	return rest, nil
}

func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 2
}

// limit is how long a test waits for an event that takes a fraction of a second on a quiet machine.
const limit = 45 * time.Second

// await waits until the condition is true. It fails the test if that takes longer than the constant limit.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v this is still not true: %s", limit, what)
		}
	}
}

// A simProcess is a simulated server that runs as a process of its own.
type simProcess struct {
	t      *testing.T
	cmd    *exec.Cmd
	url    string
	path   string // path of the log file
	http   *http.Client
	exited chan struct{}
}

// selfCommand returns a command that runs this binary as tuner sim.
func selfCommand(words ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], append([]string{"sim"}, words...)...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // without this the race detector makes each child wait for a second at its end
	return cmd
}

// startSim starts a server with a GPU of 16 GiB. The server is ready at once, unless its flags delay it. After the test
// the server and its process group are killed.
func startSim(t *testing.T, flags ...string) *simProcess {
	t.Helper()
	port := freePort(t)
	s := &simProcess{
		t: t, url: "http://127.0.0.1:" + port, path: filepath.Join(t.TempDir(), "log"), exited: make(chan struct{}),
		http: &http.Client{Timeout: limit, Transport: &http.Transport{}},
	}
	log, err := os.OpenFile(s.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	s.cmd = selfCommand(append([]string{"serve", "my/model", "--sim-profile", "small-fast", "--max-model-len", "8192", "--port", port}, flags...)...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL) // the whole process group
		<-s.exited
		s.http.CloseIdleConnections()
		if t.Failed() {
			t.Logf("the server's log:\n%.6000s", s.log())
		}
	})
	return s
}

// readySim starts a server and waits until it is ready.
func readySim(t *testing.T, flags ...string) *simProcess {
	t.Helper()
	s := startSim(t, flags...)
	await(t, "the server is ready", func() bool { return s.health() == 200 })
	return s
}

func (s *simProcess) log() string {
	text, err := os.ReadFile(s.path)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(text)
}

// health returns the status of /health; 0 means no answer.
func (s *simProcess) health() int {
	resp, err := s.http.Get(s.url + "/health")
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

func (s *simProcess) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// end waits for the process and returns its state.
func (s *simProcess) end() *os.ProcessState {
	s.t.Helper()
	return s.endWithin(limit)
}

// endWithin is like end, with a time limit of its own.
func (s *simProcess) endWithin(limit time.Duration) *os.ProcessState {
	s.t.Helper()
	select {
	case <-s.exited:
	case <-time.After(limit):
		s.t.Fatalf("the server still runs after %v", limit)
	}
	return s.cmd.ProcessState
}

func (s *simProcess) gone() bool {
	select {
	case <-s.exited:
		return true
	default:
		return false
	}
}

// metric returns the value of one of the server's metrics.
func (s *simProcess) metric(name string) float64 { return scraped(s.t, s.url)[name+"{}"] }

// engine returns the PID of the engine process, from the log.
func (s *simProcess) engine() int {
	s.t.Helper()
	m := regexp.MustCompile(`\(EngineCore_DP0 pid=(\d+)\)`).FindStringSubmatch(s.log())
	if m == nil {
		s.t.Fatal("the log names no engine")
	}
	pid, err := strconv.Atoi(m[1])
	if err != nil {
		s.t.Fatal(err)
	}
	return pid
}

// A streamed is an answer that the test reads while it arrives.
type streamed struct {
	ended chan struct{}
	drop  context.CancelFunc // disconnects the client

	mu     sync.Mutex
	status int
	kind   string // content type
	body   strings.Builder
	err    error // why the answer ended early; nil when it is complete
}

// ask sends a completion request. The request ends at the latest when ctx or the test ends.
func (s *simProcess) ask(ctx context.Context, stream bool, tokens int) *streamed {
	ctx, cancel := context.WithCancel(ctx)
	a := &streamed{ended: make(chan struct{}), drop: cancel}
	options := ""
	if stream {
		options = `,"stream_options":{"include_usage":true}`
	}
	body := fmt.Sprintf(`{"prompt":"one two three","max_tokens":%d,"stream":%v%s}`, tokens, stream, options)
	go func() {
		defer close(a.ended)
		a.read(ctx, s, body)
	}()
	s.t.Cleanup(func() {
		cancel()
		<-a.ended
	})
	return a
}

func (a *streamed) read(ctx context.Context, s *simProcess, body string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/completions", strings.NewReader(body))
	if err == nil {
		req.Header.Set("Content-Type", "application/json")
		var resp *http.Response
		if resp, err = s.http.Do(req); err == nil {
			defer resp.Body.Close()
			a.set(func() { a.status, a.kind = resp.StatusCode, resp.Header.Get("Content-Type") })
			for buf := make([]byte, 4096); err == nil; {
				var n int
				n, err = resp.Body.Read(buf)
				a.set(func() { a.body.Write(buf[:n]) })
			}
		}
	}
	if err == io.EOF {
		err = nil
	}
	a.set(func() { a.err = err })
}

func (a *streamed) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

func (a *streamed) text() (text string) {
	a.set(func() { text = a.body.String() })
	return text
}

// whole waits for the end of the answer.
func (a *streamed) whole(t *testing.T) (status int, text string, err error) {
	t.Helper()
	select {
	case <-a.ended:
	case <-time.After(limit):
		t.Fatalf("the answer has not ended after %v: %q", limit, a.text())
	}
	a.set(func() { status, text, err = a.status, a.body.String(), a.err })
	return status, text, err
}

// meanwhile waits until a server without a fault has generated 50 tokens, which takes 0.3 s on a quiet machine. A test
// waits like this before it says that another server does nothing, because a busy machine makes both servers slow.
func (s *simProcess) meanwhile(t *testing.T) {
	t.Helper()
	if status, text, err := s.ask(t.Context(), true, 50).whole(t); status != 200 || err != nil || !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Fatalf("a server without a fault answers with %d %.200q, %v", status, text, err)
	}
}

// inTime runs a check with ever longer times until the result onTime is true. The result says that the check looked at
// the server before the time was over. On a quiet machine the first check does.
func inTime(t *testing.T, first time.Duration, check func(d time.Duration) (onTime bool)) {
	t.Helper()
	for d := first; !check(d); d *= 4 {
		if d > limit {
			t.Fatalf("even %v are over before the test can look", d)
		}
		t.Logf("%v were over before the test could look", d)
	}
}

// inOrder checks that a text has all parts in their order. It returns the first part that is missing, or "".
func inOrder(text string, parts []string) (missing string) {
	for _, part := range parts {
		i := strings.Index(text, part)
		if i < 0 {
			return part
		}
		text = text[i+len(part):]
	}
	return ""
}

// statField returns a field of /proc/PID/stat. The parameter number is the field's number in proc_pid_stat(5), at least
// 3. If the process has ended, statField returns "".
func statField(pid, number int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	return strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))[number-3]
}

const (
	statState   = 3
	statParent  = 4
	statGroup   = 5
	statSession = 6
)

// alive reports whether a process runs and is no zombie.
func alive(pid int) bool {
	state := statField(pid, statState)
	return state != "" && state != "Z" && state != "X"
}

// ignoresSIGTERM reports whether a process ignores SIGTERM, by its mask of ignored signals (proc_pid_status(5)).
func ignoresSIGTERM(t *testing.T, pid int) bool {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if mask, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			bits, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return bits&(1<<(syscall.SIGTERM-1)) != 0
		}
	}
	t.Fatalf("process %d has no SigIgn", pid)
	return false
}
