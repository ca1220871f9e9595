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

	"vllmtuner/render"
	"vllmtuner/studies/rights"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
)

// WriteCSV writes all figures as one table with a line for each config and load.
func (s *Sweep) WriteCSV(w io.Writer) error { return writeRecords(w, s.records()) }

// records are all figures, a line for each config and load.
func (s *Sweep) records() [][]string {
	columns := loadtest.Columns(s.closed())
	head := []string{"config"}
	for _, c := range columns {
		head = append(head, c.Name)
	}
	records := [][]string{append(head, maxConcurrent.key, "kv_cache_gib", "simulated", "trouble")}
	simulated := strconv.FormatBool(s.simulated())
	for i := range s.Configs {
		c := &s.Configs[i]
		kv := c.kvCache()
		for _, p := range c.Probes {
			r := loadtest.ResultOf(p)
			line := []string{c.Name}
			for _, column := range columns {
				line = append(line, column.Value(r))
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

// kvCache is the size of the KV cache in GiB; "" where the server did not tell it.
func (c *Config) kvCache() string {
	if gib := c.Result.Facts.KVCacheGiB; gib > 0 {
		return strconv.FormatFloat(gib, 'f', 2, 64)
	}
	return ""
}

func writeRecords(w io.Writer, records [][]string) error {
	out := csv.NewWriter(w)
	if err := out.WriteAll(records); err != nil {
		return err
	}
	return out.Error()
}

// WriteFiles writes each table as a CSV file of its own, in the layout of manual sweeps. The name of the study begins its name.
func (s *Sweep) WriteFiles(dir string) error {
	files := map[string][][]string{"configs": s.configRecords(), "winners": s.winnerRecords(), "slo_targets": s.targetRecords()}
	if s.closed() {
		for i := range s.Configs {
			name := "sweep"
			if len(s.Configs) > 1 {
				name = s.Configs[i].Name + "_sweep"
			}
			files[name] = s.loopRecords(&s.Configs[i])
		}
	} else {
		for _, f := range gridFigures {
			files[f.key] = s.gridRecords(f.word)
		}
		files["slo"] = s.gridRecords(func(_ *Config, p trial.Probe) string { return verdictCell(p) })
		files["baseline_detail"] = s.detailRecords()
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
	return errors.Join(writeRecords(f, records), f.Close())
}

// configRecords are the configs with a column for each flag.
func (s *Sweep) configRecords() [][]string {
	var names []string
	for _, c := range s.Configs {
		for name := range c.Flags {
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
	for i, c := range s.Configs {
		line := []string{strconv.Itoa(i), c.Name}
		for _, name := range names {
			line = append(line, c.Flags[name])
		}
		records = append(records, append(line, c.kvCache(), c.Description))
	}
	return records
}

// gridRecords are loads by configs; a cell is empty where nothing was measured.
func (s *Sweep) gridRecords(cell func(*Config, trial.Probe) string) [][]string {
	head := []string{"rate_rps"}
	for _, c := range s.Configs {
		head = append(head, c.Name)
	}
	records := [][]string{head}
	for _, level := range s.Plan.Levels {
		line := []string{levelText(level)}
		for i := range s.Configs {
			text := ""
			if p, ok := s.Configs[i].at(level); ok {
				text = cell(&s.Configs[i], p)
			}
			line = append(line, text)
		}
		records = append(records, line)
	}
	return records
}

// loopRecords are the figures of one config over concurrencies.
func (s *Sweep) loopRecords(c *Config) [][]string {
	head := []string{"concurrency"}
	for _, f := range loopFigures {
		head = append(head, f.key)
	}
	records := [][]string{head}
	for _, p := range c.Probes {
		line := []string{levelText(p.Level())}
		for _, f := range loopFigures {
			line = append(line, f.word(c, p))
		}
		records = append(records, line)
	}
	return records
}

func (s *Sweep) winnerRecords() [][]string {
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
		percent := ""
		if st.known {
			percent = render.Signed(100 * st.gain)
		}
		records = append(records, []string{s.Configs[i].Name, marks[st.mark], rate, percent})
	}
	return records
}

func (s *Sweep) targetRecords() [][]string {
	records := [][]string{{"metric", "op", "limit_ms"}}
	for _, l := range s.SLO.Limits {
		percentile, metric, _ := strings.Cut(l.String(), " ")
		records = append(records, []string{metric + " " + percentile, "<=", strconv.FormatFloat(render.InMilliseconds(l.Max), 'f', -1, 64)})
	}
	return records
}

func (s *Sweep) detailRecords() [][]string {
	head := []string{"metric"}
	for _, c := range s.Configs {
		head = append(head, c.Name)
	}
	records := [][]string{head}
	level, _ := s.detailLevel()
	for _, f := range detailFigures {
		line := []string{f.title}
		for i := range s.Configs {
			text := ""
			if p, ok := s.Configs[i].at(level); ok {
				text = f.word(&s.Configs[i], p)
			}
			line = append(line, text)
		}
		records = append(records, line)
	}
	return records
}
