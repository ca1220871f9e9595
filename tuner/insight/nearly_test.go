package insight

import (
	"slices"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/space"
)

// The trial that is named is the nearest to the default among those that are nearly as good as the best.
func TestNearly(t *testing.T) {
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
		{Name: "enable-prefix-caching", Kind: space.Bool},
	})
	far := space.Point{"gpu-memory-utilization": "0.97", "max-num-seqs": "1000", "enable-prefix-caching": "true"}
	one := space.Point{"gpu-memory-utilization": "0.9", "max-num-seqs": "128"} // 0.9 is vLLM's own default
	two := space.Point{"gpu-memory-utilization": "0.95", "max-num-seqs": "128"}
	far2 := space.Point{"gpu-memory-utilization": "0.97", "max-num-seqs": "1000"}
	near := space.Point{"gpu-memory-utilization": "0.91", "max-num-seqs": "250"}
	byDefault := func(rate float64) studies.Trial {
		d := done(0, space.Point{}, rate, 0.02)
		d.Origin, d.Result.Facts.Args = studies.Default, map[string]string{"max-num-seqs": "256", "enable-prefix-caching": "false"}
		return d
	}
	trials := func(all ...studies.Trial) []studies.Trial {
		for i := range all {
			all[i].Number = i
		}
		return all
	}
	confirm := func(p space.Point, rate float64) studies.Trial {
		c := done(0, p, rate, 0.02)
		c.Origin = studies.Confirmed
		return c
	}
	limited := done(0, one, 2.6, 0.02)
	limited.Result.Class = serverctl.ClientLimited
	running := done(0, one, 2.6, 0.02)
	running.State = studies.Running
	for _, c := range []struct {
		name   string
		trials []studies.Trial
		want   int // number of the trial; -1 for none
		args   []string
	}{
		{"the fewest changes win", trials(byDefault(2), done(0, far, 2.6, 0.02), done(0, two, 2.59, 0.02), done(0, one, 2.58, 0.02)), 3, []string{"--max-num-seqs", "128"}},
		{"the default is nearly as good", trials(byDefault(2.57), done(0, far, 2.6, 0.02), done(0, one, 2.58, 0.02)), 0, nil},
		{"the default is the best", trials(byDefault(2.6), done(0, far, 2.5, 0.02), done(0, one, 2.58, 0.02)), -1, nil},
		{"a simpler trial is 5 % worse", trials(byDefault(2), done(0, far, 2.6, 0.02), done(0, one, 2.47, 0.02)), -1, nil},
		{"a simpler trial is 2.5 % worse, which is certain", trials(byDefault(2), done(0, far, 2.6, 0.001), done(0, one, 2.535, 0.001)), -1, nil},
		{"a simpler trial is 2.5 % worse, which is chance", trials(byDefault(2), done(0, far, 2.6, 0.05), done(0, one, 2.535, 0.05)), 2, []string{"--max-num-seqs", "128"}},
		{"a simpler trial that lost the race counts", trials(byDefault(2), done(0, far, 2.6, 0.02), lost(done(0, one, 2.58, 0.02))), 2, []string{"--max-num-seqs", "128"}},
		{"as many changes, but much smaller ones", trials(byDefault(2), done(0, far2, 2.6, 0.02), done(0, near, 2.59, 0.02)), 2,
			[]string{"--gpu-memory-utilization", "0.91", "--max-num-seqs", "250"}},
		{"no interval", trials(byDefault(2), done(0, far, 2.6, 0), done(0, one, 2.6, 0)), -1, nil},
		{"the load generator was late", trials(byDefault(2), done(0, far, 2.61, 0.02), limited), -1, nil},
		{"a trial runs", trials(byDefault(2), done(0, far, 2.6, 0.02), running), -1, nil},
		{"the confirmation of a simpler trial counts", trials(byDefault(2), done(0, far, 2.6, 0.02), done(0, one, 2.5, 0.02), confirm(far, 2.4), confirm(one, 2.39)), 4,
			[]string{"--max-num-seqs", "128"}},
		{"a simpler trial was not confirmed", trials(byDefault(2), done(0, far, 2.6, 0.02), done(0, one, 2.59, 0.02), confirm(far, 2.4), confirm(one, 2.2)), -1, nil},
	} {
		best, ok := report.Best(studies.Study{Trials: c.trials})
		if !ok {
			t.Fatal(c.name, ": no best trial")
		}
		got, number := nearly(s, best, c.trials), -1
		var args []string
		if got != nil {
			number, args = got.Trial, got.Args
		}
		if number != c.want || !slices.Equal(args, c.args) {
			t.Errorf("%s: nearly = %+v, want trial %d with %v", c.name, got, c.want, c.args)
		}
	}
}

// With the objective capacity_per_gpu, a larger total capacity does not make a server with more GPUs nearly as good.
func TestNearlyCountsWhatTheObjectiveCounts(t *testing.T) {
	s := spaceOf(t, []space.Parameter{
		{Name: "tensor-parallel-size", Kind: space.Int, Min: 1, Max: 4}, {Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024},
	})
	with := func(number int, p space.Point, rate float64, args ...string) studies.Trial {
		one := done(number, p, rate, 0.02)
		one.Args = args
		return one
	}
	study := studies.Study{World: map[string]string{studies.ObjectiveKey: string(studies.CapacityPerGPU)}, Trials: []studies.Trial{
		with(0, space.Point{"tensor-parallel-size": "1", "max-num-seqs": "64"}, 2, "--tensor-parallel-size", "1", "--max-num-seqs", "64"),
		with(1, space.Point{"tensor-parallel-size": "4"}, 5, "--tensor-parallel-size", "4"),
	}}
	if i := Derive(study, s); i == nil || i.Nearly != nil {
		t.Errorf("insight %+v, want no trial nearly as good: trial 1 carries 1.25 req/s per GPU, the best 2", i)
	}
	study.Trials[1] = with(1, space.Point{"tensor-parallel-size": "2"}, 3.98, "--tensor-parallel-size", "2")
	if i := Derive(study, s); i == nil || i.Nearly == nil || i.Nearly.Rate != 3.98 {
		t.Errorf("insight %+v, want trial 1 nearly as good, with the capacity of its server, 3.98 req/s", i)
	}
}

// The advice names the environment variables that a trial sets.
func TestNearlyNamesVariables(t *testing.T) {
	s := spaceOf(t, []space.Parameter{
		{Name: "VLLM_X", Kind: space.Categorical, Choices: []string{"0", "1"}}, {Name: "a", Kind: space.Int, Min: 1, Max: 100}, {Name: "b", Kind: space.Int, Min: 1, Max: 100},
	})
	study := studies.Study{Trials: []studies.Trial{
		done(0, space.Point{"VLLM_X": "1", "a": "7", "b": "8"}, 2, 0.02), done(1, space.Point{"VLLM_X": "1"}, 1.99, 0.02),
	}}
	i := Derive(study, s)
	if i == nil || i.Nearly == nil || i.Nearly.Env["VLLM_X"] != "1" || len(i.Nearly.Args) > 0 {
		t.Errorf("insight %+v, want trial 1 with VLLM_X=1", i)
	}
}
