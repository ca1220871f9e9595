package studyfile

import (
	"fmt"
	"maps"
	"slices"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/bench/workload"
)

// pinned is the word for the default output in a study file. In workload.Spec the default output is "".
const pinned = "pinned"

func (d *decoder) workload(w *workload.Spec) table {
	whole := func(to *int) reader { return read(d, to, integer(0, workload.MaxLength)) }
	return table{
		"kind":          oneOf(d, &w.Kind, workload.Kinds...),
		"path":          d.text(&w.Path),
		"endpoint":      oneOf(d, &w.Endpoint, workload.Completions, workload.Chat),
		"layout":        oneOf(d, &w.Layout, workload.Layouts...),
		"input_tokens":  whole(&w.InputTokens),
		"output_tokens": whole(&w.OutputTokens),
		"prefix_tokens": whole(&w.PrefixTokens),
		"suffix_tokens": whole(&w.SuffixTokens),
		"prefixes":      whole(&w.Prefixes),
		"groups":        whole(&w.Groups),
		"hit_percent":   read(d, &w.HitPercent, number(0.1, 99.9)),
		"range_ratio":   d.rangeRatio(w),
		"requests":      whole(&w.Requests),
		"vocab_size":    read(d, &w.VocabSize, integer(0, maxTokens)),
		"skip_bad_rows": read(d, &w.SkipBadRows, boolean),
		"repeat":        oneOf(d, &w.Repeat, workload.Salt, workload.ErrorEnded),
		"output":        d.output(w),
		"live":          d.notLive,
		"think_time":    d.notLive,
	}
}

// rangeRatio reads the relative spread of the lengths: one number for all, or one for prompts and one for answers.
func (d *decoder) rangeRatio(w *workload.Spec) reader {
	ratio := func(to *float64) reader { return read(d, to, number(0, 0.999)) }
	return func(path string, n ast.Node) {
		switch n.(type) {
		case *ast.MappingNode, *ast.MappingValueNode:
			d.mapping(table{"input": ratio(&w.InputRangeRatio), "output": ratio(&w.OutputRangeRatio)})(path, n)
		default:
			ratio(&w.RangeRatio)(path, n)
		}
	}
}

func (d *decoder) output(w *workload.Spec) reader {
	return func(path string, n ast.Node) {
		oneOf(d, &w.Output, pinned, workload.Natural)(path, n)
		if w.Output == pinned {
			w.Output = ""
		}
	}
}

// notLive adds a problem for a key that only `tuner bench` can use.
func (d *decoder) notLive(path string, _ ast.Node) {
	d.failAtKey(path, "%s: live conversations slow down with the server, so they show no capacity; "+
		"remove the key, and use `tuner bench --live` to try them", path)
}

// checkWorkload adds problems for keys that do not fit the kind of the workload. workload.Open would also find them,
// but without line and column.
func (c checker) checkWorkload() {
	w := &c.Workload
	if c.nodes["workload"] == nil {
		return
	}
	if c.nodes["workload.kind"] == nil {
		c.failAt("workload", "workload has no kind; add kind: %s", workload.Or(workload.Kinds))
		return
	}
	if !slices.Contains(workload.Kinds, w.Kind) {
		return // the unknown kind is already reported
	}
	for _, key := range slices.Sorted(maps.Keys(workload.Settings)) {
		kinds := workload.Settings[key]
		if at := "workload." + key; c.nodes[at] != nil && !slices.Contains(kinds, w.Kind) {
			c.failAtKey(at, "%s has no effect on a workload of kind %s; remove it, or write kind: %s", at, w.Kind, workload.Or(kinds))
		}
	}
	switch file := slices.Contains(workload.Settings["path"], w.Kind); {
	case file && c.nodes["workload.path"] == nil:
		c.failAt("workload.kind", "a workload of kind %s needs the path of its file; add path: data.json", w.Kind)
	case w.Endpoint == workload.Chat && !slices.Contains(workload.ChatKinds, w.Kind):
		c.failAt("workload.endpoint", "a workload of kind %s sends token ids, which chat cannot take; write completions", w.Kind)
	case w.Kind == "shared-prefix" && c.nodes["workload.hit_percent"] == nil:
		c.failAt("workload.kind", "a workload of kind shared-prefix needs the shared part of each prompt; add hit_percent: 50")
	case !file && w.Kind != "phase1" && slices.Contains(workload.Settings["repeat"], w.Kind) && w.Repeat != "" && w.Requests == 0:
		c.failAtKey("workload.repeat", "a workload of kind %s is endless, so repeat has no effect; remove repeat, or add requests: 1000", w.Kind)
	}
}

// describeWorkload returns the settings of a workload that have an effect on measurements, as one text. It leaves out
// settings that are not set.
func describeWorkload(w workload.Spec) string {
	text := w.Kind + ", " + w.Endpoint
	for _, part := range []struct {
		name  string
		value any
	}{
		{"path", w.Path}, {"input tokens", w.InputTokens}, {"output tokens", w.OutputTokens},
		{"range ratio", w.RangeRatio}, {"requests", w.Requests}, {"vocabulary", w.VocabSize},
		{"prefix tokens", w.PrefixTokens}, {"suffix tokens", w.SuffixTokens}, {"prefixes", w.Prefixes},
		{"hit percent", w.HitPercent}, {"groups", w.Groups}, {"input range ratio", w.InputRangeRatio}, {"output range ratio", w.OutputRangeRatio},
		{"layout", w.Layout}, {"skip bad rows", w.SkipBadRows}, {"repeat", w.Repeat}, {"output", w.Output},
	} {
		if part.value != "" && part.value != 0 && part.value != 0.0 && part.value != false {
			text += fmt.Sprintf(", %s %v", part.name, part.value)
		}
	}
	return text
}
