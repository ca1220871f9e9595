package calibrate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
	"vllmtuner/trial/slo"
)

func profile(t *testing.T) *sim.Profile {
	t.Helper()
	p, err := sim.LoadProfile("small-fast")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// changed returns the profile of a server that differs from small-fast.
func changed(t *testing.T) *sim.Profile {
	p := *profile(t)
	p.Name = "changed"
	p.Step.Weights, p.Step.PerKVToken, p.Step.PerSequence = 5.5, 5e-5, 0.1
	p.Memory.FixedGiB, p.Latency.AfterStep = 7.2, 3
	p.StartUp.Compile = 0.6
	return &p
}

func runner(t *testing.T, requests int) *trial.Runner {
	t.Helper()
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 500, OutputTokens: 48, RangeRatio: 0.8, Requests: 200}, 1)
	if err != nil {
		t.Fatal(err)
	}
	return &trial.Runner{
		Source: source, Cache: trial.Reset, PrimeRate: 20, Seed: 1,
		SLO:     slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Minute}}},
		Lengths: trial.Lengths{LeadIn: time.Second, Window: 2 * time.Second, MinRequests: requests},
	}
}

// study returns a study of a simulated server. The study measures each of the configs at each of the rates, in virtual
// time.
func study(t *testing.T, server *sim.Profile, r *trial.Runner, configs []string, rates ...float64) studies.Study {
	t.Helper()
	rig := simload.Rig{Profile: server}
	r.Start = rig.Start
	s := studies.Study{Name: "test"}
	for number, config := range configs {
		one := studies.Trial{Number: number, Args: strings.Fields("--max-model-len 2048 " + config), State: studies.Done}
		live, _, err := r.Start(t.Context(), trial.Launch{Number: number, Args: one.Args})
		var exit *serverctl.ExitError
		switch {
		case errors.As(err, &exit):
			one.Result.Class, one.Result.Evidence, one.Result.KVGiB = exit.Class, exit.Evidence, exit.KVGiB
		case err != nil:
			t.Fatal(err)
		default:
			one.Result.Facts = live.Facts()
			one.Result.Ended, _ = live.Stop(t.Context()) // in virtual time a stop never fails
			var asked []trial.Probe
			for seq, rate := range rates {
				asked = append(asked, trial.Probe{Seq: seq, Rate: rate})
			}
			if one.Probes, err = r.Replay(t.Context(), trial.Task{Number: number, Args: one.Args, Done: asked}); err != nil {
				t.Fatal(err)
			}
		}
		s.Trials = append(s.Trials, one)
	}
	return s
}

var configs = []string{
	"", "--max-num-seqs 16 --gpu-memory-utilization 0.7", "--max-num-seqs 64 --max-num-batched-tokens 512",
	"--max-num-batched-tokens 4096 --gpu-memory-utilization 0.8", "--max-num-seqs 128 --max-num-batched-tokens 1024 --gpu-memory-utilization 0.95",
	"--gpu-memory-utilization 0.6 --max-num-batched-tokens 8192",
}

func calibrated(t *testing.T, server *sim.Profile, r *trial.Runner, configs []string, rates ...float64) *Result {
	t.Helper()
	result, err := Fit(t.Context(), Input{Study: study(t, server, r, configs, rates...), Model: "my/model", Runner: r, From: profile(t)})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := result.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String()) // the report shows why a test failed
	for line := range strings.Lines(b.String()) {
		if n := len([]rune(strings.TrimRight(line, "\n"))); n > 80 {
			t.Errorf("a line of the report has %d columns: %s", n, line)
		}
	}
	return result
}

func change(t *testing.T, r *Result, path string) Change {
	t.Helper()
	i := slices.IndexFunc(r.Changes, func(c Change) bool { return c.Path == path })
	if i < 0 {
		t.Fatalf("the result has no %s", path)
	}
	return r.Changes[i]
}

// The fit must find the known constants within two standard errors. The new profile must also predict rates and flags
// that were not in the study.
func TestFitFindsAChangedServer(t *testing.T) {
	realtime.Long(t, "simulates twelve probes of each config")
	truth, r := changed(t), runner(t, 150)
	got := calibrated(t, truth, r, configs, 3, 12, 30, 50)
	known := 0
	for _, c := range got.Changes {
		want := truth.Value(c.Path)
		if c.Certainty != Known || c.Error == 0 {
			continue
		}
		known++
		if off := math.Abs(math.Log(c.After / *want)); off > 2*c.Error+0.001 {
			t.Errorf("%s is %g ± %.1f %%, want %g", c.Path, c.After, 100*c.Error, *want)
		}
	}
	if known < 5 {
		t.Errorf("%d constants are known, want at least five", known)
	}
	if fixed := change(t, got, "memory.fixed"); fixed.Certainty != Known || math.Abs(fixed.After-7.2) > 0.02 {
		t.Errorf("memory.fixed is %+v, want it known as 7.2", fixed)
	}
	if weights := change(t, got, "step.weights"); math.Abs(weights.After/5.5-1) > 0.1 {
		t.Errorf("step.weights is %+v, want about 5.5", weights)
	}
	if got.Profile.StartUp.Total() != truth.StartUp.Total() || !got.Simulated {
		t.Errorf("start-up %s, simulated %v", got.Profile.StartUp.Total(), got.Simulated)
	}
	for _, m := range got.Metrics {
		// Constants that cannot be separated affect p99 TTFT most. The error of p99 TTFT was 5 to 7 % with 18, 28 and
		// 34 probes of 150 to 400 requests.
		within := 0.04
		if m.Metric == "p99 TTFT" {
			within = 0.08
		}
		if m.HeldOut.N == 0 || m.HeldOut.Median > within || m.Before.Median < m.HeldOut.Median {
			t.Errorf("%s: %+v, want held-out probes with a median error within %.0f %%, and better than before", m.Metric, m, 100*within)
		}
	}
	elsewhere := []string{"--max-num-seqs 32 --gpu-memory-utilization 0.85", "--max-num-batched-tokens 700 --max-num-seqs 100"}
	want, have := study(t, truth, r, elsewhere, 5, 20, 40), study(t, got.Profile, r, elsewhere, 5, 20, 40)
	var tails []float64
	for i := range want.Trials {
		for j, p := range want.Trials[i].Probes {
			for _, m := range metrics {
				off := math.Abs(m.of(have.Trials[i].Probes[j].Measurement)/m.of(p.Measurement) - 1)
				if m.name == "p99 TTFT" { // one or two of the 150 requests decide this metric
					tails = append(tails, off)
				} else if off > 0.09 {
					t.Errorf("%s at %g req/s: %s is %.1f %% off, want within 9 %%", elsewhere[i], p.Rate, m.name, 100*off)
				}
			}
		}
	}
	if off := median(tails); off > 0.08 {
		t.Errorf("p99 TTFT of other rates and flags is %.1f %% off in the median, want within 8 %%", 100*off)
	}
}

// The profile of a fit can be written and read. It names the origin of each constant.
func TestFitWritesAProfileWithOrigins(t *testing.T) {
	realtime.Only(t, "simulates hundreds of whole studies")
	got := calibrated(t, changed(t), runner(t, 60), configs[:4], 2, 4, 8, 12)
	read, err := sim.ParseProfile("my.yaml", []byte(got.Profile.Text()))
	if err != nil {
		t.Fatal(err)
	}
	if read.Model != "my/model" || read.Step != got.Profile.Step || read.Memory != got.Profile.Memory || read.Latency != got.Profile.Latency {
		t.Errorf("after writing and reading the profile is %+v, want %+v", read, got.Profile)
	}
	origin := map[string]sim.Constant{}
	for _, c := range read.Constants {
		origin[c.Path] = c
	}
	for _, c := range got.Changes {
		o := origin[c.Path]
		switch c.Certainty {
		case Known, Together:
			if !slices.Contains([]string{"fit", "solved", "measured"}, o.Confidence) || !strings.Contains(o.Source, "study test (of a simulated server)") {
				t.Errorf("%s is %s and its origin %+v", c.Path, c.Certainty, o)
			}
		default:
			if o.Confidence != "assumed" || o.Values[0] != c.Before || c.After != c.Before || !strings.Contains(o.Source, "value of small-fast") {
				t.Errorf("%s is %s: %+v, with the origin %+v; want the old value, assumed", c.Path, c.Certainty, c, o)
			}
		}
	}
	if eager := change(t, got, "step.eager_extra"); eager.Certainty != Unseen {
		t.Errorf("step.eager_extra is %+v though no server was eager", eager)
	}
}

// At low rates, the time of a step is its fixed time plus the time to read the weights. The measurements show only this
// sum.
func TestFitNamesInseparableConstants(t *testing.T) {
	realtime.Only(t, "simulates hundreds of whole studies")
	got := calibrated(t, changed(t), runner(t, 40), configs[:3], 0.5, 1, 1.5, 2, 2.5)
	fixed, weights := change(t, got, "step.fixed"), change(t, got, "step.weights")
	if fixed.Certainty == Known || fixed.Certainty == Held && !slices.Contains(fixed.With, "step.weights") {
		t.Errorf("step.fixed is %+v, want it not separable from step.weights", fixed)
	}
	if sum := fixed.After + weights.After; math.Abs(sum/6.5-1) > 0.05 {
		t.Errorf("step.fixed and step.weights sum to %g, want 6.5, although their shares are unknown", sum)
	}
	before, after := change(t, got, "latency.before_scheduling"), change(t, got, "latency.after_step")
	if before.Certainty == Known || after.Certainty == Known || before.Certainty == after.Certainty {
		t.Errorf("the latencies are %+v and %+v, want one held and the other fitted with it", before, after)
	}
	if sum := before.After + after.After; sum < 3 || sum > 4.5 { // the fitted latency contains part of the cost of a prefill
		t.Errorf("the latencies sum to %g, want about 4", sum)
	}
}

func TestFitRefusesTooFewProbes(t *testing.T) {
	r := runner(t, 40)
	in := Input{Study: study(t, profile(t), r, configs[:2], 1, 2, 3), Runner: r, From: profile(t)}
	in.Study.Trials[0].Probes[0].Stopped = true
	in.Study.Trials[0].Probes[1].Verdict.ClientLimited = "late"
	_, err := Fit(t.Context(), in)
	var refused *InputError
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), ": 4 of ") ||
		!strings.Contains(err.Error(), "1 stopped early, 1 client-limited") || !strings.Contains(err.Error(), "budget.trials") {
		t.Errorf("Fit = %v, want a refusal with the numbers of probes", err)
	}
}

func TestFitEndsWithItsContextAndItsLimit(t *testing.T) {
	r := runner(t, 20)
	in := Input{Study: study(t, changed(t), r, configs[:4], 2, 4, 8), Runner: r, From: profile(t)}
	ctx, cancel := context.WithCancel(t.Context())
	in.Progress = func(done, _ int) {
		if done == 3 {
			cancel()
		}
	}
	if result, err := Fit(ctx, in); !errors.Is(err, context.Canceled) || result != nil {
		t.Errorf("Fit of an ended context = %v, %v", result, err)
	}
	synctest.Test(t, func(t *testing.T) { // in a bubble of synctest, only Sleep takes time
		limited := in
		limited.Progress = func(done, _ int) {
			switch {
			case done == 1: // the fit measures this replay, and refuses a limit that is too short
			case done < 5: // these replays use up the first half of the limit
				time.Sleep(time.Second / 2)
			case done < 40: // enough replays for the slope of each constant
				time.Sleep(10 * time.Millisecond)
			default:
				time.Sleep(time.Second)
			}
		}
		limited.Limit = 3 * time.Second
		result, err := Fit(t.Context(), limited)
		if err != nil || !result.TimeUp || result.Converged || result.Profile == nil {
			t.Errorf("Fit with little time = %+v, %v; want the best result so far", result, err)
		}
	})
	in.Limit, in.Progress = time.Nanosecond, nil
	var refused *InputError
	if _, err := Fit(t.Context(), in); !errors.As(err, &refused) || !strings.Contains(err.Error(), "--time-limit") {
		t.Errorf("Fit with no time = %v, want a refusal that names --time-limit", err)
	}
}

// whyNot says why a probe cannot be compared with a prediction.
func TestWhyNot(t *testing.T) {
	r := runner(t, 60)
	good := study(t, profile(t), r, configs[:1], 5).Trials[0].Probes[0]
	for _, row := range []struct {
		want   string
		change func(p *trial.Probe)
	}{
		{"", func(*trial.Probe) {}},
		{"void", func(p *trial.Probe) { p.Measurement.Void = "why" }},
		{"client-limited", func(p *trial.Probe) { p.Verdict.ClientLimited = "why" }},
		{"stopped early", func(p *trial.Probe) { p.Stopped = true }},
		{"with failed requests", func(p *trial.Probe) { p.Measurement.Failed = 1 }},
		{"over-saturated", func(p *trial.Probe) { p.Measurement.WindowRequestThroughput /= 2 }},
	} {
		p := good
		row.change(&p)
		if got := whyNot(p); got != row.want {
			t.Errorf("whyNot = %q, want %q", got, row.want)
		}
	}
}

func TestTheKVSizeOfARefusedStart(t *testing.T) {
	const evidence = "the available KV cache memory (1.91 GiB)"
	for _, row := range []struct {
		name   string
		result trial.Result
		want   float64 // 0 if it is not known
	}{
		{"as a value", trial.Result{Class: serverctl.KVTooSmall, KVGiB: new(1.5), Evidence: evidence}, 1.5},
		{"in the evidence of an older study", trial.Result{Class: serverctl.KVTooSmall, Evidence: evidence}, 1.91},
		{"nowhere", trial.Result{Class: serverctl.KVTooSmall, Evidence: "No available memory for the cache blocks"}, 0},
		{"of a start that failed otherwise", trial.Result{Class: serverctl.StartCrash, Evidence: evidence}, 0},
	} {
		c := &calibration{Input: Input{Study: studies.Study{Trials: []studies.Trial{{Result: row.result}}}}}
		sizes := c.kvSizes(profile(t))
		if len(sizes) > 1 || (len(sizes) == 1) != (row.want != 0) || len(sizes) == 1 && (sizes[0].gib != row.want || !sizes[0].refused) {
			t.Errorf("%s: the sizes are %+v, want %g of a refused start", row.name, sizes, row.want)
		}
	}
}

// If the simulated server of a trial would not start, the error says why. The error has no figures, so that the trials
// with the same error can be counted together.
func TestAReasonNotToStartHasNoFigures(t *testing.T) {
	for args, want := range map[string]string{
		"--gpu-memory-utilization 0.1":  "ValueError: No available memory for the cache blocks",
		"--max-model-len 1000000":       "ValueError: the KV cache is too small for one request of max_model_len tokens",
		"--gpu-memory-utilization 0.99": "torch.OutOfMemoryError: CUDA out of memory",
	} {
		_, err := newCandidate(profile(t), studies.Trial{Args: strings.Fields(args)})
		if err == nil || err.Error() != "the simulator would not start: "+want {
			t.Errorf("%s: newCandidate = %v, want %q", args, err, want)
		}
	}
}

// Starts determine the memory constants, and refused starts count too. For some constants only the joint effect is
// known. The result names these constants.
func TestMemoryFromStarts(t *testing.T) {
	truth := *profile(t)
	truth.Memory.FixedGiB, truth.Memory.GPUGiB, truth.Memory.GraphReserveGiB = 10, 24, 1
	r := runner(t, 20)
	var list []string
	for _, util := range []string{"0.45", "0.6", "0.8", "0.9"} {
		for _, seqs := range []string{"8", "256", "1024"} {
			list = append(list, fmt.Sprintf("--max-num-batched-tokens 2048 --gpu-memory-utilization %s --max-num-seqs %s", util, seqs))
		}
	}
	list = append(list, "--gpu-memory-utilization 0.97", "--gpu-memory-utilization 0.9 --max-num-batched-tokens 8192 --max-num-seqs 8")
	fitted := func(list []string) *calibration {
		c := &calibration{Input: Input{Study: study(t, &truth, r, list), From: profile(t)}}
		p := c.begin()
		if err := c.solveMemory(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		c.boundReserve(p)
		c.result.Profile = p
		return c
	}
	c := fitted(list)
	m := c.result.Profile.Memory
	if math.Abs(m.FixedGiB-10) > 0.05 || math.Abs(m.GPUGiB-24) > 0.05 || c.result.Memory.After > 0.01 || c.result.Memory.Refused == 0 {
		t.Errorf("memory is %+v, %+v; want 10 of 24 GiB, from refused starts too", m, c.result.Memory)
	}
	if m.GraphReserveGiB <= 0.72 || m.GraphReserveGiB > 2.4 {
		t.Errorf("graph reserve is %g, want it between 0.72 GiB, with which a start failed, and 2.4 GiB", m.GraphReserveGiB)
	}
	same := fitted([]string{"", "--max-num-seqs 1024", "--max-num-seqs 512", "--max-num-batched-tokens 8192"})
	gpu, fixed := change(t, &same.result, "memory.gpu"), change(t, &same.result, "memory.fixed")
	if gpu.Certainty != Held || gpu.After != 16 || !slices.Contains(gpu.With, "memory.fixed") || fixed.Certainty == Held {
		t.Errorf("at one utilization the GPU is %+v and its fixed use %+v, want the GPU held", gpu, fixed)
	}
}

// The time of each phase of a start is added to one of the start_up constants.
func TestTimesFromLogs(t *testing.T) {
	part := func(name string, seconds float64) serverctl.Part {
		return serverctl.Part{Name: name, Took: time.Duration(seconds * float64(time.Second))}
	}
	var s studies.Study
	for _, compile := range []float64{50, 4, 5} {
		var one studies.Trial
		one.Result.Facts.StartUp = time.Minute
		one.Result.Facts.Parts = []serverctl.Part{part("importing and configuring", 10), part("loading the weights", 20), part("compiling", compile),
			part("profiling memory", 3), part("capturing graphs and warming up", 7), part("something new", 1)}
		one.Result.Ended.Took = 6 * time.Second
		s.Trials = append(s.Trials, one)
	}
	c := &calibration{Input: Input{Study: s, From: profile(t)}}
	p := c.begin()
	c.times(p)
	if want := (sim.StartUp{Weights: 30, Profile: 3, Compile: 5, Graphs: 8}); p.StartUp != want || p.Stop != 6 {
		t.Errorf("start-up %+v and stop %g, want %+v and 6", p.StartUp, p.Stop, want)
	}
}
