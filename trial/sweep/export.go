package sweep

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies/rights"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// WriteCSV writes all figures as one table, with one line for each config at each load.
func (s Report) WriteCSV(w io.Writer) error { return csv.NewWriter(w).WriteAll(s.records()) }

// records returns the lines of the table that WriteCSV writes, the header first. A config whose server failed has one
// more line, with the reason.
func (s Report) records() [][]string {
	names, _ := loadtest.Record(loadtest.ResultOf(trial.Probe{Streams: s.Plan.Levels[0].Streams}))
	head := slices.Concat([]string{"config"}, names, []string{maxConcurrent.key, kvCache.key, "simulated", "trouble"})
	records := [][]string{head}
	simulated := strconv.FormatBool(s.simulated())
	for _, c := range s.Configs {
		for _, p := range c.Probes {
			_, values := loadtest.Record(loadtest.ResultOf(p))
			records = append(records, slices.Concat([]string{c.Name}, values, []string{maxConcurrent.programs(c, p), c.kvCache(), simulated, ""}))
		}
		if trouble := c.trouble(); trouble != "" {
			line := make([]string, len(head))
			line[0] = c.Name
			copy(line[len(line)-3:], []string{c.kvCache(), simulated, trouble})
			records = append(records, line)
		}
	}
	return records
}

// kvCache returns the size of the KV cache in GiB; "" if the server did not report it.
func (c *Config) kvCache() string { return kvCache.people(c, trial.Probe{}) }

// WriteFiles writes each table to its own CSV file in dir, in the layout of sweeps made by hand. Each file name begins
// with the name of the sweep.
func (s Report) WriteFiles(dir string) error {
	files := map[string][][]string{"configs": s.configRecords(), "winners": s.winnerRecords(), "slo_targets": targetRecords(s.SLO)}
	if s.closed() {
		for _, c := range s.Configs {
			name := "sweep"
			if len(s.Configs) > 1 {
				name = c.Name + "_sweep"
			}
			files[name] = s.loopRecords(c)
		}
	} else {
		for _, f := range gridFigures {
			files[f.key] = s.byConfig("rate_rps", f.programs)
		}
		files["slo"] = s.byConfig("rate_rps", verdictCell)
		level, _ := s.detailLevel()
		files["baseline_detail"] = s.detail("metric", level, figure.programs)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		errs = append(errs, writeCSVFile(filepath.Join(dir, s.Name+"_"+name+".csv"), files[name]))
	}
	return errors.Join(errs...)
}

func writeCSVFile(path string, records [][]string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, rights.File(filepath.Dir(path)))
	if err != nil {
		return fmt.Errorf("write the tables: %w", err)
	}
	return errors.Join(csv.NewWriter(f).WriteAll(records), f.Close())
}

// configRecords returns one line for each config, with a column for each flag.
func (all Configs) configRecords() [][]string {
	names := all.flagNames()
	head := []string{"index", "label"}
	for _, name := range names {
		head = append(head, strings.ReplaceAll(name, "-", "_"))
	}
	records := [][]string{append(head, "kv_cache_gib", "description")}
	for i, c := range all {
		line := []string{strconv.Itoa(i), c.Name}
		for _, name := range names {
			line = append(line, c.Flags[name])
		}
		records = append(records, append(line, c.kvCache(), c.Description))
	}
	return records
}

func (c comparison) winnerRecords() [][]string {
	load := "max_slo_rate_rps"
	if c.closed() {
		load = "max_slo_concurrency"
	}
	records := [][]string{{"label", "winner_mark", load, "capacity_vs_baseline_pct"}}
	marks := map[string]string{"winner": "yes", "tie": "tie", "": "no"}
	for i, st := range c.all {
		rate := ""
		if st.Met() {
			rate = c.loadWord(st.Rate)
		}
		percent := ""
		if st.known {
			percent = render.Signed(100 * st.gain)
		}
		records = append(records, []string{c.Configs[i].Name, marks[st.mark], rate, percent})
	}
	return records
}

func targetRecords(s slo.SLO) [][]string {
	records := [][]string{{"metric", "op", "limit_ms"}}
	for _, l := range s.Limits {
		metric, percentile := strings.ToUpper(string(l.Metric)), strconv.FormatFloat(l.Percentile, 'f', -1, 64)
		records = append(records, []string{metric + " p" + percentile, "<=", strconv.FormatFloat(render.InMilliseconds(l.Max), 'f', -1, 64)})
	}
	return records
}

// A document is the JSON form of a sweep.
type document struct {
	Name      string           `json:"name"`
	Model     string           `json:"model"`
	Simulated string           `json:"simulated,omitempty"` // profile of the simulated server
	Workload  string           `json:"workload"`
	Seed      uint64           `json:"seed"`
	SLO       string           `json:"slo"`
	Cache     trial.Protocol   `json:"cache"`
	Requests  int              `json:"requests"` // number of requests at each load
	Baseline  string           `json:"baseline"`
	Configs   []configDocument `json:"configs"`
	Summary   string           `json:"summary"`
	Ranking   string           `json:"ranking,omitempty"` // only for a closed loop
	Limits    []string         `json:"cannot_tell"`
}

// A configDocument is the JSON form of one config.
type configDocument struct {
	Name        string            `json:"name"`
	Description string            `json:"description,omitempty"`
	Args        []string          `json:"args"`     // all args of the server, after the model's name
	Complete    bool              `json:"complete"` // whether every load was measured
	Trouble     string            `json:"trouble,omitempty"`
	Class       serverctl.Class   `json:"class,omitempty"`
	Evidence    string            `json:"evidence,omitempty"`
	Highest     capacity.Capacity `json:"highest"`        // its rate is one of the measured loads
	Below       []float64         `json:"failed_below"`   // failed loads that are lower than the highest passed one
	VsBaseline  string            `json:"vs_baseline"`    // such as "+25 %"; "-" if it is not known
	Mark        string            `json:"mark,omitempty"` // winner or tie
	Facts       serverctl.Facts   `json:"facts"`
	GPUSeconds  float64           `json:"gpu_seconds"`
	Probes      []trial.Probe     `json:"probes"` // without their time series
	Notes       []string          `json:"notes,omitempty"`
}

// WriteJSON writes the sweep as one JSON object. It leaves out the time series of the probes.
func (s Report) WriteJSON(w io.Writer) error {
	doc := document{
		Name: s.Name, Model: s.Model, Simulated: s.Simulated, Workload: s.Workload, Seed: s.Seed, SLO: s.SLO.String(),
		Cache: s.Cache, Requests: s.Plan.Requests, Baseline: s.Configs[0].Name, Summary: s.conclusion(), Ranking: s.ranking(), Limits: s.limits(),
	}
	for i, st := range s.all {
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
	return foreign.WriteJSON(w, doc)
}
