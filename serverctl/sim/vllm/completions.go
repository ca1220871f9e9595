package vllm

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// A question is what a request asks for, as far as the simulation reads it.
type question struct {
	chat      bool
	prompts   [][]int32
	texts     bool // the prompts came as text
	output    int  // tokens of each answer
	n         int  // answers to each prompt
	stream    bool
	usage     bool // a stream ends with its usage
	allUsage  bool // and every chunk has it
	arrivedAt float64
}

// defaultMaxTokens is the length of a completion without max_tokens.
const defaultMaxTokens = 16

func (a *api) completions(w http.ResponseWriter, r *http.Request) { a.answer(w, r, false) }

func (a *api) chat(w http.ResponseWriter, r *http.Request) { a.answer(w, r, true) }

// answer reads a request, puts it into the engine, and answers as its tokens come.
func (a *api) answer(w http.ResponseWriter, r *http.Request, chat bool) {
	arrived := a.live.clock()
	q, refusal := a.question(w, r, chat)
	if refusal != nil {
		refused(w, refusal)
		return
	}
	q.arrivedAt = arrived
	a.generate(w, r, q)
}

// question reads a request. What vLLM checks first is checked first.
func (a *api) question(w http.ResponseWriter, r *http.Request, chat bool) (q question, _ *refusal) {
	text, release, refusal := a.readBody(w, r)
	defer release()
	if refusal != nil {
		return q, refusal
	}
	at, fields := completionPlace, completionFields
	if chat {
		at, fields = chatPlace, chatFields
	}
	body, refusal := a.release.body(at, r.Header.Get("Content-Type"), text)
	if refusal == nil {
		refusal = a.checkBody(at, body, fields, chat)
	}
	if refusal == nil {
		refusal = a.checkModel(body)
	}
	if refusal != nil {
		return q, refusal
	}
	q = question{chat: chat, n: 1}
	if chat {
		refusal = q.readMessages(a.release, body)
	} else {
		refusal = q.readPrompts(a.release, body)
	}
	if refusal == nil {
		refusal = q.readLength(a, body)
	}
	if refusal == nil {
		refusal = q.readSampling(a.release, body)
	}
	return q, refusal
}

// refused400 is FastAPI's answer to a body that it cannot read for another reason than its syntax: the client stopped in the
// middle of it, or it is nested too deeply.
var refused400 = refusal{status: http.StatusBadRequest, kind: "Bad Request", message: "There was an error parsing the body"}

// mostPrompts is how many prompts a request may have since 0.32.0 (VLLM_MAX_COMPLETION_PROMPTS, which is not read here).
const mostPrompts = 1024

// checkBody refuses a body that is not of the request's type: first what vLLM's own validators look for, then the fields.
func (a *api) checkBody(at place, body object, fields []bodyField, chat bool) *refusal {
	options, _ := body.get("stream_options")
	stream, _ := body.get("stream")
	if options != nil && !truth(stream) {
		const text = "Stream options can only be defined when `stream=True`."
		if a.release.modern {
			return bad("stream_options", "%s (parameter=stream_options)", text)
		}
		r := a.release.invalid(at, finding{kind: "value_error", text: "Value error, " + text + " (parameter=stream_options)", input: body,
			ctx: "'error': VLLMValidationError('" + text + "')"})
		r.param = "stream_options"
		return r
	}
	prompt, _ := body.get("prompt")
	if list, _ := prompt.([]any); !chat && a.release.modern && len(list) > mostPrompts {
		if _, ok := tokenIDs(list, math.MinInt32); !ok {
			return bad("prompt", "prompt list length %d exceeds the maximum allowed count of %d. To increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable. "+
				"(parameter=prompt)", len(list), mostPrompts)
		}
	}
	if !chat && (prompt == nil || prompt == "") {
		const text = "Either prompt or prompt_embeds must be provided and non-empty."
		if a.release.modern {
			return bad("prompt", "%s (parameter=prompt)", text)
		}
		return a.release.invalid(at, finding{kind: "value_error", text: "Value error, " + text, input: body, ctx: "'error': ValueError('" + text + "')"})
	}
	var findings []finding
	if chat {
		findings = checkMessages(body)
	}
	for _, x := range fields {
		v, _ := body.get(x.name)
		findings = append(findings, a.release.check(x, v)...)
	}
	if len(findings) > 0 {
		return a.release.invalid(at, findings...)
	}
	return nil
}

// checkMessages finds messages that are no list.
func checkMessages(body object) []finding {
	messages, ok := body.get("messages")
	if !ok {
		return []finding{{kind: "missing", loc: []any{"messages"}, text: "Field required", input: body}}
	}
	if _, ok := messages.([]any); !ok {
		return []finding{{kind: "list_type", loc: []any{"messages"}, text: "Input should be a valid list", input: messages}}
	}
	return nil
}

// checkModel refuses a model that is not served.
func (a *api) checkModel(body object) *refusal {
	o := a.live.engine.Options
	model, _ := body.get("model")
	name, ok := model.(string)
	if !ok || name == "" || o.Serves(name) {
		return nil
	}
	r := &refusal{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", name), "model"}
	if a.release.modern {
		r.message += fmt.Sprintf(" Valid aliases: %s.", strings.Join(append([]string{o.Model}, o.Aliases...), ", "))
	}
	return r
}

// readPrompts reads a prompt that is a text, a list of token ids, or a list of either.
func (q *question) readPrompts(f *release, body object) *refusal {
	if suffix, _ := body.get("suffix"); suffix != nil {
		if f.modern {
			return bad("suffix", "suffix requires text prompt input for FIM completion rendering")
		}
		return bad("", "suffix is not currently supported")
	}
	prompt, _ := body.get("prompt")
	if text, ok := prompt.(string); ok {
		q.prompts, q.texts = [][]int32{sim.Tokenize(text)}, true
		return q.notEmpty()
	}
	list, _ := prompt.([]any)
	if len(list) == 0 {
		return f.noPrompts()
	}
	if ids, ok := tokenIDs(list, f.leastToken()); ok {
		q.prompts = [][]int32{ids}
		return nil
	}
	for _, one := range list {
		switch one := one.(type) {
		case string:
			q.prompts, q.texts = append(q.prompts, sim.Tokenize(one)), true
		case []any:
			ids, ok := tokenIDs(one, f.leastToken())
			if !ok {
				return bad("", "prompt must be a string or a list of token ids")
			}
			q.prompts = append(q.prompts, ids)
		default:
			return bad("", "prompt must be a string or a list of token ids")
		}
	}
	return q.notEmpty()
}

// noPrompts is the refusal of an empty list, which each version words anew.
func (f *release) noPrompts() *refusal {
	switch {
	case !f.modern:
		return bad("", "please provide at least one prompt")
	case f.version == "0.32.0":
		return bad("", "You must pass at least one prompt")
	}
	return bad("prompt", "You must pass at least one prompt (parameter=prompt)")
}

// notEmpty refuses prompts of no token (vllm/v1/engine/input_processor.py).
func (q *question) notEmpty() *refusal {
	for _, p := range q.prompts {
		if len(p) == 0 {
			return bad("", "The decoder prompt cannot be empty")
		}
	}
	return nil
}

// leastToken is the lowest number of a token: 0.14.1 takes negative ones too.
func (f *release) leastToken() int64 {
	if f.modern {
		return 0
	}
	return math.MinInt32
}

// tokenIDs reads a list of numbers, of which none is below the least.
func tokenIDs(list []any, least int64) ([]int32, bool) {
	ids := make([]int32, len(list))
	for i, v := range list {
		n, ok := v.(json.Number)
		if !ok {
			return nil, false
		}
		id, err := n.Int64()
		if err != nil || id < least || id > math.MaxInt32 {
			return nil, false
		}
		ids[i] = int32(id)
	}
	return ids, true
}

// readMessages turns a chat into its tokens: the role and the text of each message.
func (q *question) readMessages(f *release, body object) *refusal {
	v, _ := body.get("messages")
	messages, _ := v.([]any) // was checked
	if len(messages) == 0 {
		if f.modern {
			return bad("", "Cannot apply chat template to an empty conversation. Provide at least one message.")
		}
		return bad("", "list index out of range list index out of range")
	}
	text, err := chatText(messages)
	if err != nil {
		return bad("", "%v", err)
	}
	q.prompts, q.texts = [][]int32{sim.Tokenize(text)}, true
	return nil
}

// chatText joins messages whose contents are texts or lists of text parts.
func chatText(messages []any) (string, error) {
	var text strings.Builder
	for _, m := range messages {
		message, _ := m.(object)
		role, _ := message.get("role")
		name, ok := role.(string)
		if !ok {
			return "", fmt.Errorf("a message must be an object with a role")
		}
		text.WriteString(name + "\n")
		content, _ := message.get("content")
		switch content := content.(type) {
		case nil:
		case string:
			text.WriteString(content)
		case []any:
			for _, p := range content {
				part, _ := p.(object)
				piece, _ := part.get("text")
				words, ok := piece.(string)
				if !ok {
					return "", fmt.Errorf("message content must be a string or a list of text parts")
				}
				text.WriteString(words)
			}
		default:
			return "", fmt.Errorf("message content must be a string or a list of text parts")
		}
		text.WriteString("\n")
	}
	return text.String(), nil
}

// readLength finds how many tokens each answer has. 0.14.1 refuses a request that would not fit; later versions shorten the
// answer (get_max_tokens in vllm/entrypoints/serve/utils/api_utils.py, 0.32.0), and refuse the prompt alone.
func (q *question) readLength(a *api, body object) *refusal {
	limit := a.live.engine.Options.MaxModelLen
	wanted, given := defaultMaxTokens, !q.chat
	for _, name := range []string{"max_tokens", "max_completion_tokens"} {
		if v, _ := body.get(name); v != nil && (q.chat || name == "max_tokens") {
			wanted, given = wholeOf(v), true
		}
	}
	longest := 0
	for _, p := range q.prompts {
		longest = max(longest, len(p))
	}
	if !given {
		wanted = max(limit-longest, 1)
	}
	refusal := a.release.tooLong(q, limit, longest, wanted)
	if refusal != nil {
		return refusal
	}
	q.output = wanted
	if a.release.modern {
		q.output = min(wanted, limit-longest)
	}
	return nil
}

// tooLong refuses what does not fit into the context.
func (f *release) tooLong(q *question, limit, prompt, wanted int) *refusal {
	switch {
	case f.modern && prompt > limit:
		least := ""
		if q.texts { // a text is cut as soon as it is too long
			prompt, least = limit+1, "at least "
		}
		return badValue("input_tokens", prompt, "This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, "+
			"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.", limit, least, prompt)
	case f.modern:
		return nil
	case q.chat && prompt >= limit:
		return withoutCause(badValue("input_tokens", prompt, "This model's maximum context length is %d tokens. However, your request has %d input tokens. "+
			"Please reduce the length of the input messages.", limit, prompt))
	case q.chat && wanted > limit-prompt:
		return withoutCause(badValue("max_tokens", wanted, "'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is "+
			"%d tokens and your request has %d input tokens (%d > %d - %d).", wanted, limit, prompt, wanted, limit, prompt))
	case !q.chat && prompt > limit-max(wanted, 0):
		return badValue("input_tokens", prompt, "This model's maximum context length is %d tokens. However, your request has %d input tokens. "+
			"Please reduce the length of the input messages.", limit-max(wanted, 0), prompt)
	}
	return nil
}

// withoutCause is what 0.14.1 makes of an error in a chat: its text and that of its cause, which is None.
func withoutCause(r *refusal) *refusal {
	r.message, r.param = r.message+" None", ""
	return r
}

// mostAnswers is the limit of n (VLLM_MAX_N_SEQUENCES, which is not read here). 0.14.1 has none and would be out of memory: it
// has this one in the simulation.
const mostAnswers = 16384

// mostAsks is how many answers a request may ask for in all, of all of its prompts. vLLM has no such limit.
const mostAsks = 16 * mostAnswers

// readSampling reads how the answer is made (_verify_args in vllm/sampling_params.py, in its order). Most of it changes nothing
// here, and is checked all the same.
func (q *question) readSampling(f *release, body object) *refusal {
	number := func(name string, otherwise float64) float64 {
		if v, _ := body.get(name); v != nil {
			return numberOf(v)
		}
		return otherwise
	}
	integer := func(name string, otherwise int) int {
		if v, _ := body.get(name); v != nil {
			return wholeOf(v)
		}
		return otherwise
	}
	q.n = integer("n", 1)
	least, topK := integer("min_tokens", 0), integer("top_k", 0)
	presence, frequency := number("presence_penalty", 0), number("frequency_penalty", 0)
	repetition, temperature := number("repetition_penalty", 1), number("temperature", 1)
	topP, minP := number("top_p", 1), number("min_p", 0)
	finite := func(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
	refuse := func(name string, x float64, must string) *refusal {
		return bad("", "%s must be %s, got %s.", name, must, pythonRepr(x))
	}
	refuseValue := func(name string, x float64, must string) *refusal {
		return badValue(name, pythonRepr(x), "%s must be %s, got %s.", name, must, pythonRepr(x))
	}
	switch {
	case q.n < 1:
		return bad("", "n must be at least 1, got %d.", q.n)
	case q.n > mostAnswers && f.modern:
		return bad("", "n must be at most %d, got %d. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.", mostAnswers, q.n)
	case q.n > mostAnswers:
		return bad("", "n must be at most %d, got %d.", mostAnswers, q.n)
	case q.n*len(q.prompts) > mostAsks:
		return bad("", "n for each of %d prompts must be at most %d in all, got %d; this limit is the simulation's.", len(q.prompts), mostAsks, q.n*len(q.prompts))
	case !(presence >= -2 && presence <= 2):
		return refuse("presence_penalty", presence, "in [-2, 2]")
	case !(frequency >= -2 && frequency <= 2):
		return refuse("frequency_penalty", frequency, "in [-2, 2]")
	case f.modern && !finite(repetition):
		return refuse("repetition_penalty", repetition, "a finite number")
	case repetition <= 0:
		return refuse("repetition_penalty", repetition, "greater than zero")
	case f.modern && !finite(temperature):
		return refuseValue("temperature", temperature, "a finite number")
	case temperature < 0:
		return refuseValue("temperature", temperature, "non-negative")
	case f.modern && temperature > 2:
		return refuseValue("temperature", temperature, "in [0, 2]")
	case !(topP > 0 && topP <= 1):
		return refuseValue("top_p", topP, "in (0, 1]")
	case topK < -1:
		return bad("", "top_k must be 0 (disable), or at least 1, got %d.", topK)
	case !(minP >= 0 && minP <= 1):
		return refuse("min_p", minP, "in [0, 1]")
	case q.output < 1:
		return badValue("max_tokens", q.output, "max_tokens must be at least 1, got %d.", q.output)
	case least < 0:
		return bad("", "min_tokens must be greater than or equal to 0, got %d.", least)
	case least > q.output:
		return bad("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", q.output, least)
	case emptyStop(body):
		return bad("", "stop cannot contain an empty string.")
	case temperature < leastTemperature && q.n > 1:
		return bad("", "n must be 1 when using greedy sampling, got %d.", q.n)
	}
	stream, _ := body.get("stream")
	q.stream = truth(stream)
	if v, _ := body.get("stream_options"); v != nil {
		options, _ := v.(object) // was checked
		usage, _ := options.get("include_usage")
		all, _ := options.get("continuous_usage_stats")
		q.usage = truth(usage)
		q.allUsage = q.usage && truth(all)
	}
	return nil
}

// leastTemperature is the lowest that is no greedy sampling (_SAMPLING_EPS in vllm/sampling_params.py).
const leastTemperature = 1e-5

// emptyStop reports whether an answer would end with an empty text.
func emptyStop(body object) bool {
	v, _ := body.get("stop")
	list, _ := v.([]any)
	return v == "" || slices.ContainsFunc(list, func(one any) bool { return one == "" })
}

// generate puts the question into the engine and answers.
func (a *api) generate(w http.ResponseWriter, r *http.Request, q question) {
	if q.stream { // set before anything can go wrong with the engine: from now on an error is a chunk of the stream
		w.Header().Set("Content-Type", eventStream)
	}
	time.Sleep(seconds(a.live.engine.Profile.Latency.BeforeScheduling / 1000))
	o := a.live.engine.Options
	s := &answer{
		w: w, release: a.release, model: o.Model, chat: q.chat, usage: q.usage || q.stream && o.AlwaysUsage, always: q.allUsage || q.stream && o.AlwaysUsage, details: o.TokenDetails,
	}
	for _, tokens := range q.prompts {
		s.prompt += len(tokens)
		hashes, k := sim.HashBlocks(tokens), &kin{n: q.n, left: q.n}
		for range q.n {
			s.id = a.next.Add(1)
			s.asks = append(s.asks, &ask{
				request: &sim.Request{Prompt: len(tokens), Output: q.output, Hashes: hashes, Salt: s.id}, kin: k, arrived: q.arrivedAt,
			})
		}
	}
	s.told = make([]int, len(s.asks))
	replies := a.live.submit(s.asks)
	defer a.live.abort(s.asks)
	var came []reply
	for left := len(s.asks); left > 0; {
		select {
		case <-r.Context().Done():
			return
		case <-replies.some:
		}
		came = replies.take(came)
		for _, n := range came {
			if q.stream && s.chunk == nil && s.begin() != nil {
				return
			}
			if q.stream && s.tokens(n.index, n.news) != nil {
				return
			}
			if n.last {
				left--
			}
		}
	}
	if !q.stream {
		s.whole()
		return
	}
	_ = s.end() // a client that has gone is told nothing
}
