package sweep

import (
	"encoding/json"
	"io"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A document is a sweep as JSON.
type document struct {
	Name      string           `json:"name"`
	Model     string           `json:"model"`
	Simulated string           `json:"simulated,omitempty"` // profile of the simulated server
	Workload  string           `json:"workload"`
	Seed      uint64           `json:"seed"`
	SLO       string           `json:"slo"`
	Cache     trial.Protocol   `json:"cache"`
	Requests  int              `json:"requests"` // at each load
	Baseline  string           `json:"baseline"`
	Configs   []configDocument `json:"configs"`
	Summary   string           `json:"summary"`
	Ranking   string           `json:"ranking,omitempty"` // of a closed loop
	Limits    []string         `json:"cannot_tell"`
}

// A configDocument is a config as JSON.
type configDocument struct {
	Name        string            `json:"name"`
	Description string            `json:"description,omitempty"`
	Args        []string          `json:"args"`     // all of the server, after the model
	Complete    bool              `json:"complete"` // every load was measured
	Trouble     string            `json:"trouble,omitempty"`
	Class       serverctl.Class   `json:"class,omitempty"`
	Evidence    string            `json:"evidence,omitempty"`
	Highest     capacity.Capacity `json:"highest"`        // its rate is one of the grid's
	Below       []float64         `json:"failed_below"`   // loads under the highest that failed
	VsBaseline  string            `json:"vs_baseline"`    // such as +25 %; - when it is not known
	Mark        string            `json:"mark,omitempty"` // winner or tie
	Facts       serverctl.Facts   `json:"facts"`
	GPUSeconds  float64           `json:"gpu_seconds"`
	Probes      []trial.Probe     `json:"probes"` // without their series
	Notes       []string          `json:"notes,omitempty"`
}

// WriteJSON writes the sweep as one JSON object, without the series of its probes.
func (s *Sweep) WriteJSON(w io.Writer) error {
	doc := document{
		Name: s.Name, Model: s.Model, Simulated: s.Simulated, Workload: s.Workload, Seed: s.Seed, SLO: s.SLO.String(),
		Cache: s.Cache, Requests: s.Plan.Requests, Baseline: s.Configs[0].Name, Summary: s.conclusion(), Ranking: s.ranking(), Limits: s.limits(),
	}
	for i, st := range s.compare().all {
		c := s.Configs[i]
		d := configDocument{
			Name: c.Name, Description: c.Description, Args: c.Args, Complete: len(c.Probes) == len(s.Plan.Levels),
			Trouble: c.trouble(), Class: c.Result.Class, Evidence: c.Result.Evidence, Highest: st.Capacity, Below: append([]float64{}, st.below...),
			VsBaseline: st.versus(), Mark: st.mark, Facts: c.Result.Facts, GPUSeconds: c.Result.GPUTime.Seconds(), Probes: []trial.Probe{}, Notes: c.Result.Notes,
		}
		for _, p := range c.Probes {
			p.Server, p.Measurement.Series = nil, nil
			d.Probes = append(d.Probes, p)
		}
		doc.Configs = append(doc.Configs, d)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(doc)
}
