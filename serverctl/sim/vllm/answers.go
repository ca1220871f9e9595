package vllm

import "strings"

// answers are the bodies of one version, as recorded (testdata/recordings): JSON with the keys in vLLM's order. A word in braces is a
// field that differs between answers or chunks.
type answers struct {
	completion, completionChoice string // whole
	chat, chatChoice             string
	wholeUsage, details          string // details of usage with cached tokens; "null" without

	completionChunk, roleChunk, chatChunk, usageChunk string // of a stream
	chunkUsage, roleUsage, chatUsage                  string // of a chunk, with continuous usage
	noUsage                                           string // of a completion's chunk without continuous usage
	end                                               string // only in the last chunk
}

// head is the beginning of each body.
const head = `{"id":"{id}","object":"{object}","created":{created},"model":{model},`

// tokenUsage has the fields of usage that all versions have.
const tokenUsage = `"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output}`

var oldAnswers = answers{
	completion: head + `"choices":[{choices}],"service_tier":null,"system_fingerprint":null,"usage":{usage},"kv_transfer_params":null}`,
	completionChoice: `{"index":{index},"text":{text},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,` +
		`"prompt_logprobs":null,"prompt_token_ids":null}`,
	chat: head + `"choices":[{choices}],"service_tier":null,"system_fingerprint":null,"usage":{usage},"prompt_logprobs":null,` +
		`"prompt_token_ids":null,"kv_transfer_params":null}`,
	chatChoice: `{"index":{index},"message":{"role":"assistant","content":{text},"refusal":null,"annotations":null,"audio":null,` +
		`"function_call":null,"tool_calls":[],"reasoning":null,"reasoning_content":null},"logprobs":null,"finish_reason":"length",` +
		`"stop_reason":null,"token_ids":null}`,
	wholeUsage: `{` + tokenUsage + `,"prompt_tokens_details":{details}}`,
	details:    `{"cached_tokens":{cached}}`,
	completionChunk: head + `"choices":[{"index":{index},"text":{text},"logprobs":null,"finish_reason":{finish},"stop_reason":null,` +
		`"prompt_token_ids":null,"token_ids":null}]{usage}}`,
	roleChunk: head + `"choices":[{"index":{index},"delta":{"role":"assistant","content":"","reasoning_content":null},"logprobs":null,` +
		`"finish_reason":null}]{usage},"prompt_token_ids":null}`,
	chatChunk: head + `"choices":[{"index":{index},"delta":{"content":{text},"reasoning_content":null},"logprobs":null,` +
		`"finish_reason":{finish}{stop},"token_ids":null}]{usage}}`,
	usageChunk: head + `"choices":[],"usage":{` + tokenUsage + `{details}}}`,
	chunkUsage: `,"usage":{` + tokenUsage + `,"prompt_tokens_details":null}`,
	roleUsage:  `,"usage":{` + tokenUsage + `}`,
	chatUsage:  `,"usage":{` + tokenUsage + `}`,
	noUsage:    `,"usage":null`,
}

var modernAnswers = answers{
	completion: head + `"choices":[{choices}],"service_tier":null,"system_fingerprint":{fingerprint},"usage":{usage},` +
		`"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`,
	completionChoice: `{"index":{index},"text":{text},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,` +
		`"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`,
	chat: head + `"choices":[{choices}],"service_tier":null,"system_fingerprint":{fingerprint},"usage":{usage},"prompt_logprobs":null,` +
		`"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`,
	chatChoice: `{"index":{index},"message":{"role":"assistant","content":{text},"refusal":null,"annotations":null,"audio":null,` +
		`"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,` +
		`"routed_experts":null}`,
	wholeUsage: `{` + tokenUsage + `,"prompt_tokens_details":{details},"completion_tokens_details":null}`,
	details:    `{"cached_tokens":{cached}}`,
	completionChunk: head + `"choices":[{"index":{index},"text":{text},"logprobs":null,"finish_reason":{finish},"stop_reason":null,` +
		`"prompt_token_ids":null,"token_ids":null}]{usage}{end}}`,
	roleChunk: head + `"choices":[{"index":{index},"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]{usage},` +
		`"prompt_token_ids":null,"prompt_text":null}`,
	chatChunk: head + `"choices":[{"index":{index},"delta":{"content":{text}},"logprobs":null,"finish_reason":{finish}{stop},` +
		`"token_ids":null}]{usage}{end}}`,
	usageChunk: head + `"choices":[],"usage":{` + tokenUsage + `{details}}{end}}`,
	chunkUsage: `,"usage":{` + tokenUsage + `}`,
	roleUsage:  `,"usage":{` + tokenUsage + `,"completion_tokens_details":null}`,
	chatUsage:  `,"usage":{` + tokenUsage + `,"completion_tokens_details":null}`,
	end:        `,"system_fingerprint":{fingerprint}`,
}

// latestAnswers returns the bodies of 0.33.0, which have fields for the versions of the weights and for the transfer of the KV cache.
func latestAnswers() answers {
	a := modernAnswers
	for _, choice := range []*string{&a.completionChoice, &a.chatChoice} {
		*choice = strings.Replace(*choice, `"routed_experts":null`, `"routed_experts":null,"weight_versions":null`, 1)
	}
	a.completionChunk = strings.Replace(a.completionChunk, `"token_ids":null}]{usage}{end}`, `"token_ids":null,"weight_versions":null}]{usage}{end},"kv_transfer_params":null`, 1)
	a.chatChunk = strings.Replace(a.chatChunk, `"token_ids":null}]{usage}{end}`, `"token_ids":null{weights}}]{usage}{end},"kv_transfer_params":null`, 1)
	return a
}

// A template is a text with fields to fill. Its elements are texts and names of fields in turn; the first is a text.
type template []string

// newTemplate returns a template with its fixed fields filled.
func newTemplate(text string, fixed *strings.Replacer) (t template) {
	text = fixed.Replace(text)
	for {
		i := strings.IndexByte(text, '{')
		for i >= 0 && !isField(text[i:]) {
			next := strings.IndexByte(text[i+1:], '{')
			if next < 0 {
				i = -1
				break
			}
			i += 1 + next
		}
		if i < 0 {
			return append(t, text)
		}
		end := i + strings.IndexByte(text[i:], '}')
		t = append(t, text[:i], text[i+1:end])
		text = text[end+1:]
	}
}

// isField reports whether a text begins with a word in braces.
func isField(text string) bool {
	end := strings.IndexByte(text, '}')
	if end < 2 {
		return false
	}
	for _, c := range text[1:end] {
		if c < 'a' || c > 'z' {
			return false
		}
	}
	return true
}

// fill appends the text with its fields filled.
func (t template) fill(to []byte, field func(to []byte, name string) []byte) []byte {
	for i, part := range t {
		if i%2 == 0 {
			to = append(to, part...)
		} else {
			to = field(to, part)
		}
	}
	return to
}
