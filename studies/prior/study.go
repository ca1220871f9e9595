package prior

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/studies/optuna"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// readStudy reads another study of ours, by its directory as it was published, or by the file that it was exported to. Each of its worlds is a
// source of its own, the newest first: what was measured in two of them is not to be compared.
func (r *Reader) readStudy(path string) ([]Source, error) {
	read := studies.ReadSnapshot
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		read = studies.ReadFile
	}
	study, err := read(path)
	if err != nil {
		return nil, err
	}
	if study.ID == r.ID {
		return nil, itself(path)
	}
	worlds := worldsOf(study)
	var all []Source
	for _, w := range slices.Backward(worlds) {
		s := Source{Name: path, Path: path, Kind: Study}
		if len(worlds) > 1 {
			s.Name, s.World = studies.WorldSource(path, w.number), w.number
		}
		r.readWorld(&s, w)
		all = append(all, s)
	}
	return all, nil
}

func itself(path string) error {
	return fmt.Errorf("%s is the study itself, or a copy of it, which knows its own trials; name another", path)
}

// A world is what was measured of a study in one of its worlds.
type world struct {
	number int               // from 1
	asked  map[string]string // as studies.Study.World was then
	ended  string            // when it changed, and how; "" of the one that the study is in
	trials []studies.Trial
}

// worldsOf are the worlds of a study that have trials; where none has, the one that it is in.
func worldsOf(study studies.Study) (all []world) {
	worlds, asked := study.Worlds(), study.Asked()
	next := 0 // the first trial of the world after this
	for i, trials := range worlds {
		next += len(trials)
		w := world{number: i + 1, asked: asked[i], trials: trials}
		if i+1 < len(worlds) {
			w.ended = fmt.Sprintf("before trial %d: %s", next, oneLine(study.ChangesBefore(next).String()))
		}
		if len(trials) > 0 || len(worlds) == 1 {
			all = append(all, w)
		}
	}
	return all
}

// readWorld reads what was measured in one world of a study.
func (r *Reader) readWorld(s *Source, w world) {
	if !r.sameModel(s, w.asked) {
		return
	}
	if w.ended != "" {
		s.note("its world changed later, %s", w.ended)
	}
	r.compare(s, w.asked)
	for _, t := range w.trials {
		from := fmt.Sprintf("%s, trial %d", s.Path, t.Number)
		if t.State != studies.Done || t.Result.Outcome == trial.Unknown {
			s.leave(from, "it has no result")
			continue
		}
		point, err := r.point(r.flagsOf(t))
		if err != nil {
			s.leave(from, "%v", err)
			continue
		}
		result := t.Result
		result.Tail = nil
		s.take(r, from, point, result, t.Probes)
	}
}

// sameModel reports whether a world of another study is of this study's model, as far as that matters; if not, it leaves all of it out.
func (r *Reader) sameModel(s *Source, asked map[string]string) bool {
	is, want := asked["model"], r.World["model"]
	if is == want || r.AnyModel {
		return true
	}
	s.leave(s.Name, "its model is %s, and this study's %s; if they are the same, give --any-model", is, want)
	return false
}

// compare notes in what a world of another study is not this study's.
func (r *Reader) compare(s *Source, asked map[string]string) {
	for _, key := range []string{"slo", "workload", "dataset sha256", "server args", "server simulate", "server command"} {
		if is, want := asked[key], r.World[key]; is != want {
			s.note("its %s is %q, and this study's %q", key, is, want)
		}
	}
}

// flagsOf are the flags of a trial of another study: those that it searched, and of its fixed ones those that this study searches.
func (r *Reader) flagsOf(t studies.Trial) map[string]string {
	flags := map[string]string{}
	words, err := space.Flags(t.Args)
	if err != nil {
		words = nil // its point says the rest
	}
	for _, f := range words {
		name, negated := strings.CutPrefix(f.Name, "no-")
		p := r.Space.Parameter(name)
		switch {
		case p == nil:
		case p.Kind == space.Bool:
			flags[name] = fmt.Sprint(!negated)
		case len(f.Values) == 1:
			flags[name] = f.Values[0]
		}
	}
	maps.Copy(flags, t.Point)
	return flags
}

// readOptuna reads a study of an Optuna file. One that we wrote may have several worlds, which are sources of their own as those of readStudy.
func (r *Reader) readOptuna(path string) ([]Source, error) {
	all, err := optuna.Read(path)
	if err != nil {
		return nil, err
	}
	study, err := r.chosen(path, all)
	if err != nil {
		return nil, err
	}
	if !slices.Equal(study.Directions, []string{"MAXIMIZE"}) {
		return nil, fmt.Errorf("%s: study %s has the directions %s; it takes one objective, the requests per second within the SLO, to be maximised", path, study.Name, strings.Join(study.Directions, ", "))
	}
	origin := originOf(study)
	trials := study.Trials
	if origin.id != "" && origin.id == r.ID {
		if trials = slices.DeleteFunc(slices.Clone(trials), byUs); len(trials) == 0 {
			return nil, itself(path)
		}
	}
	best := newestWorld(study.Trials)
	worlds := map[int][]optuna.Trial{}
	for _, t := range trials {
		number := best // what Optuna went on with is of the world whose trials it compares
		attribute(t.User, "world", &number)
		worlds[number] = append(worlds[number], t)
	}
	if len(worlds) == 0 {
		return []Source{{Name: path, Path: path, Kind: Optuna}}, nil
	}
	var sources []Source
	for _, number := range slices.Backward(slices.Sorted(maps.Keys(worlds))) {
		s := Source{Name: path, Path: path, Kind: Optuna}
		if len(worlds) > 1 {
			s.Name, s.World = studies.WorldSource(path, number), number
		}
		if number != best {
			s.note("it was measured in another world than the best of that study")
		}
		if len(trials) < len(study.Trials) {
			s.note("it is this study's own export: only what Optuna has added is read of it")
		}
		r.readOptunaWorld(&s, origin.asked(number), worlds[number])
		sources = append(sources, s)
	}
	return sources, nil
}

// An origin is the study of ours that an Optuna file was exported from; of a study of Optuna's own it is zero.
type origin struct {
	id      string
	present map[string]string   // as studies.Study.World
	worlds  []map[string]string // as studies.Study.Asked
}

// originOf reads the attributes that the export gives a study. Without an id they are of another's making.
func originOf(study optuna.Study) (o origin) {
	attribute(study.User, "tuner_study_id", &o.id)
	if o.id == "" {
		return origin{}
	}
	attribute(study.User, "world", &o.present)
	attribute(study.User, "worlds", &o.worlds)
	return o
}

// asked is what was asked for in one of the worlds, from 1; nil where that is not known. A file that does not tell the worlds apart is taken for one
// of the present world alone.
func (o origin) asked(number int) map[string]string {
	if number >= 1 && number <= len(o.worlds) {
		return o.worlds[number-1]
	}
	return o.present
}

// byUs reports whether the export wrote a trial, and not Optuna after it.
func byUs(t optuna.Trial) bool { return t.User["origin"] != nil && t.User["world"] != nil }

// readOptunaWorld takes the trials of one world, of a study of ours if they are of its model.
func (r *Reader) readOptunaWorld(s *Source, asked map[string]string, trials []optuna.Trial) {
	if asked != nil {
		if !r.sameModel(s, asked) {
			return
		}
		r.compare(s, asked)
	}
	r.takeOptuna(s, trials)
}

// newestWorld is the newest world with a trial that Optuna compares with others.
func newestWorld(trials []optuna.Trial) (newest int) {
	for _, t := range trials {
		if number := 0; t.State == "COMPLETE" {
			attribute(t.User, "world", &number)
			newest = max(newest, number)
		}
	}
	return newest
}

// takeOptuna takes the trials of an Optuna study that are of one world.
func (r *Reader) takeOptuna(s *Source, trials []optuna.Trial) {
	ours := false
	for _, t := range trials {
		from := fmt.Sprintf("%s, trial %d", s.Path, t.Number)
		result, why := resultOf(t)
		if why != "" {
			s.leave(from, "%s", why)
			continue
		}
		flags := map[string]string{}
		for name, value := range t.Params {
			flags[flagName(name)] = value
		}
		point, err := r.point(flags)
		switch {
		case err != nil:
			s.leave(from, "%v", err)
		case t.User["not_among_choices"] != nil:
			s.leave(from, "some of its values are no choices of its study")
		default:
			s.take(r, from, point, result, nil)
			ours = ours || t.User["outcome"] != nil
		}
	}
	if !ours && len(s.Taken) > 0 {
		s.note("its values are taken for requests per second within the SLO: what they are is not in the file")
	}
}

// chosen is the study that is to be read.
func (r *Reader) chosen(path string, all []optuna.Study) (optuna.Study, error) {
	var names []string
	for _, study := range all {
		if study.Name == r.OptunaStudy || r.OptunaStudy == "" && len(all) == 1 {
			return study, nil
		}
		names = append(names, study.Name)
	}
	switch {
	case len(all) == 0:
		return optuna.Study{}, fmt.Errorf("%s: it holds no study", path)
	case r.OptunaStudy == "":
		return optuna.Study{}, fmt.Errorf("%s: it holds several studies; name one with --optuna-study: %s", path, strings.Join(names, ", "))
	}
	return optuna.Study{}, fmt.Errorf("%s: it holds no study %q; %s", path, r.OptunaStudy, space.DidYouMean(r.OptunaStudy, names))
}

// resultOf is what an Optuna trial found; or why it says nothing. Of a study that was exported by us more is known.
func resultOf(t optuna.Trial) (result trial.Result, why string) {
	if !byUs(t) { // its user's own attributes may have any name
		t.User = nil
	}
	attribute(t.User, "outcome", &result.Outcome)
	attribute(t.User, "simulated", &result.Facts.Simulated)
	attribute(t.User, "class", &result.Class)
	attribute(t.User, "evidence", &result.Evidence)
	switch {
	case t.State == "PRUNED" && result.Outcome == trial.Dropped, t.State == "FAIL" && result.Outcome == trial.Infeasible:
		return result, ""
	case t.State == "PRUNED" && result.Outcome == trial.Measured: // by us, in a world that is not that of the study's best
		value := 0.0
		attribute(t.User, "capacity_rps", &value)
		t.Value = &value
	case t.State != "COMPLETE":
		return result, "its state is " + t.State + ", which says nothing of a capacity"
	case t.Value == nil:
		return result, "it has no value"
	case result.Outcome != "" && result.Outcome != trial.Measured:
		return result, fmt.Sprintf("its outcome is %.40q, and that of a trial with a value is %s", string(result.Outcome), trial.Measured)
	}
	result.Outcome, result.Class, result.Evidence = trial.Measured, serverctl.Class(""), ""
	c := &result.Capacity
	c.Rate, c.Low, c.Bound, c.Why = *t.Value, *t.Value, capacity.AtLeast, "as Optuna has it"
	attribute(t.User, "bound", &c.Bound)
	attribute(t.User, "binding", &c.Binding)
	if why := figures(t, c); why != "" {
		return result, why
	}
	if c.Bound == capacity.AtMost {
		c.Rate = c.High
	}
	if !(c.Rate > 0) {
		return result, fmt.Sprintf("its value %g is no rate", *t.Value)
	}
	return result, ""
}

// figures reads those of a capacity. One that the export wrote and that is no number now, such as Python's NaN, is the reason to leave the trial out.
func figures(t optuna.Trial, c *capacity.Capacity) (why string) {
	for _, f := range []struct {
		key string
		to  *float64
	}{
		{"passed_rps", &c.Low}, {"failed_rps", &c.High}, {"lowest_rps", &c.Lowest}, {"highest_rps", &c.Highest}, {"std_err", &c.StdErr}, {"in_flight", &c.InFlight},
	} {
		var number float64
		raw, given := t.User[f.key]
		switch err := json.Unmarshal(raw, &number); {
		case !given:
		case err == nil:
			*f.to = number
		default:
			return fmt.Sprintf("its %s is %.40s, which is no number; correct it where it was written", f.key, raw)
		}
	}
	return ""
}

// attribute reads a user attribute, which may be missing or of another's making: then it stays what it is.
func attribute[T any](of map[string]json.RawMessage, key string, to *T) {
	var value T
	if raw, ok := of[key]; ok && json.Unmarshal(raw, &value) == nil {
		*to = value
	}
}
