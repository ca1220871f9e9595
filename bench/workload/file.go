package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"

	"vllmtuner/foreign"
	"vllmtuner/render"
)

// openFile reads a file of requests without times. The seed decides which requests are used if the spec wants only
// some.
func openFile(spec Spec, seed uint64, read func(io.Reader, Spec, *badRows) ([]Request, error)) (Source, error) {
	bad := badRows{skip: spec.SkipBadRows}
	var requests []Request
	err := withFile(spec.Path, func(f io.Reader) (err error) {
		requests, err = read(f, spec, &bad)
		return err
	})
	if err != nil {
		return nil, err
	}
	if requests, err = choose(requests, spec, seed); err != nil {
		return nil, err
	}
	source := newFinite(spec.titleOf(len(requests), bad.note()), spec, seed, requests)
	source.bad = bad
	return source, nil
}

// choose returns as many elements as the spec wants, chosen at random with the seed. If the spec has no number, choose
// returns all elements.
func choose[T any](all []T, spec Spec, seed uint64) ([]T, error) {
	if err := spec.checkRequests(len(all)); err != nil {
		return nil, err
	}
	n := spec.Requests
	if n == 0 {
		return all, nil
	}
	r := chance(seed, conversationDraws, 0, 0)
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:n:n], nil
}

// checkRequests returns an error if the spec wants more requests than are usable.
func (s Spec) checkRequests(usable int) error {
	if s.Requests <= usable {
		return nil
	}
	return fmt.Errorf("data set %s: the workload asks for %s, but only %s usable: ask for fewer, or leave the number out", s.Path, render.Count(s.Requests, "request"), render.Are(usable, "request"))
}

// titleOf returns the name of a source with n requests from the file.
func (s Spec) titleOf(n int, notes ...string) string {
	return s.title(s.Kind+" "+filepath.Base(s.Path), append([]string{render.Count(n, "request")}, notes...)...)
}

// withFile opens a file and passes it to the function read. An error of that function gets the path as prefix.
func withFile(path string, read func(io.Reader) error) error {
	f, err := foreign.Open(path)
	if err != nil {
		return fmt.Errorf("open data set: %w", err)
	}
	defer f.Close() // the file is only read, so an error of Close does not matter
	if err := read(f); err != nil {
		return fmt.Errorf("data set %s: %w", path, err)
	}
	return nil
}

// readJSONL reads the custom data set of vllm bench serve: one JSON object on each line, with output_tokens and with
// prompt, messages or both. Endpoint chat uses messages if there are any, and completions uses prompt. So one file
// works with both endpoints, and with vllm bench serve.
func readJSONL(from io.Reader, spec Spec, bad *badRows) ([]Request, error) {
	return readLines(from, bad, func(text []byte) (Request, error) { return parseLine(text, spec) })
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
	if err := request.ask(line.Prompt, line.Messages, spec.Endpoint); err != nil {
		return Request{}, err
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
	request.OutputTokens = *line.OutputTokens
	return request, checkLength("output_tokens", request.OutputTokens, 1)
}

// ask sets the prompt for an endpoint, from a line that may have a prompt, messages or both.
func (r *Request) ask(prompt string, messages []Message, endpoint string) error {
	switch {
	case endpoint == Chat && len(messages) > 0:
		r.Messages = messages
	case endpoint == Chat && prompt != "":
		r.Messages = []Message{{Role: "user", Content: prompt}}
	case prompt != "":
		r.Text = prompt
	case len(messages) > 0:
		return errors.New("has messages but no prompt: use endpoint chat, or add a prompt")
	default:
		return errors.New(`has neither "prompt" nor "messages"`)
	}
	return nil
}

// checkLength returns an error if n is not a possible number of tokens: at least lowest and at most MaxLength.
func checkLength(field string, n, lowest int) error {
	if n < lowest || n > MaxLength {
		return fmt.Errorf("%s is %d, must be at least %d and at most %d", field, n, lowest, MaxLength)
	}
	return nil
}

// explain turns an error of encoding/json into a message about the file.
func explain(err error) error {
	if errors.Is(err, errTooLong) {
		return err
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		want := map[reflect.Kind]string{reflect.Int: "whole number", reflect.Float64: "number", reflect.Slice: "list", reflect.Struct: "JSON object"}[wrong.Type.Kind()]
		if want == "" {
			want = wrong.Type.Kind().String()
		}
		field := wrong.Field
		if field == "" {
			field = "it"
		}
		return fmt.Errorf("%s is a %s, must be a %s", field, wrong.Value, want)
	}
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("is not JSON: syntax error at byte %d", syntax.Offset)
	}
	return fmt.Errorf("is not JSON: %w", err)
}
