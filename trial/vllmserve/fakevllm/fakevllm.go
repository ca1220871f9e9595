// Package fakevllm replaces the vllm command in tests. It never sends a request.
package fakevllm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Main acts as vllm bench serve, but sends nothing. It writes the result that the environment variable FAKE_VLLM
// selects. Without FAKE_VLLM, all requests succeed.
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
		if f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err == nil {
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

// result returns the text of a result file. Every request of the data set has a TTFT of 50 ms and a TPOT of 10 ms. The
// file has only the fields that the tuner reads.
func result(data, how string) string {
	var inputs, outputs []int
	var ttfts []float64
	var itls [][]float64
	var problems []string
	text, err := os.ReadFile(data)
	if err != nil {
		return err.Error()
	}
	for i, line := range slices.Collect(strings.Lines(string(text))) {
		var row struct {
			Prompt string `json:"prompt"`
			Tokens int    `json:"output_tokens"`
		}
		if err := json.Unmarshal([]byte(line), &row); err != nil || row.Prompt == "" || how == "short" && i > 0 {
			continue
		}
		if how == "cut" {
			row.Tokens--
		}
		problem, ttft, gaps := "", 0.05, slices.Repeat([]float64{0.01}, row.Tokens-1)
		if how == "failed" || how == "some" && i%10 == 0 {
			problem, ttft, gaps, row.Tokens = "Service Unavailable", 0, []float64{}, 0
		}
		inputs, outputs = append(inputs, len(strings.Fields(row.Prompt))), append(outputs, row.Tokens)
		ttfts, itls, problems = append(ttfts, ttft), append(itls, gaps), append(problems, problem)
	}
	result, err := json.Marshal(map[string]any{
		"num_prompts": len(inputs), "request_rate": 2.0, "duration": 3.0, "total_input_tokens": 0, "total_output_tokens": 0,
		"input_lens": inputs, "output_lens": outputs, "ttfts": ttfts, "itls": itls, "errors": problems,
	})
	if err != nil {
		return err.Error()
	}
	return string(result)
}
