package prior

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// A run is one result of vllm bench serve, judged by the SLO.
type run struct {
	path  string
	point space.Point
	probe trial.Probe
	meta  map[string]string
}

// readBenches reads result files. For each point, it makes one trial of all runs.
func (r *Reader) readBenches(s *Source, paths []string) error {
	runs := map[string][]run{} // the runs by point
	for _, path := range paths {
		one, why, err := r.readBench(path)
		switch {
		case err != nil:
			return err
		case why != "":
			s.leave(path, "%s", why)
		default:
			key := one.point.String()
			runs[key] = append(runs[key], one)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(runs)) {
		r.join(s, runs[key])
	}
	return nil
}

// join makes one trial of the runs of a point, as a sweep makes one trial of its probes.
func (r *Reader) join(s *Source, runs []run) {
	point := runs[0].point
	name := cmp.Or(point.String(), "the server's default")
	slices.SortFunc(runs, func(a, b run) int {
		return cmp.Or(cmp.Compare(a.probe.Rate, b.probe.Rate), cmp.Compare(a.path, b.path))
	})
	from := runs[0].path
	if len(runs) > 1 {
		from = fmt.Sprintf("%s and %d more", from, len(runs)-1)
	}
	probes := make([]trial.Probe, len(runs))
	for i := range runs {
		probes[i] = runs[i].probe
		probes[i].Seq = i
	}
	c, below := capacity.Highest(trial.Steps(probes))
	if !c.Met() {
		s.leave(from, "%s: no rate kept the SLO (%s); measure lower rates", name, probes[0].Verdict.Reason)
		return
	}
	if len(below) > 0 {
		c.Doubt = fmt.Sprintf("a lower rate, %s req/s, failed", render.Rate(below[0]))
	}
	if keys := r.differingKeys(runs); len(keys) > 0 {
		s.note("the runs of %s differ in %s, which is not a flag of this study: if their servers differed, import them separately", name, strings.Join(keys, ", "))
	}
	s.take(r, from, point, trial.Result{Outcome: trial.Measured, Capacity: c}, probes)
}

// differingKeys returns the keys of the metadata whose values differ between the runs, except keys that are flags of
// the study.
func (r *Reader) differingKeys(runs []run) []string {
	keys := map[string]bool{}
	for _, one := range runs {
		for key := range one.meta {
			if len(r.knownFlags(map[string]string{key: ""})) == 0 && slices.ContainsFunc(runs, func(other run) bool { return other.meta[key] != one.meta[key] }) {
				keys[key] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

// readBench reads one result. It returns the run, or why the result cannot be used.
func (r *Reader) readBench(path string) (one run, why string, err error) {
	text, err := readFile(path)
	if err == nil {
		err = checkJSON(path, text)
	}
	if err != nil {
		return one, "", err
	}
	if isExport(text) {
		return one, "it is a study that `tuner export` wrote as JSON, which cannot be imported; export it with --format sqlite", nil
	}
	found, err := bench.ReadVLLMResult(text, nil, r.percentiles()...)
	if err != nil {
		return one, oneLine(err.Error()), nil
	}
	if why := r.whyUnfit(found); why != "" {
		return one, why, nil
	}
	point, err := r.benchPoint(path, found.Meta)
	if err != nil {
		return one, err.Error(), nil
	}
	verdict, err := r.judge(found)
	if err != nil {
		return one, err.Error(), nil
	}
	one = run{path, point, probeOf(found, verdict), found.Meta.Metadata}
	return one, whyImplausible(trial.Result{Outcome: trial.Unknown}, []trial.Probe{one.probe}), nil
}

// isExport reports whether text is a study in the JSON of studies/export, whose first key is tuner_export.
func isExport(text []byte) bool {
	return bytes.Contains(text[:min(len(text), 64)], []byte(`"tuner_export"`))
}

// checkJSON refuses text that is not JSON. Its error has the line number. NaN and Infinity are allowed, because Python
// writes them.
func checkJSON(path string, text []byte) error {
	clean := text
	for _, word := range []string{"-Infinity", "Infinity", "NaN"} { // each word is replaced by as many bytes, so that the offset of an error stays right
		clean = bytes.ReplaceAll(clean, []byte(word), []byte("0"+strings.Repeat(" ", len(word)-1)))
	}
	d := json.NewDecoder(bytes.NewReader(clean))
	var first json.RawMessage
	if err := d.Decode(&first); err != nil {
		at := len(clean) // the text ends too early
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			at = min(at, int(syntax.Offset))
		}
		line := 1 + bytes.Count(clean[:at], []byte("\n"))
		return fmt.Errorf("%s:%d: %w; give complete result files of vllm bench serve", path, line, err)
	}
	return nil
}

// percentiles returns the percentiles of the SLO's limits on TTFT and TPOT.
func (r *Reader) percentiles() (all []float64) {
	for _, l := range r.SLO.Limits {
		if (l.Metric == slo.TTFT || l.Metric == slo.TPOT) && !slices.Contains(all, l.Percentile) {
			all = append(all, l.Percentile)
		}
	}
	return all
}

// whyUnfit says why a run cannot show a capacity of the study's model; "" if it can.
func (r *Reader) whyUnfit(found bench.VLLMRun) string {
	m := found.Meta
	model := r.World["model"]
	switch {
	case m.MaxConcurrency > 0:
		return fmt.Sprintf("--max-concurrency %d delayed requests, so the rate is not known; measure without it", m.MaxConcurrency)
	case !r.AnyModel && m.Model != "" && model != "" && m.Model != model && m.Tokenizer != model:
		return otherModel(m.Model, model)
	case found.Measurement.Completed == 0:
		return "no request was completed"
	}
	return ""
}

// benchPoint returns the point that a run measured. Its flags come from --set, from the names of the file and its
// folders, and from the metadata in the file. If several of them have a flag, the last one wins.
func (r *Reader) benchPoint(path string, meta bench.VLLMMeta) (space.Point, error) {
	flags := r.inPath(path)
	maps.Copy(flags, r.knownFlags(meta.Metadata))
	flags = r.withSet(flags)
	point, err := r.point(flags)
	if err == nil && len(point) == 0 && !r.Defaults {
		return nil, errors.New("neither the file nor its name has the server's flags: give --set max-num-seqs=128, or --defaults for a server with none of the searched flags; " +
			"vllm bench serve --metadata max_num_seqs=128 stores them in the file")
	}
	return point, err
}

// judge judges a run by the SLO. It uses the requests if the file has them, and otherwise the percentiles.
func (r *Reader) judge(found bench.VLLMRun) (slo.Verdict, error) {
	m := &found.Measurement
	if needed, limit := r.SLO.MinRequests(); m.Requests < needed {
		return slo.Verdict{}, fmt.Errorf("%s too few for %s, which needs %d; measure with --num-prompts %[3]d", render.Are(m.Requests, "request"), limit, needed)
	}
	if found.Samples == nil {
		return r.judgeSummary(m)
	}
	var end time.Duration
	for i := range found.Samples {
		end = max(end, found.Samples[i].End)
	}
	return r.SLO.Judge(found.Samples, len(found.Samples), end), nil
}

// judgeSummary compares percentiles with the limits, and the failed requests with the error rate. Percentiles do not
// include failed requests.
func (r *Reader) judgeSummary(m *bench.Measurement) (slo.Verdict, error) {
	v := slo.Verdict{Pass: true, Headroom: math.Inf(1)}
	for _, l := range r.SLO.Limits {
		value, ok := percentile(m, l)
		if !ok {
			return v, fmt.Errorf("%s is not in the file; measure with --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99,99.9", l)
		}
		if value < minMS {
			return v, fmt.Errorf("%s is %g ms, which is too short for any server; measure again", l, value)
		}
		limit := render.InMilliseconds(l.Max)
		c := slo.Check{Limit: l.String(), Metric: l.Metric, MaxMS: limit, ValueMS: value, N: m.Completed, Headroom: math.Log(limit / value)}
		v.Checks = append(v.Checks, c)
		v.Pass = v.Pass && value <= limit
		if c.Headroom < v.Headroom {
			v.Headroom, v.Binding = c.Headroom, c.Limit
			v.Reason = fmt.Sprintf("%s %s of %s ms", c.Limit, render.Digits(value, 4), render.Digits(limit, 4))
		}
	}
	if float64(m.Failed) > r.SLO.MaxErrorRate*float64(m.Requests) {
		v.Pass, v.Binding, v.Headroom = false, slo.ErrorRate, min(v.Headroom, -minMiss)
		v.Reason = fmt.Sprintf("%s failed", render.Of(m.Failed, m.Requests, "request"))
	}
	return v, nil
}

// minMiss limits the headroom of a run in which too many requests failed: this headroom is at most -minMiss.
const minMiss = 0.005

// percentile returns the figure that a limit restricts, such as the p99 TTFT, in ms. It also reports whether the file
// has this figure. If not, the figure is 0.
func percentile(m *bench.Measurement, l slo.Limit) (float64, bool) {
	stats := map[slo.Metric]bench.Stats{slo.TTFT: m.TTFT, slo.TPOT: m.TPOT, slo.ITL: m.ITL, slo.E2E: m.E2E}[l.Metric]
	value := map[float64]float64{50: stats.P50, 90: stats.P90, 95: stats.P95, 99: stats.P99, 99.9: stats.P999}[l.Percentile]
	return value, value > 0
}

// probeOf returns a run as a probe. If all requests were sent at once, the probe's rate is the throughput.
func probeOf(found bench.VLLMRun, v slo.Verdict) trial.Probe {
	p := trial.Probe{Rate: found.Measurement.Rate, Verdict: v, Measurement: found.Measurement, HitRate: -1, GPUTime: found.Measurement.Duration}
	if !(p.Rate > 0) || math.IsInf(p.Rate, 0) {
		p.Rate = found.Measurement.RequestThroughput
		p.Note = "all requests were sent at once"
	}
	p.Measurement.Series = nil
	return p
}
