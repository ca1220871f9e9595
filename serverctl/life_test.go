package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"vllmtuner/serverctl/gpu"
)

func TestAHangIsNoticed(t *testing.T) {
	t.Parallel()
	for mode, evidence := range map[string]string{
		"busy":   "no token for 300 ms though 3 requests run",                                  // the counters of this server never change, but /health answers 200
		"frozen": "an idle server generated no token for a request of the tuner within 300 ms", // the counters of this server say that it is idle
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c, _ := config(mode)
			c.HangTimeout = 300 * time.Millisecond
			if exit := awaitDeath(t, start(t, c)); exit.Class != Hang || exit.Cause != NoToken || !strings.Contains(exit.Evidence, evidence) {
				t.Errorf("Err() = %v", exit)
			}
		})
	}
}

func TestAnIdleServerThatAnswersLives(t *testing.T) {
	t.Parallel()
	c, _ := config("serve")
	c.HangTimeout, c.limits.quiet = hangLimit, 100*time.Millisecond // the server has hangLimit for each answer
	s := start(t, c)
	const asked = 1 + 2 // the start asks for one token; then the watcher asks for one after each time without a token
	await(t, "the server is asked for tokens", func() bool { return s.Err() != nil || completions(t, s) >= asked })
	if s.Err() != nil {
		t.Errorf("Err() = %v of a server that is well", s.Err())
	}
}

// completions returns how many requests for tokens a fake has got.
func completions(t *testing.T, s *Server) (n int) {
	t.Helper()
	a, err := s.client.call(t.Context(), http.MethodGet, "/requests", nil, hangLimit)
	if err == nil {
		_, err = fmt.Sscan(string(a.body), &n)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// await waits until a condition is true. After hangLimit it fails the test.
func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(hangLimit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v until %s", hangLimit, what)
		}
	}
}

func TestStillness(t *testing.T) {
	at := func(s float64) time.Time { return time.Unix(0, int64(s*1e9)) }
	busy, served := Counters{Running: 2}, Counters{Running: 2, GenerationTokens: 5}
	for _, row := range []struct {
		name     string
		counters []Counters // one reading per second
		hangs    bool
	}{
		{"an idle server may be still", make([]Counters, 9), false},
		{"a busy one may not", []Counters{busy, busy, busy, busy}, true},
		{"not even when it only waits", []Counters{{Waiting: 1}, {Waiting: 1}, {Waiting: 1}, {Waiting: 1}}, true},
		{"a token is progress", []Counters{busy, busy, served, served, served}, false},
		{"and prefill too", []Counters{busy, busy, {Running: 2, PromptTokens: 9}, {Running: 2, PromptTokens: 9}}, false},
	} {
		still := stillness{limit: 3 * time.Second}
		evidence := ""
		for i, c := range row.counters {
			evidence = still.see(at(float64(i)), c)
		}
		if (evidence != "") != row.hangs {
			t.Errorf("%s: %q", row.name, evidence)
		}
	}
}

func TestASeriesCountsFromItsBeginning(t *testing.T) {
	t.Parallel()
	c, _ := config("serve")
	s := start(t, c)
	begin := time.Now()
	end := s.Observe(begin)
	await(t, "there are three rows", func() bool { return s.series.rows() >= 3 })
	series := end()
	took := seconds(time.Since(begin)) // rounded as the rows' times are: the last row may be younger than a millisecond
	for i, at := range series.At {
		if at < 0 || at > took || i > 0 && at < series.At[i-1] {
			t.Errorf("row %d of %v is at %g s", i, series.At, at)
		}
	}
	if len(series.Running) != len(series.At) || len(series.Generation) != len(series.At) || series.Drafted != nil {
		t.Errorf("columns of different lengths: %+v", series)
	}
	before := len(series.At)
	end = s.Observe(time.Now())
	await(t, "another series has three rows", func() bool { return s.series.rows() >= 3 })
	end()
	if len(series.At) != before {
		t.Error("the series grows after its end")
	}
}

// rows returns the number of rows of the current series; 0 if there is no series.
func (r *recorder) rows() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil {
		return 0
	}
	return len(r.current.At)
}

func TestTheStartUpIsTheSumOfItsParts(t *testing.T) {
	t.Parallel()
	c, _ := config("serve")
	f := start(t, c).Facts()
	var sum time.Duration
	names := map[string]bool{}
	for _, p := range f.Parts {
		sum += p.Took
		names[p.Name] = true
	}
	if sum != f.StartUp || !names[firstPhase] || !names["loading the weights"] {
		t.Errorf("parts %v make %v of %v", f.Parts, sum, f.StartUp)
	}
	if f.Args["dtype"] != "bfloat16" || f.Args["block-size"] != "16" {
		t.Errorf("the flags came to %v", f.Args)
	}
}

func TestWhatTheFlagsCameToIsReadFromALogLine(t *testing.T) {
	args := parseNonDefault(`{'model_tag': '/models/tiny', 'host': '127.0.0.1', 'port': 81, 'model': '/models/tiny', 'max_num_seqs': 8, ` +
		`'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}, 'api_key': ['abc'], 'enforce_eager': True, 'served_model_name': ['it\'s']}`)
	for name, want := range map[string]string{
		"max-num-seqs": "8", "speculative-config": "{'method': 'ngram', 'num_speculative_tokens': 3}", "enforce-eager": "True",
		"host": "", "port": "", "api-key": "",
	} {
		if args[name] != want {
			t.Errorf("%s is %q, want %q, of %v", name, args[name], want, args)
		}
	}
}

// A scriptedGPU reports one of its memory levels per query, and repeats the last level for ever.
type scriptedGPU struct {
	mu     sync.Mutex
	levels []float64
}

func (g *scriptedGPU) Query(context.Context) (gpu.Reading, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	used := g.levels[0]
	if len(g.levels) > 1 {
		g.levels = g.levels[1:]
	}
	return gpu.Reading{At: time.Now(), GPUs: []gpu.GPU{{UUID: "GPU-1", UsedMiB: &used, Throttle: []string{"power cap"}}}}, nil
}

// Watch reports nothing: only queries get the levels.
func (g *scriptedGPU) Watch(ctx context.Context, _ time.Duration, _ func(gpu.Reading)) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestStopWaitsForTheGPUsMemory(t *testing.T) {
	t.Parallel()
	c, _ := config("serve")
	c.GPU = &scriptedGPU{levels: []float64{1000, 70000, 70000, 30000, 1100}}
	s := start(t, c)
	ended, err := s.Stop(t.Context())
	if err != nil || len(ended.GPUs) != 1 || ended.GPUs[0].Before != 1000 || ended.GPUs[0].After != 1100 || ended.GPUWait < gpuEvery {
		t.Errorf("Stop() = %+v, %v", ended, err)
	}
}

func TestMemoryThatDoesNotComeBackIsNobodysFault(t *testing.T) {
	t.Parallel()
	c, _ := config("serve")
	c.GPU, c.GPUMemoryTimeout = &scriptedGPU{levels: []float64{1000, 70000}}, 300*time.Millisecond
	s := start(t, c)
	_, err := s.Stop(t.Context())
	memory, ok := errors.AsType[*MemoryError](err)
	if !ok || len(memory.GPUs) != 1 || !strings.Contains(err.Error(), "GPU 0 has 68.4 GiB in use, but had 1 GiB before the start") {
		t.Errorf("Stop() = %v", err)
	}
	if _, ok := errors.AsType[*ExitError](err); ok {
		t.Error("it is booked as the server's failure")
	}
}

func TestAHeldPortIsTheServersAlone(t *testing.T) {
	t.Parallel()
	held, err := holdPort(0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.release()
	for range 500 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if port := l.Addr().(*net.TCPAddr).Port; port == held.port {
			t.Errorf("the kernel gave away port %d, which is held", port)
		}
		l.Close()
	}
	server, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(held.port)))
	if err != nil {
		t.Fatalf("the server cannot have its port: %v", err)
	}
	defer server.Close()
	other, err := holdPort(held.port)
	if err != nil || other.port == held.port {
		t.Errorf("holdPort(%d) = %v, %v beside a listener", held.port, other, err)
	}
	other.release()
}

// Another process may use the same port on another loopback address. The server must still start on this port.
func TestANeighbourOnAnotherAddressDoesNoHarm(t *testing.T) {
	t.Parallel()
	neighbour, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer neighbour.Close()
	c, _ := config("serve")
	c.Port = neighbour.Addr().(*net.TCPAddr).Port
	if got := start(t, c).Facts().Port; got != c.Port {
		t.Errorf("the server was started on port %d and ended on %d", c.Port, got)
	}
}

// A pairOfGPUs reports 10 MiB in use on both GPUs at the first query. From the second query on, the second GPU reports
// laterMiB, as if another process used this GPU.
type pairOfGPUs struct {
	mu       sync.Mutex
	asked    int
	laterMiB *float64 // MiB in use on the second GPU from the second query on
}

func (g *pairOfGPUs) Query(context.Context) (gpu.Reading, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	level := new(float64(10))
	second := level
	if g.asked++; g.asked > 1 {
		second = g.laterMiB
	}
	return gpu.Reading{At: time.Now(), GPUs: []gpu.GPU{{UUID: "GPU-a", UsedMiB: level}, {Index: 1, UUID: "GPU-b", UsedMiB: second}}}, nil
}

func TestOnlyTheServersOwnGPUsCount(t *testing.T) {
	for _, row := range []struct {
		name     string
		args     string
		laterMiB *float64
		want     string // text in the error; empty means no error
	}{
		{"a neighbour fills a GPU that the server does not use", "--tensor-parallel-size 1", new(float64(90000)), ""},
		{"one of the server's two GPUs stays full", "--tensor-parallel-size 2", new(float64(90000)), "GPU 1 has 87.9 GiB in use"},
		{"one of them does not tell any more", "-tp 2", nil, "GPU 1 no longer reports its memory"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config("serve")
			c.Args, c.GPU, c.GPUMemoryTimeout = strings.Fields(row.args), &pairOfGPUs{laterMiB: row.laterMiB}, 300*time.Millisecond
			_, err := start(t, c).Stop(t.Context())
			if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
				t.Errorf("Stop() = %v, want %q", err, row.want)
			}
		})
	}
}

// When the engine dies at the first token, the API server lives on and reports the death. So Start must fail at once.
// It must not wait as it does for a slow start.
func TestAnEngineThatDiesOfTheFirstTokenIsNoticedAtOnce(t *testing.T) {
	t.Parallel()
	c, _ := config("dead-at-first")
	_, err := Start(t.Context(), c)
	if exit, ok := errors.AsType[*ExitError](err); !ok || exit.Class != StartCrash { // a wait would end with the class start-timeout
		t.Errorf("Start() = %v, want start-crash", err)
	}
}
