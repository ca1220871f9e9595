// Package report turns a study into text: the best trial with its evidence, and how far the study is, for people, shells,
// Kubernetes and programs. It is pure: it reads no file and no clock, and never judges what was measured anew.
package report

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// Options are what a report needs to know beside the study.
type Options struct {
	Planned int       // trials the study may run; 0 means unknown
	Now     time.Time // for ages and the time that is left; zero leaves them out
	Rows    int       // trials in the status table; 0 means 10, and the best one is always among them
	Sort    Order     // of the status table; "" means Newest
	Width   int       // columns there are; 0 means 80
	Margin  float64   // of the advised rate; 0 means the usual one
}

// An Order is one of the status table's rows.
type Order string

// The orders.
const (
	Newest  Order = "newest"
	Oldest  Order = "oldest"
	Fastest Order = "best" // the highest capacity first, what has none last
)

// Orders are all of them.
var Orders = []Order{Newest, Oldest, Fastest}

// A Winner is the best trial so far.
type Winner struct {
	Trial studies.Trial
	Gain  *Gain // over the reference; nil when no reference has been measured
	Among int   // it is the best of so many that were measured

	same []studies.Trial // that were measured in the same world
}

// Whole names the trials of a study that a report of so many rows says more of than what they came to: those that run, the newest, and the
// best with its reference, or where none met the SLO the one that came nearest.
func Whole(rows int) func(studies.Study) []int {
	if rows == 0 {
		rows = manyRows
	}
	return func(study studies.Study) (numbers []int) {
		best, met := Best(study)
		if !met {
			numbers = append(numbers, studies.Nearest)
		}
		for i, t := range study.Trials {
			winner := met && t.Number == best.Trial.Number
			reference := met && best.Gain != nil && t.Number == best.Gain.Trial
			if winner || reference || t.State != studies.Done || i >= len(study.Trials)-rows {
				numbers = append(numbers, t.Number)
			}
		}
		return numbers
	}
}

// Best returns the finished trial with the highest capacity among those that met the SLO: of what passed under a late load generator
// only where nothing else did. The lower end of its interval allows for the choice. Equal ones are decided by the highest rate that
// passed, then by fewer args, which is nearer to the default, then by age. It reports false when none met it.
// Trials that were measured before the world changed count only where none has met it since.
func Best(study studies.Study) (Winner, bool) {
	return bestIn(study.Worlds()[study.Deciding()-1])
}

// bestIn is Best of trials of one world.
func bestIn(trials []studies.Trial) (Winner, bool) {
	var best *studies.Trial
	among := 0
	for i := range trials { // there may be many, and one is a kilobyte
		t := &trials[i]
		if measured(*t) {
			among++
		}
		if t.Met() && (best == nil || compare(t, best) > 0) {
			best = t
		}
	}
	if best == nil {
		return Winner{}, false
	}
	b := Winner{Trial: *best, Among: among, same: trials}
	b.Gain = gainOf(*best, trials, among)
	b.Trial.Result.Capacity = b.Trial.Result.Capacity.Among(among)
	return b, true
}

// compare is positive where a is the better one.
func compare(a, b *studies.Trial) int {
	x, y := &a.Result.Capacity, &b.Result.Capacity
	return cmp.Or(cmp.Compare(x.Carried(), y.Carried()), cmp.Compare(x.Rate, y.Rate), cmp.Compare(x.Low, y.Low), cmp.Compare(len(b.Args), len(a.Args)))
}

func measured(t studies.Trial) bool {
	return t.State == studies.Done && t.Result.Outcome == trial.Measured
}

// A Summary counts a study's trials by what became of them.
type Summary struct {
	Planned    int                     `json:"planned,omitempty"` // 0 means unknown
	Finished   int                     `json:"finished"`
	Met        int                     `json:"met"`                      // have a rate that keeps the SLO
	Limited    int                     `json:"client_limited,omitempty"` // of Met: the load generator was late, and they may carry more
	Unmet      int                     `json:"unmet"`                    // are not known to keep it at any rate
	Dropped    int                     `json:"dropped"`                  // ended early, because they could not be the best
	Infeasible int                     `json:"infeasible"`               // the server cannot live with these flags
	Unknown    int                     `json:"unknown"`                  // nobody's fault
	Classes    map[serverctl.Class]int `json:"classes,omitempty"`
	GPUSeconds float64                 `json:"gpu_seconds"` // the running trial's probes included
	Simulated  bool                    `json:"simulated"`   // no GPU behind at least one of them
}

// Summarize counts.
func Summarize(study studies.Study, o Options) Summary {
	s := Summary{Planned: o.Planned, Classes: map[serverctl.Class]int{}}
	for _, t := range study.Trials {
		r := t.Result
		s.Simulated = s.Simulated || r.Facts.Simulated
		if t.State != studies.Done {
			for _, p := range t.Probes {
				s.GPUSeconds += p.GPUTime.Seconds()
			}
			continue
		}
		if t.Counts() {
			s.Finished++
		}
		s.GPUSeconds += r.GPUTime.Seconds()
		switch {
		case t.Met():
			s.Met++
			if r.Class == serverctl.ClientLimited {
				s.Limited++
			}
		case measured(t):
			s.Unmet++
		case r.Outcome == trial.Dropped:
			s.Dropped++
			s.Classes[r.Class]++
		case r.Outcome == trial.Infeasible:
			s.Infeasible++
			s.Classes[r.Class]++
		default:
			s.Unknown++
			s.Classes[r.Class]++
		}
	}
	return s
}

// left estimates the time until the last planned trial has ended from the median trial so far, which a night between an
// interruption and its resumption does not move. It reports false when there is nothing to go by.
func left(study studies.Study, o Options) (time.Duration, bool) {
	if study.State != studies.Running || study.Unseen != "" || study.Life.Doubtful() || o.Planned == 0 || o.Now.IsZero() {
		return 0, false
	}
	var lasted []time.Duration
	var running time.Duration
	for _, t := range study.Trials {
		if t.State == studies.Done && t.Counts() {
			lasted = append(lasted, t.Ended.Sub(t.Began))
		} else if t.State != studies.Done {
			running += o.Now.Sub(t.Began)
		}
	}
	todo := o.Planned - len(lasted)
	if len(lasted) == 0 || todo <= 0 {
		return 0, false
	}
	slices.Sort(lasted)
	median := lasted[len(lasted)/2]
	rest := median*time.Duration(todo) - min(running, median)
	return rest, rest >= time.Second // the last trial may take longer than the others
}

// classNames returns the classes, the most frequent first.
func classNames(classes map[serverctl.Class]int) []serverctl.Class {
	return slices.SortedFunc(maps.Keys(classes), func(a, b serverctl.Class) int {
		return cmp.Or(cmp.Compare(classes[b], classes[a]), cmp.Compare(a, b))
	})
}
