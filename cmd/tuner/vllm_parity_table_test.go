//go:build vllm && linux

package main

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"

	"vllmtuner/bench/workload"
)

// The verdicts on a field.
const (
	isIn      = "in"
	isOut     = "out"
	isLate    = "out, within late stamps" // the late stamps of vLLM's client explain the difference, see lateFirst
	isCount   = "out: template"           // vLLM 0.14.1 does not count the tokens of the chat template
	isNotHeld = "not held"                // above fewStreams streams, only counts, throughput and medians must agree
)

const (
	fewStreams = 8    // up to 8 streams, every field must lie within the spread of the repeats
	manyApart  = 0.05 // above 8 streams, throughput and medians may differ by this fraction, or by the spread
)

// These limits are for a field whose difference exceeds the spread of the repeats. vLLM's client stamps a token when
// its event loop reads it. tuner bench uses the kernel's time of arrival. A server that knows when it wrote each token
// shows that vLLM's stamps are late and the kernel's are not (docs/evidence/bench-accuracy.md). On the simulated server
// the repeats agree to a thousandth, so there only the late stamps exceed the spread.
const (
	// lateFirst, in ms: a latency that includes the first token may be lower by this much in tuner bench than in vLLM's
	// client.
	lateFirst = 5.0

	// lateChunk, in ms per stream, is how far the gaps between tokens may differ. vLLM parses the chunks of one step
	// one after the other, each in 50 µs or more.
	lateChunk = 0.1

	// lateTPOT is the fraction by which TPOT may differ in either direction. docs/evidence/bench-accuracy.md uses the
	// same limit.
	lateTPOT = 0.01

	// lateNext, in ms, is for a closed loop. There a latency that includes the first token may be higher by this much
	// in tuner bench than in vLLM's client. tuner bench sends the next request sooner than vLLM's client does. So this
	// request waits longer for the engine's next step.
	lateNext = 1.0
)

// A comparedCase is a case with the results of both tools in each repeat.
type comparedCase struct {
	parityCase
	version      string // vLLM's version
	ours, theirs []parityResult
}

// A comparedField is one field of the results, with its values in each repeat.
type comparedField struct {
	name         string
	ours, theirs []float64
	verdict      string
}

// fields returns the fields that both tools wrote in every repeat: first the counts, then one latency after the other.
func (c comparedCase) fields() []comparedField {
	var all []comparedField
	for name := range c.ours[0] {
		f := comparedField{name: name}
		for i := range c.ours {
			our, weHave := c.ours[i][name]
			their, theyHave := c.theirs[i][name]
			if weHave && theyHave {
				f.ours, f.theirs = append(f.ours, our), append(f.theirs, their)
			}
		}
		if len(f.ours) == len(c.ours) {
			f.verdict = c.judge(f)
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b comparedField) int { return strings.Compare(a.sortKey(), b.sortKey()) })
	return all
}

// sortKey orders the fields: the latencies come last, and the figures of one latency stand together.
func (f comparedField) sortKey() string {
	if metric := f.metric(); metric != "" {
		return "latency " + metric + f.name
	}
	return "count " + f.name
}

// metric returns ttft, tpot, itl or e2el; "" if the field is not a latency.
func (f comparedField) metric() string {
	name, ok := strings.CutSuffix(f.name, "_ms")
	if !ok {
		return ""
	}
	_, metric, _ := strings.Cut(name, "_")
	return metric
}

// isExact reports whether the field is a count or a setting, which must be equal in every repeat.
func (f comparedField) isExact() bool {
	return slices.Contains([]string{"completed", "failed", "num_prompts", "total_input_tokens", "total_output_tokens", "request_rate", "max_concurrency"}, f.name)
}

func (f comparedField) isThroughput() bool {
	return strings.HasSuffix(f.name, "_throughput") || f.name == "request_goodput"
}

func (f comparedField) isMedian() bool {
	return strings.HasPrefix(f.name, "median_") || strings.HasPrefix(f.name, "p50_")
}

// apart returns by how much tuner bench's median exceeds the median of vllm bench serve.
func (f comparedField) apart() float64 { return medianOf(f.ours) - medianOf(f.theirs) }

// String returns the field with the medians and ranges of both tools.
func (f comparedField) String() string {
	return fmt.Sprintf("%s is %s: tuner bench %s, vllm bench serve %s", f.name, f.verdict, spread(f.ours), spread(f.theirs))
}

// judge returns the verdict on a field.
func (c comparedCase) judge(f comparedField) string {
	band := max(width(f.ours), width(f.theirs))
	if c.streams > fewStreams {
		band = max(band, manyApart*medianOf(f.theirs))
	}
	switch {
	case f.isExact():
		band = 0
		if width(f.ours) > 0 || width(f.theirs) > 0 {
			return isOut
		}
	case c.streams > fewStreams && !f.isThroughput() && !f.isMedian() && f.name != "duration":
		return isNotHeld
	}
	switch {
	case math.Abs(f.apart()) <= band:
		return isIn
	case c.isTemplate(f):
		return isCount
	case !f.isExact() && c.isLate(f):
		return isLate
	}
	return isOut
}

// isTemplate reports whether the tokens of the chat template explain the difference in a field. Each request has the
// same number of these tokens.
func (c comparedCase) isTemplate(f comparedField) bool {
	if c.endpoint != workload.Chat || c.version != "0.14.1" {
		return false
	}
	perRequest := f.apart() / float64(c.requests)
	return f.name == "total_input_tokens" && perRequest > 0 && perRequest == math.Trunc(perRequest) || f.name == "total_token_throughput"
}

// isLate reports whether late stamps in vLLM's client explain the difference between the tools; see lateFirst.
func (c comparedCase) isLate(f comparedField) bool {
	lowest, highest := c.allowed(f)
	return lowest <= f.apart() && f.apart() <= highest
}

// allowed returns the range in which the difference between the medians may lie. The difference is the median of tuner
// bench minus the median of vllm bench serve.
func (c comparedCase) allowed(f comparedField) (lowest, highest float64) {
	const intoTPOT = lateFirst / (shortAnswer - 1) // a first token that is stamped late shortens the time per token after it
	next, waves := lateNext, float64(c.requests)/float64(c.streams)
	if c.rate > 0 {
		next, waves = 0, 0 // in the open loop no request waits for an earlier answer
	}
	theirs := medianOf(f.theirs)
	isStd := strings.HasPrefix(f.name, "std_")
	switch metric := f.metric(); {
	case metric == "itl":
		return -lateChunk * float64(c.streams), lateChunk * float64(c.streams)
	case metric == "tpot" && isStd: // each of vLLM's values is too small by up to intoTPOT
		return -intoTPOT / 2, intoTPOT / 2
	case metric == "tpot":
		return -lateTPOT * theirs, max(lateTPOT*theirs, intoTPOT)
	case isStd:
		return -lateFirst / 2, lateFirst / 2
	case metric == "ttft" || metric == "e2el":
		return -lateFirst, next
	case f.name == "max_output_tokens_per_s": // the tokens of a step at the end of a second may be stamped in the next second
		return -float64(c.streams), float64(c.streams)
	case f.name == "duration": // in a closed loop each stream's latencies add up to the duration
		return -lateFirst * waves, next * waves
	case f.isThroughput():
		took := 1000 * medianOf(lo.Map(c.ours, func(r parityResult, _ int) float64 { return r["duration"] }))
		return -theirs * next * waves / took, theirs * lateFirst * waves / took
	}
	return 0, 0
}

func medianOf(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func width(all []float64) float64 { return slices.Max(all) - slices.Min(all) }

// spread returns the median of some values with their range, as text.
func spread(all []float64) string {
	digits := func(v float64) string {
		if v == math.Trunc(v) {
			return fmt.Sprintf("%.0f", v)
		}
		return fmt.Sprintf("%.4g", v)
	}
	return fmt.Sprintf("%s (%s to %s)", digits(medianOf(all)), digits(slices.Min(all)), digits(slices.Max(all)))
}

func TestParityVerdict(t *testing.T) {
	few := parityCase{endpoint: workload.Completions, streams: 8, requests: 80}
	many, open, chat := few, few, few
	many.streams, open.rate, chat.endpoint = 64, 20, workload.Chat
	for _, row := range []struct {
		name         string
		is           parityCase
		field        string
		ours, theirs []float64
		want         string
	}{
		{"the medians differ by no more than the wider range", few, "p99_tpot_ms", []float64{10, 11, 12}, []float64{9, 9, 9}, isIn},
		{"one more token makes another load", few, "total_output_tokens", []float64{100, 100}, []float64{101, 101}, isOut},
		{"counts must agree in every repeat, not only in the median", few, "completed", []float64{80, 80, 79}, []float64{80, 80, 80}, isOut},
		{"vLLM reads the first token late", few, "p99_ttft_ms", []float64{10, 10}, []float64{14.9, 14.9}, isLate},
		{"vLLM reads the first token later than it may", few, "p99_ttft_ms", []float64{10, 10}, []float64{15.1, 15.1}, isOut},
		{"tuner bench reads the first token late", open, "p99_ttft_ms", []float64{10.1, 10.1}, []float64{10, 10}, isOut},
		{"in a closed loop a request sent sooner waits for the next step", few, "p99_ttft_ms", []float64{11, 11}, []float64{10, 10}, isLate},
		{"a request in a closed loop waits longer than for one step", few, "p99_ttft_ms", []float64{11.1, 11.1}, []float64{10, 10}, isOut},
		{"a late first token lowers vLLM's TPOT", few, "p99_tpot_ms", []float64{6.1, 6.1}, []float64{6, 6}, isLate},
		{"nothing raises vLLM's TPOT", few, "p99_tpot_ms", []float64{5.9, 5.9}, []float64{6, 6}, isOut},
		{"vLLM stamps the chunks of a step one after the other", few, "p99_itl_ms", []float64{6, 6}, []float64{6.7, 6.7}, isLate},
		{"ten late answers in a row take 50 ms", few, "request_throughput", []float64{10.1, 10.1}, []float64{10, 10}, isLate},
		{"ten late answers in a row explain no more than 50 ms", few, "request_throughput", []float64{10.2, 10.2}, []float64{10, 10}, isOut},
		{"in the open loop arrivals do not wait for answers", open, "request_throughput", []float64{10.1, 10.1}, []float64{10, 10}, isOut},
		{"one step is stamped after the end of the peak second", few, "max_output_tokens_per_s", []float64{690, 690}, []float64{698, 698}, isLate},
		{"more than one step is stamped after the end of the peak second", few, "max_output_tokens_per_s", []float64{684, 684}, []float64{698, 698}, isOut},
		{"the chat template is equally long in each prompt", chat, "total_input_tokens", []float64{1800}, []float64{1000}, isCount},
		{"a difference that is no whole number of tokens per prompt is not the template", chat, "total_input_tokens", []float64{1799}, []float64{1000}, isOut},
		{"many streams: medians differ by less than a twentieth", many, "median_ttft_ms", []float64{96, 96}, []float64{100, 100}, isIn},
		{"many streams: throughput differs by more than a twentieth", many, "output_throughput", []float64{106, 106}, []float64{100, 100}, isOut},
		{"many streams: tails are not compared here", many, "p99_ttft_ms", []float64{50, 50}, []float64{100, 100}, isNotHeld},
	} {
		c := comparedCase{parityCase: row.is, version: "0.14.1", ours: []parityResult{{"duration": 4}}}
		if got := c.judge(comparedField{name: row.field, ours: row.ours, theirs: row.theirs}); got != row.want {
			t.Errorf("%s: %s of %v and %v is %q, want %q", row.name, row.field, row.ours, row.theirs, got, row.want)
		}
	}
}

const parityTitle = `# tuner bench beside vllm bench serve

Look up here which figures of tuner bench you may compare with the figures of vllm bench serve, and by how much and why the others differ.

Written by ` + "`make bench-parity VER=…`" + `, one part for each version. Both tools, in turns, send the same prompts at the same times to one
server without prefix cache, on one machine. The answers have the same pinned lengths. Each row is a field that both tools write: the
median of its repeats and, in brackets, their range. "p50" and "median" are two of vLLM's names for one figure.

- in: the medians differ by no more than the wider of the two ranges, and counts are equal. Above 8 streams only counts,
  throughput and medians must agree, and the last two may differ by 5 %.
- out, within late stamps: the difference is larger, but late stamps in vLLM's client explain it:
  - TTFT and E2E are lower with tuner bench by at most 5 ms. In the closed loop they may be higher by at most 1 ms, because a
    request that is sent sooner waits longer for the next step. Their standard deviations differ by at most 2.5 ms.
  - TPOT differs by at most 1 %. It may be higher by 5 ms divided among the tokens of the shortest answer.
  - Gaps differ by at most 0.1 ms for each stream.
  - Duration and throughput of the closed loop differ by no more than these latencies explain.
  - The tokens of the peak second differ by one step.

  [bench-accuracy.md](bench-accuracy.md) compares both tools with the truth.
- out: template: vLLM 0.14.1 counts the tokens of a chat's prompt itself and leaves out the template; tuner bench takes the server's count.
- out: the difference has none of these reasons.

`

// write puts the part of this vLLM version into the file, and keeps the parts of other versions.
func (p *parity) write(t *testing.T, file string, busy float64) {
	t.Helper()
	title := "vLLM " + p.rig.version
	replacePart(t, file, parityTitle, title, title+p.markdown(commitOf(t), busy))
}

// markdown returns the part of this vLLM version without its title.
func (p *parity) markdown(commit string, busy float64) string {
	var text, tables strings.Builder
	fmt.Fprintf(&text, "\n\nCommit %s, %s, %d cores, %d repeats of each tool. The machine was busy for %.0f %% of the time, servers and tools included.\n\n",
		commit, time.Now().Format(time.DateOnly), runtime.NumCPU(), p.repeats, 100*busy)
	text.WriteString("| case | in | out, within late stamps | out: template | out | not held |\n|---|---|---|---|---|---|\n")
	for _, c := range p.cases {
		fields := c.fields()
		counts := lo.CountValuesBy(fields, func(f comparedField) string { return f.verdict })
		fmt.Fprintf(&text, "| %s | %d | %d | %d | %d | %d |\n", c, counts[isIn], counts[isLate], counts[isCount], counts[isOut], counts[isNotHeld])
		fmt.Fprintf(&tables, "\n### %s\n\n| field | tuner bench | vllm bench serve | |\n|---|---|---|---|\n", c)
		for _, f := range fields {
			fmt.Fprintf(&tables, "| %s | %s | %s | %s |\n", f.name, spread(f.ours), spread(f.theirs), f.verdict)
		}
	}
	return text.String() + tables.String()
}
