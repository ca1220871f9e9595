//go:build vllm && linux

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
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
	isLate    = "out, within late stamps" // of vLLM's client, see lateFirst
	isCount   = "out: template"           // which vLLM 0.14.1 does not count
	isNotHeld = "not held"                // with more than fewStreams, only counts, throughput and medians must agree
)

const (
	fewStreams = 8    // up to so many, every field must lie within the spread of the repeats
	manyApart  = 0.05 // with more, throughput and medians may differ by this share, or by the spread
)

// These limits say how far fields outside the spread may differ. vLLM's client stamps a token when its event loop reads it. tuner
// bench uses the kernel's time of arrival. A server that knows when it wrote each token shows that the first is late and the
// second is not (docs/evidence/bench-accuracy.md). On the simulated server, whose runs agree to a thousandth, this alone exceeds
// the spread.
const (
	lateFirst = 5.0  // ms by which tuner bench may report a lower latency, if that includes the first token
	lateChunk = 0.1  // ms per stream by which a gap may differ: vLLM parses the chunks of one step one after the other, each in 50 µs or more
	lateTPOT  = 0.01 // share by which TPOT may differ in either direction, as in the accuracy table

	// lateNext is by how many ms tuner bench's first token may be later in a closed loop. tuner bench sends the next request
	// sooner, and the request then waits longer for the engine's next step.
	lateNext = 1.0
)

// A comparedCase is a case with the results of both tools, repeat by repeat.
type comparedCase struct {
	parityCase
	version      string // of vLLM
	ours, theirs []parityResult
}

// A comparedField is one field of the results, repeat by repeat.
type comparedField struct {
	name         string
	ours, theirs []float64
	verdict      string
}

// fields returns the fields that both tools wrote in every repeat: counts first, then the latencies one by one.
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
	slices.SortFunc(all, func(a, b comparedField) int { return strings.Compare(a.place(), b.place()) })
	return all
}

// place orders the fields: latencies last, the figures of one latency together.
func (f comparedField) place() string {
	if metric := f.metric(); metric != "" {
		return "latency " + metric + f.name
	}
	return "count " + f.name
}

// metric returns ttft, tpot, itl or e2el; "" when the field is no latency.
func (f comparedField) metric() string {
	name, ok := strings.CutSuffix(f.name, "_ms")
	if !ok {
		return ""
	}
	_, metric, _ := strings.Cut(name, "_")
	return metric
}

// isExact reports whether the field counts what was sent and served, and measures no speed.
func (f comparedField) isExact() bool {
	return slices.Contains([]string{"completed", "failed", "num_prompts", "total_input_tokens", "total_output_tokens", "request_rate", "max_concurrency"}, f.name)
}

func (f comparedField) isThroughput() bool {
	return strings.HasSuffix(f.name, "_throughput") || f.name == "request_goodput"
}

func (f comparedField) isMedian() bool {
	return strings.HasPrefix(f.name, "median_") || strings.HasPrefix(f.name, "p50_")
}

// apart returns how much tuner bench's median exceeds vllm bench serve's.
func (f comparedField) apart() float64 { return medianOf(f.ours) - medianOf(f.theirs) }

// String names the field with both medians and ranges.
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

// isTemplate reports whether a field differs by the tokens of the chat template, the same number for each request.
func (c comparedCase) isTemplate(f comparedField) bool {
	if c.endpoint != workload.Chat || c.version != "0.14.1" {
		return false
	}
	perRequest := f.apart() / float64(c.requests)
	return f.name == "total_input_tokens" && perRequest > 0 && perRequest == math.Trunc(perRequest) || f.name == "total_token_throughput"
}

// isLate reports whether late stamps in vLLM's client explain the difference between the tools; see lateFirst.
func (c comparedCase) isLate(f comparedField) bool {
	least, most := c.allowed(f)
	return least <= f.apart() && f.apart() <= most
}

// allowed returns how much tuner bench's median may exceed vllm bench serve's outside the spread.
func (c comparedCase) allowed(f comparedField) (least, most float64) {
	const intoTPOT = lateFirst / (shortAnswer - 1) // a late first token leaves less time for those after it
	next, waves := lateNext, float64(c.requests)/float64(c.streams)
	if c.rate > 0 {
		next, waves = 0, 0 // no request waits for the answer before it
	}
	theirs := medianOf(f.theirs)
	isStd := strings.HasPrefix(f.name, "std_")
	switch metric := f.metric(); {
	case metric == "itl":
		return -lateChunk * float64(c.streams), lateChunk * float64(c.streams)
	case metric == "tpot" && isStd: // each value is too small by 0 to intoTPOT
		return -intoTPOT / 2, intoTPOT / 2
	case metric == "tpot":
		return -lateTPOT * theirs, max(lateTPOT*theirs, intoTPOT)
	case isStd:
		return -lateFirst / 2, lateFirst / 2
	case metric == "ttft" || metric == "e2el":
		return -lateFirst, next
	case f.name == "max_output_tokens_per_s": // a step at the end of a second is stamped in the next one
		return -float64(c.streams), float64(c.streams)
	case f.name == "duration": // in a closed loop the sum of the latencies of each stream
		return -lateFirst * waves, next * waves
	case f.isThroughput():
		took := 1000 * medianOf(lo.Map(c.ours, func(r parityResult, _ int) float64 { return r["duration"] }))
		return -theirs * next * waves / took, theirs * lateFirst * waves / took
	}
	return 0, 0
}

// medianOf returns the median.
func medianOf(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func width(all []float64) float64 { return slices.Max(all) - slices.Min(all) }

// spread is a median with its range.
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
		{"the medians are as near as the wider range", few, "p99_tpot_ms", []float64{10, 11, 12}, []float64{9, 9, 9}, isIn},
		{"one token more is another load", few, "total_output_tokens", []float64{100, 100}, []float64{101, 101}, isOut},
		{"counts that agree in the median only do not agree", few, "completed", []float64{80, 80, 79}, []float64{80, 80, 80}, isOut},
		{"a first token that vLLM reads late", few, "p99_ttft_ms", []float64{10, 10}, []float64{14.9, 14.9}, isLate},
		{"a first token that vLLM reads far too late", few, "p99_ttft_ms", []float64{10, 10}, []float64{15.1, 15.1}, isOut},
		{"a first token that we read late", open, "p99_ttft_ms", []float64{10.1, 10.1}, []float64{10, 10}, isOut},
		{"who asks sooner in a closed loop waits for the next step", few, "p99_ttft_ms", []float64{11, 11}, []float64{10, 10}, isLate},
		{"for one step only", few, "p99_ttft_ms", []float64{11.1, 11.1}, []float64{10, 10}, isOut},
		{"a late first token makes TPOT look better", few, "p99_tpot_ms", []float64{6.1, 6.1}, []float64{6, 6}, isLate},
		{"nothing makes it look worse", few, "p99_tpot_ms", []float64{5.9, 5.9}, []float64{6, 6}, isOut},
		{"chunks stamped one after the other", few, "p99_itl_ms", []float64{6, 6}, []float64{6.7, 6.7}, isLate},
		{"ten late answers in a row take 50 ms", few, "request_throughput", []float64{10.1, 10.1}, []float64{10, 10}, isLate},
		{"and no more", few, "request_throughput", []float64{10.2, 10.2}, []float64{10, 10}, isOut},
		{"in the open loop arrivals do not wait for answers", open, "request_throughput", []float64{10.1, 10.1}, []float64{10, 10}, isOut},
		{"a step at the edge of the peak second", few, "max_output_tokens_per_s", []float64{690, 690}, []float64{698, 698}, isLate},
		{"more than one step", few, "max_output_tokens_per_s", []float64{684, 684}, []float64{698, 698}, isOut},
		{"the template is the same length in each prompt", chat, "total_input_tokens", []float64{1800}, []float64{1000}, isCount},
		{"a prompt cut short is not the template", chat, "total_input_tokens", []float64{1799}, []float64{1000}, isOut},
		{"many streams: medians within a twentieth", many, "median_ttft_ms", []float64{96, 96}, []float64{100, 100}, isIn},
		{"many streams: throughput further apart", many, "output_throughput", []float64{106, 106}, []float64{100, 100}, isOut},
		{"many streams: the tail is for the server that knows the truth", many, "p99_ttft_ms", []float64{50, 50}, []float64{100, 100}, isNotHeld},
	} {
		c := comparedCase{parityCase: row.is, version: "0.14.1", ours: []parityResult{{"duration": 4}}}
		if got := c.judge(comparedField{name: row.field, ours: row.ours, theirs: row.theirs}); got != row.want {
			t.Errorf("%s: %s of %v and %v is %q, want %q", row.name, row.field, row.ours, row.theirs, got, row.want)
		}
	}
}

const parityTitle = `# tuner bench beside vllm bench serve

Written by ` + "`make bench-parity VER=…`" + `, one part for each version. The same prompts and answers of the same pinned lengths at the
same times, from both tools in turns, to one server without prefix cache; all on one machine. Each field that both tools write is there with the
median of its repeats and, in brackets, their range. In a row "p50" beside "median" is the same figure under vLLM's other name.

- in: the medians are no further apart than the wider of the two ranges; counts are equal. Above 8 streams, where only counts,
  throughput and medians are held, 5 % are enough.
- out, within late stamps: further apart, and not further than vLLM's stamps may be late, in their direction: TTFT and
  E2E lower with tuner bench by at most 5 ms, or in the closed loop higher by at most 1 ms, because what is asked sooner after an answer
  waits longer for the next step; their standard deviations by at most 2.5 ms; TPOT within 1 %, or higher by what 5 ms are in the
  shortest answer; gaps within 0.1 ms for each stream; duration and throughput of the closed loop as follows from that; tokens of the
  peak second by one step.
  [bench-accuracy.md](bench-accuracy.md) has both tools beside the truth.
- out: template: vLLM 0.14.1 counts the prompt of a chat itself and leaves the template out; tuner bench takes the server's count.
- out: further apart otherwise.

`

const versionTitle = "## vLLM "

// write puts this version's part into the file, and keeps the parts of other versions.
func (p *parity) write(t *testing.T, file string, busy float64) {
	t.Helper()
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	parts := strings.Split(string(before), "\n"+versionTitle)[1:]
	parts = slices.DeleteFunc(parts, func(part string) bool { return strings.HasPrefix(part, p.rig.version+"\n") })
	parts = append(parts, p.markdown(t, busy))
	slices.Sort(parts)
	text := strings.TrimRight(parityTitle, "\n")
	for _, part := range parts {
		text += "\n\n" + versionTitle + strings.TrimSpace(part)
	}
	must(t, os.WriteFile(file, []byte(text+"\n"), 0o644))
}

// markdown returns this version's part without the heading mark of its title.
func (p *parity) markdown(t *testing.T, busy float64) string {
	t.Helper()
	commit, err := exec.CommandContext(t.Context(), "git", "describe", "--always", "--dirty").Output()
	if err != nil {
		t.Logf("the commit is not known: %v", err)
	}
	var text, tables strings.Builder
	fmt.Fprintf(&text, "%s\n\nCommit %s, %s, %d cores, %d repeats of each tool. The machine was busy for %.0f %% of the time, servers and tools included.\n\n",
		p.rig.version, strings.TrimSpace(string(commit)), time.Now().Format(time.DateOnly), runtime.NumCPU(), p.repeats, 100*busy)
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
