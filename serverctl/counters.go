package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
)

// Counters reads the server's counters and gauges from /metrics.
func (s *Server) Counters(ctx context.Context) (Counters, error) {
	a, err := s.call(ctx, http.MethodGet, "/metrics", nil, callTimeout)
	if err == nil {
		err = a.failed("GET /metrics")
	}
	if err != nil {
		return Counters{}, fmt.Errorf("read the server's counters: %w", err)
	}
	c, err := parseCounters(string(a.body))
	if err != nil {
		return Counters{}, fmt.Errorf("read the server's counters: %w", err)
	}
	return c, nil
}

// parseCounters parses the text format of Prometheus, as vllm/v1/metrics/loggers.py fills it (0.14.1 to 0.33.0). Each
// engine of a server has its own samples: counters are summed, and KVUsage is their mean. Names must match
// completely, which excludes _created and other names that begin alike.
func parseCounters(text string) (Counters, error) {
	var c Counters
	fields := map[string]*float64{
		"vllm:num_requests_running":                  &c.Running,
		"vllm:num_requests_waiting":                  &c.Waiting,
		"vllm:kv_cache_usage_perc":                   &c.KVUsage,
		"vllm:prefix_cache_queries_total":            &c.PrefixQueries,
		"vllm:prefix_cache_hits_total":               &c.PrefixHits,
		"vllm:num_preemptions_total":                 &c.Preemptions,
		"vllm:prompt_tokens_total":                   &c.PromptTokens,
		"vllm:generation_tokens_total":               &c.GenerationTokens,
		"vllm:spec_decode_num_drafts_total":          &c.Drafts,
		"vllm:spec_decode_num_draft_tokens_total":    &c.DraftTokens,
		"vllm:spec_decode_num_accepted_tokens_total": &c.AcceptedTokens,
	}
	seen := map[string]int{}
	for line := range strings.Lines(text) {
		name, value, ok := parseSample(line)
		if !ok {
			continue
		}
		if name == acceptedAt {
			if err := c.acceptAt(line, value); err != nil {
				return Counters{}, err
			}
			continue
		}
		if field := fields[name]; field != nil {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return Counters{}, fmt.Errorf("%s: %q is not a number", name, value)
			}
			*field += v
			seen[name]++
		}
	}
	if seen["vllm:num_requests_running"] == 0 {
		return Counters{}, errors.New("/metrics has no vllm:num_requests_running; remove --disable-log-stats from server.args")
	}
	c.KVUsage /= float64(max(1, seen["vllm:kv_cache_usage_perc"]))
	return c, nil
}

// acceptedAt has one sample per engine and position, with the label position="0" (vllm/v1/spec_decode/metrics.py).
const acceptedAt = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

var positionLabel = regexp.MustCompile(`position="(\d{1,3})"`)

// acceptAt adds one sample of acceptedAt.
func (c *Counters) acceptAt(line, value string) error {
	label := positionLabel.FindStringSubmatch(line)
	v, err := strconv.ParseFloat(value, 64)
	if label == nil || err != nil {
		return fmt.Errorf("%s: %q has no position, or no number", acceptedAt, shorten(line))
	}
	position := int(parseFigure(label[1]))
	for len(c.AcceptedAt) <= position {
		c.AcceptedAt = append(c.AcceptedAt, 0)
	}
	c.AcceptedAt[position] += v
	return nil
}

// parseSample splits a line such as name{label="value"} 1.0 [timestamp]. The value of a label may hold anything but a line
// break, so the last brace ends the labels.
func parseSample(line string) (name, value string, ok bool) {
	line = strings.TrimSpace(line)
	if line == "" || line[0] == '#' {
		return "", "", false
	}
	rest := line
	if i := strings.IndexByte(line, '{'); i >= 0 {
		end := strings.LastIndexByte(line, '}')
		if end < i {
			return "", "", false
		}
		name, rest = line[:i], line[end+1:]
	} else {
		name, rest, _ = strings.Cut(line, " ")
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return "", "", false
	}
	return name, fields[0], true
}
