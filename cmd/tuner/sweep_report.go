package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/serverctl"
	"vllmtuner/studies/rights"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/studyfile"
)

// report writes what was measured, in the format that was asked for and as files.
func (s *sweeping) report(w io.Writer, format, dir string) error {
	var err error
	switch {
	case !slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return c.begun }):
		return nil
	case format == sweepJSON:
		err = s.writeJSON(w)
	case format == sweepCSV:
		err = writeRecords(w, s.records())
	default:
		err = s.writeText(w)
	}
	if err != nil || dir == "" {
		return err
	}
	return s.writeFiles(dir)
}

// records are all figures in one table, a line for each config and load.
func (s *sweeping) records() [][]string {
	columns := csvColumns(s.closed())
	head := []string{"config"}
	for _, c := range columns {
		head = append(head, c.name)
	}
	records := [][]string{append(head, maxConcurrent.key, "kv_cache_gib", "simulated", "trouble")}
	simulated := strconv.FormatBool(s.simulated())
	for i := range s.configs {
		c := &s.configs[i]
		kv := ""
		if gib := c.result.Facts.KVCacheGiB; gib > 0 {
			kv = strconv.FormatFloat(gib, 'f', 2, 64)
		}
		for _, p := range c.probes {
			r := benchResult{shot: shot{rate: p.Rate, concurrency: p.Streams}, m: p.Measurement, verdict: &p.Verdict, limited: p.Verdict.ClientLimited}
			line := []string{c.Name}
			for _, column := range columns {
				line = append(line, column.value(r))
			}
			records = append(records, append(line, maxConcurrent.word(c, p), kv, simulated, ""))
		}
		if trouble := c.trouble(); trouble != "" {
			line := make([]string, len(records[0]))
			line[0] = c.Name
			copy(line[len(line)-3:], []string{kv, simulated, trouble})
			records = append(records, line)
		}
	}
	return records
}

func writeRecords(w io.Writer, records [][]string) error {
	out := csv.NewWriter(w)
	if err := out.WriteAll(records); err != nil {
		return err
	}
	return out.Error()
}

// writeFiles writes each table as a file of its own, named for the study: the layout in which people keep the tables of manual
// sweeps.
func (s *sweeping) writeFiles(dir string) error {
	files := map[string][][]string{"configs": s.configRecords(), "winners": s.winnerRecords(), "slo_targets": s.targetRecords()}
	if s.closed() {
		for i := range s.configs {
			name := "sweep"
			if len(s.configs) > 1 {
				name = s.configs[i].Name + "_sweep"
			}
			files[name] = s.loopRecords(&s.configs[i])
		}
	} else {
		for _, f := range gridFigures {
			files[f.key] = s.gridRecords(f.word)
		}
		files["slo"] = s.gridRecords(func(_ *sweptConfig, p trial.Probe) string { return verdictCell(p) })
		files["baseline_detail"] = s.detailRecords()
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		errs = append(errs, writeCSVFile(filepath.Join(dir, s.File.Name+"_"+name+".csv"), files[name]))
	}
	return errors.Join(errs...)
}

func writeCSVFile(path string, records [][]string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, rights.File(filepath.Dir(path)))
	if err != nil {
		return fmt.Errorf("write the tables: %w", err)
	}
	return errors.Join(writeRecords(f, records), f.Close())
}

// configRecords are the configs with a column for each flag.
func (s *sweeping) configRecords() [][]string {
	var names []string
	for _, c := range s.configs {
		for name := range studyfile.ConfigFlags(c.Config) {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	head := []string{"index", "label"}
	for _, name := range names {
		head = append(head, strings.ReplaceAll(name, "-", "_"))
	}
	records := [][]string{append(head, "kv_cache_gib", "description")}
	for i, c := range s.configs {
		line, flags := []string{strconv.Itoa(i), c.Name}, studyfile.ConfigFlags(c.Config)
		for _, name := range names {
			line = append(line, flags[name])
		}
		kv := ""
		if gib := c.result.Facts.KVCacheGiB; gib > 0 {
			kv = strconv.FormatFloat(gib, 'f', 2, 64)
		}
		records = append(records, append(line, kv, c.Description))
	}
	return records
}

// gridRecords are loads by configs; a cell is empty where nothing was measured.
func (s *sweeping) gridRecords(cell func(*sweptConfig, trial.Probe) string) [][]string {
	head := []string{"rate_rps"}
	for _, c := range s.configs {
		head = append(head, c.Name)
	}
	records := [][]string{head}
	for _, level := range s.sweep.Levels {
		line := []string{levelText(level)}
		for i := range s.configs {
			text := ""
			if p, ok := s.configs[i].at(level); ok {
				text = cell(&s.configs[i], p)
			}
			line = append(line, text)
		}
		records = append(records, line)
	}
	return records
}

// loopRecords are the figures of one config over concurrencies.
func (s *sweeping) loopRecords(c *sweptConfig) [][]string {
	head := []string{"concurrency"}
	for _, f := range loopFigures {
		head = append(head, f.key)
	}
	records := [][]string{head}
	for _, p := range c.probes {
		line := []string{levelText(p.Level())}
		for _, f := range loopFigures {
			line = append(line, f.word(c, p))
		}
		records = append(records, line)
	}
	return records
}

func (s *sweeping) winnerRecords() [][]string {
	load := "max_slo_rate_rps"
	if s.closed() {
		load = "max_slo_concurrency"
	}
	records := [][]string{{"label", "winner_mark", load, "capacity_vs_baseline_pct"}}
	marks := map[string]string{"winner": "yes", "tie": "tie", "": "no"}
	for i, st := range s.standings() {
		rate := ""
		if st.highest.Met() {
			rate = s.loadWord(st.highest.Rate)
		}
		percent, known := strings.CutSuffix(st.versus, " %")
		if !known {
			percent = ""
		}
		records = append(records, []string{s.configs[i].Name, marks[st.word], rate, percent})
	}
	return records
}

func (s *sweeping) targetRecords() [][]string {
	records := [][]string{{"metric", "op", "limit_ms"}}
	for _, l := range s.File.SLO().Limits {
		percentile, metric, _ := strings.Cut(l.String(), " ")
		records = append(records, []string{metric + " " + percentile, "<=", strconv.FormatFloat(milliseconds(l.Max), 'f', -1, 64)})
	}
	return records
}

func (s *sweeping) detailRecords() [][]string {
	head := []string{"metric"}
	for _, c := range s.configs {
		head = append(head, c.Name)
	}
	records := [][]string{head}
	level, _ := s.detailLevel()
	for _, f := range detailFigures {
		line := []string{f.title}
		for i := range s.configs {
			text := ""
			if p, ok := s.configs[i].at(level); ok {
				text = f.word(&s.configs[i], p)
			}
			line = append(line, text)
		}
		records = append(records, line)
	}
	return records
}

// A sweepDocument is the sweep as JSON.
type sweepDocument struct {
	Name      string          `json:"name"`
	Model     string          `json:"model"`
	Simulated string          `json:"simulated,omitempty"` // profile of the simulated server
	Workload  string          `json:"workload"`
	Seed      uint64          `json:"seed"`
	SLO       string          `json:"slo"`
	Cache     trial.Protocol  `json:"cache"`
	Requests  int             `json:"requests"` // at each load
	Baseline  string          `json:"baseline"`
	Configs   []sweptDocument `json:"configs"`
	Summary   string          `json:"summary"`
	Ranking   string          `json:"ranking,omitempty"` // of a closed loop
	Limits    []string        `json:"cannot_tell"`
}

// A sweptDocument is one config.
type sweptDocument struct {
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

func (s *sweeping) writeJSON(w io.Writer) error {
	doc := sweepDocument{
		Name: s.File.Name, Model: s.File.Model, Simulated: s.File.Server.Simulate, Workload: s.Source.Name(), Seed: s.Seed, SLO: s.File.SLO().String(),
		Cache: s.setup.Cache, Requests: s.sweep.Requests, Baseline: s.configs[0].Name, Summary: s.conclusion(), Ranking: s.ranking(), Limits: s.limits(),
	}
	for i, st := range s.standings() {
		c := &s.configs[i]
		d := sweptDocument{
			Name: c.Name, Description: c.Description, Args: s.File.ConfigArgs(c.Config), Complete: len(c.probes) == len(s.sweep.Levels),
			Trouble: c.trouble(), Class: c.result.Class, Evidence: c.result.Evidence, Highest: st.highest, Below: append([]float64{}, st.below...),
			VsBaseline: st.versus, Mark: st.word, Facts: c.result.Facts, GPUSeconds: c.result.GPUTime.Seconds(), Probes: []trial.Probe{}, Notes: c.result.Notes,
		}
		for _, p := range c.probes {
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
