package vllm

import (
	"encoding/json"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
)

// Fields are refused in the words of the version. What is expected is what the classes of 0.14.1 and 0.32.0 themselves said of
// these bodies.
func TestFieldsAreRefusedAsByVLLM(t *testing.T) {
	const served = `"finish_reason":"length"`
	urls := map[string]string{}
	for _, version := range []string{"0.14.1", "0.32.0"} {
		urls[version], _ = serveAs(t, version, "m", "--max-model-len", "4096")
	}
	for _, row := range []struct{ name, fields, old, modern string }{
		{"top_k", `"top_k":-5`, "top_k must be 0 (disable), or at least 1, got -5.", "top_k must be 0 (disable), or at least 1, got -5."},
		{"a presence penalty", `"presence_penalty":99`, "presence_penalty must be in [-2, 2], got 99.0.", "presence_penalty must be in [-2, 2], got 99.0."},
		{"a frequency penalty", `"frequency_penalty":-99`, "frequency_penalty must be in [-2, 2], got -99.0.", "frequency_penalty must be in [-2, 2], got -99.0."},
		{"no penalty of repetition", `"repetition_penalty":0`, "repetition_penalty must be greater than zero, got 0.0.", "repetition_penalty must be greater than zero, got 0.0."},
		{"an endless one", `"repetition_penalty":"inf"`, served, "repetition_penalty must be a finite number, got inf."},
		{"min_p", `"min_p":2`, "min_p must be in [0, 1], got 2.0.", "min_p must be in [0, 1], got 2.0."},
		{"min_p of no number", `"min_p":"x"`, "('body', 'min_p'), 'msg': 'Input should be a valid number, unable to parse string as a number', 'input': 'x'}", "{'type': 'float_parsing', 'loc': 'body.min_p', 'msg': 'Input should be a valid number, unable to parse string as a number', 'input': 'x'}"},
		{"a temperature that is none", `"temperature":"nan"`, served, "temperature must be a finite number, got nan. (parameter=temperature, value=nan)"},
		{"a high temperature", `"temperature":3`, served, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"},
		{"a low temperature", `"temperature":-1`, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)", "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"},
		{"top_p that is none", `"top_p":"nan"`, "top_p must be in (0, 1], got nan. (parameter=top_p, value=nan)", "top_p must be in (0, 1], got nan. (parameter=top_p, value=nan)"},
		{"a stop of no text", `"stop":5`, "{'type': 'string_type', 'loc': ('body', 'stop', 'str'), 'msg': 'Input should be a valid string', 'input': 5}", "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string', 'input': '5'}\n  {'type': 'list_type', 'loc': 'body.stop', 'msg': 'Input should be a valid list', 'input': '5'}"},
		{"a list with no text", `"stop":["a",5]`, "('body', 'stop', 'list[str]', 1)", "{'type': 'string_type', 'loc': 'body.stop.1', 'msg': 'Input should be a valid string', 'input': '5'}"},
		{"five stops", `"stop":["a","b","c","d","e"]`, served, "{'type': 'too_long', 'loc': 'body.stop', 'msg': 'List should have at most 4 items after validation, not 5', 'input': '<list of 5 items>', 'ctx': {'field_type': 'List', 'max_length': 4, 'actual_length': 5}}"},
		{"an empty stop", `"stop":""`, "stop cannot contain an empty string.", "stop cannot contain an empty string."},
		{"good stops", `"stop":["a","b"]`, served, served},
		{"biases of no object", `"logit_bias":"x"`, "{'type': 'dict_type', 'loc': ('body', 'logit_bias'), 'msg': 'Input should be a valid dictionary', 'input': 'x'}", "{'type': 'dict_type', 'loc': 'body.logit_bias', 'msg': 'Input should be a valid dictionary', 'input': 'x'}"},
		{"a bias of no number", `"logit_bias":{"5":"x"}`, "('body', 'logit_bias', '5')", "{'type': 'float_parsing', 'loc': 'body.logit_bias.5',"},
		{"a model of no text", `"model":123`, "{'type': 'string_type', 'loc': ('body', 'model'), 'msg': 'Input should be a valid string', 'input': 123}", "{'type': 'string_type', 'loc': 'body.model', 'msg': 'Input should be a valid string', 'input': '123'}"},
		{"a length beyond all", `"max_tokens":1e300`, "{'type': 'int_parsing_size', 'loc': ('body', 'max_tokens'), 'msg': 'Unable to parse input string as an integer, exceeded maximum size', 'input': 1e+300}", "{'type': 'int_parsing_size', 'loc': 'body.max_tokens', 'msg': 'Unable to parse input string as an integer, exceeded maximum size', 'input': '1e+300'}"},
		{"the least of them", `"max_tokens":1e19`, "int_parsing_size", "int_parsing_size"},
		{"n beyond all", `"n":1e300`, "'loc': ('body', 'n')", "'loc': 'body.n'"},
		{"min_tokens beyond all", `"min_tokens":1e300`, "int_parsing_size", "int_parsing_size"},
		{"min_tokens of many digits", `"min_tokens":99999999999999999999`, "min_tokens must be less than or equal to max_tokens=1", "min_tokens must be less than or equal to max_tokens=1"},
		{"n in digits", `"n":99999999999999999999`, "n must be at most 16384", "n must be at most 16384"},
		{"too large an n", `"n":2000000`, "n must be at most 16384, got 2000000.", "n must be at most 16384, got 2000000. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."},
		{"n of greedy sampling", `"n":2,"temperature":0`, "n must be 1 when using greedy sampling, got 2.", "n must be 1 when using greedy sampling, got 2."},
		{"a negative token", `"prompt":[-1]`, served, "4 validation errors:\n  {'type': 'greater_than_equal', 'loc': 'body.prompt.0', 'msg': 'Input should be greater than or equal to 0', 'input': '-1', 'ctx': {'ge': 0}}\n  {'type': 'list_type', 'loc': 'body.prompt.0', 'msg': 'Input should be a valid list', 'input': '-1'}\n  {'type': 'string_type', 'loc': 'body.prompt', 'msg': 'Input should be a valid string', 'input': '<list of 1 items>'}\n  {'type': 'string_type', 'loc': 'body.prompt.0', 'msg': 'Input should be a valid string', 'input': '-1'}"},
		{"negative tokens of one of two prompts", `"prompt":[[1,2],[-3,-4]]`, served, "7 validation errors:\n  {'type': 'int_type', 'loc': 'body.prompt.0', 'msg': 'Input should be a valid integer', 'input': '<list of 2 items>'}\n  {'type': 'int_type', 'loc': 'body.prompt.1', 'msg': 'Input should be a valid integer', 'input': '<list of 2 items>'}\n  {'type': 'greater_than_equal', 'loc': 'body.prompt.1.0',"},
		{"a token and a text", `"prompt":[1,"a"]`, "('body', 'prompt', 'list[int]', 1), 'msg': 'Input should be a valid integer, unable to parse string as an integer', 'input': 'a'}", "5 validation errors:\n  {'type': 'int_parsing', 'loc': 'body.prompt.1',"},
		{"many that are none", `"prompt":[` + strings.Repeat("null,", 5) + `-1]`, "18 validation errors", "...and 9 more errors"},
		{"too many prompts", `"prompt":[` + strings.Repeat(`"a",`, 1024) + `"a"]`, served, "prompt list length 1025 exceeds the maximum allowed count of 1024. To increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable."},
		{"too many answers in all", `"n":16384,"prompt":[` + strings.Repeat(`"a",`, 16) + `"a"]`, "n for each of 17 prompts must be at most 262144 in all, got 278528", "must be at most 262144 in all"},
	} {
		for version, url := range urls {
			want := row.old
			if version != "0.14.1" {
				want = row.modern
			}
			body := `{"prompt":"a","max_tokens":1,` + row.fields + `}`
			status, text := post(t, url+"/v1/completions", body)
			var answer struct{ Error struct{ Message string } }
			if err := json.Unmarshal([]byte(text), &answer); err != nil {
				t.Fatal(err)
			}
			message := answer.Error.Message
			if want == served {
				message = text
			}
			if (status == 200) != (want == served) || !strings.Contains(message, want) {
				t.Errorf("%s %s: %d %.1000s\nwant %s", version, row.name, status, text, want)
			}
		}
	}
	for version, url := range urls {
		status, text := post(t, url+"/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_completion_tokens":1e300,"stop":5}`)
		if status != 400 || !strings.Contains(text, "3 validation errors") {
			t.Errorf("%s: a chat is answered with %d %s", version, status, text)
		}
	}
}

// A body that is nested too deeply is refused, whether it is JSON or not, and the server lives.
func TestDeepBodiesAreRefused(t *testing.T) {
	for _, version := range sim.Versions {
		url, _ := serveAs(t, version)
		const refused = `{"error":{"message":"There was an error parsing the body","type":"Bad Request","param":null,"code":400}}`
		for _, row := range []struct{ name, body, want string }{
			{"8 MB of brackets", strings.Repeat("[", 8<<20), refused},
			{"8 MB of objects", strings.Repeat(`{"a":`, 8<<20/5), refused},
			{"brackets that are closed", `{"prompt":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + "}", refused},
			{"not too deep", `{"prompt":` + strings.Repeat("[", 999) + strings.Repeat("]", 999) + "}", "validation error"},
			{"a mistake before", `x` + strings.Repeat("[", 2000), "Expecting value"},
			{"many brackets side by side", `{"max_tokens":1,"prompt":[` + strings.Repeat("[1],", 1000) + `[1]]}`, `"finish_reason":"length"`},
			{"brackets in a text", `{"max_tokens":1,"prompt":"` + strings.Repeat("[", 2000) + `"}`, `"finish_reason":"length"`},
		} {
			if _, text := post(t, url+"/v1/completions", row.body); !strings.Contains(text, row.want) {
				t.Errorf("%s: %s: %.300s, want %s", version, row.name, text, row.want)
			}
		}
	}
}

// What waits for its tokens takes memory for those that have come, not for those that it may get.
func TestRepliesTakeNoMemoryAhead(t *testing.T) {
	p := profile(t, "small-fast")
	engine, err := sim.NewEngine(p, p.Defaults)
	if err != nil {
		t.Fatal(err)
	}
	l := newLive(engine)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var asks []*ask
	for range 1000 {
		asks = append(asks, &ask{request: &sim.Request{Prompt: 1, Output: 100_000}, kin: &kin{}})
	}
	replies := l.submit(asks)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 10<<20 {
		t.Errorf("1,000 requests take %d bytes before their first token", used)
	}
	l.abort(asks)
	runtime.KeepAlive(replies)
}

// Putting never waits for the handler, and what is taken is what was put, in its order.
func TestRepliesComeInOrder(t *testing.T) {
	const all = 10_000
	r := &replies{some: make(chan struct{}, 1)}
	r.put(reply{index: 0})
	r.put(reply{index: 1}) // nobody takes
	go func() {
		for i := 2; i < all; i++ {
			r.put(reply{index: i})
		}
	}()
	var came []reply
	var got []int
	for len(got) < all {
		select {
		case <-r.some:
		case <-time.After(10 * time.Second):
			t.Fatalf("%d of %d came, and no wake-up", len(got), all)
		}
		came = r.take(came)
		for _, one := range came {
			got = append(got, one.index)
		}
	}
	if !slices.IsSorted(got) || got[all-1] != all-1 {
		t.Error("they came in another order")
	}
}
