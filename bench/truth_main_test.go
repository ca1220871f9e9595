package bench_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/truth"
	"vllmtuner/bench/workload"
)

// The truth server (of package bench/truth) and the client under test run in child processes, so that each has its own
// runtime and CPU time. The children run this test binary, with their role in an environment variable.
const (
	roleVariable   = "BENCH_TEST_ROLE"
	configVariable = "BENCH_TEST_CONFIG"
	serverRole     = "server"
	clientRole     = "client"
)

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(roleVariable) {
	case serverRole:
		err = beServer()
	case clientRole:
		err = beClient()
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// beServer runs the truth server until its standard input ends. The input also ends when the parent dies.
func beServer() error {
	var config truth.Config
	if err := json.Unmarshal([]byte(os.Getenv(configVariable)), &config); err != nil {
		return err
	}
	server, err := truth.Listen("127.0.0.1:0", config)
	if err != nil {
		return err
	}
	fmt.Println(server.URL())
	ctx, stop := context.WithCancel(context.Background())
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		defer stop()
		_, _ = io.Copy(io.Discard, os.Stdin) // an error also means that the input has ended
	}()
	if err := server.Serve(ctx); err != nil {
		return err
	}
	<-watching
	return nil
}

// A load says which requests the client's process sends. It is a closed loop unless Rate is set.
type load struct {
	URL        string
	InFlight   int           // requests in flight in a closed loop
	Rate       float64       // requests per second
	LeadIn     time.Duration // time with uncounted load before the counted requests
	Requests   int           // counted requests
	Tokens     int           // tokens of each answer
	Samples    bool          // report each request, and record the times between tokens
	MaxSamples int
}

// An outcome is the report of the client's process.
type outcome struct {
	Measurement bench.Measurement
	Samples     []reported
	CPU         time.Duration // CPU time of the run, without the start of the process
}

// A reported value holds what the client reports about one request.
type reported struct {
	Index                        int
	OK                           bool
	TTFT, TPOT, SendLag, ReadLag time.Duration
}

func beClient() error {
	var l load
	if err := json.Unmarshal([]byte(os.Getenv(configVariable)), &l); err != nil {
		return err
	}
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 32, OutputTokens: l.Tokens}, 7)
	if err != nil {
		return err
	}
	client := &bench.Client{URL: l.URL, Model: "tiny", MaxInFlight: l.InFlight, ITL: l.Samples, MaxSamples: l.MaxSamples}
	before := truth.CPUTime()
	run, err := client.Run(context.Background(), l.schedule(source), nil)
	if err != nil {
		return err
	}
	result := outcome{CPU: truth.CPUTime() - before, Measurement: bench.Measure(run, bench.Scope{Rate: l.Rate, Start: l.LeadIn})}
	result.Measurement.Series = nil
	if l.Samples {
		for _, s := range run.Samples {
			tpot, _ := s.TPOT()
			result.Samples = append(result.Samples, reported{s.Index, s.OK(), s.TTFT(), tpot, s.SendLag() - s.SlotFree, s.ReadLag})
		}
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// schedule returns the requests of a load.
func (l load) schedule(source workload.Source) workload.Schedule {
	if l.Rate > 0 {
		return workload.Plan{Source: source, Seed: 7, Rate: l.Rate, LeadIn: l.LeadIn, Window: 1, MinRequests: l.Requests}.Schedule()
	}
	return func(yield func(workload.Arrival) bool) {
		for i := range l.Requests {
			request := source.Request(workload.WindowStream, i)
			if !yield(workload.Arrival{Due: workload.Asap, Phase: workload.Window, Index: i, Request: request}) {
				return
			}
		}
	}
}
