package studies

import (
	"slices"
	"time"

	"vllmtuner/serverctl"
)

// Starts has the start-up times of a study's servers. A start with the compile key of an earlier start finds its graphs
// in the compile cache, and is shorter.
type Starts struct {
	cold  []time.Duration // the first start of each key
	warm  []time.Duration // the later starts
	parts []serverctl.Part
}

// StartsOf reads the finished trials whose server became ready, in their order.
func StartsOf(trials []Trial) *Starts {
	s, seen := &Starts{}, map[string]bool{}
	took := map[string][]time.Duration{}
	var names []string
	for _, t := range trials {
		f := t.Result.Facts
		if t.State != Done || f.StartUp <= 0 {
			continue
		}
		key := serverctl.CompileKey(f.Version, t.Args)
		if seen[key] {
			s.warm = append(s.warm, f.StartUp)
		} else {
			s.cold = append(s.cold, f.StartUp)
		}
		seen[key] = true
		for _, p := range f.Parts {
			if took[p.Name] == nil {
				names = append(names, p.Name)
			}
			took[p.Name] = append(took[p.Name], p.Took)
		}
	}
	for _, name := range names {
		s.parts = append(s.parts, serverctl.Part{Name: name, Took: median(took[name])})
	}
	return s
}

// Cold is the median of the starts that were the first with their compile key; 0 without any.
func (s *Starts) Cold() time.Duration { return median(s.cold) }

// Warm is the median of the starts whose compile key was seen before; 0 without any.
func (s *Starts) Warm() time.Duration { return median(s.warm) }

// Parts are the median durations of the parts of a start, in the order of their first appearance.
func (s *Starts) Parts() []serverctl.Part { return s.parts }

// median returns the median. Of an even number it returns the lower middle value, and 0 of none.
func median(of []time.Duration) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[(len(sorted)-1)/2]
}
