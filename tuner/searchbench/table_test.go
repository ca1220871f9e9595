package searchbench

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/trial/capacity"
)

// reach is a list of regrets. For each regret, the table has the GPU time until a method's best point is that close to
// the best point of the world.
var reach = []float64{0.10, 0.05, 0.03}

// A judgedRun is a methodRun compared with the true capacities.
type judgedRun struct {
	methodRun
	regret  float64   // regret of the recommended point; 1 if there is none
	hours   []float64 // GPU hours until the run came as near as each regret in reach; all its hours if it never did
	reached []bool    // whether the run came that near, for each regret in reach
	bias    float64   // ln(reported / true) of the recommended point
	exact   bool      // whether bias is known, because the reported capacity is exact
	covered *bool     // whether the 95 % interval contains the true capacity; nil if there is no interval
}

// judge compares what a method did with the true capacities.
func judge(f methodRun, capacityOf func(step) float64, truthOfBest float64, best float64) judgedRun {
	j := judgedRun{methodRun: f, regret: 1, hours: make([]float64, len(reach)), reached: make([]bool, len(reach))}
	if f.Best != nil {
		j.regret = 1 - truthOfBest/best
		if truthOfBest > 0 && f.Best.Rate > 0 && f.Best.Bound == capacity.Exact {
			j.bias, j.exact = math.Log(f.Best.Rate/truthOfBest), true
		}
		if f.Best.High > 0 {
			j.covered = new(f.Best.Low <= truthOfBest && truthOfBest <= f.Best.High)
		}
	}
	for i, regret := range reach {
		j.hours[i] = f.Spent.total().Hours()
		for _, s := range f.Steps {
			if s.Point != nil && capacityOf(s) >= (1-regret)*best {
				j.hours[i], j.reached[i] = s.GPU.Hours(), true
				break
			}
		}
	}
	return j
}

// A result is one world with what each method did in it.
type result struct {
	world  world
	best   best
	bestAt string
	byName map[string][]judgedRun // the runs of each method, in the order of the seeds
	names  []string
	noPath bool // whether only the last best point of each run is judged, so no time to a regret is known
}

// A summary has the settings and the results of a whole run.
type summary struct {
	commit, engine string
	seeds          int
	trials, rivals int  // trials of a study, and of another method
	onlyAnswers    bool // whether only the last best point of each run is judged
	skipped        []string
	results        []result
}

// trialsOf returns the number of trials of a method.
func (s summary) trialsOf(m method) int {
	if m.own {
		return s.trials
	}
	return s.rivals
}

func values(all []judgedRun, of func(judgedRun) float64) []float64 {
	v := make([]float64, len(all))
	for i, j := range all {
		v[i] = of(j)
	}
	return v
}

// meanError writes the mean and its standard error, such as "2.1 ± 0.3".
func meanError(v []float64, format string) string {
	if len(v) < 2 {
		return fmt.Sprintf(format, stat.Mean(v, nil))
	}
	m, sd := stat.MeanStdDev(v, nil)
	return fmt.Sprintf(format+" ± "+format, m, sd/math.Sqrt(float64(len(v))))
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// markdown returns the report.
func (s summary) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Whole studies on engines whose capacities are known\n\n"+
		"Read here how good the flags are that a study finds, and how much GPU time it takes, beside the methods of other tools.\n\n")
	fmt.Fprintf(&b, "`make bench-search` wrote this page. Commit %s; %d seeds; %d trials a study, %d of other methods; engines %s. All figures are simulated.\n"+
		"Every method has the settings of `tuner init`. *Regret* is how far the true capacity of the recommended point lies below the best\n"+
		"known one. *To 10 %%* is the GPU time until the best point so far is truly within 10 %%; a study that never gets there counts with all\n"+
		"its time, and the number in brackets says how many studies got there.\n", s.commit, s.seeds, s.trials, s.rivals, s.engine)
	for _, r := range s.results {
		r.write(&b)
	}
	s.writeBars(&b)
	if len(s.skipped) > 0 {
		fmt.Fprintf(&b, "\n## Skipped\n\n")
		for _, line := range s.skipped {
			fmt.Fprintf(&b, "- %s\n", line)
		}
	}
	return b.String()
}

func (r result) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n## %s\n\n", r.world.name)
	fmt.Fprintf(b, "Best: %.3g req/s (± %.1f %%) at %s, where %s breaks first; %s.\n\n", r.best.Capacity, 100*r.best.StdErr, r.bestAt, r.best.Limit, r.best.how)
	fmt.Fprintln(b, "| method | regret % | median | worst | GPU-h to 10 % | 5 % | 3 % | GPU-h in all | trials | crashed |")
	fmt.Fprintln(b, "|---|---|---|---|---|---|---|---|---|---|")
	for _, name := range r.names {
		r.writeSearch(b, name)
	}
	fmt.Fprintln(b, "\n| method | starts and stops | warm-up, priming | lead-in | windows | run-out | bias % | sd | interval holds the truth | regret above the first's | GPU-h above |")
	fmt.Fprintln(b, "|---|---|---|---|---|---|---|---|---|---|---|")
	for _, name := range r.names {
		r.writeCost(b, name)
	}
}

func (r result) writeSearch(b *strings.Builder, name string) {
	all := r.byName[name]
	regrets := values(all, func(j judgedRun) float64 { return 100 * j.regret })
	fmt.Fprintf(b, "| %s | %s | %.1f | %.1f |", name, meanError(regrets, "%.1f"), median(regrets), slices.Max(regrets))
	for i := range reach {
		if r.noPath {
			fmt.Fprint(b, " – |")
			continue
		}
		came := 0
		for _, j := range all {
			if j.reached[i] {
				came++
			}
		}
		fmt.Fprintf(b, " %.1f (%d) |", stat.Mean(values(all, func(j judgedRun) float64 { return j.hours[i] }), nil), came)
	}
	fmt.Fprintf(b, " %s | %.1f | %.1f |\n", meanError(values(all, hoursOf), "%.1f"),
		stat.Mean(values(all, func(j judgedRun) float64 { return float64(len(j.Steps)) }), nil),
		stat.Mean(values(all, func(j judgedRun) float64 { return float64(j.crashes()) }), nil))
}

func hoursOf(j judgedRun) float64 { return j.Spent.total().Hours() }

func (r result) writeCost(b *strings.Builder, name string) {
	all := r.byName[name]
	fmt.Fprintf(b, "| %s |", name)
	for _, part := range []func(gpuTimes) time.Duration{
		func(s gpuTimes) time.Duration { return s.Start + s.Stop }, func(s gpuTimes) time.Duration { return s.WarmUp },
		func(s gpuTimes) time.Duration { return s.LeadIn }, func(s gpuTimes) time.Duration { return s.Window },
		func(s gpuTimes) time.Duration { return s.RunOut },
	} {
		fmt.Fprintf(b, " %.2f |", stat.Mean(values(all, func(j judgedRun) float64 { return part(j.Spent).Hours() }), nil))
	}
	var biases []float64
	held, of := 0, 0
	for _, j := range all {
		if j.exact {
			biases = append(biases, 100*j.bias)
		}
		if j.covered != nil {
			of++
			if *j.covered {
				held++
			}
		}
	}
	switch len(biases) {
	case 0:
		fmt.Fprint(b, " – | – |")
	case 1:
		fmt.Fprintf(b, " %+.1f | – |", biases[0])
	default:
		fmt.Fprintf(b, " %+.1f | %.1f |", stat.Mean(biases, nil), stat.StdDev(biases, nil))
	}
	fmt.Fprintf(b, " %d of %d |", held, of)
	if name == r.names[0] {
		fmt.Fprintln(b, " | |")
		return
	}
	fmt.Fprintf(b, " %s | %s |\n", r.paired(name, func(j judgedRun) float64 { return 100 * j.regret }), r.paired(name, hoursOf))
}

// paired writes the mean difference of a method to the first method, over pairs with the same seed.
func (r result) paired(name string, of func(judgedRun) float64) string {
	mine, theirs := values(r.byName[r.names[0]], of), values(r.byName[name], of)
	differences := make([]float64, len(theirs))
	for i := range theirs {
		differences[i] = theirs[i] - mine[i]
	}
	return meanError(differences, "%.1f")
}

// writeBars writes, for each method that has an interval, how its answers compare with the truth over all worlds. Then it
// compares the first method with each other method, world by world.
func (s summary) writeBars(b *strings.Builder) {
	if len(s.results) == 0 {
		return
	}
	fmt.Fprint(b, "\n## All worlds\n\n| method | studies | bias % | interval holds the truth | more than 10 % below the best |\n|---|---|---|---|---|\n")
	for _, name := range s.results[0].names {
		var all []judgedRun
		for _, r := range s.results {
			all = append(all, r.byName[name]...)
		}
		fmt.Fprintf(b, "| %s | %d | %s | %s | %d |\n", name, len(all), biasOf(all), coverageOf(all), lo.CountBy(all, func(j judgedRun) bool { return j.regret > 0.1 }))
	}
	names := s.results[0].names
	if len(names) < 2 {
		return
	}
	fmt.Fprintf(b, "\nRegret of each method less that of %s (pairs with the same seed), and its GPU time as a multiple:\n\n| world |", names[0])
	for _, name := range names[1:] {
		fmt.Fprintf(b, " %s: regret | GPU time |", name)
	}
	fmt.Fprintf(b, "\n|---|%s\n", strings.Repeat("---|---|", len(names)-1))
	for _, r := range s.results {
		fmt.Fprintf(b, "| %s |", r.world.name)
		first := stat.Mean(values(r.byName[names[0]], hoursOf), nil)
		for _, name := range names[1:] {
			fmt.Fprintf(b, " %s | %.1f |", r.paired(name, func(j judgedRun) float64 { return 100 * j.regret }), stat.Mean(values(r.byName[name], hoursOf), nil)/first)
		}
		fmt.Fprintln(b)
	}
}

// biasOf writes the mean error of the reported capacities, in percent, and its standard error.
func biasOf(all []judgedRun) string {
	known := values(lo.Filter(all, func(j judgedRun, _ int) bool { return j.exact }), func(j judgedRun) float64 { return 100 * j.bias })
	if len(known) == 0 {
		return "–"
	}
	return meanError(known, "%.1f")
}

// coverageOf writes in how many of 100 studies the 95 % interval contains the truth.
func coverageOf(all []judgedRun) string {
	known := lo.Filter(all, func(j judgedRun, _ int) bool { return j.covered != nil })
	if len(known) == 0 {
		return "–"
	}
	held := lo.CountBy(known, func(j judgedRun) bool { return *j.covered })
	return fmt.Sprintf("%d of %d", held, len(known))
}
