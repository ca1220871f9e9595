package asktell

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

func TestMain(m *testing.M) {
	proc.Main()
	if len(os.Args) > 2 && os.Args[1] == "optimiser" {
		optimise(os.Args[2])
		return
	}
	quitGrace = 100 * time.Millisecond
	os.Setenv("GORACE", "atexit_sleep_ms=10") // without this, each child would sleep for a second at its end
	os.Exit(m.Run())
}

// optimise is an optimiser whose mode decides its behaviour. It answers the i-th question, counted from 0, with
// answers[mode](i).
func optimise(mode string) {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	asked := 0
	switch mode {
	case "dead":
		fmt.Fprintln(os.Stderr, "Traceback:\nModuleNotFoundError: \x1b[31mno optuna\x07")
		os.Exit(3)
	case "unready":
		fmt.Println(`{"point": {}}`)
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		defer time.Sleep(time.Hour)
	case "deaf":
		fmt.Println(`{"ready": true}`)
		time.Sleep(time.Hour)
	}
	for lines.Scan() {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			panic(err)
		}
		if m["space"] != nil {
			fmt.Println(`{"ready": true}`)
		}
		if m["tell"] != nil || m["refused"] != nil {
			fmt.Fprintln(os.Stderr, lines.Text())
		}
		if m["ask"] != nil {
			if text := answersOf[mode](asked); text != "" {
				fmt.Println(text)
			} else {
				os.Exit(0)
			}
			asked++
		}
	}
}

func seqs(i int) string { return fmt.Sprintf(`{"point": {"max-num-seqs": %d}}`, 16+i) }

var answersOf = map[string]func(i int) string{
	"good":      seqs,
	"stubborn":  seqs,
	"constant":  func(int) string { return seqs(0) },
	"illegal":   func(int) string { return seqs(1000) },
	"learns":    func(i int) string { return seqs(max(0, 60-i)) }, // the constraint allows at most 40
	"exhausted": func(int) string { return `{"exhausted": true}` },
	"garbage":   func(int) string { return "[I 2026] a \x1b[31mmessage" },
	"empty":     func(int) string { return `{"pont": {}}` },
	"long":      func(int) string { return strings.Repeat("x", 2*maxLine) },
	"twice":     func(i int) string { return seqs(i) + "\n" + seqs(i+1) },
	"silent":    func(int) string { time.Sleep(time.Hour); return "" },
	"ends":      func(int) string { return "" },
}

// heard collects the lines of a program's stderr.
type heard struct {
	mu    sync.Mutex
	lines []string
}

func (h *heard) say(line string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, line)
}

func (h *heard) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.lines, "\n")
}

func config(t *testing.T, mode string) (Config, *heard) {
	t.Helper()
	s, err := space.New([]space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 64}}, []string{"max-num-seqs <= 40"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := &heard{}
	return Config{
		Command: []string{os.Args[0], "optimiser", mode}, Dir: t.TempDir(), Timeout: time.Minute, Say: h.say,
		Study: "s", Space: s, Constraints: []string{"max-num-seqs <= 40"}, Seed: 7, Trials: 20, Objective: studies.TotalCapacity,
	}, h
}

func begun(t *testing.T, c Config) *Program {
	t.Helper()
	p, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func measured(number int, seqs string, c capacity.Capacity) studies.Trial {
	return studies.Trial{
		Number: number, Origin: studies.Sampled, State: studies.Done, Point: space.Point{"max-num-seqs": seqs},
		Result: trial.Result{Outcome: trial.Measured, Capacity: c},
	}
}

// Each trial is told once, and the program's points are returned.
func TestTheProgramChooses(t *testing.T) {
	c, h := config(t, "good")
	p := begun(t, c)
	var history []studies.Trial
	history = append(history, studies.Trial{Number: -1, Source: "old", State: studies.Done, Point: space.Point{"max-num-seqs": "20"},
		Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 3, Low: 5, Bound: capacity.Exact}}},
		studies.Trial{Number: 0, Origin: studies.Default, State: studies.Done, Result: trial.Result{Outcome: trial.Infeasible, Class: "oom-start", Evidence: "out of memory"}})
	for i := 1; i < 4; i++ {
		point, err := p.Next(i, history)
		if want := strconv.Itoa(15 + i); err != nil || point["max-num-seqs"] != want {
			t.Fatalf("Next(%d) = %v, %v; want max-num-seqs %s", i, point, err, want)
		}
		history = append(history, measured(i, point["max-num-seqs"], capacity.Capacity{Rate: float64(i), Low: float64(i), Bound: capacity.Exact}))
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	want := `{"tell":{"number":-1,"origin":"imported","source":"old","point":{"max-num-seqs":20},"outcome":"measured","value":3,"bound":"exact"}}
{"tell":{"number":0,"origin":"default","point":{},"outcome":"infeasible","value":null,"class":"oom-start","evidence":"out of memory"}}
{"tell":{"number":1,"origin":"sampler","point":{"max-num-seqs":16},"outcome":"measured","value":1,"bound":"exact","passed_rps":1}}
{"tell":{"number":2,"origin":"sampler","point":{"max-num-seqs":17},"outcome":"measured","value":2,"bound":"exact","passed_rps":2}}`
	if got := h.String(); got != want {
		t.Errorf("the program was told\n%s\nwant\n%s", got, want)
	}
	if _, err := p.Next(5, history); !errors.Is(err, ErrInterrupted) {
		t.Errorf("Next after Stop = %v, want ErrInterrupted", err)
	}
}

// A point that is not legal, or was tried, is refused with the reason, and the program is asked again.
func TestRefusedPoints(t *testing.T) {
	c, h := config(t, "learns")
	p := begun(t, c)
	point, err := p.Next(1, []studies.Trial{measured(0, "56", capacity.Capacity{}), measured(1, "40", capacity.Capacity{})})
	if err != nil || point["max-num-seqs"] != "39" {
		t.Fatalf("Next = %v, %v; want the first untried point that keeps the constraint, 39", point, err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`{"refused":{"number":1,"point":{"max-num-seqs":76},"reason":"max-num-seqs=76 is outside the range [16, 64]"}}`,
		`{"refused":{"number":1,"point":{"max-num-seqs":60},"reason":"constraint \"max-num-seqs <= 40\" is broken by max-num-seqs=60"}}`,
		`{"refused":{"number":1,"point":{"max-num-seqs":40},"reason":"max-num-seqs=40 was tried before"}}`,
	} {
		if !strings.Contains(h.String(), want) {
			t.Errorf("the program was told\n%s\nwithout %s", h, want)
		}
	}
}

// If the program does anything wrong, Next returns an error that says what is wrong and what to do.
func TestWrongPrograms(t *testing.T) {
	for _, row := range []struct {
		mode, want, remedy string
	}{
		{"illegal", "proposed 100 points that cannot be tried, the last one because max-num-seqs=1016 is outside the range [16, 64]", "the key refused"},
		{"garbage", `wrote "[I 2026] a message": this is not a JSON object`, "messages to its standard error"},
		{"empty", `wrote "{\"pont\": {}}": the answer must be {"point": {…}} or {"exhausted": true}`, "only answers"},
		{"long", "wrote a line of more than 64 KiB", "one JSON object per line"},
		{"silent", "gave no answer within 200 ms", "flush"},
		{"ends", "ended with exit status 0 before the study was over", "run the study again"},
	} {
		t.Run(row.mode, func(t *testing.T) {
			t.Parallel()
			c, _ := config(t, row.mode)
			p := begun(t, c)
			if row.mode == "silent" {
				p.config.Timeout = 200 * time.Millisecond
			}
			_, err := p.Next(1, nil)
			advised, ok := errors.AsType[*trial.RemedyError](err)
			if !ok || !strings.Contains(advised.Err.Error(), row.want) || !strings.Contains(advised.Remedy, row.remedy) {
				t.Errorf("Next = %v, want an error with %q and the advice %q", err, row.want, row.remedy)
			}
		})
	}
}

// A line that nobody asked for would be taken for the next answer, so it is an error.
func TestAnUnaskedLine(t *testing.T) {
	c, _ := config(t, "twice")
	p := begun(t, c)
	if _, err := p.Next(1, nil); err != nil {
		t.Fatal(err)
	}
	for len(p.answers.ready) == 0 { // the second line is on its way
		time.Sleep(time.Millisecond)
	}
	if _, err := p.Next(2, nil); err == nil || !strings.Contains(err.Error(), "nothing was asked") {
		t.Errorf("Next = %v, want an error about the second line", err)
	}
}

// A program without further points, or with tried points only, ends the search and not the study.
func TestTheSearchEnds(t *testing.T) {
	for mode, want := range map[string]string{"exhausted": "the optimiser has none", "constant": "100 points that were tried before"} {
		c, _ := config(t, mode)
		p := begun(t, c)
		if _, err := p.Next(1, []studies.Trial{measured(0, "16", capacity.Capacity{})}); !errors.Is(err, sampler.ErrExhausted) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: Next = %v, want ErrExhausted with %q", mode, err, want)
		}
	}
}

// A program that cannot run is found by Start.
func TestStartFindsABrokenProgram(t *testing.T) {
	for mode, want := range map[string]string{
		"dead":    `ended with exit status 3 before the study was over; its last words: "ModuleNotFoundError: no optuna"`,
		"unready": `its first answer must be {"ready": true}`,
	} {
		c, _ := config(t, mode)
		if p, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: Start = %v, %v; want %q", mode, p, err, want)
		}
	}
	c, _ := config(t, "")
	c.Command = []string{"/no/such/program"}
	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("Start = %v, want no such file", err)
	}
}

// A full pipe does not block Next for ever.
func TestAProgramThatReadsNothing(t *testing.T) {
	c, _ := config(t, "deaf")
	p := begun(t, c)
	p.config.Timeout = 200 * time.Millisecond
	var long []studies.Trial
	for i := range 2000 {
		long = append(long, measured(i, "16", capacity.Capacity{}))
	}
	if _, err := p.Next(2000, long); err == nil || !strings.Contains(err.Error(), "has read nothing for 200 ms") {
		t.Errorf("Next = %v, want an error about the unread lines", err)
	}
}

// Interrupt ends a wait for an answer, and a write into a full pipe.
func TestInterrupt(t *testing.T) {
	var long []studies.Trial
	for i := range 2000 {
		long = append(long, measured(i, "16", capacity.Capacity{}))
	}
	for mode, history := range map[string][]studies.Trial{"silent": nil, "deaf": long} {
		c, _ := config(t, mode)
		p := begun(t, c)
		time.AfterFunc(100*time.Millisecond, p.Interrupt)
		if _, err := p.Next(1, history); !errors.Is(err, ErrInterrupted) {
			t.Errorf("%s: Next = %v, want ErrInterrupted", mode, err)
		}
	}
	c, _ := config(t, "dead")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.Command = []string{"/bin/sleep", "3600"}
	if _, err := Start(ctx, c); !errors.Is(err, ErrInterrupted) {
		t.Errorf("Start = %v, want ErrInterrupted", err)
	}
}

// Stop ends a program that ignores the end of its input and SIGTERM.
func TestAStubbornProgram(t *testing.T) {
	c, _ := config(t, "stubborn")
	p := begun(t, c)
	if _, err := p.Next(1, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	if members, err := p.process.Members(); err != nil || len(members) > 0 {
		t.Errorf("Stop left %v, %v", members, err)
	}
}
