package vllm

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestAServerThatIgnoresSIGTERM(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "ignore-term")
	if !ignoresSIGTERM(t, s.cmd.Process.Pid) {
		t.Error("SIGTERM is not ignored")
	}
	s.signal(syscall.SIGTERM)
	if status := s.health(); status != 200 {
		t.Errorf("after SIGTERM /health says %d", status)
	}
}

func TestAServerThatStopsSlowly(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "slow-stop:for=700ms", "--sim-engine-process")
	stream, engine := runningStream(t, s), s.engine()
	begin := time.Now()
	s.signal(syscall.SIGTERM)
	if code := s.end().ExitCode(); code != 0 || alive(engine) {
		t.Errorf("exit code %d, engine alive: %v; want 0 and false", code, alive(engine))
	}
	if took := time.Since(begin); took < 700*time.Millisecond {
		t.Errorf("the server ended %v after SIGTERM, want at least 700ms", took)
	}
	stream.whole(t)
}

// After SIGTERM, vLLM 0.14.1 may wait for its clients without a limit. Two of three real servers with streams in flight
// did so.
func TestAServerThatWaitsForItsClients(t *testing.T) {
	t.Parallel()
	for _, process := range []string{"", "--sim-engine-process"} {
		t.Run(process, func(t *testing.T) {
			t.Parallel()
			s := readySim(t, strings.Fields("--sim-fault hang-on-connections "+process)...)
			stream := s.ask(t.Context(), true, 5000)
			await(t, "the stream begins", func() bool { return strings.Contains(stream.text(), "w2") })
			s.signal(syscall.SIGTERM)
			await(t, "the server waits for connections", func() bool { return strings.Contains(s.log(), "Waiting for connections to close.") })
			await(t, "the port is closed", func() bool { return s.health() == 0 })
			healthy := readySim(t)
			await(t, "no more tokens come", func() bool {
				before := stream.text()
				healthy.meanwhile(t) // this wait is long enough: without the fault the server would have ended
				return stream.text() == before
			})
			select {
			case <-s.exited:
				t.Fatal("the server has ended although a client is connected")
			case <-stream.ended:
				t.Fatal("the client's stream has ended")
			default:
			}
			if process != "" && alive(s.engine()) {
				t.Error("the engine is still alive")
			}
			stream.drop()
			if code := s.end().ExitCode(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if strings.Contains(s.log(), "died unexpectedly") {
				t.Error("the log reports the stopped engine as dead")
			}
		})
	}
}

func TestADaemonOutlivesItsServer(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "daemon")
	m := regexp.MustCompile(`Fault daemon: process (\d+) has`).FindStringSubmatch(s.log())
	if m == nil {
		t.Fatal("the log names no daemon")
	}
	daemon, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(daemon, syscall.SIGKILL) })
	if statField(daemon, statSession) != m[1] || statField(daemon, statParent) != fmt.Sprint(s.cmd.Process.Pid) {
		t.Errorf("the daemon is in session %s, child of %s", statField(daemon, statSession), statField(daemon, statParent))
	}
	if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", daemon)); err != nil || len(env) != 0 {
		t.Errorf("the daemon's environment is %q, %v", env, err)
	}
	if !ignoresSIGTERM(t, daemon) {
		t.Error("the daemon does not ignore SIGTERM")
	}
	s.signal(syscall.SIGTERM)
	s.end()
	if err := syscall.Kill(daemon, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if !alive(daemon) {
		t.Error("SIGTERM has ended the daemon")
	}
}

func TestASegmentThatIsLeftInSharedMemory(t *testing.T) {
	t.Parallel()
	s := readySim(t, "--sim-fault", "leak-shm:bytes=1MiB")
	m := regexp.MustCompile(`Fault leak-shm: (/dev/shm/psm_[0-9a-f]{8}) has 1048576 bytes`).FindStringSubmatch(s.log())
	if m == nil {
		t.Fatal("the log names no segment")
	}
	t.Cleanup(func() { os.Remove(m[1]) })
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", s.cmd.Process.Pid))
	if err != nil || !strings.Contains(string(maps), m[1]) {
		t.Errorf("the segment is not mapped (%v)", err)
	}
	s.signal(syscall.SIGTERM)
	s.end()
	if info, err := os.Stat(m[1]); err != nil || info.Size() != 1<<20 {
		t.Errorf("the segment is not left behind: %v", err)
	}
}
