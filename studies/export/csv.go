package export

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"

	"vllmtuner/bench"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// A cell is one value of a row, under the name of its column. The value nil leaves the cell empty.
type cell struct {
	column string
	value  any
}

// WriteTrials writes one row for each trial. There is a column for each given flag, and for each other flag that a
// trial of the study sets. Of the trials in study.Trials, only the numbers and points are used.
func WriteTrials(w io.Writer, study studies.Study, trials iter.Seq2[studies.Trial, error], flags []string) error {
	settings := settingsOf(study, flags)
	row := func(t studies.Trial, _ trial.Probe) []cell {
		r := t.Result
		head := []cell{{"number", t.Number}, {"origin", t.Origin}, {"state", t.State}, {"outcome", r.Outcome}, {"class", r.Class}}
		return slices.Concat(head, settings(t), capacityCells(t), spentCells(r.Spent, trialParts))
	}
	return write(w, row, trials, func(studies.Trial) []trial.Probe { return []trial.Probe{{}} })
}

// WriteProbes writes one row for each probe, with the flags of its trial.
func WriteProbes(w io.Writer, study studies.Study, trials iter.Seq2[studies.Trial, error], flags []string) error {
	settings := settingsOf(study, flags)
	row := func(t studies.Trial, p trial.Probe) []cell {
		return slices.Concat([]cell{{"trial", t.Number}, {"seq", p.Seq}}, settings(t), probeCells(p), spentCells(p.Spent, probeParts))
	}
	return write(w, row, trials, func(t studies.Trial) []trial.Probe { return t.Probes })
}

// write writes a row with the names of the columns. Then, for each trial, it writes one row for each probe that
// probesOf returns.
func write(w io.Writer, row func(studies.Trial, trial.Probe) []cell, trials iter.Seq2[studies.Trial, error],
	probesOf func(studies.Trial) []trial.Probe) error {
	out := csv.NewWriter(w)
	name := func(c cell, _ int) string { return c.column }
	err := out.Write(lo.Map(row(studies.Trial{}, trial.Probe{}), name))
	for t, unread := range trials {
		if unread != nil {
			return unread
		}
		for _, p := range probesOf(t) {
			err = errors.Join(err, out.Write(lo.Map(row(t, p), cell.text)))
		}
		if err != nil {
			break
		}
	}
	out.Flush()
	if err := cmp.Or(err, out.Error()); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}

// text returns the value as text. Numbers have all their digits, and times are UTC.
func (c cell) text(int) string {
	switch v := c.value.(type) {
	case nil:
		return ""
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64)
	case time.Time:
		if v.IsZero() {
			return ""
		}
		return v.UTC().Format(time.RFC3339Nano)
	}
	return fmt.Sprint(c.value)
}

// settingsOf returns a function that makes the cells for the world and the flags of a trial. The given flags come
// first. Then comes each other flag that a trial of the study sets. Only trials of one world can be compared; see
// studies.Study.
func settingsOf(study studies.Study, flags []string) func(studies.Trial) []cell {
	names, worlds := slices.Clone(flags), study.WorldNumbers()
	for _, t := range study.Trials {
		for name := range t.Point {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names[len(flags):])
	return func(t studies.Trial) []cell {
		cells := []cell{{"world", worlds[t.Number]}}
		for _, name := range names {
			cells = append(cells, cell{name, t.Point[name]})
		}
		return cells
	}
}

// capacityCells returns the cells with the result of a trial. A missing figure is empty, never 0.
func capacityCells(t studies.Trial) []cell {
	var r trial.Result // empty until the trial is done
	var rate float64
	var simulated any
	if t.State == studies.Done {
		r, simulated = t.Result, t.Result.Facts.Simulated
	}
	c := r.Capacity
	if t.Met() || c.Known() { // without this condition, c.Rate could be the lowest rate that failed
		rate = c.Rate
	}
	return []cell{
		{"capacity_rps", known(rate)}, {"bound", c.Bound}, {"lowest_rps", known(c.Lowest)}, {"highest_rps", known(c.Highest)},
		{"passed_rps", known(c.Low)}, {"failed_rps", known(c.High)}, {"binding", c.Binding}, {"in_flight", known(c.InFlight)},
		{"kv_tokens", known(float64(r.Facts.KVCacheTokens))}, {"probes", len(t.Probes)}, {"gpu_seconds", known(r.GPUTime.Seconds())},
		{"simulated", simulated}, {"began", t.Began}, {"ended", t.Ended}, {"doubt", c.Doubt}, {"evidence", r.Evidence},
		{"args", strings.Join(t.Args, " ")},
	}
}

// spentCells returns a cell with the seconds of each part of the time of a trial or a probe. If an older tuner measured
// the trial or the probe, all cells are empty.
func spentCells(spent trial.Spent, parts []trial.Part) (cells []cell) {
	for _, part := range parts {
		c := cell{string(part) + "_seconds", nil}
		if len(spent) > 0 {
			c.value = spent[part].Seconds()
		}
		cells = append(cells, c)
	}
	return cells
}

// The parts of a trial and of a probe.
var (
	trialParts = lo.Filter(trial.Parts, func(p trial.Part, _ int) bool { return p.OnGPU() })
	probeParts = []trial.Part{trial.Emptying, trial.LeadIn, trial.Windows, trial.RunOut}
)

// probeCells returns the cells with the figures of a probe. Latencies are of completed requests, in milliseconds.
func probeCells(p trial.Probe) []cell {
	m := p.Measurement
	cells := []cell{
		{"rate", p.Rate}, {"pass", p.Verdict.Pass}, {"headroom", p.Verdict.Headroom}, {"binding", p.Verdict.Binding},
		{"requests", m.Requests}, {"completed", m.Completed}, {"failed", m.Failed}, {"request_throughput", m.RequestThroughput},
		{"output_tok_s", m.OutputThroughput}, {"in_flight", m.MeanInFlight},
	}
	for _, of := range []struct {
		metric string
		bench.Stats
	}{{"ttft", m.TTFT}, {"tpot", m.TPOT}, {"itl", m.ITL}, {"e2e", m.E2E}} {
		for _, c := range []cell{{"mean", of.Mean}, {"p50", of.P50}, {"p95", of.P95}, {"p99", of.P99}} {
			if of.N == 0 { // without requests the cells are empty, because 0 ms would look like a good latency
				c.value = nil
			}
			cells = append(cells, cell{fmt.Sprintf("%s_%s_ms", of.metric, c.column), c.value})
		}
	}
	hits := cell{"hit_rate", p.HitRate}
	if p.HitRate < 0 { // not known
		hits.value = nil
	}
	return append(cells, hits, cell{"preemptions", p.Preemptions}, cell{"stopped", p.Stopped},
		cell{"gpu_seconds", p.GPUTime.Seconds()}, cell{"reason", p.Verdict.Reason}, cell{"note", p.Note})
}

// known returns nil for the figure 0, which means that the figure is not known.
func known(v float64) any {
	if v == 0 {
		return nil
	}
	return v
}
