package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"vllmtuner/render"
)

// A shareGPTEntry is one conversation.
type shareGPTEntry struct {
	Conversations []shareGPTTurn `json:"conversations"`
}

type shareGPTTurn struct {
	From  string `json:"from"`
	Value string `json:"value"`
}

// readShareGPT reads a JSON array of conversations. As in vllm bench serve (vllm/benchmarks/datasets.py, 0.14.1 and
// 0.33), the first turn is the prompt. The second turn gives the length of the answer if the spec does not.
func readShareGPT(from io.Reader, spec Spec, bad *badRows) ([]Request, error) {
	var requests []Request
	n, err := eachShareGPT(from, bad, func(entry shareGPTEntry) error {
		if request, ok := entry.request(spec); ok {
			requests = append(requests, request)
		}
		return nil
	})
	if err == nil && len(requests) == 0 {
		err = fmt.Errorf(`it has %s, but none has two turns under "conversations" and a prompt of 4 to %d tokens (estimated at %d bytes a token)`,
			render.Count(n, "entry"), shareGPTPromptMax, bytesPerToken)
	}
	if err != nil {
		return nil, err
	}
	return requests, nil
}

// eachShareGPT calls read with every readable entry. It returns the number of entries, at least one. An entry with a
// wrong type is a bad row, which can be skipped. A syntax error ends the reading, because the next entry cannot be
// found.
func eachShareGPT(from io.Reader, bad *badRows, read func(shareGPTEntry) error) (n int, err error) {
	limited := &bounded{from, maxRow}
	in := json.NewDecoder(limited)
	switch start, err := in.Token(); {
	case err == io.EOF:
		return 0, errEmpty
	case err != nil:
		return 0, explain(err)
	case start != json.Delim('['):
		return 0, errors.New("is not a JSON array of conversations: for one JSON object on each line use kind jsonl")
	}
	for limited.left = maxRow; in.More(); limited.left = maxRow {
		n++
		var entry shareGPTEntry
		err := in.Decode(&entry)
		if _, wrongType := errors.AsType[*json.UnmarshalTypeError](err); err != nil && !wrongType {
			return n, fmt.Errorf("entry %d: %w", n, explain(err))
		}
		if err != nil {
			err = explain(err)
		} else {
			err = read(entry)
		}
		if err != nil {
			if err := bad.add(fmt.Errorf("entry %d: %w", n, err)); err != nil {
				return n, err
			}
		}
	}
	if _, err := in.Token(); err != nil {
		return n, fmt.Errorf("after entry %d: %w", n, explain(err))
	}
	if n == bad.n {
		return n, bad.noUsableRow()
	}
	return n, nil
}

// vllm bench serve drops entries outside these lengths in tokens (is_valid_sequence in vllm/benchmarks/datasets.py, 0.14.1
// and 0.33).
const (
	shareGPTMin       = 4
	shareGPTPromptMax = 1024
	shareGPTTotalMax  = 2048
)

// bytesPerToken is the usual estimate for English text and vocabularies of 32,000 and more.
const bytesPerToken = 4

// request returns the entry's request, and whether to use it. vLLM drops entries by exact token counts. There is no
// tokenizer here, so this method estimates lengths at four bytes a token, and may decide differently near a limit. The
// same estimate gives the length of the answer if the spec does not.
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
