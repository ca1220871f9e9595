package studyfile

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

var metrics = []slo.Metric{slo.TTFT, slo.TPOT, slo.ITL, slo.E2E}

const (
	percentileForm = `([0-9]{1,3}(?:\.[0-9]{1,6})?)`
	errorRate      = "error_rate"
)

var (
	// limitForm matches the name of a limit in a study file, such as ttft_p99.
	limitForm = regexp.MustCompile(`^([a-z0-9]+)_p` + percentileForm + `$`)
	// turnedForm matches the other names of limits: "p99 ttft", and vLLM's p99_e2el_ms.
	turnedForm = regexp.MustCompile(`^p` + percentileForm + `[ _]*([a-z][a-z0-9]*?)(?:_ms)?$`)
	// lineForm matches a limit in one line: a name, a sign and a time.
	lineForm = regexp.MustCompile(`^(.*?) *(?:<=|<|=|:) *(.+)$`)
)

// LimitExample shows how to write a limit in one line.
const LimitExample = `write "p99 ttft <= 1000ms", or as in a study file ttft_p99=1000ms; error_rate=1% lets 1 % of the requests fail`

// ParseSLO parses limits. Each line has one limit, such as "p99 ttft <= 1000ms" or, as in a study file, "ttft_p99:
// 1000ms". The error begins with the wrong line.
func ParseSLO(lines []string) (s slo.SLO, err error) {
	for _, line := range lines {
		line = strings.ToLower(strings.TrimSpace(line))
		if err := parseLimit(&s, line); err != nil {
			return s, fmt.Errorf("%q: %w", line, err)
		}
	}
	return s, nil
}

// parseLimit parses one line, and adds its limit to s.
func parseLimit(s *slo.SLO, line string) (err error) {
	if share, ok := strings.CutPrefix(line, errorRate); ok {
		s.MaxErrorRate, err = Fraction(errorRate, strings.Trim(share, " <=:"))
		return err
	}
	parts := lineForm.FindStringSubmatch(line)
	if parts == nil {
		if limit, ok := limitNamed(nameInFile(line)); ok {
			return fmt.Errorf("has no time; write \"%s <= 1000ms\"", strings.ToLower(limit.String()))
		}
		return errors.New("is no limit; " + LimitExample)
	}
	name := nameInFile(parts[1])
	limit, ok := limitNamed(name)
	if !ok {
		return fmt.Errorf("there is no latency %q; %s", parts[1], limitRemedy(name))
	}
	if err := checkPercentile(limit); err != nil {
		return err
	}
	if limit.Max, err = latency(parts[1], strings.ReplaceAll(parts[2], " ", "")); err != nil {
		return err
	}
	return addLimit(s, limit)
}

// nameInFile returns the name of a limit as a study file has it. It returns other words unchanged.
func nameInFile(name string) string {
	if parts := turnedForm.FindStringSubmatch(name); parts != nil {
		name = parts[2] + "_p" + parts[1]
	}
	return strings.Replace(name, "e2el_", "e2e_", 1)
}

// limitNamed returns the limit with the given name in a study file, without its Max.
func limitNamed(name string) (limit slo.Limit, ok bool) {
	parts := limitForm.FindStringSubmatch(name)
	if parts == nil || !slices.Contains(metrics, slo.Metric(parts[1])) {
		return slo.Limit{}, false
	}
	percentile, err := strconv.ParseFloat(parts[2], 64)
	return slo.Limit{Metric: slo.Metric(parts[1]), Percentile: percentile}, err == nil
}

// limitRemedy says what to write instead of a name that limitNamed does not know.
func limitRemedy(name string) string {
	inFile := nameInFile(name)
	if _, ok := limitNamed(inFile); ok {
		return "write " + inFile
	}
	known := []string{errorRate}
	for _, metric := range metrics {
		for _, percentile := range []string{"50", "90", "95", "99", "99.9"} {
			known = append(known, string(metric)+"_p"+percentile)
		}
	}
	if best := space.Nearest(inFile, known); best != "" {
		return "did you mean \"" + best + "\"?"
	}
	return "write ttft, tpot, itl or e2e with a percentile, such as ttft_p99, or error_rate"
}

func checkPercentile(limit slo.Limit) error {
	if limit.Percentile <= 0 || limit.Percentile >= 100 {
		return fmt.Errorf("the percentile must be above 0 and below 100; write %s_p99", limit.Metric)
	}
	return nil
}

// latency parses the Max of a limit. It requires a unit, because 1000 could mean seconds or milliseconds.
var latency = duration(time.Microsecond, "ms")

// addLimit adds a limit, unless s has one on the same percentile of the same metric.
func addLimit(s *slo.SLO, limit slo.Limit) error {
	if slices.ContainsFunc(s.Limits, func(l slo.Limit) bool { return l.Metric == limit.Metric && l.Percentile == limit.Percentile }) {
		return fmt.Errorf("the limit on %s is given twice; remove one", limit)
	}
	s.Limits = append(s.Limits, limit)
	return nil
}
