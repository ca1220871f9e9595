package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"vllmtuner/serverctl/exposition"
)

// Counters reads the server's counters and gauges from /metrics.
func (s *Server) Counters(ctx context.Context) (Counters, error) { return s.client.counters(ctx) }

func (c *client) counters(ctx context.Context) (Counters, error) {
	a, err := c.call(ctx, http.MethodGet, "/metrics", nil, callTimeout)
	if err == nil {
		err = a.checkStatus("GET /metrics")
	}
	var counters Counters
	if err == nil {
		counters, err = parseCounters(string(a.body))
	}
	if err != nil {
		return Counters{}, fmt.Errorf("read the server's counters: %w", err)
	}
	return counters, nil
}

// parseCounters reads the metrics of vllm/v1/metrics/loggers.py (0.14.1 to 0.33.0). Each engine of a server has its own
// samples. parseCounters adds up the counters of all engines, but takes the mean of their KVUsage.
func parseCounters(text string) (Counters, error) {
	samples, err := exposition.Parse(text)
	if err != nil {
		return Counters{}, err
	}
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
	for _, s := range samples {
		if field := fields[s.Name]; field != nil {
			*field += s.Value
			seen[s.Name]++
		} else if s.Name == acceptedAt {
			if err := c.acceptAt(s); err != nil {
				return Counters{}, err
			}
		}
	}
	if seen["vllm:num_requests_running"] == 0 {
		return Counters{}, errors.New("/metrics has no vllm:num_requests_running; remove --disable-log-stats from server.args")
	}
	c.KVUsage /= float64(max(1, seen["vllm:kv_cache_usage_perc"]))
	return c, nil
}

// acceptedAt is the name of a metric that has one sample per engine and position in the draft
// (vllm/v1/spec_decode/metrics.py). The label of the first position is position="0".
const acceptedAt = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

// acceptAt adds one sample of acceptedAt to the counter of the sample's position.
func (c *Counters) acceptAt(s exposition.Sample) error {
	position, err := strconv.ParseUint(s.Labels["position"], 10, 8) // 8 bits are enough, because nobody drafts 256 tokens
	if err != nil {
		return fmt.Errorf("%s: the position %q is not a number", acceptedAt, shorten(s.Labels["position"]))
	}
	for uint64(len(c.AcceptedAt)) <= position {
		c.AcceptedAt = append(c.AcceptedAt, 0)
	}
	c.AcceptedAt[position] += s.Value
	return nil
}
