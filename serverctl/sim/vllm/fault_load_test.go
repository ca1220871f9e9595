package vllm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// errorChunk is the end of a stream whose engine has died: an error in JSON as Python writes it, and then [DONE]. The
// HTTP status of the stream is 200.
const errorChunk = `data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", ` +
	`"type": "InternalServerError", "param": null, "code": 500}}` + "\n\ndata: [DONE]\n\n"

// runningStream starts a stream that lasts for half a minute, and waits for its first tokens.
func runningStream(t *testing.T, s *simProcess) *streamed {
	t.Helper()
	a := s.ask(t.Context(), true, 5000)
	await(t, "the stream begins", func() bool { return strings.Contains(a.text(), "w2") })
	return a
}

// An engine dies under load as in vLLM 0.14.1. The third request triggers the fault.
func TestAnEngineThatDiesUnderLoad(t *testing.T) {
	t.Parallel()
	fatal := func(exception string) []string {
		return []string{
			"EngineCore encountered a fatal error.\n",
			"" + exception, "AsyncLLM output_handler failed.\n",
			"vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "INFO:     Shutting down\n",
		}
	}
	silent := []string{"Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n",
		"AsyncLLM output_handler failed.\n", "INFO:     Shutting down\n"}
	for _, row := range []struct {
		kind string
		want []string
	}{
		{"oom-load", fatal("torch.OutOfMemoryError: CUDA out of memory.")},
		{"illegal-memory", fatal("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")},
		{"disk-full", fatal("OSError: [Errno 28] No space left on device")},
		{"too-many-files", fatal("OSError: [Errno 24] Too many open files")},
		{"nccl", fatal("torch.distributed.DistBackendError: NCCL error in: ")},
		{"engine-death", silent},
	} {
		processes := []string{""}
		if row.kind == "oom-load" || row.kind == "engine-death" { // one death with a message and one without; the other kinds differ only in the message
			processes = append(processes, "--sim-engine-process")
		}
		for _, process := range processes {
			t.Run(row.kind+" "+process, func(t *testing.T) {
				t.Parallel()
				s := readySim(t, strings.Fields("--sim-fault "+row.kind+":request=3,for=1h "+process)...)
				stream := runningStream(t, s)
				body := s.ask(t.Context(), false, 5000)
				await(t, "both requests run", func() bool { return s.metric("vllm:num_requests_running") == 2 })
				last := s.ask(t.Context(), true, 100)
				if status, text, err := stream.whole(t); status != 200 || err != nil || !strings.HasSuffix(text, errorChunk) {
					t.Errorf("the stream ends with %.300q, status %d, %v", text[max(0, len(text)-300):], status, err)
				}
				if status, text, err := last.whole(t); status != 200 || err != nil || !strings.HasSuffix(text, errorChunk) {
					t.Errorf("the request that triggered the fault ends with %q, status %d, %v", text, status, err)
				}
				if status, text, err := body.whole(t); status != 500 || err != nil || !strings.Contains(text, `"type":"InternalServerError"`) {
					t.Errorf("the request without a stream ends with %q, status %d, %v", text, status, err)
				}
				if status := s.health(); status != 503 {
					t.Errorf("/health says %d", status)
				}
				if status, text := postTo(s, "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}]}`); status != 500 || !strings.Contains(text, deadEngine) {
					t.Errorf("a later chat is answered with %d %q", status, text)
				}
				endAtSIGTERM(t, s)
				if missing := inOrder(s.log(), row.want); missing != "" {
					t.Errorf("the log lacks %q, or has it in another order", missing)
				}
			})
		}
	}
}

// An API server outlives its engine for the time that the fault's key for= gives. It exits with 0, as in vLLM.
func TestAnAPIServerEndsAfterItsEngine(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "engine-death:request=1,for=1s")
	begin := time.Now()
	s.ask(t.Context(), true, 3)
	if code := s.end().ExitCode(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if took := time.Since(begin); took < time.Second {
		t.Errorf("the server ended after %v, want at least 1s", took)
	}
}

// postTo sends a request and returns the beginning of the answer.
func postTo(s *simProcess, path, body string) (int, string) {
	resp, err := s.http.Post(s.url+path, "application/json", strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text := make([]byte, 1000)
	n, _ := resp.Body.Read(text)
	return resp.StatusCode, string(text[:n])
}

// The test kills the engine's process with SIGKILL; no fault is set. Then /health answers 503, and the API server exits
// with 0 after five seconds. On a busy machine the test may ask /health too late. Then it tries again with a longer
// time.
func TestAnEngineThatIsKilled(t *testing.T) {
	t.Parallel()
	inTime(t, watchdogTime, func(d time.Duration) bool {
		var flags []string
		if d != watchdogTime { // the first time shows that watchdogTime is the default
			flags = append(flags, watchdogFlag+d.String())
		}
		s := readySim(t, append(flags, "--sim-engine-process")...)
		stream, engine := runningStream(t, s), s.engine()
		if group := statField(engine, statGroup); group != fmt.Sprint(s.cmd.Process.Pid) {
			t.Errorf("the engine is in group %s, its server in %d", group, s.cmd.Process.Pid)
		}
		begin := time.Now()
		if err := syscall.Kill(engine, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		onTime := false
		await(t, "/health says 503, or the server has ended", func() bool {
			onTime = s.health() == 503
			return onTime || s.gone()
		})
		if _, text, err := stream.whole(t); err != nil || !strings.HasSuffix(text, errorChunk) {
			t.Errorf("the stream ends with %q, %v", text[max(0, len(text)-300):], err)
		}
		if code := s.endWithin(d + limit).ExitCode(); code != 0 {
			t.Errorf("exit code %d", code)
		}
		if took := time.Since(begin); took < d {
			t.Errorf("the API server ended after %v, want at least %v", took, d)
		}
		if missing := inOrder(s.log(), []string{"died unexpectedly", "output_handler failed", "Error in completion stream generator."}); missing != "" {
			t.Errorf("the log lacks %q", missing)
		}
		return onTime
	})
}

// When the API server is killed, its engine lives on and holds the GPU's memory. With vLLM 0.32.0 this happened in two
// of two runs.
func TestAnEngineOutlivesAnAPIServerThatIsKilled(t *testing.T) {
	t.Parallel()
	gpu := t.TempDir()
	s := readySim(t, "--sim-engine-process", "--sim-gpu", gpu)
	engine, stream := s.engine(), runningStream(t, s)
	s.signal(syscall.SIGKILL)
	s.end()
	if _, text, err := stream.whole(t); err == nil || strings.Contains(text, "[DONE]") {
		t.Errorf("the stream ends without an error: %v", err)
	}
	if !alive(engine) || statField(engine, statGroup) != fmt.Sprint(s.cmd.Process.Pid) || statField(engine, statParent) == fmt.Sprint(s.cmd.Process.Pid) {
		t.Errorf("the engine has not become an orphan: state %s, group %s, parent %s", statField(engine, statState), statField(engine, statGroup), statField(engine, statParent))
	}
	if used, holders := usedMiB(t, gpu); used < 14000 || len(holders) != 1 || holders[0].PID != engine {
		t.Errorf("%.0f MiB are held by %v, want all of them held by the engine", used, holders)
	}
	if err := syscall.Kill(engine, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	await(t, "the engine ends at SIGTERM", func() bool { return !alive(engine) })
	if used, _ := usedMiB(t, gpu); used != 0 {
		t.Errorf("%.0f MiB are still held", used)
	}
}

func TestSIGTERMEndsBothProcesses(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-engine-process")
	engine := s.engine()
	s.signal(syscall.SIGTERM)
	if code := s.end().ExitCode(); code != 0 || alive(engine) {
		t.Errorf("exit code %d, engine alive: %v", code, alive(engine))
	}
}

func TestServersThatEndUnderLoad(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, flags string
		code        int
		signal      syscall.Signal
		want        string // part of the log
	}{
		{"an exit with code 0", "--sim-fault exit-0:request=2", 0, -1, ""},
		{"an exit with an engine process", "--sim-fault exit-0:request=2 --sim-engine-process", 0, -1, ""},
		{"an exit at a time", "--sim-fault exit-0:at=500ms", 0, -1, ""},
		{"a crash", "--sim-fault crash:request=2", -1, syscall.SIGSEGV, "!!!!!!! Segfault encountered !!!!!!!\n"},
		{"a crash at one running request", "--sim-fault crash:running=1", -1, syscall.SIGSEGV, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := startSim(t, strings.Fields(row.flags)...)
			await(t, "the server is ready or has ended", func() bool { return s.health() == 200 || s.gone() })
			stream := s.ask(t.Context(), true, 5000)
			await(t, "the stream has begun or ended", func() bool { return strings.Contains(stream.text(), "w2") || s.gone() })
			s.ask(t.Context(), true, 5000)
			state := s.end()
			if status := state.Sys().(syscall.WaitStatus); state.ExitCode() != row.code || status.Signaled() && status.Signal() != row.signal {
				t.Errorf("the server ends with %v, want code %d or signal %v", state, row.code, row.signal)
			}
			if _, text, err := stream.whole(t); err == nil || strings.Contains(text, "[DONE]") || strings.Contains(text, "error") {
				t.Errorf("the stream ends without an error: %q, %v", text, err)
			}
			if !strings.Contains(s.log(), row.want) {
				t.Errorf("the log lacks %q", row.want)
			}
			if strings.Contains(row.flags, "--sim-engine-process") {
				await(t, "the engine has ended", func() bool { return !alive(s.engine()) })
			}
		})
	}
}

// During the fault named hang, requests stay in the engine but get no tokens. The API server still answers.
func TestAnEngineThatHangs(t *testing.T) {
	t.Parallel()
	s, healthy := readySim(t, "--sim-fault", "hang:request=2"), readySim(t)
	stream := runningStream(t, s)
	second := s.ask(t.Context(), true, 3)
	await(t, "no token comes although requests run", func() bool {
		before := s.metric("vllm:generation_tokens_total")
		healthy.meanwhile(t)
		return s.metric("vllm:generation_tokens_total") == before && s.metric("vllm:num_requests_running") > 0
	})
	if status := s.health(); status != 200 {
		t.Errorf("/health says %d", status)
	}
	for _, a := range []*streamed{stream, second} {
		if text := a.text(); strings.Contains(text, "[DONE]") {
			t.Errorf("a stream has ended during the hang: %q", text)
		}
	}
}

// When the fault named hang ends, the streams go on.
func TestAHangThatEnds(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "hang:request=2,for=1s")
	stream := s.ask(t.Context(), true, 100)
	await(t, "the stream begins", func() bool { return strings.Contains(stream.text(), "w2") })
	begin := time.Now()
	second := s.ask(t.Context(), true, 3)
	for _, a := range []*streamed{stream, second} {
		if _, text, err := a.whole(t); err != nil || !strings.HasSuffix(text, "data: [DONE]\n\n") {
			t.Errorf("after the hang a stream ends with %q, %v", text[max(0, len(text)-200):], err)
		}
	}
	if took := time.Since(begin); took < time.Second {
		t.Errorf("the hang was over after %v", took)
	}
}

// awaitDeaf waits until the server accepts a connection but does not answer the request on it. The answer must be
// missing while a server without a fault generates 50 tokens.
func awaitDeaf(t *testing.T, s *simProcess) {
	t.Helper()
	healthy := readySim(t)
	await(t, "connections are accepted and not answered", func() bool {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		if err != nil {
			return false
		}
		defer conn.Close()
		fmt.Fprint(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		healthy.meanwhile(t)
		raw, err := conn.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var waiting error
		err = raw.Control(func(fd uintptr) {
			_, _, waiting = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		})
		return err == nil && errors.Is(waiting, unix.EAGAIN) // neither an answer nor the end of the connection
	})
}

func TestAnAPIServerThatIsDeaf(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "deaf:request=2,for=1s")
	stream := runningStream(t, s)
	begin := time.Now()
	second := s.ask(t.Context(), true, 3)
	if _, text, err := second.whole(t); err != nil || !strings.HasSuffix(text, "data: [DONE]\n\n") || time.Since(begin) < time.Second {
		t.Errorf("the second request ends with %q, %v, after %v", text, err, time.Since(begin))
	}
	before := len(stream.text())
	await(t, "the first stream goes on", func() bool { return len(stream.text()) > before })
	if status := s.health(); status != 200 {
		t.Errorf("/health says %d", status)
	}
}

// A server with the fault named deaf, without a time limit, still ends at SIGTERM. Only the fault named ignore-term
// makes a server ignore SIGTERM.
func TestADeafServerEndsAtSIGTERM(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "deaf:request=1")
	a := s.ask(t.Context(), true, 3)
	awaitDeaf(t, s)
	endAtSIGTERM(t, s)
	if _, text, _ := a.whole(t); text != "" {
		t.Errorf("the deaf server answered %q", text)
	}
}

func TestAServerThatStopsItself(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "stop:request=1")
	a := s.ask(t.Context(), true, 3)
	await(t, "the server is stopped", func() bool { return statField(s.cmd.Process.Pid, statState) == "T" })
	s.signal(syscall.SIGCONT)
	if _, text, err := a.whole(t); err != nil || !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("after SIGCONT the stream ends with %q, %v", text, err)
	}
}

func TestAFloodOfLines(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "flood:request=1,bytes=8MiB")
	before := len(s.log())
	s.ask(t.Context(), true, 3)
	await(t, "the log has 8 MiB more", func() bool {
		info, err := os.Stat(s.path)
		return err == nil && info.Size() >= int64(before)+8<<20
	})
	if status := s.health(); status != 200 {
		t.Errorf("/health says %d", status)
	}
	for line := range strings.Lines(s.log()[before:]) {
		if !strings.HasPrefix(line, "(EngineCore_DP0 pid=") || !strings.HasSuffix(line, "to be quiet\n") {
			t.Fatalf("a line is %q", line)
		}
	}
}

func TestZombies(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "zombies:n=3")
	await(t, "the server has three zombies", func() bool { return zombiesOf(t, s.cmd.Process.Pid) == 3 })
}

func zombiesOf(t *testing.T, parent int) (n int) {
	t.Helper()
	entries, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(filepath.Base(entry))
		if err == nil && statField(pid, statParent) == fmt.Sprint(parent) && statField(pid, statState) == "Z" {
			n++
		}
	}
	return n
}

// A fault of one request does not change the answers to the requests before and after.
func TestFaultsOfOneRequest(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		kind  string
		check func(t *testing.T, s *simProcess, a *streamed, asked time.Time)
	}{
		{"status-500", func(t *testing.T, _ *simProcess, a *streamed, _ time.Time) {
			if status, text, err := a.whole(t); status != 500 || err != nil || !strings.Contains(text, `"message":"Internal server error"`) {
				t.Errorf("%d %q, %v", status, text, err)
			}
		}},
		{"wrong-type", func(t *testing.T, _ *simProcess, a *streamed, _ time.Time) {
			if status, text, err := a.whole(t); status != 200 || err != nil || a.kind != "text/html; charset=utf-8" || !strings.Contains(text, "<html>") {
				t.Errorf("%d %q of type %s, %v", status, text, a.kind, err)
			}
		}},
		{"stop-writing", func(t *testing.T, s *simProcess, a *streamed, _ time.Time) {
			await(t, "three tokens come", func() bool { return strings.Contains(a.text(), "w2") })
			s.meanwhile(t) // without the fault, the answer would go on or end in this time
			select {
			case <-a.ended:
				t.Error("the answer ends although it should stop in the middle")
			default:
			}
			if text := a.text(); strings.Contains(text, "w3") {
				t.Errorf("the stream goes on: %q", text)
			}
			a.drop()
		}},
		{"slow-loris", func(t *testing.T, _ *simProcess, a *streamed, asked time.Time) {
			await(t, "two bytes come", func() bool { return len(a.text()) >= 2 })
			text := a.text() // on a busy machine the test may look late and see more than two bytes
			took, start := time.Since(asked), "data: "
			if pauses := time.Duration(len(text) - 1); took < pauses*900*time.Millisecond || !strings.HasPrefix(start, text[:min(len(text), len(start))]) {
				t.Errorf("%q came in %v, want one byte a second", text, took)
			}
			a.drop()
		}},
		{"mid-stream-error", func(t *testing.T, _ *simProcess, a *streamed, _ time.Time) {
			status, text, err := a.whole(t)
			if status != 200 || err != nil || !strings.Contains(text, "w2") || strings.Contains(text, "w3") ||
				!strings.HasSuffix(text, `data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}`+"\n\ndata: [DONE]\n\n") {
				t.Errorf("%d %q, %v", status, text, err)
			}
		}},
		{"truncated", func(t *testing.T, _ *simProcess, a *streamed, _ time.Time) {
			status, text, err := a.whole(t)
			if status != 200 || err == nil || !strings.Contains(text, "w2") || strings.Contains(text, "w3") || strings.Contains(text, "[DONE]") {
				t.Errorf("%d %q, %v; want the connection closed in the middle", status, text, err)
			}
		}},
	} {
		t.Run(row.kind, func(t *testing.T) {
			t.Parallel()
			s := readySim(t, "--sim-fault", row.kind+":request=2")
			askUnaffected := func() {
				t.Helper()
				if status, text, err := s.ask(t.Context(), true, 5).whole(t); status != 200 || err != nil || !strings.Contains(text, "w4") || !strings.HasSuffix(text, "data: [DONE]\n\n") {
					t.Errorf("another request: %d %q, %v", status, text, err)
				}
			}
			askUnaffected()
			asked := time.Now()
			row.check(t, s, s.ask(t.Context(), true, 100), asked)
			askUnaffected()
			await(t, "the engine has no request left", func() bool { return s.metric("vllm:num_requests_running") == 0 })
		})
	}
}

// A fault with the keys at= and for= hits all requests that come in that period, and no later request.
func TestAFaultHitsAllRequestsOfAPeriod(t *testing.T) {
	t.Parallel()
	var s *simProcess
	inTime(t, time.Second, func(d time.Duration) bool {
		begin := time.Now()
		s = readySim(t, "--sim-fault", fmt.Sprintf("status-500:at=0s,for=%s", d), "--sim-fault", "wrong-type:running=1")
		status, _, _ := s.ask(t.Context(), true, 3).whole(t)
		onTime := time.Since(begin) < d // the period of the fault began later than begin was taken
		if onTime && status != 500 {
			t.Errorf("during the time of the fault a request is answered with %d", status)
		}
		await(t, "the fault is over", func() bool {
			status, _, _ := s.ask(t.Context(), true, 3).whole(t)
			return status != 500
		})
		if time.Since(begin) < d {
			t.Errorf("the fault was over before %v", d)
		}
		return onTime
	})
	if status, text, _ := s.ask(t.Context(), true, 3).whole(t); status != 200 || !strings.Contains(text, "[DONE]") {
		t.Errorf("after the time of the fault a request is answered with %d %q", status, text)
	}
	runningStream(t, s)
	if _, text, _ := s.ask(t.Context(), true, 3).whole(t); !strings.Contains(text, "<html>") {
		t.Errorf("while another request runs, a request is answered with %q", text)
	}
}

// The model accepts draft tokens until the second request. From then on the model accepts none, for ever or for a
// second.
func TestADrafterWithoutAcceptedTokens(t *testing.T) {
	t.Parallel()
	accepted := func(s *simProcess) float64 { return s.metric("vllm:spec_decode_num_accepted_tokens_total") }
	// ask requests 200 tokens, and returns how many draft tokens were accepted for them.
	ask := func(t *testing.T, s *simProcess) float64 {
		t.Helper()
		before := accepted(s)
		if status, text, err := s.ask(t.Context(), true, 200).whole(t); status != 200 || err != nil {
			t.Fatalf("a request is answered with %d %.200q, %v", status, text, err)
		}
		return accepted(s) - before
	}
	start := func(t *testing.T, fault string) *simProcess {
		t.Helper()
		s := readySim(t, "--speculative-config", `{"method":"eagle3","num_speculative_tokens":3}`, "--sim-fault", fault)
		if n := ask(t, s); n < 50 {
			t.Fatalf("%g draft tokens are accepted in 200 tokens, want at least 50", n)
		}
		return s
	}
	t.Run("for ever", func(t *testing.T) {
		t.Parallel()
		s := start(t, "no-acceptance:request=2")
		ask(t, s) // the fault may begin after the first steps of the request
		drafted := s.metric("vllm:spec_decode_num_draft_tokens_total")
		if n := ask(t, s); n != 0 || s.metric("vllm:spec_decode_num_draft_tokens_total") < drafted+500 {
			t.Errorf("%g draft tokens are accepted, want none", n)
		}
	})
	t.Run("for a second", func(t *testing.T) {
		t.Parallel()
		s := start(t, "no-acceptance:request=2,for=1s")
		await(t, "the model accepts draft tokens again", func() bool { return ask(t, s) >= 50 })
	})
}
