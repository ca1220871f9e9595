package sim

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// report returns the fit as a page in Markdown.
func (f fit) report(t *testing.T) string {
	var b strings.Builder
	b.WriteString(`# How well the simulator agrees with measurements

Look up here how large the simulator's errors are, by metric and configuration, before you trust a simulated figure. A *cell* is one
configuration at one rate. Errors are relative to the measured value. The *guess* for a cell is the mean of all configurations at
that rate: a prediction without a simulator. If a simulated metric is not clearly better than the guess, it says nothing about
flags. In single cells the simulator is better than the guess only for p99 TTFT. The mean effect of the flags agrees with the
measurements for p99 TTFT and p99 TPOT.

*Simulated* is what the simulator gives with the profile ` + "`h200-llama70b-fp8`" + `, or ` + "`l4-qwen0.5b`" + ` for the L4.
*TTFT* is the time to first token, and *TPOT* the time per output token after the first. *ITL* is the gaps between chunks of output,
and *E2E* the time to the end of the answer. The *SLO* is the latency limits.

` + "`make sim-fit`" + ` writes this page from the measurements in serverctl/sim/testdata/seed and the trace in
serverctl/sim/testdata/trace_h200.csv.

## KV cache, GiB

| configuration | gpu-memory-utilization | max-num-batched-tokens | max-num-seqs | measured | simulated |
|---|---|---|---|---|---|
`)
	for _, c := range f.kv {
		o := f.options[c.config]
		fmt.Fprintf(&b, "| %s | %.2f | %d | %d | %.2f | %.2f |\n", c.config, o.GPUMemoryUtilization, o.MaxNumBatchedTokens, o.MaxNumSeqs, c.observed, c.simulated)
	}
	b.WriteString("\n## Llama 70B on one H200: 7 configurations × 12 rates\n\n")
	b.WriteString("80 of the 84 cells were measured: phase0 only up to 3 requests/s.\n\n")
	writeErrors(&b, f.phase1, true)
	b.WriteString("\nAt 2 requests/s, all percentiles:\n\n")
	writeErrors(&b, f.detail, false)
	f.writeGains(&b)
	f.writeMatrix(&b)
	b.WriteString("\n## EAGLE-3 on the same server: k = 3, nothing accepted, 8 rates\n\n")
	b.WriteString("The run had other prompts. Only the mean length of its answers is known, 858 tokens, so the answers of the trace are lengthened to this mean. " +
		"The cell at 2 requests/s counts twice, because two measured tables have it.\n\n")
	writeErrors(&b, f.eagle, false)
	b.WriteString("\n## Qwen2.5 0.5B on one L4: closed loop, 6 concurrencies\n\n")
	writeErrors(&b, f.l4, false)
	writeTable(&b, f.l4)
	f.writeUnexplained(&b)
	return b.String()
}

func metricsOf(cells []cell) []string {
	var names []string
	for _, c := range cells {
		if !slices.Contains(names, c.metric) {
			names = append(names, c.metric)
		}
	}
	return names
}

// writeErrors writes a row for each metric: median, 90th percentile, maximum and mean (bias) of the errors, and the
// worst cell.
func writeErrors(b *strings.Builder, cells []cell, guess bool) {
	head, line := "| metric | cells | median | p90 | max | bias | worst |", "|---|---|---|---|---|---|---|"
	if guess {
		head, line = head+" guess: median | p90 |", line+"---|---|"
	}
	fmt.Fprintf(b, "%s\n%s\n", head, line)
	for _, metric := range metricsOf(cells) {
		errs := errorsOf(cells, metric, cell.err)
		var worst cell
		var signed []float64
		for _, c := range cells {
			if c.metric == metric {
				signed = append(signed, c.err())
				if math.Abs(c.err()) > math.Abs(worst.err()) || worst.metric == "" {
					worst = c
				}
			}
		}
		fmt.Fprintf(b, "| %s | %d | %.1f %% | %.1f %% | %.1f %% | %+.1f %% | %s at %g: %.4g → %.4g |", metric, len(errs),
			100*percentile(errs, 50), 100*percentile(errs, 90), 100*slices.Max(errs), 100*mean(signed), worst.config, worst.rate, worst.observed, worst.simulated)
		if guess {
			errs := errorsOf(cells, metric, cell.guessErr)
			fmt.Fprintf(b, " %.1f %% | %.1f %% |", 100*percentile(errs, 50), 100*percentile(errs, 90))
		}
		b.WriteString("\n")
	}
}

// writeTable writes each cell in the form measured → simulated.
func writeTable(b *strings.Builder, cells []cell) {
	metrics := metricsOf(cells)
	fmt.Fprintf(b, "\n| streams | %s |\n|---|%s\n", strings.Join(metrics, " | "), strings.Repeat("---|", len(metrics)))
	var rates []float64
	for _, c := range cells {
		if !slices.Contains(rates, c.rate) {
			rates = append(rates, c.rate)
		}
	}
	for _, rate := range rates {
		fmt.Fprintf(b, "| %g |", rate)
		for _, c := range cells {
			if c.rate == rate {
				fmt.Fprintf(b, " %g → %.4g |", c.observed, c.simulated)
			}
		}
		b.WriteString("\n")
	}
}

// writeGains writes the measured effect of the flags beside the simulated effect.
func (f fit) writeGains(b *strings.Builder) {
	b.WriteString("\nThe effect of the flags: the five changed configurations against the baseline, as the mean over configurations and the rates 0.75 to 3.\nThe guess is the same for all configurations, so its effect is 0.\n\n| metric | against | measured | simulated |\n|---|---|---|---|\n")
	for _, metric := range []string{"ttft_p99_ms", "tpot_p99_ms"} {
		for _, against := range [][]string{baselines, {baselines[0]}, {baselines[1]}} {
			fmt.Fprintf(b, "| %s | %s | %+.1f %% | %+.1f %% |\n", metric, strings.Join(against, " and "),
				100*f.gain(metric, observed, against...), 100*f.gain(metric, simulated, against...))
		}
	}
	b.WriteString("\nAll figures above are without the profile's noise, which is the difference between two equal sweeps. With noise, over eight seeds:\n\n| | min | max |\n|---|---|---|\n")
	spread := func(name, format string, of func(fit) float64) {
		var values []float64
		for _, f := range f.noisy {
			values = append(values, of(f))
		}
		fmt.Fprintf(b, "| %s | "+format+" | "+format+" |\n", name, slices.Min(values), slices.Max(values))
	}
	spread("cells with the same limits broken", "%.0f", func(f fit) float64 { return float64(f.same()) })
	for _, metric := range sweepMetrics[:3] {
		spread("median error of "+metric, "%.1f %%", func(f fit) float64 { return 100 * percentile(errorsOf(f.phase1, metric, cell.err), 50) })
	}
}

// writeMatrix writes in how many cells the simulation agrees with the measurement, which cells differ, and the highest
// passing rate of each configuration.
func (f fit) writeMatrix(b *strings.Builder) {
	vs := f.verdicts()
	passes, fails := [2]int{}, [2]int{}
	byRate := 0
	for _, v := range vs {
		for i, said := range []string{v.simulated, v.trivial} {
			if (said == "") == (v.observed == "") {
				passes[i]++
			}
			if said == v.observed {
				fails[i]++
			}
		}
		if (v.rate <= 2) == (v.observed == "") {
			byRate++
		}
	}
	fmt.Fprintf(b, "\nThe SLO matrix (p99 TTFT < %g ms, p99 TPOT < %g ms), %d cells:\n\n| | simulated | guess | \"pass up to 2.0\" |\n|---|---|---|---|\n"+
		"| pass or fail as measured | %d | %d | %d |\n| the same limits broken | %d | %d | – |\n\n", ttftLimit, tpotLimit, len(vs), passes[0], passes[1], byRate, fails[0], fails[1])
	b.WriteString("Pass or fail alone proves nothing, because a rule that ignores the configuration is right equally often. Cells that differ (measured → simulated):\n\n")
	for _, v := range vs {
		if v.observed != v.simulated {
			fmt.Fprintf(b, "- %s at %g: %s → %s\n", v.config, v.rate, cmp.Or(v.observed, "pass"), cmp.Or(v.simulated, "pass"))
		}
	}
	was, is := winners(vs, func(v verdict) string { return v.observed }), winners(vs, func(v verdict) string { return v.simulated })
	b.WriteString("\nHighest rate within the limits. (The table in docs/sweep.md has 2.50 for two of the simulated configurations: its simulation used other requests.)\n\n| configuration | measured | simulated |\n|---|---|---|\n")
	for _, c := range f.kv {
		if _, ok := was[c.config]; ok {
			fmt.Fprintf(b, "| %s | %.2f | %.2f |\n", c.config, was[c.config], is[c.config])
		}
	}
}

// writeUnexplained writes which differences the model cannot explain, with the figures of this fit.
func (f fit) writeUnexplained(b *strings.Builder) {
	b.WriteString("\n## What it cannot explain\n\n")
	say := func(format string, args ...any) { fmt.Fprintf(b, "- "+format+"\n", args...) }
	at := func(cells []cell, config, metric string, rate float64) cell {
		for _, c := range cells {
			if c.config == config && c.metric == metric && c.rate == rate {
				return c
			}
		}
		return cell{}
	}
	c := at(f.phase1, "phase1-seqs128", "ttft_p99_ms", 3.5)
	say("The onset of queueing: p99 TTFT of seqs128 at 3.5 requests/s is %.0f ms, measured %.0f. A few requests in flight make the difference.", c.simulated, c.observed)
	c = at(f.phase1, "phase1-baseline-rerun", "ttft_p99_ms", 2)
	say("The p99 of 300 requests depends on chance: two runs of the baseline on the same server had %.0f and %.0f ms at 2 requests/s (simulated %.0f).",
		at(f.phase1, "phase0", "ttft_p99_ms", 2).observed, c.observed, c.simulated)
	c = at(f.phase1, "phase0", "max_concurrent", 3)
	say("Between 2.5 and 3 requests/s the simulator has too many requests in flight: %.0f, measured %.0f.", c.simulated, c.observed)
	var large []float64
	for _, c := range f.detail {
		if c.metric == "ttft_p95_ms" && slices.Contains([]string{"phase1-mem095", "phase1-moderate", "phase1-aggressive"}, c.config) {
			large = append(large, c.err())
		}
	}
	say("With large caches the real server has more cache misses than the model: p95 TTFT at 2 requests/s is %+.0f %% off for util 0.95.", 100*mean(large))
	c = at(f.l4, "l4", "ttft_p95_ms", 1)
	say("One stream on the L4: p95 TTFT is %.1f ms, simulated %.1f. One slow first request causes it, and the model has no such request.", c.observed, c.simulated)
	say("Nobody knows whether the prefix cache was kept from rate to rate. h200-llama70b-fp8 assumes that it was kept, h200-llama70b-fp8-reset that it was emptied. " +
		"Both fit about equally well, but they disagree on whether a larger cache carries more traffic.")
	say("Some constants show only as a sum: the fixed time of a step and the time of the weights; a token's compute and its attention; the cost of a sequence and of its KV cache.")
}
