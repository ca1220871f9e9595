package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/space/landscape"
	"vllmtuner/tuner/studyfile"
)

// demoWinner runs the demo with a sampler and a seed. It returns the winner, and the hours of GPU time that the study
// would take on a real server.
func demoWinner(t testing.TB, sampler string, seed uint64) (report.Winner, float64) {
	t.Helper()
	root := t.TempDir()
	file, err := demoStudy(root, sampler, seed)
	must(t, err)
	must(t, runStudy(context.Background(), file, runOptions{root: root, stdout: io.Discard, stderr: io.Discard}))
	study, err := studies.ReadSnapshot(root + "/" + file.Name)
	must(t, err)
	best, met := report.Best(study)
	if !met {
		t.Fatalf("seed %d: nothing met the SLO", seed)
	}
	var spent time.Duration
	for _, trial := range study.Trials {
		spent += trial.Result.GPUTime
	}
	return best, spent.Hours()
}

// demoRegrets runs the demo once with each seed from 1 to seedCount. It returns the sorted regrets of the winners, how
// many winners beat the default, and the mean GPU time in hours.
func demoRegrets(t testing.TB, sampler string, seedCount uint64) (regrets []float64, better int, hours float64) {
	t.Helper()
	truth, err := landscape.H200()
	must(t, err)
	byDefault, err := truth.Regret(nil)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range seedCount {
		best, took := demoWinner(t, sampler, seed+1)
		hours += took / float64(seedCount)
		regret, err := truth.Regret(best.Trial.Point)
		must(t, err)
		t.Logf("%s, seed %2d: %-75s measured %.2f req/s, regret %.1f %%", sampler, seed+1, best.Trial.Point, best.Trial.Result.Capacity.Rate, 100*regret)
		regrets = append(regrets, regret)
		if regret < byDefault {
			better++
		}
	}
	slices.Sort(regrets)
	return regrets, better, hours
}

// The demo's winner must beat the default on every seed, and the median regret must be small. Both are computed from
// the true capacities. This test takes three seeds; BenchmarkDemoRegret takes twenty.
func TestDemoFindsAGoodPoint(t *testing.T) {
	realtime.Only(t, "whole demos on three seeds")
	regrets, better, _ := demoRegrets(t, "gp", 3)
	if median := regrets[1]; median > 0.07 || better != 3 {
		t.Errorf("regrets %.3f, %d of 3 better than the default; want a median of at most 0.07 and all better", regrets, better)
	}
}

// BenchmarkDemoRegret reports the demo's median regret over 20 seeds for each sampler, in percent.
func BenchmarkDemoRegret(b *testing.B) {
	for _, sampler := range []string{"tpe", "random", "grid"} {
		b.Run(sampler, func(b *testing.B) {
			for b.Loop() {
				const seeds = 20
				regrets, better, hours := demoRegrets(b, sampler, seeds)
				b.ReportMetric(100*(regrets[seeds/2-1]+regrets[seeds/2])/2, "%median-regret")
				b.ReportMetric(100*regrets[seeds*9/10], "%p90-regret")
				b.ReportMetric(hours, "GPU-hours/study")
				b.ReportMetric(float64(better), "of-20-better-than-default")
			}
		})
	}
}

// BenchmarkFullTrials reports the GPU time of 30 trials of the demo that are all measured in full, as the mean of three
// seeds. The constant fullTrials has its result.
func BenchmarkFullTrials(b *testing.B) {
	for b.Loop() {
		hours := 0.0
		for seed := range uint64(3) {
			root := b.TempDir()
			file, err := demoStudy(root, "gp", seed+1)
			must(b, err)
			file.Budget = studyfile.Budget{Trials: 30}
			must(b, runStudy(context.Background(), file, runOptions{root: root, stdout: io.Discard, stderr: io.Discard}))
			study, err := studies.ReadSnapshot(filepath.Join(root, file.Name))
			must(b, err)
			hours += report.Summarize(study, report.Options{}).GPUSeconds / 3600 / 3
		}
		b.ReportMetric(hours, "GPU-hours/30-trials")
	}
}

// If demo.yaml is written in another form, the demo fails instead of ignoring its flags.
func TestChangedDemoReplacesWhatItMust(t *testing.T) {
	for _, old := range []string{"name: demo", "{name: gp, seed: 1}"} {
		text := strings.Replace(string(demoFile), old, strings.ReplaceAll(old, ": ", ":  "), 1)
		if f, err := changedDemo(text, "other", "tpe", 7); err == nil || f != nil || !strings.Contains(err.Error(), "want other, tpe and 7") {
			t.Errorf("without %q changedDemo = %v, %v, want an error", old, f, err)
		}
	}
}

// The demo's file is valid with each sampler. If a directory cannot be read, the demo takes the next name.
func TestDemoFileIsAStudy(t *testing.T) {
	for _, sampler := range studyfile.Samplers {
		f, err := demoStudy(t.TempDir(), sampler, 42)
		if err != nil || f.Sampler.Name != sampler || f.Sampler.Seed != 42 || f.Name != "demo-"+sampler+"-42" {
			t.Errorf("demoStudy(%s, 42) = %+v, %v", sampler, f, err)
		}
	}
	root := t.TempDir()
	dir := filepath.Join(root, "demo-gp-42")
	must(t, os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "study.db"), []byte("damaged"), 0o600))
	if f, err := demoStudy(root, "gp", 42); err != nil || f.Name != "demo-gp-42-2" {
		t.Errorf("beside a damaged demo demoStudy(gp, 42) = %+v, %v", f, err)
	}
}
