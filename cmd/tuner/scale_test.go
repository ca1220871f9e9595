package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// TestALongStudy fills a study with STORE_SCALE trials of eight probes each, copied from a trial of the demo. For each
// tenth of the trials it measures the time of a commit and the size of the files. At the end it times the commands that
// read the study. With more than 1000 trials, a commit may take at most three times as long in the last tenth as in the
// first.
func TestALongStudy(t *testing.T) {
	realtime.Long(t, "dozens of trials, and hundreds with SOAK_REAL_TIME")
	trials := realtime.Rounds(50, 500)
	if n, err := strconv.Atoi(os.Getenv("STORE_SCALE")); err == nil {
		trials = n
	}
	root := t.TempDir()
	template := demoTrial(t)
	file, err := studyfile.Parse("demo.yaml", demoFile)
	must(t, err)
	dir := filepath.Join(root, "long")
	is := studies.New{Name: "long", Seed: 1, File: file.Text, World: file.World()}
	store, _, err := studies.Open(context.Background(), dir, is, studies.Options{})
	must(t, err)
	filling := &filler{store: store, template: template, random: rand.New(rand.NewPCG(1, 1))}
	table := fmt.Sprintf("%8s %12s %12s %12s %12s\n", "trials", "commit ms", "p99 ms", "kB/probe", "snapshots MB")
	var first, last tenth
	for part := range 10 {
		took := filling.trials(t, trials*part/10, trials*(part+1)/10)
		slices.Sort(took)
		last = tenth{commit: took[len(took)/2], size: sizes(t, filepath.Join(dir, "e000000000001"))}
		if part == 0 {
			first = last
		}
		table += fmt.Sprintf("%8d %12.2f %12.2f %12.2f %12.1f\n", trials*(part+1)/10, render.InMilliseconds(last.commit), render.InMilliseconds(took[len(took)*99/100]),
			float64(last.size)/1e3/float64(8*trials*(part+1)/10), float64(sizes(t, filepath.Join(dir, "snap")))/1e6)
	}
	must(t, store.Close())
	unmet := filepath.Join(root, "unmet") // here a reader searches for the trial nearest to the SLO
	filling.template.Result.Capacity.Bound = capacity.AtMost
	filling.store, _, err = studies.Open(context.Background(), unmet, is, studies.Options{})
	must(t, err)
	filling.trials(t, 0, trials)
	must(t, filling.store.Close())
	table += readerTimes(t, dir, "STUDY", 0) + readerTimes(t, unmet, "NONE-MET", exitNothingMet)
	t.Logf("%d trials of 8 probes; medians\n%s", trials, table)
	if last.commit > 3*first.commit && trials > 1000 { // with fewer trials, other work on the machine affects the times more than the store does
		t.Errorf("the median commit took %s at the beginning and %s at the end", first.commit, last.commit)
	}
	if path := os.Getenv("BENCH_STORE"); path != "" {
		text := fmt.Sprintf("# A long study\n\nRead here how fast commits and commands are in a study of thousands of trials, and how much disk it takes.\n\n%d trials with 8 probes each, by `make bench-store` at %s on a local disk, %s.\n\n```\n%s```\n", trials,
			os.Getenv("STORE_COMMIT"), time.Now().Format(time.DateOnly), table)
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
}

// A tenth has the measurements of one tenth of the trials.
type tenth struct {
	commit time.Duration // median time of a commit
	size   int64         // bytes of the database at the end of the tenth
}

// demoTrial returns a finished trial on a simulated H200, with its probes.
func demoTrial(t *testing.T) studies.Trial {
	t.Helper()
	root := t.TempDir()
	file, err := demoStudy(root, "random", 1)
	must(t, err)
	file.Budget.Trials, file.Budget.MinGain, file.Budget.Confirm = 2, 0, 0 // trial 1 is measured in full
	must(t, runStudy(context.Background(), file, runOptions{root: root, stdout: new(strings.Builder), stderr: new(strings.Builder)}))
	return snapshot(t, filepath.Join(root, file.Name)).Trials[1]
}

// A filler stores many trials that are similar to its field template.
type filler struct {
	store    *studies.Store
	template studies.Trial
	random   *rand.Rand
}

// trials stores the trials with the numbers first to end - 1. It returns the commit time of each probe.
func (f *filler) trials(t *testing.T, first, end int) (took []time.Duration) {
	t.Helper()
	for n := first; n < end; n++ {
		next := f.template
		next.Number, next.Began = n, time.Now()
		next.Point = space.Point{"max-num-seqs": strconv.Itoa(16 + f.random.IntN(1000)), "gpu-memory-utilization": strconv.FormatFloat(f.random.Float64(), 'g', 3, 64)}
		must(t, f.store.Begin(next))
		for seq := range 8 {
			p := f.template.Probes[seq%len(f.template.Probes)]
			p.Seq, p.Measurement.Series = seq, slices.Clone(p.Measurement.Series)
			for i := range p.Measurement.Series {
				p.Measurement.Series[i].Chunks = f.random.IntN(1500)
			}
			began := time.Now()
			must(t, f.store.Record(n, p))
			took = append(took, time.Since(began))
		}
		r := f.template.Result
		if r.Capacity.Rate *= 0.5 + f.random.Float64()/2; n%7 == 3 {
			r = trial.Result{Outcome: trial.Infeasible, Class: "oom-start", Evidence: "torch.OutOfMemoryError: CUDA out of memory.", GPUTime: time.Minute}
		}
		must(t, f.store.Finish(n, r))
	}
	return took
}

// sizes returns the sum of the sizes of all files below a directory.
func sizes(t *testing.T, dir string) (sum int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	must(t, err)
	return sum
}

// readerTimes returns lines with the wall times of `tuner best`, `tuner status` and `tuner --version`. In these lines
// the study has the name shownName. The snapshot is in the page cache.
func readerTimes(t *testing.T, dir, shownName string, code int) (text string) {
	t.Helper()
	for _, args := range [][]string{{"best", dir}, {"status", dir}, {"best", dir, "-o", "json"}, {"status", dir, "-o", "json"}, {"--version"}} {
		var took []time.Duration
		for range realtime.Rounds(3, 9) {
			began := time.Now()
			cmd := exec.Command(tunerPath(t), args...)
			out, err := cmd.Output()
			if exit := cmd.ProcessState.ExitCode(); err != nil && (exit != code || args[0] != "best") {
				t.Fatalf("tuner %s: %v", args, err)
			}
			took = append(took, time.Since(began))
			if slices.Contains(args, "json") && !json.Valid(out) {
				t.Fatalf("tuner %s gives no JSON", args)
			}
		}
		slices.Sort(took)
		text += fmt.Sprintf("tuner %-24s %6.0f ms\n", strings.ReplaceAll(strings.Join(args, " "), dir, shownName), render.InMilliseconds(took[len(took)/2]))
	}
	return text
}
