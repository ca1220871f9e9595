package export

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// A column has a name and returns the cell of a trial or one of its probes; "" if there is no value.
type column struct {
	name  string
	value func(studies.Trial, trial.Probe) string
}

// WriteTrials writes one row for each trial. There is a column for each of flags, and for each other flag that a trial
// of the study sets. study.Trials needs only the points.
func WriteTrials(w io.Writer, study studies.Study, trials iter.Seq2[studies.Trial, error], flags []string) error {
	columns := slices.Concat(headOfTrial(), worldColumn(study), flagColumns(study, flags), capacityColumns())
	return write(w, columns, trials, func(studies.Trial) []trial.Probe { return []trial.Probe{{}} })
}

// WriteProbes writes one row for each probe, with the flags of its trial.
func WriteProbes(w io.Writer, study studies.Study, trials iter.Seq2[studies.Trial, error], flags []string) error {
	columns := slices.Concat([]column{{"trial", func(t studies.Trial, _ trial.Probe) string { return strconv.Itoa(t.Number) }}},
		[]column{{"seq", func(_ studies.Trial, p trial.Probe) string { return strconv.Itoa(p.Seq) }}},
		worldColumn(study), flagColumns(study, flags), probeColumns())
	return write(w, columns, trials, func(t studies.Trial) []trial.Probe { return t.Probes })
}

// write writes the head, and for each trial the rows of the probes that rows returns.
func write(w io.Writer, columns []column, trials iter.Seq2[studies.Trial, error], rows func(studies.Trial) []trial.Probe) error {
	out := csv.NewWriter(w)
	err := out.Write(names(columns))
	for t, unread := range trials {
		if unread != nil {
			return unread
		}
		for _, p := range rows(t) {
			err = errors.Join(err, out.Write(row(columns, t, p)))
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

func names(columns []column) []string {
	all := make([]string, len(columns))
	for i, c := range columns {
		all[i] = c.name
	}
	return all
}

func row(columns []column, t studies.Trial, p trial.Probe) []string {
	all := make([]string, len(columns))
	for i, c := range columns {
		all[i] = c.value(t, p)
	}
	return all
}

// worldColumn numbers the worlds. Only trials of one world can be compared; see studies.Study.
func worldColumn(study studies.Study) []column {
	worlds := study.WorldNumbers()
	return []column{{"world", func(t studies.Trial, _ trial.Probe) string { return strconv.Itoa(worlds[t.Number]) }}}
}

// flagColumns returns a column for each of flags, in this order, and then for each other flag that a trial sets.
func flagColumns(study studies.Study, flags []string) []column {
	more := map[string]bool{}
	for _, t := range study.Trials {
		for name := range t.Point {
			if !slices.Contains(flags, name) {
				more[name] = true
			}
		}
	}
	var columns []column
	for _, name := range slices.Concat(flags, slices.Sorted(maps.Keys(more))) {
		columns = append(columns, column{name, func(t studies.Trial, _ trial.Probe) string { return t.Point[name] }})
	}
	return columns
}

func headOfTrial() []column {
	of := func(value func(studies.Trial) string) func(studies.Trial, trial.Probe) string {
		return func(t studies.Trial, _ trial.Probe) string { return value(t) }
	}
	return []column{
		{"number", of(func(t studies.Trial) string { return strconv.Itoa(t.Number) })},
		{"origin", of(func(t studies.Trial) string { return string(t.Origin) })},
		{"state", of(func(t studies.Trial) string { return string(t.State) })},
		{"outcome", of(func(t studies.Trial) string { return string(t.Result.Outcome) })},
		{"class", of(func(t studies.Trial) string { return string(t.Result.Class) })},
	}
}

// capacityColumns returns the columns with the result of a trial. A missing figure is empty, never 0.
func capacityColumns() []column {
	done := func(value func(studies.Trial) string) func(studies.Trial, trial.Probe) string {
		return func(t studies.Trial, _ trial.Probe) string {
			if t.State != studies.Done {
				return ""
			}
			return value(t)
		}
	}
	figure := func(value func(studies.Trial) float64) func(studies.Trial, trial.Probe) string {
		return done(func(t studies.Trial) string { return positive(value(t)) })
	}
	return []column{
		{"capacity_rps", figure(func(t studies.Trial) float64 {
			if !t.Met() { // Rate is then the lowest rate that failed
				return 0
			}
			return t.Result.Capacity.Rate
		})},
		{"bound", done(func(t studies.Trial) string { return string(t.Result.Capacity.Bound) })},
		{"lowest_rps", figure(func(t studies.Trial) float64 { return t.Result.Capacity.Lowest })},
		{"highest_rps", figure(func(t studies.Trial) float64 { return t.Result.Capacity.Highest })},
		{"passed_rps", figure(func(t studies.Trial) float64 { return t.Result.Capacity.Low })},
		{"failed_rps", figure(func(t studies.Trial) float64 { return t.Result.Capacity.High })},
		{"binding", done(func(t studies.Trial) string { return t.Result.Capacity.Binding })},
		{"in_flight", figure(func(t studies.Trial) float64 { return t.Result.Capacity.InFlight })},
		{"kv_tokens", figure(func(t studies.Trial) float64 { return float64(t.Result.Facts.KVCacheTokens) })},
		{"probes", func(t studies.Trial, _ trial.Probe) string { return strconv.Itoa(len(t.Probes)) }},
		{"gpu_seconds", figure(func(t studies.Trial) float64 { return t.Result.GPUTime.Seconds() })},
		{"simulated", done(func(t studies.Trial) string { return strconv.FormatBool(t.Result.Facts.Simulated) })},
		{"began", func(t studies.Trial, _ trial.Probe) string { return moment(t.Began) }},
		{"ended", func(t studies.Trial, _ trial.Probe) string { return moment(t.Ended) }},
		{"doubt", done(func(t studies.Trial) string { return t.Result.Capacity.Doubt })},
		{"evidence", done(func(t studies.Trial) string { return t.Result.Evidence })},
		{"args", func(t studies.Trial, _ trial.Probe) string { return strings.Join(t.Args, " ") }},
	}
}

// probeColumns returns the columns with the figures of a probe. Latencies are in milliseconds, of completed requests.
func probeColumns() []column {
	number := func(value func(trial.Probe) float64) func(studies.Trial, trial.Probe) string {
		return func(_ studies.Trial, p trial.Probe) string { return plain(value(p)) }
	}
	count := func(value func(trial.Probe) int) func(studies.Trial, trial.Probe) string {
		return func(_ studies.Trial, p trial.Probe) string { return strconv.Itoa(value(p)) }
	}
	text := func(value func(trial.Probe) string) func(studies.Trial, trial.Probe) string {
		return func(_ studies.Trial, p trial.Probe) string { return value(p) }
	}
	columns := []column{
		{"rate", number(func(p trial.Probe) float64 { return p.Rate })},
		{"pass", text(func(p trial.Probe) string { return strconv.FormatBool(p.Verdict.Pass) })},
		{"headroom", number(func(p trial.Probe) float64 { return p.Verdict.Headroom })},
		{"binding", text(func(p trial.Probe) string { return p.Verdict.Binding })},
		{"requests", count(func(p trial.Probe) int { return p.Measurement.Requests })},
		{"completed", count(func(p trial.Probe) int { return p.Measurement.Completed })},
		{"failed", count(func(p trial.Probe) int { return p.Measurement.Failed })},
		{"request_throughput", number(func(p trial.Probe) float64 { return p.Measurement.RequestThroughput })},
		{"output_tok_s", number(func(p trial.Probe) float64 { return p.Measurement.OutputThroughput })},
		{"in_flight", number(func(p trial.Probe) float64 { return p.Measurement.MeanInFlight })},
	}
	for _, metric := range []struct {
		name  string
		stats func(trial.Probe) bench.Stats
	}{
		{"ttft", func(p trial.Probe) bench.Stats { return p.Measurement.TTFT }},
		{"tpot", func(p trial.Probe) bench.Stats { return p.Measurement.TPOT }},
		{"itl", func(p trial.Probe) bench.Stats { return p.Measurement.ITL }},
		{"e2e", func(p trial.Probe) bench.Stats { return p.Measurement.E2E }},
	} {
		columns = append(columns, latencyColumns(metric.name, metric.stats)...)
	}
	return append(columns,
		column{"hit_rate", text(func(p trial.Probe) string {
			if p.HitRate < 0 { // not known
				return ""
			}
			return plain(p.HitRate)
		})},
		column{"preemptions", number(func(p trial.Probe) float64 { return p.Preemptions })},
		column{"stopped", text(func(p trial.Probe) string { return strconv.FormatBool(p.Stopped) })},
		column{"gpu_seconds", number(func(p trial.Probe) float64 { return p.GPUTime.Seconds() })},
		column{"reason", text(func(p trial.Probe) string { return p.Verdict.Reason })},
		column{"note", text(func(p trial.Probe) string { return p.Note })})
}

// latencyColumns returns the columns of one metric. Without measurements they are empty: 0 ms would be a good latency.
func latencyColumns(metric string, stats func(trial.Probe) bench.Stats) (columns []column) {
	for _, figure := range []struct {
		name  string
		value func(bench.Stats) float64
	}{
		{"mean", func(s bench.Stats) float64 { return s.Mean }},
		{"p50", func(s bench.Stats) float64 { return s.P50 }},
		{"p95", func(s bench.Stats) float64 { return s.P95 }},
		{"p99", func(s bench.Stats) float64 { return s.P99 }},
	} {
		columns = append(columns, column{fmt.Sprintf("%s_%s_ms", metric, figure.name), func(_ studies.Trial, p trial.Probe) string {
			if s := stats(p); s.N > 0 {
				return plain(figure.value(s))
			}
			return ""
		}})
	}
	return columns
}

func plain(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// positive writes a figure for which 0 means that there is none.
func positive(v float64) string {
	if v == 0 {
		return ""
	}
	return plain(v)
}

func moment(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}
