package serverctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
)

// A transcript collects the progress and the log of a starting server.
type transcript struct {
	mu   sync.Mutex
	said []string
	log  bytes.Buffer
}

func (t *transcript) progress(phase string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.said = append(t.said, phase)
}

func (t *transcript) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.log.Write(b)
}

func (t *transcript) all() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.said, "\n") + "\n" + t.log.String()
}

// hangLimit is how long a test waits for an event that must happen. It is long, because two busy cores are slow.
const hangLimit = 45 * time.Second

// config returns a config that starts the test binary in a role.
func config(role string) (Config, *transcript) {
	var seen transcript
	return Config{
		Command:      []string{os.Args[0]},
		Model:        "/models/tiny",
		Args:         []string{"--max-num-seqs", "8"},
		Env:          map[string]string{roleVariable: role, "GORACE": noExitPause},
		StartTimeout: hangLimit,
		StopTimeout:  hangLimit,
		Log:          &seen,
		Progress:     seen.progress,
		limits: limits{readyEvery: 20 * time.Millisecond, healthEvery: 50 * time.Millisecond, sampleEvery: 50 * time.Millisecond, healthTimeout: hangLimit,
			healthFailures: 3, drain: 300 * time.Millisecond, resetPause: 50 * time.Millisecond},
	}, &seen
}

// start starts a server that becomes ready, and stops it after the test.
func start(t *testing.T, c Config) *Server {
	t.Helper()
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatalf("Start() = %v", err)
	}
	t.Cleanup(func() { s.Stop(context.Background()) })
	return s
}

func TestAServerStartsTellsItsFactsAndIsGoneAfterStop(t *testing.T) {
	t.Parallel()
	c, seen := config("serve")
	var record proc.Record
	c.OnRecord = func(r proc.Record) error { record = r; return nil }
	s := start(t, c)
	f := s.Facts()
	if f.Version != "0.14.1" || f.KVCacheTokens != 2097152 || f.MaxConcurrency != 1024 || f.MaxModelLen != 2048 ||
		f.StartUp <= 0 || f.Port == 0 || f.Simulated {
		t.Errorf("Facts() = %+v", f)
	}
	if s.ModelID() != "tiny" || s.URL() != fmt.Sprintf("http://127.0.0.1:%d", f.Port) {
		t.Errorf("model %q at %s", s.ModelID(), s.URL())
	}
	begin := time.Now()
	if took, err := s.Drain(t.Context()); err != nil || took <= 0 || took > time.Since(begin) {
		t.Errorf("Drain() = %v, %v after %v", took, err, time.Since(begin))
	}
	if record.PID == 0 || record.Token == "" {
		t.Errorf("the record is %+v", record)
	}
	if !strings.Contains(seen.all(), "--max-num-seqs 8 --host 127.0.0.1 --port") {
		t.Errorf("the log does not show the command line: %s", seen.all())
	}
	ended, err := s.Stop(t.Context())
	if err != nil || ended.Took <= 0 {
		t.Errorf("Stop() = %+v, %v", ended, err)
	}
	if again, err := s.Stop(t.Context()); err != nil || again.Took != ended.Took {
		t.Errorf("a second Stop() = %+v, %v, want %+v again", again, err, ended)
	}
	select {
	case <-s.Exited():
		t.Error("Exited is closed by Stop; it is for a server that ends by itself")
	default:
	}
	if s.Err() != nil {
		t.Errorf("Err() = %v after Stop", s.Err())
	}
	if syscall.Kill(record.PID, 0) == nil {
		t.Error("the process lives after Stop")
	}
}

func TestAStartThatFailsHasAClassWithItsEvidence(t *testing.T) {
	t.Parallel()
	oom := filepath.Join(t.TempDir(), "oom.log")
	text := "(EngineCore_DP0 pid=2) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n" +
		"(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
	if err := os.WriteFile(oom, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name, role string
		class      Class
		evidence   string
		code       int
	}{
		{"out of memory", "log " + oom + " 1", OOMStart, "CUDA out of memory. Tried", 1},
		{"a KV cache that holds no request", "log testdata/death-kv-0.14.1.log 1", KVTooSmall, "1.91 GiB KV cache is needed", 1},
		{"an unknown flag", "log testdata/death-flags-unknown-0.14.1.log 2", FlagsRejected, "unrecognized arguments: --max-num-sequences", 2},
		{"a model that is not there is named", "log testdata/death-model-cache-0.14.1.log 1", ModelNotFound, "model /models/tiny: ", 1},
		{"exit code 2 without argparse's words", "log /dev/null 2", StartCrash, "exit status 2", 2},
		{"no word and exit code 3", "log /dev/null 3", StartCrash, "exit status 3", 3},
		{"an end in good order before it was ready", "log /dev/null 0", StartCrash, "exit status 0", 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config(row.role)
			_, err := Start(t.Context(), c)
			exit, ok := errors.AsType[*ExitError](err)
			if !ok || exit.Class != row.class || !strings.Contains(exit.Evidence, row.evidence) || exit.Code != row.code {
				t.Errorf("Start() = %#v, want class %s, code %d, evidence with %q", err, row.class, row.code, row.evidence)
			}
		})
	}
}

func TestAServerThatDoesNotGetReadyIsStopped(t *testing.T) {
	t.Parallel()
	t.Run("after the start timeout, with the last line", func(t *testing.T) {
		t.Parallel()
		for timeout := time.Second; ; timeout *= 4 {
			c, seen := config("hang")
			c.StartTimeout = timeout
			_, err := Start(t.Context(), c)
			exit, ok := errors.AsType[*ExitError](err)
			if !ok || exit.Class != StartTimeout || !strings.Contains(exit.Evidence, fmt.Sprintf("not ready after %v, still waiting for /health", render.Took(timeout))) {
				t.Fatalf("Start() = %v", err)
			}
			if strings.Contains(exit.Evidence, "Starting to load model") && strings.Contains(seen.all(), "loading the weights") {
				return
			}
			if timeout > hangLimit {
				t.Fatalf("Start() = %v, and told: %s; want the last line and the phase", err, seen.all())
			}
			t.Logf("the server said nothing within %v", timeout) // such a silence means that the machine is busy
		}
	})
	t.Run("when the context ends", func(t *testing.T) {
		t.Parallel()
		c, _ := config("hang")
		var record proc.Record
		c.OnRecord = func(r proc.Record) error { record = r; return nil }
		ctx, cancel := context.WithCancelCause(t.Context())
		c.Progress = func(phase string) {
			if strings.Contains(phase, "loading the weights") {
				cancel(errors.New("budget spent"))
			}
		}
		_, err := Start(ctx, c)
		if _, ok := errors.AsType[*ExitError](err); ok || err == nil || !strings.Contains(err.Error(), "budget spent") {
			t.Errorf("Start() = %v, want the context's cause and no class", err)
		}
		if syscall.Kill(record.PID, 0) == nil {
			t.Error("the process lives")
		}
	})
	t.Run("when its record cannot be kept", func(t *testing.T) {
		t.Parallel()
		c, _ := config("hang")
		var pid int
		c.OnRecord = func(r proc.Record) error { pid = r.PID; return errors.New("disk full") }
		if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "disk full") || syscall.Kill(pid, 0) == nil {
			t.Errorf("Start() = %v", err)
		}
	})
}

func TestAConfigThatNoServerCanStartWithIsNoFaultOfThePoint(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "vllm")
	if err := os.WriteFile(script, []byte("#!/no/such/python3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		change func(c *Config)
		want   string
	}{
		{"a program that is nowhere", func(c *Config) { c.Command = []string{"no-such-vllm"}; c.Env["PATH"] = "/no/bin" },
			`"no-such-vllm": executable file not found in $PATH; give its full path, or set PATH in server.env: PATH=/no/bin`},
		{"a path that is no file", func(c *Config) { c.Command = []string{"/no/such/vllm"} }, "/no/such/vllm cannot be run"},
		{"a script without its interpreter", func(c *Config) { c.Command = []string{script} }, "the interpreter in its first line"},
		{"no command", func(c *Config) { c.Command = nil }, "server.command is empty"},
		{"no model", func(c *Config) { c.Model = "" }, "model is empty"},
		{"a port among the args", func(c *Config) { c.Args = []string{"--port=8000"} }, "holds --port, but the tuner chooses the address itself; remove it and use server.port"},
		{"a host among the args", func(c *Config) { c.Args = []string{"--host", "0.0.0.0"} }, "holds --host"},
	} {
		c, _ := config("serve")
		row.change(&c)
		_, err := Start(t.Context(), c)
		if _, ok := errors.AsType[*ExitError](err); ok || err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: Start() = %v, want %q", row.name, err, row.want)
		}
	}
}

func TestAForeignServerOnThePortIsNeverMeasured(t *testing.T) {
	t.Parallel()
	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hit := false
	server := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hit = true })}
	go server.Serve(foreign)
	defer server.Close()
	port := foreign.Addr().(*net.TCPAddr).Port

	c, seen := config("serve")
	c.Port = port
	s := start(t, c)
	if s.Facts().Port == port || hit {
		t.Errorf("the server is on port %d, foreign port %d, foreign server asked %v", s.Facts().Port, port, hit)
	}
	if want := fmt.Sprintf("port %d is taken by another process", port); !strings.Contains(seen.all(), want) {
		t.Errorf("told %q, want %q", seen.all(), want)
	}

	// The child never listens, while another process answers on its port.
	c, _ = config("hang")
	withDefaults, err := c.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	_, err = launch(t.Context(), withDefaults, port)
	if exit, ok := errors.AsType[*ExitError](err); !ok || exit.Class != PortTaken {
		t.Errorf("launch beside a foreign server = %v, want %s", err, PortTaken)
	}
}

func TestAPortThatIsLostDuringTheStartIsReplaced(t *testing.T) {
	t.Parallel()
	c, seen := config("port " + filepath.Join(t.TempDir(), "tried"))
	start(t, c)
	if !strings.Contains(seen.all(), "was taken while the server started; trying another port") {
		t.Errorf("told %q", seen.all())
	}
}

func TestAStubbornServerAndItsEngineAreKilled(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "engine")
	c, _ := config("stubborn " + file)
	c.StopTimeout = 200 * time.Millisecond
	s := start(t, c)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	engine, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if ended, err := s.Stop(t.Context()); err != nil || ended.Took < c.StopTimeout {
		t.Errorf("Stop() = %+v, %v", ended, err)
	}
	if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", engine)); err == nil && !strings.Contains(string(state), ") Z ") {
		t.Errorf("the engine lives: %s", state)
	}
}

func TestSecretsAreInNoLogAndNoTail(t *testing.T) {
	t.Parallel()
	c, seen := config("serve")
	c.APIKey = "key-of-the-api"
	c.Args = []string{"--api-key", "key-in-args", "--hf-token=token-in-args", "--max-num-seqs", "123456"}
	c.Env["HF_TOKEN"], c.Env["MYCRED"] = "token-in-env", "value-of-a-reference"
	c.Secrets = []string{"value-of-a-reference"}
	s := start(t, c)
	text := seen.all() + strings.Join(s.log.snapshot().tail, "\n")
	for _, secret := range []string{"key-of-the-api", "key-in-args", "token-in-args", "token-in-env", "value-of-a-reference"} {
		if strings.Contains(text, secret) {
			t.Errorf("%q is in the log", secret)
		}
	}
	if !strings.Contains(text, "--max-num-seqs 123456") {
		t.Errorf("the harmless args are hidden too: %s", text)
	}
}

func TestSecretsByTheNamesOfVariables(t *testing.T) {
	t.Parallel()
	for variable, secret := range map[string]bool{
		"HF_TOKEN=abcdefgh": true, "API_KEYS=12345678": true, "MY_PASSWORD=abcdefgh": true,
		"SSL_PASSPHRASE=abcdefgh": true, "REGISTRY_AUTH=abcdefgh": true, "DB_PASS=abcdefgh": true, "COOKIE=abcdefgh": true,
		"REGISTRY_AUTH=12345678": false, "AUTHOR=abcdefgh": false, "COMPASSES=abcdefgh": false, "TOKENIZERS_PARALLELISM=abcdefgh": false,
	} {
		_, value, _ := strings.Cut(variable, "=")
		if hidden := (Config{}).censor([]string{variable}).hide("given " + value); (hidden == "given [secret]") != secret {
			t.Errorf("with %s in the environment the log says %q", variable, hidden)
		}
	}
}

func TestAKeyReachesServerAndRequests(t *testing.T) {
	t.Parallel()
	c, _ := config("key")
	c.APIKey = "key-of-the-api"
	start(t, c)
	c, _ = config("key")
	c.Env["VLLM_API_KEY"] = "another"
	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "give it as VLLM_API_KEY") {
		t.Errorf("Start without the key = %v, want the remedy", err)
	}
}

// Each variable that the tuner sets itself is known by name, so that no study can search it.
func TestOwnVariablesAreNamed(t *testing.T) {
	var inherited []string
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		inherited = append(inherited, name)
	}
	for _, variable := range (Config{APIKey: "a", Unset: inherited}).environ() {
		if name, _, _ := strings.Cut(variable, "="); OwnVariable(name) == "" {
			t.Errorf("environ sets %s, but OwnVariable does not know it", name)
		}
	}
}

func TestUnknownVariablesAreFacts(t *testing.T) {
	var l logbook
	fmt.Fprintln(&l, "WARNING 04-21 12:32:10 [envs.py:1744] Unknown vLLM environment variable detected: VLLM_USE_V1")
	fmt.Fprintln(&l, "(APIServer pid=1) WARNING 07-02 21:58:11 [envs.py:2027] Unknown vLLM environment variable detected: VLLM_BUILD_URL")
	fmt.Fprintln(&l, "(EngineCore pid=2) WARNING 07-02 21:58:11 [envs.py:2027] Unknown vLLM environment variable detected: VLLM_USE_V1")
	if got := l.snapshot().facts.UnknownVariables; !slices.Equal(got, []string{"VLLM_USE_V1", "VLLM_BUILD_URL"}) {
		t.Errorf("the unknown variables are %q", got)
	}
}

func TestTheEnvironmentPutsTheUsersWordLast(t *testing.T) {
	t.Setenv("NO_COLOR", "mine")
	t.Setenv("VLLM_SERVER_DEV_MODE", "0")
	env := Config{Env: map[string]string{"EXTRA": "x"}, StartTimeout: time.Minute}.environ()
	for _, want := range []string{"NO_COLOR=mine", "VLLM_SERVER_DEV_MODE=1", "EXTRA=x", "VLLM_ENGINE_READY_TIMEOUT_S=120", "PYTHONUNBUFFERED=1", "PYTHONFAULTHANDLER=1"} {
		if !slices.Contains(env, want) {
			t.Errorf("the environment lacks %s", want)
		}
	}
	t.Setenv("OMP_NUM_THREADS", "3")
	t.Setenv("NCCL_ALGO", "Ring")
	env = Config{Env: map[string]string{"NCCL_ALGO": "Tree"}, Unset: []string{"OMP_NUM_THREADS", "NCCL_ALGO"}}.environ()
	if slices.Contains(env, "OMP_NUM_THREADS=3") || !slices.Contains(env, "NCCL_ALGO=Tree") || slices.Contains(env, "NCCL_ALGO=Ring") {
		t.Errorf("the environment is %q: Unset removes what Env does not set", env)
	}
	env = Config{Env: map[string]string{"PYTHONFAULTHANDLER": ""}}.environ()
	if slices.Contains(env, "PYTHONFAULTHANDLER=1") {
		t.Error("the user's word does not count")
	}
}
