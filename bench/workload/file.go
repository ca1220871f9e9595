package workload

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
)

// openJSONL reads the custom data set of vllm bench serve: one JSON object a line with prompt, or messages, and
// output_tokens. A line with both asks its messages at chat and its prompt at completions, so that one file serves both
// endpoints and vllm bench serve too.
func openJSONL(spec Spec, seed uint64) (Source, error) {
	return openFile(spec, seed, readJSONL)
}

// openShareGPT reads a JSON array of conversations. As in vllm bench serve (vllm/benchmarks/datasets.py, 0.14.1 and 0.33)
// the first turn is the prompt and the second the model answer, whose length is asked for unless the spec overrides it.
func openShareGPT(spec Spec, seed uint64) (Source, error) {
	return openFile(spec, seed, readShareGPT)
}

// openFile reads a file and takes as many of its requests as the spec wants, chosen by the seed.
func openFile(spec Spec, seed uint64, read func(io.Reader, Spec) ([]Request, error)) (Source, error) {
	f, err := os.Open(spec.Path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("open data set: %w: check the path of the workload", err)
	}
	if err != nil {
		return nil, fmt.Errorf("open data set: %w", err)
	}
	defer f.Close() // only read
	requests, err := read(bufio.NewReaderSize(f, 1<<16), spec)
	if err != nil {
		return nil, fmt.Errorf("data set %s: %w", spec.Path, err)
	}
	if spec.Requests > len(requests) {
		return nil, fmt.Errorf("data set %s: %d requests are asked for and %d are usable: ask for fewer, or leave the number out", spec.Path, spec.Requests, len(requests))
	}
	if n := spec.Requests; n > 0 {
		r := chance(seed, conversationDraws, 0, 0)
		r.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
		requests = requests[:n:n]
	}
	name := fmt.Sprintf("%s %s (%d requests)", spec.Kind, filepath.Base(spec.Path), len(requests))
	return newFinite(name, seed, requests), nil
}

var errEmpty = errors.New("the file is empty")

func readJSONL(from io.Reader, spec Spec) ([]Request, error) {
	in := bufio.NewReader(from)
	var requests []Request
	for line := 1; ; line++ {
		text, err := in.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if text = bytes.TrimSpace(text); len(text) > 0 {
			request, err := parseLine(text, spec)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", line, err)
			}
			requests = append(requests, request)
		}
		if err == io.EOF {
			break
		}
	}
	if len(requests) == 0 {
		return nil, errEmpty
	}
	return requests, nil
}

// parseLine reads one object of a JSON Lines file.
func parseLine(text []byte, spec Spec) (Request, error) {
	if text[0] == '[' {
		return Request{}, errors.New("is a JSON array, not one object a line: for ShareGPT files use kind sharegpt")
	}
	var line struct {
		Prompt       string    `json:"prompt"`
		Messages     []Message `json:"messages"`
		OutputTokens *int      `json:"output_tokens"`
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return Request{}, explain(err)
	}
	request := Request{Conversation: -1, OutputTokens: spec.OutputTokens}
	switch {
	case spec.Endpoint == Chat && len(line.Messages) > 0:
		request.Messages = line.Messages
	case spec.Endpoint == Chat && line.Prompt != "":
		request.Messages = []Message{{Role: "user", Content: line.Prompt}}
	case line.Prompt != "":
		request.Text = line.Prompt
	case len(line.Messages) > 0:
		return Request{}, errors.New("has messages and no prompt: use endpoint chat, or add a prompt")
	default:
		return Request{}, errors.New(`has neither "prompt" nor "messages"`)
	}
	for i, m := range line.Messages {
		if m.Role == "" || m.Content == "" {
			return Request{}, fmt.Errorf("message %d needs a role and a content", i+1)
		}
	}
	if spec.OutputTokens > 0 {
		return request, nil
	}
	if line.OutputTokens == nil {
		return Request{}, errors.New(`has no "output_tokens": add it to each line, or set the workload's output tokens`)
	}
	if *line.OutputTokens < 1 {
		return Request{}, fmt.Errorf("output_tokens is %d, must be at least 1", *line.OutputTokens)
	}
	request.OutputTokens = *line.OutputTokens
	return request, nil
}

// explain turns the errors of encoding/json into words of the file.
func explain(err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		want := map[reflect.Kind]string{reflect.Int: "whole number", reflect.Slice: "list", reflect.Struct: "JSON object"}[wrong.Type.Kind()]
		if want == "" {
			want = wrong.Type.Kind().String()
		}
		field := wrong.Field
		if field == "" {
			field = "it"
		}
		return fmt.Errorf("%s is a %s, want a %s", field, wrong.Value, want)
	}
	return fmt.Errorf("is no JSON: %w", err)
}

// shareGPTEntry is one conversation. Only the first two turns are used.
type shareGPTEntry struct {
	Conversations []struct {
		Value string `json:"value"`
	} `json:"conversations"`
}

func readShareGPT(from io.Reader, spec Spec) ([]Request, error) {
	in := json.NewDecoder(from)
	switch start, err := in.Token(); {
	case err == io.EOF:
		return nil, errEmpty
	case err != nil:
		return nil, explain(err)
	case start != json.Delim('['):
		return nil, errors.New("is no JSON array of conversations: for one JSON object a line use kind jsonl")
	}
	var requests []Request
	n := 0
	for ; in.More(); n++ {
		var entry shareGPTEntry
		if err := in.Decode(&entry); err != nil {
			return nil, fmt.Errorf("entry %d: %w", n+1, explain(err))
		}
		if request, ok := entry.request(spec); ok {
			requests = append(requests, request)
		}
	}
	if _, err := in.Token(); err != nil {
		return nil, fmt.Errorf("after entry %d: %w", n, explain(err))
	}
	switch {
	case n == 0:
		return nil, errEmpty
	case len(requests) == 0:
		return nil, fmt.Errorf(`none of the %d entries has two turns under "conversations" with 4 to %d tokens of prompt (by the estimate of %d bytes a token)`,
			n, shareGPTPromptMax, bytesPerToken)
	}
	return requests, nil
}

// The pruning of vllm bench serve (is_valid_sequence in vllm/benchmarks/datasets.py, 0.14.1 and 0.33).
const (
	shareGPTMin       = 4
	shareGPTPromptMax = 1024
	shareGPTTotalMax  = 2048
)

// bytesPerToken is the usual rule of thumb for English text in vocabularies of 32,000 and more.
const bytesPerToken = 4

// request returns the entry's request, and whether it is used. vLLM prunes by exact token counts; here, without a
// tokenizer, the same limits are held against an estimate of four bytes a token, so that entries near a limit can differ.
// The same estimate of the answer's text is the length asked for, unless the spec overrides it.
func (e shareGPTEntry) request(spec Spec) (Request, bool) {
	if len(e.Conversations) < 2 {
		return Request{}, false
	}
	prompt := e.Conversations[0].Value
	input, output := estimate(prompt), spec.OutputTokens
	if output == 0 {
		if output = estimate(e.Conversations[1].Value); output < shareGPTMin {
			return Request{}, false
		}
	}
	if input < shareGPTMin || input > shareGPTPromptMax || input+output > shareGPTTotalMax {
		return Request{}, false
	}
	request := Request{OutputTokens: output, Conversation: -1}
	if spec.Endpoint == Chat {
		request.Messages = []Message{{Role: "user", Content: prompt}}
	} else {
		request.Text = prompt
	}
	return request, true
}

func estimate(text string) int { return (len(text) + bytesPerToken - 1) / bytesPerToken }
