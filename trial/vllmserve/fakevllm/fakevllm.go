// Package fakevllm stands in for the vllm command, for tests alone. It never sends a request.
package fakevllm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Main is a vllm bench serve that sends nothing. It writes the result that FAKE_VLLM names, in the layout of 0.14.1. Without
// FAKE_VLLM, all requests succeed.
func Main() {
	how := os.Getenv("FAKE_VLLM")
	fmt.Println("Namespace(backend='openai')")
	option := func(name string) string {
		at := slices.Index(os.Args, name)
		if at < 0 || at+1 == len(os.Args) {
			fmt.Fprintln(os.Stderr, "error: missing", name)
			os.Exit(2)
		}
		return os.Args[at+1]
	}
	if log := os.Getenv("FAKE_VLLM_ARGS"); log != "" {
		f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			fmt.Fprintln(f, strings.Join(os.Args[1:], " "))
			f.Close()
		}
	}
	path := filepath.Join(option("--result-dir"), option("--result-filename"))
	text := result(option("--dataset-path"), how)
	switch how {
	case "crash":
		fmt.Fprintln(os.Stderr, "Traceback (most recent call last):\nValueError: tokenizer not found")
		os.Exit(1)
	case "pandas":
		fmt.Fprintln(os.Stderr, "ModuleNotFoundError: No module named 'pandas'")
		os.Exit(1)
	case "hang":
		time.Sleep(time.Hour)
	case "nothing":
		return
	case "garbage":
		text = "{\"completed\": oops"
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// result is a result file in which each row of the data set was answered with a TTFT of 50 ms and a TPOT of 10 ms.
func result(data, how string) string {
	var inputs, outputs []int
	var ttfts []float64
	var itls [][]float64
	var problems []string
	f, err := os.Open(data)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	for i := 0; in.Scan(); i++ {
		var row struct {
			Prompt string `json:"prompt"`
			Tokens int    `json:"output_tokens"`
		}
		if err := json.Unmarshal(in.Bytes(), &row); err != nil || row.Prompt == "" || how == "short" && i > 0 {
			continue
		}
		problem := ""
		if how == "failed" || how == "some" && i%10 == 0 {
			problem = "Service Unavailable"
		}
		inputs, problems = append(inputs, len(strings.Fields(row.Prompt))), append(problems, problem)
		if problem != "" {
			outputs, ttfts, itls = append(outputs, 0), append(ttfts, 0), append(itls, []float64{})
			continue
		}
		if how == "cut" {
			row.Tokens--
		}
		outputs, ttfts, itls = append(outputs, row.Tokens), append(ttfts, 0.05), append(itls, slices.Repeat([]float64{0.01}, row.Tokens-1))
	}
	n, failed := len(inputs), 0
	for _, p := range problems {
		failed += min(1, len(p))
	}
	fields := map[string]any{
		"date": "20260101-000000", "backend": "openai", "endpoint_type": "openai", "label": nil, "model_id": "m", "tokenizer_id": "m",
		"num_prompts": n, "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": nil, "duration": 3.0, "completed": n - failed,
		"failed": failed, "total_input_tokens": 8 * n, "total_output_tokens": 8 * (n - failed), "request_throughput": 2.0, "request_goodput": nil,
		"output_throughput": 16.0, "total_token_throughput": 32.0, "max_output_tokens_per_s": 20.0, "max_concurrent_requests": 3,
		"input_lens": inputs, "output_lens": outputs, "ttfts": ttfts, "itls": itls, "errors": problems, "generated_texts": make([]string, n),
	}
	for _, metric := range []string{"ttft", "tpot", "itl", "e2el"} {
		for _, name := range []string{"mean_%s_ms", "median_%s_ms", "std_%s_ms", "p50_%s_ms", "p90_%s_ms", "p95_%s_ms", "p99_%s_ms", "p99.9_%s_ms"} {
			fields[fmt.Sprintf(name, metric)] = 0.0
		}
	}
	text, err := json.Marshal(fields)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
