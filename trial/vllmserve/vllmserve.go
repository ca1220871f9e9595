// Package vllmserve has a Load for trials that runs vllm bench serve to send the requests. It never judges the results.
package vllmserve

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
	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
)

// A Load sends the requests of a trial with vllm bench serve (0.14.1 to 0.33). It differs from the tuner's own load in
// four ways. Latencies count from the POST, not from the due time. The lead-in is a separate run. Nothing is sent after
// the window. A probe cannot be ended early.
type Load struct {
	Command    []string // command to run, such as vllm bench serve; Load appends the options
	Env        []string // environment variables, added to the tuner's own
	Client     *bench.Client
	Tokenizer  string        // the model, as a Hugging Face id or a path
	Dir        string        // directory for data sets and results; Load removes them afterwards
	Log        io.Writer     // receives the output of the command; may be nil
	Limit      time.Duration // time limit of one call; 0 means startTime + the planned time + drainTime
	Burstiness float64       // burstiness of the arrivals; 0 means Poisson
}

const (
	// startTime is how long vllm bench serve may take before it sends the first request. Its imports take 8 s on an
	// idle machine. After that it tokenises the prompts, which may be long.
	startTime = 5 * time.Minute
	// drainTime is how long the last answers may take. Without this limit, vllm bench serve would wait six hours for an
	// answer.
	drainTime = 10 * time.Minute
	stopGrace = 2 * time.Second // time between SIGTERM and SIGKILL
)

// Run sends the lead-in and the window of the schedule, without the run-out. It cannot use a bench.Stop, because vllm
// bench serve reports nothing before its end.
func (l *Load) Run(ctx context.Context, schedule workload.Schedule, _ bench.Stop) (bench.Run, error) {
	start := time.Now()
	lead, window := split(schedule)
	uncounted, err := l.send(ctx, lead)
	if err != nil {
		return bench.Run{}, err
	}
	counted, err := l.send(ctx, window)
	if err != nil {
		return bench.Run{}, err
	}
	run := bench.Run{Samples: counted, Others: len(uncounted), Elapsed: time.Since(start)}
	for _, s := range uncounted {
		if s.Failure != "" {
			run.Broken++
			run.BrokenDetail = cmp.Or(run.BrokenDetail, string(s.Failure)+": "+s.Detail)
		}
	}
	return run, nil
}

// split returns the arrivals of the lead-in and of the window. It leaves out the run-out, which is the end of the
// schedule.
func split(schedule workload.Schedule) (lead, window []workload.Arrival) {
	for a := range schedule {
		switch a.Phase {
		case workload.LeadIn:
			lead = append(lead, a)
		case workload.Window:
			window = append(window, a)
		default:
			return lead, window
		}
	}
	return lead, window
}

// send runs vllm bench serve, which sends the requests at the mean rate of the arrivals. The result has one sample for
// each arrival, in the same order.
func (l *Load) send(ctx context.Context, arrivals []workload.Arrival) ([]bench.Sample, error) {
	if len(arrivals) == 0 {
		return nil, nil
	}
	dir, err := os.MkdirTemp(l.Dir, "load-*")
	if err != nil {
		return nil, fmt.Errorf("vllm bench serve: %w", err)
	}
	samples, err := l.sendIn(ctx, dir, arrivals)
	return samples, errors.Join(err, os.RemoveAll(dir))
}

func (l *Load) sendIn(ctx context.Context, dir string, arrivals []workload.Arrival) ([]bench.Sample, error) {
	path, err := l.Call(ctx, dir, arrivals)
	if errors.Is(err, errTooLong) {
		return neverFinished(arrivals, l.wait(arrivals)), nil
	}
	if err != nil {
		return nil, err
	}
	text, err := foreign.Read(path, maxResult)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s ended with exit code 0 but wrote no result", l)
	}
	if err != nil {
		return nil, fmt.Errorf("read the result of %s: %w", l, err)
	}
	result, err := bench.ReadVLLMResult(text, nil)
	if err != nil {
		return nil, fmt.Errorf("read the result of %s: %w", l, err)
	}
	if len(result.Samples) != len(arrivals) {
		return nil, fmt.Errorf("%s wrote a result of %s instead of %d", l, render.Count(len(result.Samples), "request"), len(arrivals))
	}
	complete(result.Samples, arrivals)
	return result.Samples, nil
}

// maxResult is the largest result file that is read, in bytes. The detailed result of 100,000 requests takes 300 MB.
const maxResult = 1 << 30

// errTooLong says that a call of vllm bench serve was ended because it exceeded its time limit.
var errTooLong = errors.New("vllm bench serve did not end in time")

// Call runs vllm bench serve once, and returns the path of the result file that it wrote to dir. The given options come
// last on the command line, so they replace the Load's own. The error is errTooLong after the time limit. If ctx ends
// first, the error wraps the cause of ctx.
func (l *Load) Call(ctx context.Context, dir string, arrivals []workload.Arrival, options ...string) (path string, err error) {
	const result = "result.json"
	data := filepath.Join(dir, "requests.jsonl")
	if err := l.writeRequests(ctx, data, arrivals); err != nil {
		return "", err
	}
	args := append(l.args(data, dir, result, arrivals), options...)
	return filepath.Join(dir, result), l.execute(ctx, dir, args, arrivals)
}

// String returns the command for error messages.
func (l *Load) String() string { return strings.Join(l.Command, " ") }

// complete adds to the samples two things that vLLM does not report. The first is the wanted length of each answer;
// vLLM does not check it, so complete does. The second is the time since the start of the plan. vLLM 0.14.1 does not
// report when it sent a request, so complete uses the planned time instead. The latencies do not change.
func complete(samples []bench.Sample, arrivals []workload.Arrival) {
	reported := false // whether vLLM reports when it sent each request
	for i := range samples {
		reported = reported || samples[i].Sent > 0
	}
	begin := arrivals[0].Due - samples[0].Due
	for i := range samples {
		s, a := &samples[i], arrivals[i]
		offset := begin
		if !reported {
			offset = a.Due
		}
		for _, t := range []*time.Duration{&s.Due, &s.Sent, &s.Connected, &s.End} {
			*t += offset
		}
		s.Phase, s.Index, s.WantTokens = a.Phase, a.Index, a.Request.OutputTokens
		if s.Failure != "" {
			continue
		}
		s.First += offset
		s.Last += offset
		if s.OutputTokens != s.WantTokens {
			s.Failure, s.Detail = bench.WrongLength, fmt.Sprintf("the server generated %s instead of %d", render.Count(s.OutputTokens, "token"), s.WantTokens)
		}
	}
}

// neverFinished returns one failed sample for each request of a call that exceeded its time limit. The parameter took
// is how long that call took.
func neverFinished(arrivals []workload.Arrival, took time.Duration) []bench.Sample {
	samples := make([]bench.Sample, len(arrivals))
	for i, a := range arrivals {
		samples[i] = bench.Sample{
			Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, End: a.Due + took, WantTokens: a.Request.OutputTokens, Conversation: -1,
			Failure: bench.NeverFinished, Detail: fmt.Sprintf("vllm bench serve had not ended after %s", render.Took(took)),
		}
	}
	return samples
}

// args returns the command line of one call. It asks for a detailed result, because the totals in a result leave out
// failed requests.
func (l *Load) args(data, dir, result string, arrivals []workload.Arrival) []string {
	backend, endpoint := "openai", "/v1/completions"
	if l.Client.Endpoint == workload.Chat {
		backend, endpoint = "openai-chat", "/v1/chat/completions"
	}
	rate := "inf"
	if r := meanRate(arrivals); r > 0 {
		rate = strconv.FormatFloat(r, 'f', -1, 64)
	}
	args := append(l.Command[:len(l.Command):len(l.Command)],
		"--backend", backend, "--base-url", l.Client.URL, "--endpoint", endpoint,
		"--model", l.Tokenizer, "--served-model-name", l.Client.Model,
		"--dataset-name", "custom", "--dataset-path", data, "--custom-output-len", "-1",
		"--skip-chat-template", "--disable-shuffle", "--no-oversample",
		"--num-prompts", strconv.Itoa(len(arrivals)), "--request-rate", rate,
		"--temperature", "0", "--disable-tqdm",
		"--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99,99.9",
		"--save-result", "--save-detailed", "--result-dir", dir, "--result-filename", result)
	if l.Burstiness > 0 {
		args = append(args, "--burstiness", strconv.FormatFloat(l.Burstiness, 'f', -1, 64))
	}
	if !l.Client.Natural {
		args = append(args, "--ignore-eos")
	}
	return args
}

// meanRate returns the mean rate in requests per second. It returns 0 for a single arrival, or if all arrive at the
// same time.
func meanRate(arrivals []workload.Arrival) float64 {
	took := (arrivals[len(arrivals)-1].Due - arrivals[0].Due).Seconds()
	if took <= 0 {
		return 0
	}
	return float64(len(arrivals)-1) / took
}

// wait returns the time limit of one call.
func (l *Load) wait(arrivals []workload.Arrival) time.Duration {
	return cmp.Or(l.Limit, startTime+arrivals[len(arrivals)-1].Due-arrivals[0].Due+drainTime)
}

// execute runs the command. It returns errTooLong after the time limit, and the cause of ctx if ctx ends first.
func (l *Load) execute(ctx context.Context, dir string, argv []string, arrivals []workload.Arrival) error {
	env := append(os.Environ(), l.Env...)
	if l.Client.APIKey != "" {
		env = append(env, "OPENAI_API_KEY="+string(l.Client.APIKey))
	}
	last := &lastOutput{to: l.Log}
	p, err := proc.Start(proc.Spec{Argv: argv, Env: env, Dir: dir, Output: last})
	if err != nil {
		return fmt.Errorf("load.command: %w", err)
	}
	limit := time.NewTimer(l.wait(arrivals))
	defer limit.Stop()
	ended := false
	select {
	case <-p.Exited():
		ended = true
	case <-limit.C:
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.Stop(ctx, stopGrace))
	}
	state := p.State() // read before Stop, which ends a command that still runs
	if err := p.Stop(context.WithoutCancel(ctx), stopGrace); err != nil {
		return fmt.Errorf("end %s: %w", l, err)
	}
	switch {
	case !ended:
		return errTooLong
	case state.ExitCode() != 0:
		return fmt.Errorf("%s: %s%s; it printed last:\n%s", l, state, last.remedy(), last)
	}
	return nil
}

// writeRequests writes the requests as the custom data set of vllm bench serve.
func (l *Load) writeRequests(ctx context.Context, path string, arrivals []workload.Arrival) error {
	texts := make([]string, len(arrivals))
	work, ctx := errgroup.WithContext(ctx)
	const maxParallel = 8
	work.SetLimit(maxParallel)
	for i, a := range arrivals {
		work.Go(func() (err error) {
			if texts[i], err = l.text(ctx, a.Request); err != nil {
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
			return fmt.Errorf("write the requests for %s: %w", l, err)
		}
	}
	return os.WriteFile(path, rows.Bytes(), 0o600)
}

// text returns the prompt as one text, because vllm bench serve accepts no other form.
func (l *Load) text(ctx context.Context, r *workload.Request) (string, error) {
	switch {
	case r.Tokens != nil:
		return l.Client.Detokenize(ctx, r.Tokens)
	case len(r.Messages) == 0:
		return r.Text, nil
	case len(r.Messages) == 1 && r.Messages[0].Role == "user":
		return r.Messages[0].Content, nil
	}
	return "", errors.New("it is a chat of several messages, but the custom data set of vllm bench serve holds one prompt per row; use load: {driver: tuner}")
}

// A lastOutput forwards the output of the command, and keeps the last maxKept bytes of it.
type lastOutput struct {
	to   io.Writer // may be nil
	kept []byte
}

const maxKept = 4 << 10

// Write is called by one goroutine. The other methods are called only after that goroutine has ended, so there is no
// lock.
func (o *lastOutput) Write(b []byte) (int, error) {
	o.kept = append(o.kept, b...)
	if extra := len(o.kept) - maxKept; extra > 0 {
		o.kept = o.kept[extra:]
	}
	if o.to == nil {
		return len(b), nil
	}
	return o.to.Write(b)
}

// remedy returns advice for the most common failure: vLLM was installed without the packages that vllm bench needs.
func (o *lastOutput) remedy() string {
	if bytes.Contains(o.kept, []byte("No module named 'pandas'")) || bytes.Contains(o.kept, []byte("vllm[bench]")) {
		return "; Python packages are missing, install them with pip install 'vllm[bench]'"
	}
	return ""
}

// String returns the last 12 lines of the output, indented.
func (o *lastOutput) String() string {
	const maxLines = 12
	var lines []string
	for in := bufio.NewScanner(bytes.NewReader(o.kept)); in.Scan(); {
		if line := strings.TrimSpace(in.Text()); line != "" {
			lines = append(lines, "  "+line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-maxLines):], "\n")
}
