package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// A frontRow is a point of the Pareto front of capacity against GPUs: no other point carries as much on as few GPUs.
type frontRow struct {
	GPUs     int            `json:"gpus"`
	Capacity float64        `json:"capacity_rps"` // of the server; see the field Bound
	Lowest   float64        `json:"lowest_rps,omitempty"`
	Highest  float64        `json:"highest_rps,omitempty"`
	Bound    capacity.Bound `json:"bound"`
	PerGPU   float64        `json:"per_gpu_rps"`
	Trial    int            `json:"trial"` // the trial whose capacity is shown: the confirmation of the point, if there is one
	Point    space.Point    `json:"point"`

	simulated bool
}

// A carrier is a point that carries a known rate.
type carrier struct {
	shown studies.Trial // the trial whose capacity counts: the confirmation of the point, if there is one
	found studies.Trial // the trial of the search
}

func (c carrier) gpus() int { return c.shown.GPUs() }

func (c carrier) confirmed() bool { return c.shown.Origin == studies.Confirmed }

// rateCarried returns the rate by which the trials on the front are ranked; 0 if none is known.
func rateCarried(t studies.Trial) float64 { return max(0, rateOf(studies.TotalCapacity, t)) }

// frontOf returns the Pareto front of the world that decides the study, with the fewest GPUs first. It returns nil if
// all servers of that world have the same number of GPUs.
func frontOf(study studies.Study) (front []frontRow) {
	trials := study.Worlds()[study.Deciding()-1]
	if len(lo.UniqBy(trials, studies.Trial.GPUs)) < 2 {
		return nil
	}
	best, met := bestIn(trials, study.DecidingObjective())
	groups := lo.GroupBy(carriers(trials), carrier.gpus)
	var all []carrier // the best for each number of GPUs
	for _, n := range slices.Sorted(maps.Keys(groups)) {
		c := slices.MaxFunc(groups[n], compareCarriers)
		if met && best.Trial.GPUs() == n { // only bestIn chooses the winner
			c = carrier{best.Trial, best.Found}
		} else {
			c.shown.Result.Capacity = c.shown.Result.Capacity.Among(len(groups[n]))
		}
		all = append(all, c)
	}
	for _, c := range all {
		wins := met && c.shown.Number == best.Trial.Number
		if wins || !slices.ContainsFunc(all, func(other carrier) bool { return other.dominates(c) }) {
			front = append(front, c.row())
		}
	}
	return front
}

// carriers returns the points that carry a known rate. It leaves out points whose confirmation failed at every rate.
func carriers(trials []studies.Trial) (all []carrier) {
	index, confirmations := map[string]int{}, map[string]studies.Trial{}
	for _, t := range studies.Pooled(trials) {
		at, known := index[t.Point.String()]
		switch {
		case t.State != studies.Done:
		case t.Origin == studies.Confirmed && t.Counts():
			confirmations[t.Point.String()] = t
		case t.Origin == studies.Confirmed || rateCarried(t) == 0:
		case !known:
			index[t.Point.String()] = len(all)
			all = append(all, carrier{t, t})
		case rateCarried(t) > rateCarried(all[at].found):
			all[at] = carrier{t, t}
		}
	}
	for i, c := range all {
		if t, tried := confirmations[c.found.Point.String()]; tried {
			all[i].shown = t
		}
	}
	return slices.DeleteFunc(all, func(c carrier) bool { return rateCarried(c.shown) == 0 })
}

// compareCarriers compares two points with equal numbers of GPUs. If a is better than b, it returns a positive number.
// A confirmed point comes before all points that were not confirmed, as in Best.
func compareCarriers(a, b carrier) int {
	switch {
	case a.confirmed() != b.confirmed() && a.confirmed():
		return 1
	case a.confirmed() != b.confirmed():
		return -1
	}
	return cmp.Compare(rateCarried(a.shown), rateCarried(b.shown))
}

// dominates reports whether c carries at least as much as other, on fewer GPUs. It compares only trials that had the
// same requests: two confirmations, or two trials of the search.
func (c carrier) dominates(other carrier) bool {
	mine, theirs := c.found, other.found
	if c.confirmed() && other.confirmed() {
		mine, theirs = c.shown, other.shown
	}
	return c.gpus() < other.gpus() && rateCarried(mine) >= rateCarried(theirs)
}

func (c carrier) row() frontRow {
	is, n := c.shown.Result.Capacity, c.gpus()
	return frontRow{
		GPUs: n, Capacity: is.Rate, Lowest: is.Lowest, Highest: is.Highest, Bound: is.Bound, PerGPU: is.Rate / float64(n),
		Trial: c.shown.Number, Point: c.shown.Point, simulated: c.shown.Result.Facts.Simulated,
	}
}

// addFront adds the Pareto front as a table.
func (l *lines) addFront(study studies.Study) {
	front := frontOf(study)
	if len(front) == 0 {
		return
	}
	l.Line("")
	l.Paragraph(fmt.Sprintf("The best flags for each number of GPUs, in req/s%s (left out: flags that carry no more than others on fewer GPUs):",
		simulatedMark(front[0].simulated)), "")
	t := render.Table{Columns: []render.Column{
		{Head: "GPUs", Right: true}, {Head: "capacity", Right: true}, {Head: "95 %", Rank: 2}, {Head: "per GPU", Right: true, Rank: 1},
		{Head: "trial", Right: true}, {Head: "flags that differ", ShrinkTo: 20, Wraps: true, Rank: 3},
	}}
	differ := differing(front)
	for _, row := range front {
		interval := ""
		if row.Lowest > 0 && row.Highest > 0 {
			interval = render.Number(row.Lowest) + " to " + render.Number(row.Highest)
		}
		t.Rows = append(t.Rows, []string{
			fmt.Sprint(row.GPUs), rateText(row.Capacity, row.Bound), interval, rateText(row.PerGPU, row.Bound), fmt.Sprint(row.Trial), flagsText(row.Point, differ),
		})
	}
	for _, line := range t.Lines(l.Columns()) {
		l.Line("%s", line)
	}
}

// differing returns the flags, sorted, whose values differ between the rows. For a single row it returns all its flags.
func differing(front []frontRow) (names []string) {
	all := lo.Uniq(lo.FlatMap(front, func(row frontRow, _ int) []string { return lo.Keys(row.Point) }))
	for _, name := range slices.Sorted(slices.Values(all)) {
		value, set := front[0].Point[name]
		if len(front) == 1 || slices.ContainsFunc(front, func(row frontRow) bool {
			other, given := row.Point[name]
			return other != value || given != set
		}) {
			names = append(names, name)
		}
	}
	return names
}

// flagsText writes those flags of a point that are in names.
func flagsText(p space.Point, names []string) string {
	if len(p) == 0 {
		return nothingSet
	}
	var set []string
	for _, name := range names {
		if value, ok := p[name]; ok {
			set = append(set, name+"="+value)
		}
	}
	return cmp.Or(strings.Join(set, " "), "-")
}

// perGPUText says how much the winner carries per GPU; "" if the study does not compare that.
func (b Winner) perGPUText() string {
	if b.objective != studies.CapacityPerGPU {
		return ""
	}
	c, t := b.objective.Of(b.Trial), b.Trial
	return fmt.Sprintf("%s req/s%s on %s; the study compares this figure", rateText(c.Rate, c.Bound), simulatedMark(t.Result.Facts.Simulated),
		render.Count(t.GPUs(), "GPU"))
}

// namedObjective returns the objective for documents; "" for the default.
func namedObjective(study studies.Study) studies.Objective {
	if o := study.DecidingObjective(); o != studies.TotalCapacity {
		return o
	}
	return ""
}
