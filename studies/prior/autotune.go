package prior

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A row is one line of result.txt: a combination of flags that auto_tune.sh measured.
type row struct {
	line         int
	seqs, tokens string
	met          bool
	rate         float64 // requests per second that kept the limit; infinite if all requests were sent at once
	throughput   float64 // requests per second; 0 if the file does not have it
}

// Patterns of the lines of result.txt (vLLM, benchmarks/auto_tune/auto_tune.sh).
var (
	metLine  = regexp.MustCompile(`^max_num_seqs: *(\d+), *max_num_batched_tokens: *(\d+), *request_rate: *(inf|[0-9.]+), *e2el: *([^,]*), *throughput: *([^,]*), *goodput: *(.*)$`)
	missLine = regexp.MustCompile(`^max_num_seqs: *(\d+), *max_num_batched_tokens: *(\d+),? does not meet latency requirement\b`)
	restLine = regexp.MustCompile(`^(hash:|best_max_num_seqs:)`)
)

// parseAutoTune reads the text of a result.txt. An error begins with the line number, counted from 1.
func parseAutoTune(text []byte) (rows []row, err error) {
	known := false
	line := 0
	for raw := range bytes.Lines(text) {
		line++
		words := strings.TrimSpace(string(raw))
		if m := metLine.FindStringSubmatch(words); m != nil {
			r := row{line: line, seqs: m[1], tokens: m[2], met: true}
			if r.rate, err = strconv.ParseFloat(m[3], 64); err != nil {
				return nil, fmt.Errorf("%d: request_rate %.20s is not a number of requests per second; correct the line, or delete it", line, m[3])
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
			return nil, fmt.Errorf("%d: %.60q is not a line of auto_tune.sh's result.txt; give that file, or a .json file of vllm bench serve", line, words)
		}
	}
	if len(rows) == 0 && !known {
		return nil, fmt.Errorf("%d: the file is empty; auto_tune.sh writes a line after each combination that it measured", max(line, 1))
	}
	return rows, nil
}

// carriedRate returns the highest rate that kept the limit. This is the offered rate, or the throughput if all requests
// were sent at once.
func (r row) carriedRate() float64 {
	if math.IsInf(r.rate, 1) {
		return r.throughput
	}
	return r.rate
}

// readAutoTune reads one result.txt into the source.
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
			s.leave(from, "%s: no rate kept the limit, or the server did not start; vllm_log_%s_%s.txt beside the file shows which", point, row.seqs, row.tokens)
		case !(row.carriedRate() > 0):
			s.leave(from, "%s: the file has no throughput, because the benchmark did not end", point)
		default:
			s.take(r, from, point, trial.Result{Outcome: trial.Measured, Capacity: row.capacity()}, nil)
		}
	}
	s.note("auto_tune.sh limits only p99 E2E, and uses dummy weights and 100 to 1,000 requests: its figures may be far from this study's")
	return nil
}

// capacity returns the capacity of a row. It is a lower bound, because the file does not say which rate failed.
func (r row) capacity() capacity.Capacity {
	c := capacity.Capacity{Rate: r.carriedRate(), Low: r.carriedRate(), Bound: capacity.AtLeast, Binding: "p99 E2E", Probes: 1}
	c.Why = fmt.Sprintf("auto_tune.sh found the limit kept at %g req/s, and tried rates in steps of 1", r.rate)
	if math.IsInf(r.rate, 1) {
		c.Why = "auto_tune.sh found the limit kept with all requests sent at once"
	}
	return c
}

var utilizationLog = regexp.MustCompile(`^vllm_log_gpu_memory_utilization_([0-9.]+)\.log$`)

// autoTuneFlags returns the searched flags that auto_tune.sh sets for all servers but does not put into result.txt.
// They are prefix caching and the memory utilization. auto_tune.sh lowers the utilization from 0.98 until a server
// starts. So it used the lowest value that has a log.
func (r *Reader) autoTuneFlags(s *Source, dir string) map[string]string {
	flags := map[string]string{}
	if r.Space.Parameter("enable-prefix-caching") != nil {
		flags["enable-prefix-caching"] = "true"
	}
	const utilization = "gpu-memory-utilization"
	if _, isSet := r.Set[utilization]; isSet || r.Space.Parameter(utilization) == nil {
		return flags
	}
	lowest := 0.0
	logs, _ := os.ReadDir(dir) // if the folder cannot be read, the note below says what to do
	for _, log := range logs {
		m := utilizationLog.FindStringSubmatch(log.Name())
		if m == nil {
			continue
		}
		if v, err := strconv.ParseFloat(m[1], 64); err == nil && (lowest == 0 || v < lowest) {
			lowest = v
		}
	}
	if lowest == 0 {
		s.note("the file does not have the gpu-memory-utilization, so the server's default is assumed: set it with --set gpu-memory-utilization=0.95")
		return flags
	}
	flags[utilization] = strconv.FormatFloat(lowest, 'f', -1, 64)
	return flags
}

// note adds a note about all trials of the source, unless the source has it already.
func (s *Source) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !slices.Contains(s.Notes, text) {
		s.Notes = append(s.Notes, text)
	}
}
