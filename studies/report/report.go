// Package report turns a study into text: the best trial with its evidence, and how far the study is, for people, shells,
// Kubernetes and programs. It reads no file, and never judges a measurement again.
package report

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// Options are the facts that a report needs and the study does not have.
type Options struct {
	Planned int       // number of trials that the study may run; 0 means unknown
	Now     time.Time // the current time, for ages and the remaining time; the zero time leaves them out
	Rows    int       // number of trials in the status table; 0 means 10. The best trial is always shown
	Sort    Order     // order of the status table; "" means Newest
	Width   int       // columns of the terminal; 0 means 80
	Margin  float64   // factor from the capacity to the advised rate, see trial.Advise; 0 means trial.DefaultMargin
	Insight *Insight  // what the study knows besides its best trial; nil leaves it out
}

// An Order is an order of the rows of the status table.
type Order string

// These are the orders of the status table.
const (
	Newest  Order = "newest"
	oldest  Order = "oldest"
	fastest Order = "best" // the highest capacity first, trials without a capacity last
)

// Orders lists the orders of the status table.
var Orders = []Order{Newest, oldest, fastest}

// A Winner is the best trial so far.
type Winner struct {
	Trial studies.Trial // the trial whose capacity counts: the confirmation of the best point, if there is one
	Found studies.Trial // the trial of the search that found the point; gains compare it, because all trials of the search had the same requests
	Gain  *gain         // gain over the reference; nil when no reference has been measured
	Among int           // number of measured trials, including the best one

	// Capacity is the capacity of Trial, less what is probably luck: it was chosen as the best of several confirmations.
	// Trials are compared by the capacities as measured. Luck is in ln rate.
	Capacity capacity.Capacity
	Luck     float64

	objective studies.Objective
	same      []studies.Trial // all trials of the best trial's world
}

// Whole returns a function for studies.ReadSummary. The function selects the trials that a report with this number of
// rows needs in full. These are the running trial, the newest trials, the best trial, its reference and all confirmations:
// what they have in common decides how lucky the best one is. If no trial met the SLO, Whole also selects the trial that
// came nearest.
func Whole(rows int) func(studies.Study) []int {
	if rows == 0 {
		rows = defaultRows
	}
	return func(study studies.Study) (numbers []int) {
		best, met := Best(study)
		if !met {
			numbers = append(numbers, studies.Nearest)
		}
		for i, t := range study.Trials {
			winner := met && (t.Number == best.Trial.Number || t.Number == best.Found.Number)
			reference := met && best.Gain != nil && t.Number == best.Gain.Trial
			if winner || reference || t.Origin == studies.Confirmed || t.State != studies.Done || i >= len(study.Trials)-rows {
				numbers = append(numbers, t.Number)
			}
		}
		return numbers
	}
}

// Best returns the finished trial with the highest capacity, or with the highest capacity per GPU if that is the study's
// objective. It reports false if no trial has met the SLO. A capacity
// that was found with a late load generator counts only if there is no other capacity. If capacities are equal, the
// trial with the higher rate that passed wins. If these rates are equal too, the trial with fewer args wins, because it
// is nearer to the default. Otherwise the older trial wins.
//
// The winner's interval is corrected, because the trial was chosen as the best of several. If it was chosen from
// confirmations, its rate is corrected as well. Trials from before a change of the world count only if no trial has met
// the SLO since.
func Best(study studies.Study) (Winner, bool) {
	return bestIn(study.Worlds()[study.Deciding()-1], study.DecidingObjective())
}

// bestIn does what Best does, for the trials of one world.
func bestIn(trials []studies.Trial, o studies.Objective) (Winner, bool) {
	trials = studies.Pooled(trials)
	var found, confirmed *studies.Trial
	among := 0
	held := studies.Held(trials)
	for i := range trials { // the loop runs by index, because there may be many trials of a kilobyte each
		t := &trials[i]
		holds, tried := held[t.Point.String()]
		switch {
		case t.Origin == studies.Confirmed && tried:
			if holds && (confirmed == nil || compare(o, t, confirmed) > 0) {
				confirmed = t
			}
			continue
		case measured(*t), t.Result.Class == serverctl.DroppedByRace:
			among++
		}
		if t.Met() && (!tried || holds) && (found == nil || compare(o, t, found) > 0) {
			found = t
		}
	}
	if confirmed != nil { // a confirmed point comes before all points that were not confirmed
		for i := range trials {
			if t := &trials[i]; t.Met() && t.Origin != studies.Confirmed && t.Point.String() == confirmed.Point.String() {
				found = t
			}
		}
	}
	if found == nil {
		return Winner{}, false
	}
	b := Winner{Trial: *found, Found: *found, Among: among, objective: o, same: trials}
	b.Gain = gainOf(o, *found, trials, among)
	if confirmed != nil {
		b.Trial, among = *confirmed, len(held)
		b.confirmGain(*confirmed, trials, len(held))
		b.Luck = o.Of(*confirmed).Luck(outrun(o, trials, *confirmed, held))
	}
	b.Trial.Result.Capacity = b.Trial.Result.Capacity.Among(among)
	b.Capacity = b.Trial.Result.Capacity.Lowered(b.Luck)
	return b, true
}

// outrun returns the confirmed capacities of all other points of the best one's server version, as the objective counts
// them. A point that lost its race is one of them. The map held is what studies.Held returns.
func outrun(o studies.Objective, trials []studies.Trial, best studies.Trial, held map[string]bool) (others []capacity.Capacity) {
	known := map[string]bool{best.Point.String(): true}
	for _, t := range trials { // all confirmations of a point have the same rate: their mean
		p, c := t.Point.String(), t.Result.Capacity
		rival := held[p] || c.Bound == capacity.Estimated
		if t.Origin == studies.Confirmed && t.State == studies.Done && t.Version == best.Version && rival && !known[p] {
			known[p] = true
			others = append(others, o.Of(t))
		}
	}
	return others
}

// confirmed reports whether a confirmation measured the winner's capacity.
func (b Winner) confirmed() bool { return b.Trial.Origin == studies.Confirmed }

// compare returns a positive number if the trial a is better than the trial b.
func compare(o studies.Objective, a, b *studies.Trial) int {
	x, y := o.Of(*a), o.Of(*b)
	return cmp.Or(cmp.Compare(x.Carried(), y.Carried()), cmp.Compare(x.Rate, y.Rate), cmp.Compare(x.Low, y.Low), cmp.Compare(settings(b), settings(a)))
}

// settings returns how many args and variables a trial has.
func settings(t *studies.Trial) int { return len(t.Args) + len(t.Point.Env()) }

func measured(t studies.Trial) bool {
	return t.State == studies.Done && t.Result.Outcome == trial.Measured
}

// A Summary counts a study's trials by how they ended.
type Summary struct {
	Planned    int                     `json:"planned,omitempty"` // 0 means unknown
	Finished   int                     `json:"finished"`
	Met        int                     `json:"met"`                      // trials that keep the SLO at some rate
	Limited    int                     `json:"client_limited,omitempty"` // trials counted in Met that may carry more, because the load generator was late
	Unmet      int                     `json:"unmet"`                    // trials not known to keep the SLO at any rate
	Dropped    int                     `json:"dropped"`                  // trials ended early, because they could not be the best
	Infeasible int                     `json:"infeasible"`               // trials whose flags the server cannot run with
	Unknown    int                     `json:"unknown"`                  // trials that failed for reasons other than their flags
	Classes    map[serverctl.Class]int `json:"classes,omitempty"`
	GPUSeconds float64                 `json:"gpu_seconds"`             // includes the probes of the running trial
	Spent      map[trial.Part]float64  `json:"spent_seconds,omitempty"` // time of all runs, by parts; absent in a study of an older tuner
	Simulated  bool                    `json:"simulated"`               // at least one trial ran without a GPU
}

// Summarize counts the trials of a study.
func Summarize(study studies.Study, o Options) Summary {
	s := Summary{Classes: map[serverctl.Class]int{}, Spent: inSeconds(study.Spent)}
	running := 0
	for _, t := range study.Trials {
		r := t.Result
		s.Simulated = s.Simulated || r.Facts.Simulated
		if t.State != studies.Done {
			running++
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
	if o.Planned > 0 {
		s.Planned = max(o.Planned, s.Finished+running) // further rounds of confirmations are not planned
	}
	return s
}

// left estimates the time until the last planned trial has ended. It reports false if no estimate is possible. It uses
// the median trial, because a trial that was interrupted overnight would distort the mean.
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
	return rest, rest >= time.Second // if the last trial takes longer than the median, there is no estimate
}

// classNames returns the classes, the most frequent first.
func classNames(classes map[serverctl.Class]int) []serverctl.Class {
	return slices.SortedFunc(maps.Keys(classes), func(a, b serverctl.Class) int {
		return cmp.Or(cmp.Compare(classes[b], classes[a]), cmp.Compare(a, b))
	})
}
