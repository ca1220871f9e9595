package prior

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A row is one combination of auto_tune.sh.
type row struct {
	line         int
	seqs, tokens string
	met          bool
	rate         float64 // requests per second at which its limit was kept; infinite where all were sent at once
	throughput   float64 // requests per second; 0 where it could not be read
}

// The lines of result.txt (vLLM, benchmarks/auto_tune/auto_tune.sh).
var (
	metLine  = regexp.MustCompile(`^max_num_seqs: *(\d+), *max_num_batched_tokens: *(\d+), *request_rate: *(inf|[0-9.]+), *e2el: *([^,]*), *throughput: *([^,]*), *goodput: *(.*)$`)
	missLine = regexp.MustCompile(`^max_num_seqs: *(\d+), *max_num_batched_tokens: *(\d+),? does not meet latency requirement\b`)
	restLine = regexp.MustCompile(`^(hash:|best_max_num_seqs:)`)
)

// parseAutoTune reads the text of a result.txt. The error names the line, from 1.
func parseAutoTune(text []byte) (rows []row, err error) {
	known := false
	line := 0
	for raw := range bytes.Lines(text) {
		line++
		words := strings.TrimSpace(string(raw))
		if m := metLine.FindStringSubmatch(words); m != nil {
			r := row{line: line, seqs: m[1], tokens: m[2], met: true}
			if r.rate, err = strconv.ParseFloat(m[3], 64); err != nil {
				return nil, fmt.Errorf("%d: request_rate %.20s is no number of requests per second; correct the line, or take it out", line, m[3])
			}
			if v, err := strconv.ParseFloat(strings.TrimSpace(m[5]), 64); err == nil && v > 0 && !math.IsInf(v, 0) {
				r.throughput = v
			}
			rows = append(rows, r)
		} else if m := missLine.FindStringSubmatch(words); m != nil {
			rows = append(rows, row{line: line, seqs: m[1], tokens: m[2]})
		} else if restLine.MatchString(words) {
			known = true
		} else if words != "" {
			return nil, fmt.Errorf("%d: %.60q is no line that auto_tune.sh writes to its result.txt; name that file, or one .json file of vllm bench serve", line, words)
		}
	}
	if len(rows) == 0 && !known {
		return nil, fmt.Errorf("%d: it is empty; auto_tune.sh writes a line for each combination when it was measured", max(line, 1))
	}
	return rows, nil
}

// carried is the highest rate that a row says was carried within its limit: the one that was offered, or, where all requests came at
// once, what the server then did.
func (r row) carried() float64 {
	if math.IsInf(r.rate, 1) {
		return r.throughput
	}
	return r.rate
}

// readAutoTune reads one result.txt.
func (r *Reader) readAutoTune(s *Source, path string) error {
	text, err := readFile(path)
	if err != nil {
		return err
	}
	rows, err := parseAutoTune(text)
	if err != nil {
		return fmt.Errorf("%s:%w", path, err)
	}
	common := r.autoTuneFlags(s, filepath.Dir(path))
	for _, row := range rows {
		from := fmt.Sprintf("%s:%d", path, row.line)
		flags := map[string]string{"max-num-seqs": row.seqs, "max-num-batched-tokens": row.tokens}
		maps.Copy(flags, common)
		point, err := r.point(r.withSet(flags))
		switch {
		case err != nil:
			s.leave(from, "%v", err)
		case !row.met:
			s.leave(from, "%s: no rate kept its limit, or the server did not start: the file cannot tell; see vllm_log_%s_%s.txt beside it", point, row.seqs, row.tokens)
		case !(row.carried() > 0):
			s.leave(from, "%s: the file has no throughput; its benchmark did not end", point)
		default:
			s.take(r, from, point, trial.Result{Outcome: trial.Measured, Capacity: row.capacity()}, nil)
		}
	}
	s.note("its limit is on p99 E2E alone, with dummy weights and 100 to 1,000 requests: its figures may be far from this study's")
	return nil
}

// capacity of a row. That the next higher rate failed is not in the file.
func (r row) capacity() capacity.Capacity {
	c := capacity.Capacity{Rate: r.carried(), Low: r.carried(), Bound: capacity.AtLeast, Binding: "p99 E2E", Probes: 1}
	c.Why = fmt.Sprintf("auto_tune.sh: kept at %g req/s, a whole number", r.rate)
	if math.IsInf(r.rate, 1) {
		c.Why = "auto_tune.sh: kept with all requests at once"
	}
	return c
}

var utilizationLog = regexp.MustCompile(`^vllm_log_gpu_memory_utilization_([0-9.]+)\.log$`)

// autoTuneFlags are the searched flags that auto_tune.sh gives every server and does not write down: prefix caching, and the highest
// utilization with which a server started, which is the last that it tried, on its way down from 0.98.
func (r *Reader) autoTuneFlags(s *Source, dir string) map[string]string {
	flags := map[string]string{}
	if r.Space.Parameter("enable-prefix-caching") != nil {
		flags["enable-prefix-caching"] = "true"
	}
	const utilization = "gpu-memory-utilization"
	if _, isSet := r.Set[utilization]; isSet || r.Space.Parameter(utilization) == nil {
		return flags
	}
	logs, err := filepath.Glob(filepath.Join(globbed(dir), "vllm_log_gpu_memory_utilization_*.log"))
	if err != nil {
		return flags
	}
	least := ""
	for _, log := range logs {
		m := utilizationLog.FindStringSubmatch(filepath.Base(log))
		if m == nil {
			continue
		}
		if v, err := strconv.ParseFloat(m[1], 64); err == nil && (least == "" || v < number(least)) {
			least = m[1]
		}
	}
	if least == "" {
		s.note("which gpu-memory-utilization it found is not in the file, and is left to the server's default: say it with --set gpu-memory-utilization=0.95")
		return flags
	}
	flags[utilization] = shortest(number(least))
	return flags
}

// globbed protects a folder's name from being read as a pattern.
func globbed(dir string) string {
	return regexp.MustCompile(`[*?\[\\]`).ReplaceAllString(dir, `\$0`)
}

// number reads what is known to be one.
func number(text string) float64 {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

func shortest(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// note adds what holds for all that was taken, once.
func (s *Source) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if slices.Contains(s.Notes, text) {
		return
	}
	s.Notes = append(s.Notes, text)
}
