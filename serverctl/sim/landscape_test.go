package sim

import (
	"math"
	"math/rand/v2"
	"testing"

	"vllmtuner/realtime"
)

// keeps reports whether the latencies of the trace keep the limits at a rate. Before that, the server replays the trace
// once at 1 request/s.
func keeps(t testing.TB, p *Profile, o Options, trace []traceRequest, rate float64) bool {
	t.Helper()
	e, err := NewEngine(p, o)
	if err != nil {
		t.Fatal(err)
	}
	replay(e, trace, 1)
	f := figures(replay(e, trace, rate))
	return f["ttft_p99_ms"] < ttftLimit && f["tpot_p99_ms"] < tpotLimit
}

func TestEngineReproducesTheLandscape(t *testing.T) {
	t.Parallel()
	reproduceLandscape(t, 2)
}

func TestEngineReproducesMoreOfTheLandscape(t *testing.T) {
	realtime.Only(t, "replays 20 configurations")
	reproduceLandscape(t, 20)
}

// reproduceLandscape simulates some random configurations of the landscape. The landscape is a table of 432
// configurations, each with the highest rate that keeps the limits. It comes from the program in which the profile was
// fitted. That program searched without noise, by bisection to 0.025 requests/s. The engine must keep the limits at the
// landscape's rate, and break them at the next rate. The test does not search for the rate, because several rates can
// meet both conditions when a p99 is close to its limit.
func reproduceLandscape(t *testing.T, configurations int) {
	t.Helper()
	const step = 0.025
	p, trace := profile(t, "h200-llama70b-fp8").quiet(), readTrace(t)
	rows := readCSV(t, "../../tuner/space/landscape/h200-llama70b-fp8.csv")[1:]
	rng := rand.New(rand.NewPCG(1, 1))
	for tried := 0; tried < configurations; {
		row := rows[rng.IntN(len(rows))]
		if row[4] != "ok" {
			continue
		}
		tried++
		o := p.Defaults
		o.MaxModelLen = 16384
		o.GPUMemoryUtilization, o.MaxNumSeqs, o.MaxNumBatchedTokens = number(t, row[0]), int(number(t, row[1])), int(number(t, row[2]))
		if kv, want := p.KVGiB(o), number(t, row[3]); math.Abs(kv-want) > 0.01 {
			t.Errorf("%v: KV cache of %.2f GiB, the landscape has %.2f", row[:3], kv, want)
		}
		rate := number(t, row[5])
		if !keeps(t, p, o, trace, rate) || keeps(t, p, o, trace, rate+step) {
			t.Errorf("%v: %.3f requests/s is not the highest rate within the limits, as it is in the landscape", row[:3], rate)
		}
	}
}
