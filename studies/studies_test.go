package studies

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
	"vllmtuner/studies/fence"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// llama is the study that most tests use.
var llama = New{
	Name: "llama70b", Seed: math.MaxUint64, File: "name: llama70b\n",
	World: map[string]string{"model": "llama-70b-fp8", "vllm": "0.14.1"},
}

// open opens a study, and closes it when the test ends.
func open(t testing.TB, dir string) *Store {
	t.Helper()
	s, _, err := Open(context.Background(), dir, llama, Options{})
	try(t, err)
	t.Cleanup(func() { try(t, s.Close()) })
	return s
}

// try ends the test if any of the errors is not nil.
func try(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// wantError checks that an error contains all the words.
func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("there is no error, want one with %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error = %q, want %q in it", err, word)
		}
	}
}

// wantUnusable is wantError for an error that wraps ErrUnusable.
func wantUnusable(t *testing.T, err error, words ...string) {
	t.Helper()
	wantError(t, err, words...)
	if !errors.Is(err, ErrUnusable) {
		t.Errorf("%v does not wrap ErrUnusable", err)
	}
}

// errorOf returns the error of a call, and drops the call's other result.
func errorOf[T any](_ T, err error) error { return err }

func aTrial(number int) Trial {
	return Trial{
		Number: number, Origin: Sampled,
		Point: space.Point{"max-num-seqs": "128", "speculative-config": `{"method":"ngram"}`},
		Args:  []string{"--max-num-seqs", "128", "--speculative-config", `{"method":"ngram"}`},
	}
}

func aProbe(seq int, rate float64) trial.Probe {
	stats := bench.Stats{N: 300, Mean: 41.25, P50: 40.1, P90: 50, P95: 55.5, P99: 59.7000000001, Max: 71}
	return trial.Probe{
		Seq: seq, Rate: rate,
		Verdict: slo.Verdict{
			Pass: true, Reason: "p99 TPOT 59.7 of 60 ms", Binding: "p99 TPOT", Headroom: 0.005,
			Checks: []slo.Check{{Limit: "p99 TTFT", Metric: slo.TTFT, MaxMS: 1000, ValueMS: 711, N: 300, Allowed: 3, Headroom: 0.34},
				{Limit: "p99 TPOT", MaxMS: 60, ValueMS: 59.7, N: 300, Allowed: 3, Headroom: 0.005}},
		},
		Measurement: bench.Measurement{
			Rate: rate, Window: 2 * time.Minute, Requests: 300, Completed: 299, Failed: 1,
			Failures: map[bench.Failure]int{bench.Reset: 1, bench.TimedOut: 0},
			TTFT:     stats, TPOT: stats, E2E: stats, SendLag: stats, PromptTokens: 1741800, OutputTokens: 154500,
			OutputThroughput: 1333.3, PeakInFlight: 160, MeanInFlight: 143.2,
		},
		HitRate: 0.62, GPUTime: 3 * time.Minute,
	}
}

func aResult(rate float64) trial.Result {
	return trial.Result{
		Outcome: trial.Measured,
		Capacity: capacity.Capacity{
			Rate: rate, Low: rate * 0.97, High: rate * 1.05, Bound: capacity.Exact, Binding: "p99 TPOT",
			InFlight: 143, Probes: 4, Why: "bracketed to 8 %",
		},
		Facts:   serverctl.Facts{Version: "0.14.1", KVCacheTokens: 512000, StartUp: 150 * time.Second},
		GPUTime: 11 * time.Minute,
		Notes:   []string{"a note"},
	}
}

// A study has the same values when it is read again, from the store and from a snapshot.
func TestStoredValuesComeBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "studies", "llama70b")
	s := open(t, dir)
	failed := trial.Result{
		Outcome: trial.Infeasible, Class: serverctl.OOMStart, Evidence: "CUDA out of memory",
		Tail: []string{"last", "lines"}, GPUTime: time.Minute,
	}
	try(t, s.Begin(Trial{Number: 0, Origin: Default}), s.Finish(0, failed),
		s.Begin(aTrial(1)), s.Record(1, aProbe(0, 2)), s.Record(1, aProbe(1, 2.62)), s.Finish(1, aResult(2.71)),
		s.Begin(aTrial(2)), s.Record(2, aProbe(0, 2.71)), s.SetState(Stopped, "interrupted"))
	study, err := s.Study()
	try(t, err)

	if study.Name != "llama70b" || study.Seed != math.MaxUint64 || study.File != llama.File || len(study.ID) < 20 ||
		!reflect.DeepEqual(study.World, llama.World) || study.State != Stopped || study.Note != "interrupted" {
		t.Errorf("Study = %+v", study)
	}
	if study.Created.IsZero() || study.Updated.Before(study.Created) {
		t.Errorf("Created = %s, Updated = %s, want Created first", study.Created, study.Updated)
	}
	if len(study.Trials) != 3 {
		t.Fatalf("%d trials, want 3", len(study.Trials))
	}
	if got := study.Trials[0]; !reflect.DeepEqual(got.Result, failed) || got.State != Done || got.Ended.IsZero() || len(got.Point) != 0 {
		t.Errorf("trial 0 = %+v", got)
	}
	one := study.Trials[1]
	want := aTrial(1)
	want.State, want.Began, want.Ended, want.Version = Done, one.Began, one.Ended, "0.14.1"
	want.Probes, want.Result = []trial.Probe{aProbe(0, 2), aProbe(1, 2.62)}, aResult(2.71)
	if !reflect.DeepEqual(one, want) {
		t.Errorf("trial 1 =\n%+v, want\n%+v", one, want)
	}
	if two := study.Trials[2]; two.State != Running || len(two.Probes) != 1 || !two.Ended.IsZero() || two.Result.Outcome != "" {
		t.Errorf("the half-done trial 2 = %+v", two)
	}
	snapshot, err := ReadSnapshot(dir)
	try(t, err)
	if !reflect.DeepEqual(snapshot, study) {
		t.Errorf("ReadSnapshot =\n%+v, want as in the store\n%+v", snapshot, study)
	}
}

func TestResume(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.SetState(Stopped, "interrupted"), s.Close())
	s, resumed, err := Open(context.Background(), dir, llama, Options{})
	try(t, err)
	if !resumed {
		t.Error("Open = not resumed, want resumed")
	}
	study, err := s.Study()
	try(t, err)
	if study.State != Stopped || study.Trials[0].State != Running || len(study.Trials[0].Probes) != 1 {
		t.Errorf("after Open the study is %+v, want no change", study)
	}
	try(t, s.Begin(study.Trials[0]), s.Record(0, aProbe(0, 2)), s.Record(0, aProbe(1, 4)))
	study, err = s.Study()
	try(t, err, s.Close())
	if study.State != Running || study.Note != "" || len(study.Trials) != 1 || len(study.Trials[0].Probes) != 2 {
		t.Errorf("after another probe the study is %+v, want it running with 2 probes", study)
	}
}

func TestCallsOutOfOrder(t *testing.T) {
	s := open(t, t.TempDir())
	other := aTrial(1)
	other.Point = space.Point{"max-num-seqs": "256"}
	otherArgs := aTrial(1)
	otherArgs.Args = []string{"--max-num-seqs", "129"}
	otherResult := aResult(2.5)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)), s.Begin(aTrial(1)), s.Record(1, aProbe(0, 2)))
	for _, c := range []struct {
		name string
		err  error
		want []string // words that the error must have; nil for no error
	}{
		{"a probe is recorded again", s.Record(1, aProbe(0, 2)), nil},
		{"a probe of a finished trial is recorded again", s.Record(0, aProbe(0, 2)), nil},
		{"a different probe has the same number", s.Record(1, aProbe(0, 3)), []string{"record probe 0 of trial 1", "something else is stored already"}},
		{"a probe of a trial that was never begun", s.Record(7, aProbe(0, 2)), []string{"record probe 0 of trial 7", "never begun", "study.db"}},
		{"a new probe of a finished trial", s.Record(0, aProbe(1, 2)), []string{"finished already"}},
		{"a trial is begun again", s.Begin(aTrial(1)), nil},
		{"a finished trial is begun again", s.Begin(aTrial(0)), []string{"begin trial 0", "finished already"}},
		{"a trial is begun with another point", s.Begin(other), []string{"begin trial 1", "128", "256"}},
		{"a trial is begun with other args", s.Begin(otherArgs), []string{"begin trial 1", `"128"`, `"129"`}},
		{"a trial is finished again", s.Finish(0, aResult(2)), nil},
		{"a trial is finished with another result", s.Finish(0, otherResult), []string{"finish trial 0", "something else"}},
		{"a trial that was never begun is finished", s.Finish(9, aResult(2)), []string{"finish trial 9", "never begun"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.want == nil {
				try(t, c.err)
				return
			}
			wantError(t, c.err, c.want...)
		})
	}
	try(t, s.Finish(1, aResult(3))) // none of these errors breaks the store
}

// NaN and infinite values are refused, and the store stays usable.
func TestNaNIsRefused(t *testing.T) {
	s := open(t, t.TempDir())
	try(t, s.Begin(aTrial(0)))
	p := aProbe(0, 2)
	p.Measurement.TTFT.P99 = math.NaN()
	wantError(t, s.Record(0, p), "record probe 0 of trial 0", "Measurement.TTFT.P99 is NaN")
	p = aProbe(0, 2)
	p.Verdict.Checks[1].Headroom = math.Inf(-1)
	wantError(t, s.Record(0, p), "Verdict.Checks[1].Headroom is -Inf")
	r := aResult(2)
	r.Capacity.InFlight = math.Inf(1)
	wantError(t, s.Finish(0, r), "finish trial 0", "Capacity.InFlight is +Inf")
	try(t, s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)))
}

func TestWorldChanged(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Close())
	changed := llama
	changed.Seed = 8
	changed.World = map[string]string{"model": "llama-70b-fp8", "vllm": "0.33.0", "gpu": "H200"}

	_, _, err := Open(context.Background(), dir, changed, Options{})
	wantError(t, err, "vllm: 0.14.1 → 0.33.0", "gpu: (nothing) → H200", "seed: 18446744073709551615 → 8", "--accept-drift")
	if !errors.Is(err, ErrWorldChanged) || strings.Contains(err.Error(), "model:") {
		t.Errorf("error = %v, want ErrWorldChanged, without the model, which is the same", err)
	}
	s, _, err = Open(context.Background(), dir, changed, Options{AcceptDrift: true})
	try(t, err)
	// Open has ended trial 0, which was unfinished in the old world.
	try(t, s.Begin(aTrial(1)), s.Record(1, aProbe(0, 3)), s.Close())
	study, err := ReadSnapshot(dir)
	try(t, err)
	i := slices.IndexFunc(study.Events, func(e Event) bool { return e.Kind == Drift })
	if i < 0 || study.Events[i].Trial != 1 || !strings.Contains(study.Events[i].Text(), "vllm: 0.14.1 → 0.33.0") {
		t.Errorf("the events are %+v, want a drift before trial 1", study.Events)
	}
	if !reflect.DeepEqual(study.World, changed.World) || study.Seed != 8 {
		t.Errorf("after the accepted drift the study is %+v, want the new world and seed 8", study)
	}
	first := study.Trials[0]
	if first.State != Done || first.Result.Outcome != trial.Unknown || first.Result.GPUTime != 3*time.Minute || !strings.Contains(first.Result.Evidence, "the world changed before the trial was finished: gpu") {
		t.Errorf("the trial that was half done is %+v, want it done, with an unknown outcome", first)
	}
	worlds, now := study.Worlds(), study.Present()
	if len(worlds) != 2 || len(worlds[0]) != 1 || len(now.Trials) != 1 || now.Trials[0].Number != 1 || len(now.Prior) != 1 || now.Prior[0].Source != "trials 0 to 0, before the world changed" {
		t.Errorf("Worlds = %+v and Present = %+v, want a trial in each of two worlds", worlds, now)
	}
	if numbers := study.WorldNumbers(); numbers[0] != 1 || numbers[1] != 2 || study.Deciding() != 2 {
		t.Errorf("WorldNumbers = %v, Deciding = %d; want world 2 for trial 1, and world 2", numbers, study.Deciding())
	}
	if asked := study.Asked(); !reflect.DeepEqual(asked, []map[string]string{llama.World, changed.World}) {
		t.Errorf("Asked = %v, want %v and %v", asked, llama.World, changed.World)
	}
	try(t, err)
	for _, is := range []New{llama, changed} { // the world changes, and changes back before anything is measured
		s, _, err = Open(context.Background(), dir, is, Options{AcceptDrift: true})
		try(t, err, s.Close())
	}
	s, _, err = Open(context.Background(), dir, changed, Options{})
	try(t, err, s.Begin(aTrial(2)), s.Record(2, aProbe(0, 3)), s.Close())
	study, err = ReadSnapshot(dir)
	try(t, err)
	if worlds, numbers := study.Worlds(), study.WorldNumbers(); len(worlds) != 2 || numbers[1] != 2 || numbers[2] != 2 || len(study.ChangesBefore(2)) > 0 {
		t.Errorf("WorldNumbers = %v and the changes before trial 2 = %q; want trial 2 in world 2", numbers, study.ChangesBefore(2))
	}
	other := llama
	other.Name = "qwen"
	_, _, err = Open(context.Background(), dir, other, Options{AcceptDrift: true})
	wantError(t, err, `holds the study "llama70b", not "qwen"`)
}

func TestOpenRefuses(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "file")
	newer := filepath.Join(root, "newer")
	foreign := filepath.Join(root, "foreign")
	try(t, os.WriteFile(file, nil, 0o644), os.Mkdir(foreign, 0o755),
		os.WriteFile(filepath.Join(foreign, fence.Database), []byte(strings.Repeat("no database at all. ", 100)), 0o644))
	s := open(t, newer)
	_, err := s.db.Exec(fmt.Sprintf("PRAGMA user_version=99; PRAGMA application_id=%d", application(99)))
	try(t, err, s.Close())
	for _, c := range []struct {
		name string
		dir  string
		as   string
		want []string
	}{
		{"a name with a slash", root, "a/b", []string{`study name "a/b"`, "llama70b-h200"}},
		{"a directory that is a file", file, "llama70b", []string{file, "director"}},
		{"a root that is a file", filepath.Join(file, "llama70b"), "llama70b", []string{file + " is a file, not a directory for studies"}},
		{"the database of a newer tuner", newer, "llama70b", []string{"newer tuner (schema 99, this one knows 6)", "study.db"}},
		{"a file that is no database", foreign, "llama70b", []string{"not a database", foreign, fence.Database}},
	} {
		t.Run(c.name, func(t *testing.T) {
			study := llama
			study.Name = c.as
			s, _, err := Open(context.Background(), c.dir, study, Options{})
			if err == nil {
				try(t, s.Close())
			}
			wantUnusable(t, err, c.want...)
		})
	}
}

func TestClosedStore(t *testing.T) {
	s := open(t, t.TempDir())
	try(t, s.Close(), s.Close())
	wantError(t, s.Begin(aTrial(0)), "begin trial 0", "closed")
	_, err := s.Study()
	wantError(t, err, "closed")
}

func TestDirectoriesWithOddNames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a b?c#d%20e&mode=ro")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close())
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Trials) != 1 {
		t.Errorf("%d trials, want 1", len(study.Trials))
	}
}

// docs/schema.md names every table and every column.
func TestSchemaIsDescribed(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "docs", "schema.md"))
	try(t, err)
	s := open(t, t.TempDir())
	n := 0
	const query = `SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type='table'`
	try(t, scanRows(s.db, query, nil, func(values []any) error {
		table, column := values[0].(string), values[1].(string)
		_, section, _ := strings.Cut(string(page), "\n## "+table)
		section, _, _ = strings.Cut(section, "\n## ")
		if !strings.Contains(section, "`"+column+"`") {
			t.Errorf("docs/schema.md does not name %s.%s", table, column)
		}
		n++
		return nil
	}))
	if n < 40 {
		t.Errorf("the database has %d columns, want more than 40", n)
	}
}

// BenchmarkReadSnapshot reads a study of 1,000 trials with 4 probes each.
func BenchmarkReadSnapshot(b *testing.B) {
	dir := b.TempDir()
	s := open(b, dir)
	for n := range 1000 {
		try(b, s.Begin(aTrial(n)))
		for seq := range 4 {
			try(b, s.Record(n, aProbe(seq, 2)))
		}
	}
	try(b, s.Close())
	name, _, err := newest(dir, loadStudy)
	try(b, err)
	size, err := sizeOf(name.path(dir))
	try(b, err)
	for b.Loop() {
		_, err := ReadSnapshot(dir)
		try(b, err)
	}
	b.ReportMetric(float64(size)/4000, "bytes/probe")
}

// If a database is removed or replaced, its open file can still be written, but the content would be lost. The store
// must notice.
func TestRemovedDatabase(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		replace    bool
	}{
		{"removed", "it was removed while it was written", false},
		{"replaced by a copy", "it was replaced by another file", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir)
			try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
			content, err := os.ReadFile(s.path)
			try(t, err, os.Remove(s.path))
			if tt.replace {
				try(t, os.WriteFile(s.path, content, 0o644))
			}
			wantError(t, s.Record(0, aProbe(1, 3)), s.path, tt.want)
			wantError(t, s.Record(0, aProbe(2, 3)), "not usable")
			try(t, s.Close())
		})
	}
}

// A fact in Found may become known later, and must stay the same from then on. A fact in Noted may change; an event
// records the change.
func TestDriftOfTheMachine(t *testing.T) {
	dir := t.TempDir()
	begin := func(options Options, found, noted map[string]string) (Study, error) {
		is := llama
		is.Found, is.Noted = found, noted
		s, _, err := Open(context.Background(), dir, is, options)
		if err != nil {
			return Study{}, err
		}
		study, err := s.Study()
		if err == nil && len(study.Trials) == 0 { // without a probe, the study could be resumed on any machine
			err = errors.Join(s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
		}
		return study, errors.Join(err, s.Close())
	}
	h200 := map[string]string{"gpu": "1 × NVIDIA H200"}
	_, err := begin(Options{}, nil, map[string]string{"host": "node-a"})
	try(t, err)
	study, err := begin(Options{}, h200, map[string]string{"host": "node-b"})
	try(t, err)
	if study.Found["gpu"] != h200["gpu"] || study.Noted["host"] != "node-b" {
		t.Errorf("Found = %v, Noted = %v; want the H200 and node-b", study.Found, study.Noted)
	}
	study, err = begin(Options{}, nil, nil) // no fact is found, as when the driver does not answer
	try(t, err)
	if study.Found["gpu"] != h200["gpu"] {
		t.Errorf("Found = %v", study.Found)
	}
	_, err = begin(Options{}, map[string]string{"gpu": "1 × NVIDIA L4"}, nil)
	wantError(t, err, "gpu: 1 × NVIDIA H200 → 1 × NVIDIA L4", "--accept-drift")
	if !errors.Is(err, ErrWorldChanged) {
		t.Errorf("%v does not wrap ErrWorldChanged", err)
	}
	study, err = begin(Options{AcceptDrift: true}, map[string]string{"gpu": "1 × NVIDIA L4"}, nil)
	try(t, err)
	if study.Found["gpu"] != "1 × NVIDIA L4" {
		t.Errorf("Found = %v", study.Found)
	}
	db, err := openFile(database(t, dir), liveOptions)
	try(t, err)
	var texts string
	try(t, db.QueryRow(`SELECT group_concat(kind || ' ' || fact || ': ' || was || ' → ' || now, '; ') FROM events JOIN changes ON event=id`).Scan(&texts), db.Close())
	if want := "noted host: node-a → node-b; drift gpu: 1 × NVIDIA H200 → 1 × NVIDIA L4"; texts != want {
		t.Errorf("the stored changes are %q, want %q", texts, want)
	}
}

// ChangesBefore merges the changes of one fact. A change that was taken back does not begin a new world.
func TestChangesBefore(t *testing.T) {
	change := func(fact, was, is string) Change { return Change{Fact: fact, Was: parseValue(was), Is: parseValue(is)} }
	version := func(was string, in int, is string) Change {
		return VersionChange(Trial{Version: was, Number: in}, is)
	}
	for _, c := range []struct {
		changes []Changes
		want    string
	}{
		{[]Changes{{change("gpu", "A", "B")}}, "gpu: A → B"},
		{[]Changes{{change("gpu", "A", "B"), change("model", "x", "y")}, {change("gpu", "B", "A")}}, "model: x → y"},
		{[]Changes{{change("gpu", "A", "B")}, {change("gpu", "B", "C")}}, "gpu: A → C"},
		{[]Changes{{change("image", nothing, "a")}, {change("image", "a", nothing)}}, ""},
		{[]Changes{{version("1", 0, "2")}, {version("2", 1, "1")}}, ""},
		{[]Changes{{version("1", 0, "2")}, {version("1", 0, "3")}}, "server version: 1 in trial 0 → 3"},
		{[]Changes{{change("server command", "run in trial mode", "run")}}, "server command: run in trial mode → run"},
	} {
		s := Study{Trials: []Trial{aTrial(0), aTrial(1)}}
		for _, changes := range c.changes {
			s.Events = append(s.Events, Event{Kind: Drift, Changes: changes, Trial: 1})
		}
		worlds := 2
		if c.want == "" {
			worlds = 1
		}
		if got := s.ChangesBefore(1).String(); got != c.want || len(s.Worlds()) != worlds {
			t.Errorf("ChangesBefore of %q = %q in %d worlds, want %q in %d", c.changes, got, len(s.Worlds()), c.want, worlds)
		}
	}
}

// parseChanges turns the text of an old event into changes that print the same text.
func TestParseChanges(t *testing.T) {
	for text, want := range map[string]Changes{
		"gpu: A → B\nmodel: x → y":             {{Fact: "gpu", Was: new("A"), Is: new("B")}, {Fact: "model", Was: new("x"), Is: new("y")}},
		"image: (nothing) → a":                 {{Fact: "image", Is: new("a")}},
		"image: a → (nothing)":                 {{Fact: "image", Was: new("a")}},
		"slo: p99 TTFT: 1 s → p99 TTFT: 2 s":   {{Fact: "slo", Was: new("p99 TTFT: 1 s"), Is: new("p99 TTFT: 2 s")}},
		"server version: 1 in trial 12 → 2":    {{Fact: "server version", Was: new("1"), Is: new("2"), WasIn: new(12)}},
		"server command: a in trial 12 → b":    {{Fact: "server command", Was: new("a in trial 12"), Is: new("b")}},
		"seed: 18446744073709551615 → 8":       {{Fact: "seed", Was: new("18446744073709551615"), Is: new("8")}},
		"server args: a → b\nof a second line": {{Fact: "server args", Was: new("a"), Is: new("b\nof a second line")}},
	} {
		if got := parseChanges(text); !reflect.DeepEqual(got, want) || got.String() != text {
			t.Errorf("parseChanges(%q) = %q, want %q", text, got, want)
		}
	}
	if got := parseChanges("something else"); len(got) != 1 || *got[0].Is != "something else" {
		t.Errorf("parseChanges of a text without a change = %q", got)
	}
}
