package studies

import (
	"slices"
	"strings"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/tuner/space"
)

// Starts has the typical start-up times of a study's servers. A start is warm if an earlier server had the same compile
// key and environment variables: the server then finds its graphs in the compile cache, and takes less time.
type Starts struct {
	Cold  time.Duration    // median of the first start with each compile key; 0 if there is none
	Warm  time.Duration    // median of the later starts with the same keys; 0 if there is none
	Parts []serverctl.Part // median time of each part of a start; the parts are in the order of their first appearance
}

// StartsOf returns the start-up times of the finished trials whose server became ready. trials must be in the order in
// which they ran.
func StartsOf(trials []Trial) (s Starts) {
	var cold, warm []time.Duration
	seen, took := map[string]bool{}, map[string][]time.Duration{}
	for _, t := range trials {
		f := t.Result.Facts
		if t.State != Done || f.StartUp <= 0 {
			continue
		}
		key := serverctl.CompileKey(f.Version, t.Args) + strings.Join(space.EnvWords(t.Point.Env()), " ")
		if seen[key] {
			warm = append(warm, f.StartUp)
		} else {
			cold = append(cold, f.StartUp)
		}
		seen[key] = true
		for _, p := range f.Parts {
			if took[p.Name] == nil {
				s.Parts = append(s.Parts, serverctl.Part{Name: p.Name})
			}
			took[p.Name] = append(took[p.Name], p.Took)
		}
	}
	s.Cold, s.Warm = lowerMedian(cold), lowerMedian(warm)
	for i := range s.Parts {
		s.Parts[i].Took = lowerMedian(took[s.Parts[i].Name])
	}
	return s
}

// lowerMedian returns the median. Of two middle values it returns the lower one. Without values it returns 0.
func lowerMedian(of []time.Duration) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[(len(sorted)-1)/2]
}
