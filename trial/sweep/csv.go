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
func (s *Sweep) WriteCSV(w io.Writer) error { return csv.NewWriter(w).WriteAll(s.records()) }

// records are all figures, a line for each config and load.
func (s *Sweep) records() [][]string {
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

// kvCache is the size of the KV cache in GiB; "" where the server did not tell it.
func (c *Config) kvCache() string { return kvCache.people(c, trial.Probe{}) }

// WriteFiles writes each table as a CSV file of its own, in the layout of manual sweeps. The name of the study begins its name.
func (s *Sweep) WriteFiles(dir string) error {
	files := map[string][][]string{"configs": s.configRecords(), "winners": s.winnerRecords(), "slo_targets": s.targetRecords()}
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

// configRecords are the configs with a column for each flag.
func (s *Sweep) configRecords() [][]string {
	names := s.flagNames()
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

func (s *Sweep) winnerRecords() [][]string {
	load := "max_slo_rate_rps"
	if s.closed() {
		load = "max_slo_concurrency"
	}
	records := [][]string{{"label", "winner_mark", load, "capacity_vs_baseline_pct"}}
	marks := map[string]string{"winner": "yes", "tie": "tie", "": "no"}
	for i, st := range s.compare().all {
		rate := ""
		if st.Met() {
			rate = s.loadWord(st.Rate)
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
