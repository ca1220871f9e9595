package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
	"vllmtuner/serverctl/proc"
)

// A vllmBench is the load of a trial that vllm bench serve sends (0.14.1 to 0.33). It differs from the tuner's own: latencies
// count from the POST and not from the due time, the lead-in is a run of its own, nothing is sent after the window, and a
// probe cannot be ended early.
type vllmBench struct {
	command   []string // to which the options are appended
	env       []string // of the command, beside the tuner's own
	client    *bench.Client
	tokenizer string    // the model as its tokenizer is found: Hugging Face id, or path
	dir       string    // for data sets and results, which are removed again
	log       io.Writer // gets what the command prints
	limit     time.Duration

	burstiness float64 // of its arrivals; 0 means Poisson
}

const (
	// benchStart is what vllm bench serve may take before it sends: its imports take 8 s on a quiet machine, and long prompts
	// are tokenised first.
	benchStart = 5 * time.Minute
	// benchDrain is how long its last answers may take: it has no limit of its own below six hours.
	benchDrain = 10 * time.Minute
	benchGrace = 2 * time.Second // from SIGTERM to SIGKILL
)

// Run sends the schedule up to its run-out. stop is never asked: vllm bench serve tells nothing before its end.
func (v *vllmBench) Run(ctx context.Context, schedule workload.Schedule, _ bench.Stop) (bench.Run, error) {
	start := time.Now()
	var lead, window []workload.Arrival
	for a := range schedule {
		switch a.Phase {
		case workload.LeadIn:
			lead = append(lead, a)
			continue
		case workload.Window:
			window = append(window, a)
			continue
		}
		break
	}
	var run bench.Run
	if len(lead) > 0 {
		samples, err := v.send(ctx, lead)
		if err != nil {
			return run, err
		}
		run.Others = len(lead)
		for _, s := range samples {
			if s.Failure != "" {
				run.Broken++
				run.BrokenDetail = cmp.Or(run.BrokenDetail, string(s.Failure)+": "+s.Detail)
			}
		}
	}
	if len(window) > 0 {
		samples, err := v.send(ctx, window)
		if err != nil {
			return run, err
		}
		run.Samples = samples
	}
	run.Elapsed = time.Since(start)
	return run, nil
}

// send lets vllm bench serve send the requests at the mean rate of the arrivals, and returns a sample of each, in their order.
func (v *vllmBench) send(ctx context.Context, arrivals []workload.Arrival) ([]bench.Sample, error) {
	dir, err := os.MkdirTemp(v.dir, "load-*")
	if err != nil {
		return nil, fmt.Errorf("vllm bench serve: %w", err)
	}
	samples, err := v.sendIn(ctx, dir, arrivals)
	return samples, errors.Join(err, os.RemoveAll(dir))
}

const resultFile = "result.json"

func (v *vllmBench) sendIn(ctx context.Context, dir string, arrivals []workload.Arrival) ([]bench.Sample, error) {
	data := filepath.Join(dir, "requests.jsonl")
	if err := v.writeRequests(ctx, data, arrivals); err != nil {
		return nil, err
	}
	ended, err := v.execute(ctx, dir, v.args(data, dir, arrivals), arrivals)
	if err != nil {
		return nil, err
	}
	if !ended {
		return neverFinished(arrivals, v.wait(arrivals)), nil
	}
	text, err := foreign.Read(filepath.Join(dir, resultFile), 1<<30) // 100,000 requests in detail have 300 MB
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s ended well and wrote no result", v)
	}
	if err != nil {
		return nil, fmt.Errorf("read the result of %s: %w", v, err)
	}
	result, err := bench.ReadVLLMResult(text, nil)
	if err != nil {
		return nil, fmt.Errorf("read the result of %s: %w", v, err)
	}
	if len(result.Samples) != len(arrivals) {
		return nil, fmt.Errorf("%s wrote a result of %d requests, want %d", v, len(result.Samples), len(arrivals))
	}
	place(result.Samples, arrivals)
	return result.Samples, nil
}

// String is the command, for errors.
func (v *vllmBench) String() string { return strings.Join(v.command, " ") }

// place gives the samples what vLLM does not know: the lengths that were pinned, which it does not check, and the time line of
// the plan. 0.14.1 does not say when a request was sent; then it is taken to be when it was planned, which says nothing
// of latencies and only spreads the requests over the window.
func place(samples []bench.Sample, arrivals []workload.Arrival) {
	told := false
	for i := range samples {
		told = told || samples[i].Sent > 0
	}
	begin := arrivals[0].Due - samples[0].Due
	for i := range samples {
		s, a := &samples[i], arrivals[i]
		by := begin
		if !told {
			by = a.Due
		}
		for _, t := range []*time.Duration{&s.Due, &s.Sent, &s.Connected, &s.End} {
			*t += by
		}
		s.Phase, s.Index, s.WantTokens = a.Phase, a.Index, a.Request.OutputTokens
		if s.Failure != "" {
			continue
		}
		s.First += by
		s.Last += by
		if s.OutputTokens != s.WantTokens {
			s.Failure, s.Detail = bench.WrongLength, fmt.Sprintf("%d tokens were generated, %d were asked for", s.OutputTokens, s.WantTokens)
		}
	}
}

// neverFinished are the samples of a command that was ended because it took too long.
func neverFinished(arrivals []workload.Arrival, after time.Duration) []bench.Sample {
	samples := make([]bench.Sample, len(arrivals))
	for i, a := range arrivals {
		samples[i] = bench.Sample{
			Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, End: a.Due + after, WantTokens: a.Request.OutputTokens, Conversation: -1,
			Failure: bench.NeverFinished, Detail: fmt.Sprintf("vllm bench serve had not ended after %s", after.Round(time.Second)),
		}
	}
	return samples
}

// args are the options of one call. The result has all lists, because its sums leave failed requests out.
func (v *vllmBench) args(data, dir string, arrivals []workload.Arrival) []string {
	backend, endpoint := "openai", "/v1/completions"
	if v.client.Endpoint == workload.Chat {
		backend, endpoint = "openai-chat", "/v1/chat/completions"
	}
	rate := "inf"
	if r := meanRate(arrivals); r > 0 {
		rate = strconv.FormatFloat(r, 'f', -1, 64)
	}
	args := append(v.command[:len(v.command):len(v.command)],
		"--backend", backend, "--base-url", v.client.URL, "--endpoint", endpoint,
		"--model", v.tokenizer, "--served-model-name", v.client.Model,
		"--dataset-name", "custom", "--dataset-path", data, "--custom-output-len", "-1",
		"--skip-chat-template", "--disable-shuffle", "--no-oversample",
		"--num-prompts", strconv.Itoa(len(arrivals)), "--request-rate", rate,
		"--temperature", "0", "--disable-tqdm",
		"--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99,99.9",
		"--save-result", "--save-detailed", "--result-dir", dir, "--result-filename", resultFile)
	if v.burstiness > 0 {
		args = append(args, "--burstiness", strconv.FormatFloat(v.burstiness, 'f', -1, 64))
	}
	if !v.client.Natural {
		args = append(args, "--ignore-eos")
	}
	return args
}

// meanRate is that of the arrivals in requests per second; 0 when they are at once, or only one.
func meanRate(arrivals []workload.Arrival) float64 {
	took := (arrivals[len(arrivals)-1].Due - arrivals[0].Due).Seconds()
	if took <= 0 {
		return 0
	}
	return float64(len(arrivals)-1) / took
}

// wait is how long one call may take.
func (v *vllmBench) wait(arrivals []workload.Arrival) time.Duration {
	return cmp.Or(v.limit, benchStart+arrivals[len(arrivals)-1].Due-arrivals[0].Due+benchDrain)
}

// execute runs the command. It reports false when it took too long; ctx ends it with its cause.
func (v *vllmBench) execute(ctx context.Context, dir string, argv []string, arrivals []workload.Arrival) (ended bool, err error) {
	env := append(os.Environ(), v.env...)
	if v.client.APIKey != "" {
		env = append(env, "OPENAI_API_KEY="+string(v.client.APIKey))
	}
	last := &lastOutput{to: v.log}
	p, err := proc.Start(proc.Spec{Argv: argv, Env: env, Dir: dir, Output: last})
	if err != nil {
		return false, fmt.Errorf("load.command: %w", err)
	}
	tooLong := time.NewTimer(v.wait(arrivals))
	defer tooLong.Stop()
	select {
	case <-p.Exited():
		ended = true
	case <-tooLong.C:
	case <-ctx.Done():
		return false, errors.Join(context.Cause(ctx), p.Stop(ctx, benchGrace))
	}
	code, ending := p.ExitCode(), p.Ending()
	if err := p.Stop(context.WithoutCancel(ctx), benchGrace); err != nil {
		return ended, fmt.Errorf("end %s: %w", v, err)
	}
	if ended && code != 0 {
		return true, fmt.Errorf("%s: %s%s; its last words:\n%s", v, ending, last.remedy(), last)
	}
	return ended, nil
}

// writeRequests writes the requests as the custom data set of vllm bench serve.
func (v *vllmBench) writeRequests(ctx context.Context, path string, arrivals []workload.Arrival) error {
	texts := make([]string, len(arrivals))
	work, ctx := errgroup.WithContext(ctx)
	const atOnce = 8
	work.SetLimit(atOnce)
	for i, a := range arrivals {
		work.Go(func() (err error) {
			if texts[i], err = v.text(ctx, a.Request); err != nil {
				return fmt.Errorf("request %d of the %s: %w", a.Index+1, a.Phase, err)
			}
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return fmt.Errorf("load.driver vllm-bench: %w", err)
	}
	var rows bytes.Buffer
	lines := json.NewEncoder(&rows)
	for i, a := range arrivals {
		row := struct {
			Prompt       string `json:"prompt"`
			OutputTokens int    `json:"output_tokens"`
		}{texts[i], a.Request.OutputTokens}
		if err := lines.Encode(row); err != nil {
			return fmt.Errorf("write the requests for %s: %w", v, err)
		}
	}
	return os.WriteFile(path, rows.Bytes(), 0o600)
}

// text is the prompt as vllm bench serve takes it.
func (v *vllmBench) text(ctx context.Context, r *workload.Request) (string, error) {
	switch {
	case r.Tokens != nil:
		return v.client.Detokenize(ctx, r.Tokens)
	case len(r.Messages) == 0:
		return r.Text, nil
	case len(r.Messages) == 1 && r.Messages[0].Role == "user":
		return r.Messages[0].Content, nil
	}
	return "", errors.New("is a chat of several messages, and the custom data set of vllm bench serve has one prompt a row: take driver tuner")
}

// A lastOutput passes on what a child prints, and keeps its last lines.
type lastOutput struct {
	to   io.Writer
	kept []byte
}

const keptOutput = 4 << 10

// Write keeps and passes on. It is called by one goroutine, and the rest reads when that has ended.
func (l *lastOutput) Write(b []byte) (int, error) {
	l.kept = append(l.kept, b...)
	if extra := len(l.kept) - keptOutput; extra > 0 {
		l.kept = l.kept[extra:]
	}
	if l.to == nil {
		return len(b), nil
	}
	return l.to.Write(b)
}

// remedy is what helps against the usual reason to fail: a plain vLLM lacks the packages that its own bench needs.
func (l *lastOutput) remedy() string {
	if bytes.Contains(l.kept, []byte("No module named 'pandas'")) || bytes.Contains(l.kept, []byte("vllm[bench]")) {
		return " for lack of a package; install them with pip install 'vllm[bench]'"
	}
	return ""
}

// String returns the last lines.
func (l *lastOutput) String() string {
	const most = 12
	var lines []string
	for in := bufio.NewScanner(bytes.NewReader(l.kept)); in.Scan(); {
		if line := strings.TrimSpace(in.Text()); line != "" {
			lines = append(lines, "  "+line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}
