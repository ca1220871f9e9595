package main

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
)

// A benchFlag is a flag of tuner bench with its help. Its valueName is the placeholder for the flag's value in the
// help, and is empty for a switch. Its help says what the flag does.
type benchFlag struct {
	cli.Flag
	valueName, help string
}

// A benchGroup is a group of flags in the help of tuner bench. A flat list of 60 flags would be hard to read.
type benchGroup struct {
	name  string
	flags []benchFlag
}

func benchFlags() []benchGroup {
	return []benchGroup{
		{"SERVER", benchServerFlags()}, {"REQUESTS", benchWorkloadFlags()},
		{"LOAD", benchLoadFlags()}, {"RESULTS", benchReportFlags()},
	}
}

// benchServerFlags returns the flags that say how to reach the server.
func benchServerFlags() []benchFlag {
	return []benchFlag{
		{&cli.StringFlag{Name: "url"}, "URL", "base URL, such as http://127.0.0.1:8000"},
		{&cli.StringFlag{Name: "model"}, "NAME", "served model (default: the server's first)"},
		{&cli.StringFlag{Name: "endpoint", Value: workload.Completions}, "NAME",
			"completions or chat (default: completions)"},
		{&cli.StringFlag{Name: "api-key-file"}, "FILE", "file with the API key (default: $OPENAI_API_KEY)"},
		{&cli.GenericFlag{Name: "header", Value: new(headerFlag)}, "'NAME: V'",
			"send this header with each request; may be repeated"},
		{&cli.StringFlag{Name: "ca-file"}, "FILE", "PEM file of the authority that signed the certificate"},
		{&cli.BoolFlag{Name: "insecure"}, "", "do not check the server's certificate"},
		{&cli.StringFlag{Name: "proxy"}, "URL", "HTTP proxy; HTTP_PROXY and the like are not used"},
		{&cli.DurationFlag{Name: "idle-timeout", Value: time.Minute}, "TIME",
			"a request fails if no byte comes for this long (1m)"},
		{&cli.DurationFlag{Name: "answer-limit", Value: 10 * time.Minute}, "TIME",
			"a request fails if it takes longer than this; a run ends this long after its last request was due (10m)"},
	}
}

// benchWorkloadFlags returns the flags that say which requests are sent.
func benchWorkloadFlags() []benchFlag {
	return []benchFlag{
		{&cli.StringFlag{Name: "workload", Value: "random"}, "KIND",
			"random (default), phase1, production, sharegpt, jsonl, prefix-repetition, shared-prefix, trace or " +
				"capture"},
		{&cli.StringFlag{Name: "path"}, "FILE", "file that sharegpt, jsonl, trace and capture read"},
		{&cli.StringFlag{Name: "layout"}, "NAME", "layout of a trace file, if it is not recognised"},
		{&cli.IntFlag{Name: "input-tokens"}, "N", "mean prompt length"},
		{&cli.IntFlag{Name: "output-tokens"}, "N", "mean answer length; with a file, every answer's length"},
		{&cli.Float64Flag{Name: "range-ratio"}, "R", "lengths from (1-R) to (1+R) times the mean; R is 0 to 1"},
		{&cli.IntFlag{Name: "prefix-tokens"}, "N", "length of a shared prefix"},
		{&cli.IntFlag{Name: "prefixes"}, "N", "number of prefixes of prefix-repetition"},
		{&cli.IntFlag{Name: "suffix-tokens"}, "N", "length of the text after a prefix"},
		{&cli.Float64Flag{Name: "hit-percent"}, "P", "percentage of a prompt that shared-prefix shares"},
		{&cli.IntFlag{Name: "groups"}, "N", "groups of requests that share a prefix"},
		{&cli.IntFlag{Name: "vocab-size"}, "N", "token ids are below N"},
		{&cli.StringFlag{Name: "repeat"}, "salt|error",
			"if the file is shorter than the run: salt repeats it with other first tokens, error refuses it (default: repeat it unchanged)"},
		{&cli.BoolFlag{Name: "skip-bad-rows"}, "", "leave bad rows of a file out and count them, instead of refusing the file"},
		{&cli.BoolFlag{Name: "natural"}, "", "let the model end its answers; do not compare such runs"},
		{&cli.Uint64Flag{Name: "seed", Value: 1}, "N", "seed of requests and arrivals (1)"},
	}
}

// benchLoadFlags returns the flags that say when requests are sent, and for how long.
func benchLoadFlags() []benchFlag {
	return []benchFlag{
		{&cli.StringSliceFlag{Name: "rate"}, "R,…", "open loop: requests per second; also FROM:TO:STEP"},
		{&cli.StringSliceFlag{Name: "concurrency"}, "N,…", "closed loop: N requests are always in flight"},
		{&cli.IntFlag{Name: "max-concurrency"}, "N", "with --rate: at most N requests are in flight; others wait in the client"},
		{&cli.StringFlag{Name: "arrivals", Value: "poisson"}, "KIND",
			"poisson (default) or constant; trace: gaps from a file, scaled to the rate; replay: times as in the file"},
		{&cli.Float64Flag{Name: "burstiness", Value: 1}, "B", "gamma arrivals; 1 is Poisson, larger is smoother (1)"},
		{&cli.StringFlag{Name: "trace"}, "FILE", "file with the times (default: --path)"},
		{&cli.Float64Flag{Name: "speed", Value: 1}, "S", "replay S times as fast (1)"},
		{&cli.BoolFlag{Name: "rescale"}, "",
			"send N requests in exactly N/rate seconds, without lead-in and run-out, as vllm bench serve does"},
		{&cli.StringFlag{Name: "ramp-up"}, "KIND", "raise the rate over all requests: linear or exponential"},
		{&cli.Float64Flag{Name: "ramp-from"}, "R", "first rate of the ramp"},
		{&cli.Float64Flag{Name: "ramp-to"}, "R", "last rate of the ramp"},
		{&cli.BoolFlag{Name: "live"}, "", "conversations with real answers; rates are sessions/s"},
		{&cli.DurationFlag{Name: "think-time", Value: 5 * time.Second}, "TIME", "mean pause before the next turn (5s)"},
		{&cli.IntFlag{Name: "requests"}, "N",
			"count at least N requests (300; in a closed loop 10 for each stream and at least 30)"},
		{&cli.Float64Flag{Name: "seconds"}, "S", "count requests for at least S seconds"},
		{&cli.DurationFlag{Name: "lead-in", Value: 5 * time.Second}, "TIME",
			"send load for this time before requests count (5s; in a search 4 times as long as the SLO lets an answer take, " +
				"60s to 5m; with --reset-cache half of that)"},
		{&cli.BoolFlag{Name: "reset-cache"}, "",
			"empty the server's prefix cache before each run; vLLM needs VLLM_SERVER_DEV_MODE=1"},
		{&cli.BoolFlag{Name: "no-run-out"}, "",
			"send nothing after the last counted request, as vllm bench serve does; the last answers are then too quick"},
	}
}

// benchReportFlags returns the flags that say how the answers are judged and reported.
func benchReportFlags() []benchFlag {
	return []benchFlag{
		{&cli.StringSliceFlag{Name: "slo"}, "LIMIT,…",
			"judge each run by limits such as 'p99 ttft <= 1000ms'; exit code 4 when no run keeps them"},
		{&cli.StringSliceFlag{Name: "goodput"}, "M:MS,…", "count requests within limits in ms: ttft:1000 tpot:50"},
		{&cli.BoolFlag{Name: "find-capacity"}, "",
			"search for the highest rate that keeps --slo, beginning at --rate; print it with its 95 % interval and a " +
				"rate to run at; a run takes 2m without --seconds or --requests"},
		{&cli.Float64Flag{Name: "tolerance", Value: 0.2}, "T",
			"narrow the search until the lowest failing rate is at most 1+T times the highest passing one (0.2)"},
		{&cli.StringFlag{Name: "precision"}, "P", "after --tolerance, go on until the capacity is known to ±P: 5% or 0.05"},
		{&cli.DurationFlag{Name: "budget", Value: defaultBudget}, "TIME",
			"begin no run that would end after this time (2h)"},
		{&cli.Float64Flag{Name: "max-rate", Value: maxRate}, "R", "try no rate above R (100000)"},
		{&cli.Float64Flag{Name: "margin", Value: trial.DefaultMargin}, "M",
			"advise M times the lower end of the interval (0.9)"},
		{&cli.BoolFlag{Name: "no-prime"}, "", "before a search, do not fill the prefix cache with one pass of the workload"},
		{&cli.StringFlag{Name: "rules", Value: string(bench.Rules033)}, "VERSION",
			"compute figures as vLLM 0.33 or 0.14.1 does (0.33)"},
		{&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "text"}, "FORMAT",
			"text, csv, yaml or json (vLLM's field names)"},
		{&cli.StringFlag{Name: "result-file"}, "FILE", "write vLLM's result JSON, one line for each run"},
		{&cli.BoolFlag{Name: "append"}, "", "with --result-file: add to FILE instead of replacing it"},
		{&cli.BoolFlag{Name: "detailed"}, "", "list every request in the JSON"},
		{&cli.StringSliceFlag{Name: "metadata"}, "K=V,…", "labels to add to the result JSON, as in vllm bench serve"},
		{&cli.BoolFlag{Name: "quiet"}, "", "no progress on standard error"},
	}
}

// benchHelp returns the help of tuner bench. printHelp breaks its long lines.
func benchHelp(groups []benchGroup) string {
	var text strings.Builder
	text.WriteString(benchUsage)
	for _, group := range groups {
		fmt.Fprintf(&text, "\n%s:\n", group.name)
		table := render.Table{Indent: 3, Columns: []render.Column{{MinWidth: 19}, {}}}
		for _, f := range group.flags {
			name := "--" + f.Names()[0]
			for _, short := range f.Names()[1:] {
				name = "-" + short + ", " + name
			}
			table.Rows = append(table.Rows, []string{strings.TrimSpace(name + " " + f.valueName), f.help})
		}
		for _, line := range table.Lines(math.MaxInt) {
			text.WriteString(line + "\n")
		}
	}
	return text.String() + "\nSee also: docs/bench.md\n"
}

// benchUsage is the beginning of the help of tuner bench.
const benchUsage = `NAME:
   tuner bench - send a load to a running server and measure its answers

USAGE:
   tuner bench --url URL --rate R,… | --concurrency N,… [options]

   Works with any OpenAI-compatible server. A latency counts from the moment
   the request was due. The report also says how late requests were sent.
   Ctrl-C ends the current run; runs that are already printed stay valid.

EXAMPLES:
   tuner bench --url http://127.0.0.1:8000 --rate 2
   tuner bench --url http://127.0.0.1:8000 --workload sharegpt \
       --path ShareGPT.json --rate 1:8:1 --slo 'p99 ttft <= 1000ms'
   tuner bench --url http://127.0.0.1:8000 --concurrency 1,2,4,8,16 -o csv
   tuner bench --url http://127.0.0.1:8000 --find-capacity \
       --slo 'p99 ttft <= 1000ms, p99 tpot <= 60ms' --precision 5%
`
