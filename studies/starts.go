package studies

import (
	"slices"
	"time"

	"vllmtuner/serverctl"
)

// Starts has the typical start-up times of a study's servers. A start with the compile key of an earlier start finds its
// graphs in the compile cache, and is shorter.
type Starts struct {
	Cold  time.Duration    // median of the first start of each key; 0 without any
	Warm  time.Duration    // median of the later starts; 0 without any
	Parts []serverctl.Part // median of each part of a start, in the order of their first appearance
}

// StartsOf reads the finished trials whose server became ready, in their order.
func StartsOf(trials []Trial) (s Starts) {
	var cold, warm []time.Duration
	seen, took := map[string]bool{}, map[string][]time.Duration{}
	for _, t := range trials {
		f := t.Result.Facts
		if t.State != Done || f.StartUp <= 0 {
			continue
		}
		key := serverctl.CompileKey(f.Version, t.Args)
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
	s.Cold, s.Warm = median(cold), median(warm)
	for i := range s.Parts {
		s.Parts[i].Took = median(took[s.Parts[i].Name])
	}
	return s
}

// median returns the median. Of an even number it returns the lower middle value, and 0 of none.
func median(of []time.Duration) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[(len(sorted)-1)/2]
}
