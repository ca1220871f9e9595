package asktell

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// protocol is the version of the protocol. A later tuner may add keys without a new version. The version changes if a
// program for an earlier version would no longer work.
const protocol = 1

// A message is one line to the program. It has one key.
type message struct {
	Space   *spaceMessage `json:"space,omitempty"`
	Tell    *tellMessage  `json:"tell,omitempty"`
	Ask     *askMessage   `json:"ask,omitempty"`
	Refused *refusal      `json:"refused,omitempty"`
}

// A spaceMessage comes first, and says what is searched.
type spaceMessage struct {
	Protocol    int                `json:"protocol"`
	Study       string             `json:"study"`
	Seed        uint64             `json:"seed"`
	Trials      int                `json:"trials"` // the budget of the search
	Objective   objective          `json:"objective"`
	Parameters  []parameterMessage `json:"parameters"`
	Constraints []string           `json:"constraints"`
	Fixed       map[string]string  `json:"fixed"` // flags of every trial, which constraints may name
}

type objective struct {
	Name      string `json:"name"`
	Unit      string `json:"unit"`
	Direction string `json:"direction"`
}

type parameterMessage struct {
	Name    string     `json:"name"`
	Kind    space.Kind `json:"kind"`
	Low     *float64   `json:"low,omitempty"` // for a float or an int
	High    *float64   `json:"high,omitempty"`
	Step    float64    `json:"step,omitempty"`
	Log     bool       `json:"log,omitempty"`
	Choices []string   `json:"choices,omitempty"` // for a categorical or JSON
	When    string     `json:"when,omitempty"`
}

// newSpaceMessage describes a study.
func newSpaceMessage(c Config) *spaceMessage {
	m := &spaceMessage{
		Protocol: protocol, Study: c.Study, Seed: c.Seed, Trials: c.Trials,
		Objective:   objective{string(c.Objective), "requests per second", "maximize"},
		Constraints: append([]string{}, c.Constraints...), Fixed: map[string]string{},
	}
	maps.Copy(m.Fixed, c.Space.Defaults)
	maps.DeleteFunc(m.Fixed, func(name, _ string) bool { return c.Space.Parameter(name) != nil }) // a searched variable that is unset by default
	if c.Objective == studies.CapacityPerGPU {
		m.Objective.Unit = "requests per second and GPU"
	}
	for _, p := range c.Space.Parameters() {
		one := parameterMessage{Name: p.Name, Kind: p.Kind, Step: p.Step, Log: p.Log, Choices: p.Choices, When: p.When}
		if p.Kind == space.Float || p.Kind == space.Int {
			low, high := p.Min, p.Max
			levels := p.Levels(2) // the last legal value may be below Max, if the range is not a multiple of the step
			if last, err := p.Number(levels[len(levels)-1]); err == nil {
				high = last
			}
			one.Low, one.High = &low, &high
		}
		m.Parameters = append(m.Parameters, one)
	}
	return m
}

// A tellMessage says how a trial ended. A number that is not known is left out. The names of the keys are the same as
// those of tuner export.
type tellMessage struct {
	Number   int            `json:"number"` // -1 for an imported trial
	Origin   string         `json:"origin"` // default, current, preset, prior, sampler, or imported
	Source   string         `json:"source,omitempty"`
	Point    map[string]any `json:"point"`
	Outcome  trial.Outcome  `json:"outcome"`
	Value    *float64       `json:"value"` // to be maximised; null if there is none
	Bound    capacity.Bound `json:"bound,omitempty"`
	Passed   *float64       `json:"passed_rps,omitempty"`
	Failed   *float64       `json:"failed_rps,omitempty"`
	Lowest   *float64       `json:"lowest_rps,omitempty"`
	Highest  *float64       `json:"highest_rps,omitempty"`
	StdErr   *float64       `json:"std_err,omitempty"`
	Binding  string         `json:"binding,omitempty"`
	Class    string         `json:"class,omitempty"`
	Evidence string         `json:"evidence,omitempty"`
	GPU      *float64       `json:"gpu_seconds,omitempty"`
}

// imported is the origin of a trial that was not measured in this study.
const imported = "imported"

func newTellMessage(s *space.Space, t studies.Trial) *tellMessage {
	r, c := t.Result, t.Result.Capacity
	m := &tellMessage{
		Number: t.Number, Origin: string(t.Origin), Source: t.Source, Point: pointMessage(s, t.Point),
		Outcome: r.Outcome, Value: valueOf(t), Class: string(r.Class), Evidence: shown(r.Evidence), GPU: known(r.GPUTime.Seconds()),
	}
	if t.Number < 0 { // of an imported trial, only the value is scaled to this study
		m.Origin, m.Bound = imported, c.Bound
		return m
	}
	if r.Outcome == trial.Measured || r.Outcome == trial.Dropped {
		m.Bound, m.Binding = c.Bound, c.Binding
		m.Passed, m.Failed, m.Lowest, m.Highest, m.StdErr = known(c.Low), known(c.High), known(c.Lowest), known(c.Highest), known(c.StdErr)
	}
	return m
}

// valueOf returns the value of a trial: its capacity or an estimate of it, and 0 if no rate kept the SLO. It returns
// nil if the trial has no capacity. It also returns nil if the trial lost the race and has only an upper bound.
func valueOf(t studies.Trial) *float64 {
	c := t.Result.Capacity
	switch {
	case t.Met(), t.Result.Outcome == trial.Dropped && c.Bound == capacity.Estimated:
		return known(c.Rate)
	case t.Result.Outcome == trial.Measured && c.Bound == capacity.AtMost:
		return new(0.0)
	}
	return nil
}

// known returns a figure, or nil if it is not known. JSON has no infinity.
func known(v float64) *float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// pointMessage returns a point. Values of numeric parameters become numbers, and values of switches become booleans.
func pointMessage(s *space.Space, p space.Point) map[string]any {
	m := make(map[string]any, len(p))
	for name, text := range p {
		m[name] = text
		parameter := s.Parameter(name)
		if parameter == nil {
			continue
		}
		switch parameter.Kind {
		case space.Float, space.Int:
			if v, err := parameter.Number(text); err == nil {
				m[name] = v
			}
		case space.Bool:
			m[name] = text == "true"
		}
	}
	return m
}

// An askMessage asks for the point of a trial.
type askMessage struct {
	Number  int `json:"number"`
	Refused int `json:"refused"` // how many points for this trial were refused
}

// A refusal says why a point is not tried. The next line asks again.
type refusal struct {
	Number int             `json:"number"`
	Point  json.RawMessage `json:"point"`
	Reason string          `json:"reason"`
}

// An answer is one line of the program. It has one of the keys.
type answer struct {
	Ready     bool            `json:"ready"`
	Point     json.RawMessage `json:"point"`
	Exhausted bool            `json:"exhausted"`
}

// decode reads one JSON object.
func (a *answer) decode(line string) error {
	if err := json.Unmarshal([]byte(line), a); err != nil {
		return errors.New("this is not a JSON object of the protocol")
	}
	if string(a.Point) == "null" {
		a.Point = nil
	}
	return nil
}

// readPoint reads a point. It moves each number to the nearest legal one within its range. It leaves out parameters
// whose condition does not hold. So optimisers that know no steps and conditions can take part.
func readPoint(s *space.Space, raw json.RawMessage) (space.Point, error) {
	var values map[string]json.RawMessage
	if err := json.Unmarshal(raw, &values); err != nil {
		return nil, errors.New("the point is not an object with a value for each parameter")
	}
	p := space.Point{}
	var errs []error
	allKnown := true
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if string(values[name]) == "null" {
			continue // the server's default
		}
		allKnown = allKnown && s.Parameter(name) != nil
		text, err := readValue(s.Parameter(name), values[name])
		errs = append(errs, err)
		p[name] = text
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if allKnown { // otherwise Check names the unknown parameters, which Nearest would leave out
		p = s.Nearest(p)
	}
	return p, s.Check(p)
}

// readValue returns a value as the text of a point. parameter is nil for an unknown name, which space.Check reports.
func readValue(parameter *space.Parameter, raw json.RawMessage) (string, error) {
	text := string(raw)
	if raw[0] == '"' {
		if err := json.Unmarshal(raw, &text); err != nil {
			return "", err
		}
	}
	switch {
	case parameter == nil:
		return text, nil
	case parameter.Kind != space.Float && parameter.Kind != space.Int:
		text, err := parameter.Read(text)
		return text, errors.Join(err, parameter.Check(text))
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) {
		return "", fmt.Errorf("%s=%s is not a number", parameter.Name, text)
	}
	slack := 1e-9 * (parameter.Max - parameter.Min) // 0.8 + 17 * 0.01 is a little more than 0.97
	if v < parameter.Min-slack || v > parameter.Max+slack {
		return "", fmt.Errorf("%s=%s is outside the range [%g, %g]", parameter.Name, text, parameter.Min, parameter.Max)
	}
	if parameter.Kind == space.Int {
		v = math.Round(v)
	}
	return strconv.FormatFloat(v, 'f', -1, 64), nil
}

// encode returns a message as one line.
func encode(m message) ([]byte, error) {
	line, err := foreign.JSON(m, "", "") // conditions and constraints have < and >, which stay readable
	return append(line, '\n'), err
}
