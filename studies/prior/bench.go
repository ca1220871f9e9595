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
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// A run is one result of vllm bench serve that the SLO could be held against.
type run struct {
	path  string
	probe trial.Probe
	meta  map[string]string
}

// readBenches reads result files, and joins those of one config.
func (r *Reader) readBenches(s *Source, paths []string) error {
	runs := map[string][]run{}
	points := map[string]space.Point{}
	for _, path := range paths {
		point, one, why, err := r.readBench(path)
		switch {
		case err != nil:
			return err
		case why != "":
			s.leave(path, "%s", why)
		default:
			key := point.String()
			runs[key], points[key] = append(runs[key], one), point
		}
	}
	for _, key := range slices.Sorted(maps.Keys(runs)) {
		r.join(s, points[key], runs[key])
	}
	return nil
}

// join makes one trial of the runs of a config, as a sweep's grid is read.
func (r *Reader) join(s *Source, point space.Point, runs []run) {
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
		s.leave(from, "%s: no rate kept the SLO (%s); measure lower ones", nameOf(point), probes[0].Verdict.Reason)
		return
	}
	if len(below) > 0 {
		c.Doubt = fmt.Sprintf("%.4g req/s failed, below it", below[0])
	}
	if keys := r.differing(runs); len(keys) > 0 {
		s.note("the runs of %s differ in %s, which this study does not know: if the servers were different ones, import them apart", nameOf(point), strings.Join(keys, ", "))
	}
	s.take(r, from, point, trial.Result{Outcome: trial.Measured, Capacity: c}, probes)
}

// differing are the keys of the metadata in which runs of one point differ, and which are no flags of the study.
func (r *Reader) differing(runs []run) []string {
	keys := map[string]bool{}
	for _, one := range runs {
		for key := range one.meta {
			if len(r.known(map[string]string{key: ""})) == 0 && slices.ContainsFunc(runs, func(other run) bool { return other.meta[key] != one.meta[key] }) {
				keys[key] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

// nameOf is a point in words.
func nameOf(p space.Point) string {
	if len(p) == 0 {
		return "the server's default"
	}
	return p.String()
}

// readBench reads one result: the point that was measured, and the run; or why it is of no use.
func (r *Reader) readBench(path string) (point space.Point, one run, why string, err error) {
	text, err := readFile(path)
	if err != nil {
		return nil, one, "", err
	}
	if err := checkJSON(path, text); err != nil {
		return nil, one, "", err
	}
	if isExport(text) {
		return nil, one, "it is a study that tuner export wrote as JSON; write it with --format sqlite, which can be imported", nil
	}
	found, err := bench.ReadVLLMResult(text, nil, r.percentiles()...)
	if err != nil {
		return nil, one, oneLine(err.Error()), nil
	}
	if why := r.unfit(found); why != "" {
		return nil, one, why, nil
	}
	if point, err = r.benchPoint(path, found.Meta); err != nil {
		return nil, one, err.Error(), nil
	}
	verdict, err := r.judge(found)
	if err != nil {
		return nil, one, err.Error(), nil
	}
	one = run{path, probeOf(found, verdict), found.Meta.Metadata}
	return point, one, implausibleRun(one.probe), nil
}

// isExport reports whether text is a study that we have written as JSON, whose first key is the format's: see studies/export.
func isExport(text []byte) bool {
	return bytes.Contains(text[:min(len(text), 64)], []byte(`"tuner_export"`))
}

// checkJSON refuses text that is no JSON, by line. Python writes NaN and Infinity, which bench reads.
func checkJSON(path string, text []byte) error {
	clean := text
	for _, word := range []string{"-Infinity", "Infinity", "NaN"} { // as many bytes, so that places stay
		clean = bytes.ReplaceAll(clean, []byte(word), []byte("0"+strings.Repeat(" ", len(word)-1)))
	}
	d := json.NewDecoder(bytes.NewReader(clean))
	var first json.RawMessage
	if err := d.Decode(&first); err != nil {
		line := 1 + bytes.Count(clean[:min(brokenAt(err), len(clean))], []byte("\n"))
		return fmt.Errorf("%s:%d: %w; name result files of vllm bench serve that are whole", path, line, err)
	}
	return nil
}

// brokenAt is how many bytes could be read.
func brokenAt(err error) int {
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return int(syntax.Offset)
	}
	return math.MaxInt // it ends too early
}

// percentiles are those of the SLO that a result is asked for, of TTFT and TPOT.
func (r *Reader) percentiles() (all []float64) {
	for _, l := range r.SLO.Limits {
		if (l.Metric == slo.TTFT || l.Metric == slo.TPOT) && !slices.Contains(all, l.Percentile) {
			all = append(all, l.Percentile)
		}
	}
	return all
}

// unfit says why a run says nothing of the highest rate that the study's model carries.
func (r *Reader) unfit(found bench.VLLMRun) string {
	m := found.Meta
	model := r.World["model"]
	switch {
	case m.MaxConcurrency > 0:
		return fmt.Sprintf("--max-concurrency %d held requests back, so that no rate was offered; measure without it", m.MaxConcurrency)
	case !r.AnyModel && m.Model != "" && model != "" && m.Model != model && m.Tokenizer != model:
		return fmt.Sprintf("its model is %s, and this study's %s; if they are the same, give --any-model", m.Model, model)
	case found.Measurement.Completed == 0:
		return "no request was completed"
	}
	return ""
}

// benchPoint is the point that a run measured, by the user's word, the names of the file and its folders, and the file's metadata, each
// of which counts for more than those before it.
func (r *Reader) benchPoint(path string, meta bench.VLLMMeta) (space.Point, error) {
	flags := r.inPath(path)
	maps.Copy(flags, r.known(meta.Metadata))
	flags = r.withSet(flags)
	point, err := r.point(flags)
	if err == nil && len(point) == 0 && !r.Defaults {
		return nil, errors.New("neither the file nor its name says the server's flags: give --set max-num-seqs=128, or --defaults for a server with none of the searched ones; " +
			"vllm bench serve --metadata max_num_seqs=128 writes them")
	}
	return point, err
}

// judge holds a run against the SLO: request by request where the file has them, else by its percentiles.
func (r *Reader) judge(found bench.VLLMRun) (slo.Verdict, error) {
	m := &found.Measurement
	if least, limit := r.SLO.MinRequests(); m.Requests < least {
		return slo.Verdict{}, fmt.Errorf("%d requests are too few for %s, it takes %d; run it with --num-prompts %[3]d", m.Requests, limit, least)
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

// judgeSummary holds percentiles against the limits. Failed requests are in no percentile.
func (r *Reader) judgeSummary(m *bench.Measurement) (slo.Verdict, error) {
	v := slo.Verdict{Pass: true, Headroom: math.Inf(1)}
	for _, l := range r.SLO.Limits {
		value, ok := percentile(m, l)
		if !ok {
			return v, fmt.Errorf("%s is not in the file; run it with --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99,99.9", l)
		}
		if value < leastMS {
			return v, fmt.Errorf("%s is %g ms, in which no server answers; measure it again", l, value)
		}
		most := float64(l.Max) / float64(time.Millisecond)
		c := slo.Check{Limit: l.String(), MaxMS: most, ValueMS: value, N: m.Completed, Headroom: math.Log(most / value)}
		v.Checks = append(v.Checks, c)
		v.Pass = v.Pass && value <= most
		if c.Headroom < v.Headroom {
			v.Headroom, v.Binding = c.Headroom, c.Limit
			v.Reason = fmt.Sprintf("%s %.4g of %.4g ms", c.Limit, value, most)
		}
	}
	if float64(m.Failed) > r.SLO.MaxErrorRate*float64(m.Requests) {
		v.Pass, v.Binding, v.Headroom = false, "error rate", min(v.Headroom, -leastMiss)
		v.Reason = fmt.Sprintf("%d of %d requests failed", m.Failed, m.Requests)
	}
	return v, nil
}

// leastMiss is how far a broken limit is at least.
const leastMiss = 0.005

// percentile is the figure that a limit is on, and whether the file had it: no latency is 0.
func percentile(m *bench.Measurement, l slo.Limit) (float64, bool) {
	stats := map[slo.Metric]bench.Stats{slo.TTFT: m.TTFT, slo.TPOT: m.TPOT, slo.ITL: m.ITL, slo.E2E: m.E2E}[l.Metric]
	value := map[float64]float64{50: stats.P50, 90: stats.P90, 95: stats.P95, 99: stats.P99, 99.9: stats.P999}[l.Percentile]
	return value, value > 0
}

// probeOf is a run as a probe. Where all requests were sent at once, the rate is what the server did.
func probeOf(found bench.VLLMRun, v slo.Verdict) trial.Probe {
	p := trial.Probe{Rate: found.Measurement.Rate, Verdict: v, Measurement: found.Measurement, HitRate: -1, GPUTime: found.Measurement.Duration}
	if !(p.Rate > 0) || math.IsInf(p.Rate, 0) {
		p.Rate = found.Measurement.RequestThroughput
		p.Note = "all requests were sent at once"
	}
	p.Measurement.Series = nil
	return p
}
