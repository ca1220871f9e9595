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
	"vllmtuner/tuner/studyfile"
)

// A world is one of the worlds of another study.
type world struct {
	number int               // counted from 1
	asked  map[string]string // what studies.Study.World was in this world; nil if that is not known
	notes  []string          // notes on the trials of this world
	take   func(*Source)     // takes its trials
}

// sources returns a source for each world, the newest first, because trials of two worlds cannot be compared. From a
// world of another model it takes no trials.
func (r *Reader) sources(path string, kind Kind, worlds []world) (all []Source) {
	for _, w := range slices.Backward(worlds) {
		s := Source{Name: path, Path: path, Kind: kind}
		if len(worlds) > 1 {
			s.Name, s.World = studies.WorldSource(path, w.number), w.number
		}
		if model := r.World["model"]; w.asked != nil && w.asked["model"] != model && !r.AnyModel {
			s.leave(s.Name, "%s", otherModel(w.asked["model"], model))
		} else {
			s.Notes = w.notes
			r.compare(&s, w.asked)
			w.take(&s)
		}
		all = append(all, s)
	}
	return all
}

// readStudy reads another study of the tuner, from its directory or from a copy of its database.
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
	return r.sources(path, tunerStudy, r.worldsOf(study)), nil
}

func itself(path string) error {
	return fmt.Errorf("%s is this study itself, or a copy of it; give another study", path)
}

// worldsOf returns the worlds of a study that have trials. If the study has only one world, worldsOf returns it even
// without trials.
func (r *Reader) worldsOf(study studies.Study) (all []world) {
	worlds, asked := study.Worlds(), study.Asked()
	next := 0 // number of the first trial of the next world
	for i, trials := range worlds {
		next += len(trials)
		w := world{number: i + 1, asked: maps.Collect(maps.All(asked[i])), take: func(s *Source) { r.takeTrials(s, trials, asked[i]) }}
		if i+1 < len(worlds) {
			changes := oneLine(study.ChangesBefore(next).String())
			w.notes = []string{fmt.Sprintf("later, before trial %d, this changed: %s", next, changes)}
		}
		if len(trials) > 0 || len(worlds) == 1 {
			all = append(all, w)
		}
	}
	return all
}

// takeTrials takes the trials of one world of another study. The worldFacts are the facts of that world.
func (r *Reader) takeTrials(s *Source, trials []studies.Trial, worldFacts map[string]string) {
	for _, t := range trials {
		from := fmt.Sprintf("%s, trial %d", s.Path, t.Number)
		if t.State != studies.Done || t.Result.Outcome == trial.Unknown {
			s.leave(from, "it has no result")
			continue
		}
		point, err := r.point(r.flagsOf(t, worldFacts))
		if err != nil {
			s.leave(from, "%v", err)
			continue
		}
		t.Result.Tail = nil
		s.take(r, from, point, t.Result, t.Probes)
	}
}

func otherModel(is, want string) string {
	return fmt.Sprintf("its model is %s, but this study's is %s; if they are the same, give --any-model", is, want)
}

// compare adds a note for each fact that differs between a world of another study and this study. If the facts of that
// world are not known, it adds none.
func (r *Reader) compare(s *Source, worldFacts map[string]string) {
	if worldFacts == nil {
		return
	}
	for _, key := range []string{"slo", "workload", "dataset sha256", "server args", "server simulate", "server command"} {
		if is, want := worldFacts[key], r.World[key]; is != want {
			s.note("its %s is %q, but this study's is %q", key, is, want)
		}
	}
}

// flagsOf returns flags and variables of another study's trial. It returns all flags that the other study searched. It
// also returns the flags that the other study fixed, if this study searches them. The worldFacts are the facts of the
// trial's world.
func (r *Reader) flagsOf(t studies.Trial, worldFacts map[string]string) map[string]string {
	flags := map[string]string{}
	for name, value := range space.FlagValues(t.Args) {
		if r.Space.Parameter(name) != nil {
			flags[name] = value
		}
	}
	for _, name := range r.Space.Variables() {
		if value, fixed := worldFacts[studyfile.EnvKey+name]; fixed && !strings.Contains(value, "${") {
			flags[name] = value
		}
	}
	maps.Copy(flags, t.Point)
	return flags
}

// readOptuna reads a study of an Optuna file. A study that the tuner exported may have several worlds.
func (r *Reader) readOptuna(path string) ([]Source, error) {
	all, err := optuna.Read(path)
	if err != nil {
		return nil, err
	}
	study, err := r.chooseStudy(path, all)
	if err != nil {
		return nil, err
	}
	if !slices.Equal(study.Directions, []string{"MAXIMIZE"}) {
		return nil, fmt.Errorf("%s: study %s has the directions %s; only a study that maximises one objective, the requests per second within the SLO, can be imported", path, study.Name, strings.Join(study.Directions, ", "))
	}
	id := "" // ID of the tuner's study that was exported; "" if Optuna made the study
	attribute(study.User, "tuner_study_id", &id)
	trials := study.Trials
	if id != "" && id == r.ID {
		if trials = slices.DeleteFunc(slices.Clone(trials), byUs); len(trials) == 0 {
			return nil, itself(path)
		}
	}
	best := newestWorld(study.Trials)
	of := map[int][]*optuna.Trial{} // the trials by the number of their world
	for _, t := range trials {
		number := best // a trial that Optuna added names no world; such a trial belongs to the newest world, whose trials Optuna compares
		attribute(t.User, "world", &number)
		of[number] = append(of[number], t)
	}
	if len(of) == 0 {
		return []Source{{Name: path, Path: path, Kind: optunaFile}}, nil
	}
	var worlds []world
	for _, number := range slices.Sorted(maps.Keys(of)) {
		w := world{number: number, take: func(s *Source) { r.takeOptuna(s, of[number]) }}
		if id != "" { // without the ID, another program wrote the attributes
			w.asked = askedIn(study, number)
		}
		if number != best {
			w.notes = append(w.notes, "its trials were measured with another model, server or workload than the best trial of that study")
		}
		if len(trials) < len(study.Trials) {
			w.notes = append(w.notes, "this study exported it: only the trials that Optuna has added are read")
		}
		worlds = append(worlds, w)
	}
	return r.sources(path, optunaFile, worlds), nil
}

// askedIn returns studies.Study.World as it was in the world of this number, counted from 1. It returns nil if the file
// does not say. A file without a list of worlds has only the current world.
func askedIn(study *optuna.Study, number int) (present map[string]string) {
	var worlds []map[string]string
	attribute(study.User, "world", &present)
	attribute(study.User, "worlds", &worlds)
	if number >= 1 && number <= len(worlds) {
		return worlds[number-1]
	}
	return present
}

// byUs reports whether the tuner's export wrote a trial. Optuna may have added other trials since.
func byUs(t *optuna.Trial) bool { return t.User["origin"] != nil && t.User["world"] != nil }

// newestWorld returns the newest world with a COMPLETE trial.
func newestWorld(trials []*optuna.Trial) (newest int) {
	for _, t := range trials {
		if number := 0; t.State == "COMPLETE" {
			attribute(t.User, "world", &number)
			newest = max(newest, number)
		}
	}
	return newest
}

// takeOptuna takes the trials of one world of an Optuna study.
func (r *Reader) takeOptuna(s *Source, trials []*optuna.Trial) {
	ours := false
	for _, t := range trials {
		from := fmt.Sprintf("%s, trial %d", s.Path, t.Number)
		result, why := resultOf(*t)
		if why != "" {
			s.leave(from, "%s", why)
			continue
		}
		flags := map[string]string{}
		for name, value := range t.Params {
			flags[nameIn(r.Space, name)] = value
		}
		point, err := r.point(flags)
		switch {
		case err != nil:
			s.leave(from, "%v", err)
		case t.User["not_among_choices"] != nil:
			s.leave(from, "some of its values are not among the choices of its study")
		default:
			s.take(r, from, point, result, nil)
			ours = ours || t.User["outcome"] != nil
		}
	}
	if !ours && len(s.Taken) > 0 {
		s.note("the file does not say what its values are; they are taken as requests per second within the SLO")
	}
}

// chooseStudy returns the study that the user named, or the only one in the file.
func (r *Reader) chooseStudy(path string, all []*optuna.Study) (*optuna.Study, error) {
	var names []string
	for _, study := range all {
		if study.Name == r.OptunaStudy || r.OptunaStudy == "" && len(all) == 1 {
			return study, nil
		}
		names = append(names, study.Name)
	}
	switch {
	case len(all) == 0:
		return nil, fmt.Errorf("%s: it holds no study", path)
	case r.OptunaStudy == "":
		return nil, fmt.Errorf("%s: it holds several studies; name one with --optuna-study: %s", path, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("%s: it holds no study %q; %s", path, r.OptunaStudy, space.DidYouMean(r.OptunaStudy, names))
}

// resultOf returns the result of an Optuna trial, or why it has none. If the tuner exported the trial, attributes have
// more of the result.
func resultOf(t optuna.Trial) (result trial.Result, why string) {
	if !byUs(&t) { // then attributes of the same names are the user's own
		t.User = nil
	}
	attribute(t.User, "outcome", &result.Outcome)
	attribute(t.User, "simulated", &result.Facts.Simulated)
	attribute(t.User, "class", &result.Class)
	attribute(t.User, "evidence", &result.Evidence)
	switch {
	case t.State == "PRUNED" && result.Outcome == trial.Dropped, t.State == "FAIL" && result.Outcome == trial.Infeasible:
		return result, ""
	case t.State == "PRUNED" && result.Outcome == trial.Measured: // the export prunes trials of other worlds
		value := 0.0
		attribute(t.User, "capacity_rps", &value)
		t.Value = &value
	case t.State != "COMPLETE":
		return result, "its state is " + t.State + ", so it has no capacity"
	case t.Value == nil:
		return result, "it has no value"
	case result.Outcome != "" && result.Outcome != trial.Measured:
		return result, fmt.Sprintf("its outcome is %.40q, but a trial with a value must have %s", string(result.Outcome), trial.Measured)
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
		return result, fmt.Sprintf("its value %g is not a rate", *t.Value)
	}
	return result, ""
}

// figures reads the figures of a capacity from attributes. If one of them is not a number, such as Python's NaN, it
// returns the reason to leave out the trial.
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
			return fmt.Sprintf("its %s is %.40s, which is not a number; correct it in the program or file that wrote it", f.key, raw)
		}
	}
	return ""
}

// attribute reads a user attribute into the variable *to. If the attribute is missing or has another type, the variable
// keeps its value.
func attribute[T any](of map[string]json.RawMessage, key string, to *T) {
	var value T
	if raw, ok := of[key]; ok && json.Unmarshal(raw, &value) == nil {
		*to = value
	}
}
