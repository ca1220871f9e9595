package simload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A pair has two choices of flags for the same workload.
type pair struct {
	name string
	a, b world
}

// chosenPairs returns the pairs of the table. Some flags change which limit breaks first; others change little.
func chosenPairs(t *testing.T) []pair {
	t.Helper()
	one := func(name string) world { return named(t, name) }
	with := func(w world, args ...string) world {
		w.args = slices.Concat(w.args, args)
		return w
	}
	return []pair{
		{"h200, phase1: default and utilization .95, 96 sequences, 2048 tokens", one("h200-phase1"), one("h200-phase1-u95")},
		{"h200, phase1: default and utilization .92", one("h200-phase1"), with(one("h200-phase1"), "--gpu-memory-utilization", "0.92")},
		{"h200, 1000/250: default and 4096 tokens", one("h200-plain"), with(one("h200-plain"), "--max-num-batched-tokens", "4096")},
		{"h200, 1000/250: default and 1024 tokens", one("h200-plain"), with(one("h200-plain"), "--max-num-batched-tokens", "1024")},
		{"h200, 500/200: 48 and 64 sequences", one("h200-seqs48"), with(one("h200-seqs48"), "--max-num-seqs", "64")},
		{"h200, 500/200: 48 and 52 sequences", one("h200-seqs48"), with(one("h200-seqs48"), "--max-num-seqs", "52")},
		{"small-fast, 800/200: default and 1024 tokens", one("small-plain"), with(one("small-plain"), "--max-num-batched-tokens", "1024")},
		{"small-fast, 40 × 1500 + 200/150: utilization .8 and .7", one("small-shared"), with(one("small-shared"), "--gpu-memory-utilization", "0.7")},
	}
}

// A pairResult has the results of all repetitions of a pair, in per cent.
type pairResult struct {
	paired, unpaired      []float64 // the ratio 100 · ln(b/a): paired uses the same draws for a and b, unpaired uses independent draws
	stated, ifIndependent []float64 // standard errors of paired: from capacity.Compare, and for the case that a and b were independent
	seconds               []float64 // time for which both searches send load
	bounds                int       // repetitions left out because an answer is only a bound
	measured              [][2]capacity.Capacity
}

// measure searches for both capacities of a pair, reps times. Both searches begin at the same hint, as in a study of
// the tuner.
func (p pair) measure(lengths trial.Lengths, reps int) (q pairResult, err error) {
	find := ours(lengths, 0)
	found := make([][3]answer, reps)
	err = inParallel(reps, func(i int) (err error) {
		hint := p.a.guess * math.Exp(hintError*rand.New(rand.NewPCG(uint64(i), 0x42)).NormFloat64())
		for k, w := range []world{p.a, p.b, p.b} {
			draw := pairDraws + i
			if k == 2 {
				draw += 1 << 10
			}
			if found[i][k], err = find(w, draw, hint); err != nil {
				return err
			}
		}
		return nil
	})
	for _, f := range found {
		c, ok := capacity.Compare(f[1].found, f[0].found)
		if !ok || f[2].bound != capacity.Exact {
			q.bounds++
			continue
		}
		q.measured = append(q.measured, [2]capacity.Capacity{f[0].found, f[1].found})
		q.paired = append(q.paired, 100*math.Log(f[1].rate/f[0].rate))
		q.unpaired = append(q.unpaired, 100*math.Log(f[2].rate/f[0].rate))
		q.stated = append(q.stated, 100*math.Log(c.Highest/c.Ratio)/1.96)
		q.ifIndependent = append(q.ifIndependent, 100*math.Hypot(f[0].found.StdErr, f[1].found.StdErr))
		q.seconds = append(q.seconds, totalSeconds(f[0])+totalSeconds(f[1]))
	}
	return q, err
}

// held returns the share of the 95 % intervals that contain the true ratio. It takes the mean of all ratios as the true
// ratio.
func (q pairResult) held() float64 {
	truth, hit := mean(append(slices.Clone(q.paired), q.unpaired...)), 0.0
	for i, ratio := range q.paired {
		if math.Abs(ratio-truth) <= 1.96*q.stated[i] {
			hit++
		}
	}
	return hit / float64(len(q.paired))
}

// recognised returns in how many of 100 studies b is found to be distinguishably better than a, and the mean number of
// rounds, if b carried gain (0.05 for 5 %) more than a. A round of a study is a repetition, chosen at random, with b's
// capacity moved so that the mean gain of all repetitions is gain. The rule of the rounds ends a study. In each, three points were
// confirmed, as usual.
func (q pairResult) recognised(gain float64) (percent, rounds float64) {
	const studies, rivals, minGain = 400, 2, 0.01
	moved := math.Exp(math.Log(1+gain) - mean(q.paired)/100)
	for seed := range uint64(studies) {
		var a, b []capacity.Capacity
		for _, i := range rand.New(rand.NewPCG(seed, 0x44)).Perm(len(q.measured))[:capacity.MaxRounds] {
			a, b = append(a, ofRound(q.measured[i][0], 1, len(a))), append(b, ofRound(q.measured[i][1], moved, len(b)))
			first, _ := a[0].Pooled(a)
			second, _ := b[0].Pooled(b)
			c, _ := capacity.Compare(second, first)
			if c = c.Among(rivals); len(a) < capacity.MaxRounds && c.Open(minGain) {
				continue
			}
			rounds += float64(len(a)) / studies
			if c.Distinguishable() {
				percent += 100. / studies
			}
			break
		}
	}
	return percent, rounds
}

// ofRound returns a capacity as one round of a study would measure it: with draws of its own, and times factor.
func ofRound(c capacity.Capacity, factor float64, round int) capacity.Capacity {
	c.Rate *= factor
	c.Pieces = slices.Clone(c.Pieces)
	for i := range c.Pieces {
		c.Pieces[i].Draw += 1000 * round
	}
	return c
}

const pairsHead = `# Two choices of flags: how sure their ratio is

Read here how well a study can tell two choices of flags apart, and why it measures both with the same requests.

Written by ` + "`make bench-capacity`" + `. All of it is simulated. Two configurations are measured from the same hint, as in a study: once with the same draws of
requests and arrivals, as a study does, and once with independent draws. All figures of errors are in %.

- SD: the standard deviation of ln(second / first).
- stated: the mean of the standard errors that a comparison states. *if independent*: the same, computed as if the two errors were
  not correlated.
- holds: the share of the stated 95 % intervals that contain the mean ratio of all repetitions.
- s: seconds of both searches.

`

const recognisedHead = `
## How often a gain is recognised

The same repetitions of the setting *confirmation*, as rounds of studies: in each study the rounds are repetitions in a random order,
and the rule in [capacity.md](../capacity.md#how-the-best-are-confirmed) ends them. For each column, the second choice's capacities are moved so
that its mean gain is the figure at the top. The table has the share of 400 studies that call the second choice better, and in
brackets the mean number of rounds.

`

// TestPairTable measures how wrong the ratio of two measured capacities is, and writes a report.
func TestPairTable(t *testing.T) {
	file := os.Getenv(pairsVariable)
	if file == "" {
		t.Skip("takes minutes; make bench-capacity runs it")
	}
	reps := setting(t, repsVariable, 40)
	var b strings.Builder
	fmt.Fprintf(&b, "%sCommit %s, %d repetitions.\n\n", pairsHead, os.Getenv(commitVariable), reps)
	b.WriteString("| pair | setting | mean | SD, same draws | SD, independent | SD, same / independent | stated | if independent | holds | s |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	gains := []float64{0, 0.03, 0.05, 0.08}
	recognised := "| pair | 0 % | 3 % | 5 % | 8 % |\n|---|---|---|---|---|\n"
	means := make([][]float64, len(gains))
	for _, p := range chosenPairs(t) {
		for i, lengths := range []trial.Lengths{searchLengths, confirmLengths} {
			q, err := p.measure(lengths, reps)
			if err != nil {
				t.Fatal(err)
			}
			if q.bounds > reps/2 {
				t.Errorf("%s: %d of %d comparisons have an answer that is only a bound", p.name, q.bounds, reps)
				continue
			}
			ratio, same := meanSD(q.paired)
			_, apart := meanSD(q.unpaired)
			fmt.Fprintf(&b, "| %s | %s | %+.1f | %.1f | %.1f | %.2f | %.1f | %.1f | %.0f %% of %d | %.0f |\n", p.name, []string{"search", "confirmation"}[i], ratio, same, apart, same/apart,
				mean(q.stated), mean(q.ifIndependent), 100*q.held(), len(q.paired), mean(q.seconds))
			if i == 0 || len(q.measured) < capacity.MaxRounds {
				continue
			}
			recognised += "| " + p.name + " |"
			for k, gain := range gains {
				percent, rounds := q.recognised(gain)
				means[k] = append(means[k], percent)
				recognised += fmt.Sprintf(" %.0f %% (%.1f) |", percent, rounds)
			}
			recognised += "\n"
		}
	}
	recognised += "| mean |"
	for _, percent := range means {
		recognised += fmt.Sprintf(" %.1f %% |", mean(percent))
	}
	writePage(t, file, b.String()+recognisedHead+recognised+"\n")
}
