package vllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// The refusals of vLLM's API server: what FastAPI and pydantic say of a body that is not of the request's type, and how each
// version hands that on (validation_exception_handler in vllm/entrypoints/openai/api_server.py, 0.14.1, and in
// vllm/entrypoints/serve/exception_handling/handlers/validation.py, 0.32.0 and 0.33.0).

// A refusal is an answer that is an error.
type refusal struct {
	status  int
	kind    string
	message string
	param   string // empty is null
}

// Error returns the message.
func (r *refusal) Error() string { return r.message }

// bad is a request that was understood and cannot be served.
func bad(param, format string, args ...any) *refusal {
	return &refusal{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), param}
}

// badValue is bad with the parameter and its value behind the message.
func badValue(param string, value any, format string, args ...any) *refusal {
	return bad(param, "%s (parameter=%s, value=%v)", fmt.Sprintf(format, args...), param, value)
}

// write answers with the refusal.
func (r *refusal) write(w http.ResponseWriter) {
	param := "null"
	if r.param != "" {
		param = quoteJSON(r.param)
	}
	writeJSON(w, r.status, fmt.Sprintf(`{"error":{"message":%s,"type":%s,"param":%s,"code":%d}}`,
		quoteJSON(r.message), quoteJSON(r.kind), param, r.status))
}

// writeJSON sends a body. A client that has gone is no error of the server's.
func writeJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
}

// quoteJSON writes a text as JSON, with the characters that Go escapes for the sake of HTML as they are.
func quoteJSON(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a text can always be encoded
	return strings.TrimSuffix(b.String(), "\n")
}

// A place is where a request is read: the function of vLLM that does, with its line in the traceback that 0.14.1 shows.
type place struct {
	path, function string
	line           int
	dir            string // below packages
}

var (
	completionPlace = place{"/v1/completions", "create_completion", 519, "vllm/entrypoints/utils.py"}
	chatPlace       = place{"/v1/chat/completions", "create_chat_completion", 478, "vllm/entrypoints/utils.py"}
	tokenizePlace   = place{"/tokenize", "tokenize", 36, "vllm/entrypoints/utils.py"}
	detokenizePlace = place{"/detokenize", "detokenize", 65, "vllm/entrypoints/utils.py"}
)

// A finding is one thing that pydantic finds wrong.
type finding struct {
	kind  string
	loc   []any // names and indexes below the body
	text  string
	input any    // of JSON; see decode
	ctx   string // Python's repr of what is in the dict 'ctx'; empty without
}

// mostFindings is how many later versions tell.
const mostFindings = 10

// invalid is the refusal of a body of another type.
func (f *release) invalid(at place, findings ...finding) *refusal {
	label := "error"
	if len(findings) > 1 {
		label = "errors"
	}
	message := fmt.Sprintf("%d validation %s:\n", len(findings), label)
	var texts []string
	for i, x := range findings {
		if f.modern && i == mostFindings {
			message += fmt.Sprintf("  ...and %d more %s\n", len(findings)-i, label)
			break
		}
		texts = append(texts, f.finding(x))
		message += "  " + texts[len(texts)-1] + "\n"
	}
	r := &refusal{status: http.StatusBadRequest, kind: "Bad Request"}
	if f.modern {
		r.message, r.param = strings.TrimRight(message, "\n"), location(findings[0].loc)
		return r
	}
	r.message = fmt.Sprintf("%s\n  File \"%s/%s\", line %d, in %s\n    POST %s [%s]", message, packages, at.dir, at.line, at.function, at.path,
		strings.Join(texts, ", "))
	return r
}

// location is a place in the body as later versions write it.
func location(loc []any) string {
	parts := []string{"body"}
	for _, part := range loc {
		if text := fmt.Sprint(part); !strings.ContainsAny(text, "[(") && text != "str" { // types are left out
			parts = append(parts, text)
		}
	}
	return strings.Join(parts, ".")
}

// finding is Python's repr of one of pydantic's errors.
func (f *release) finding(x finding) string {
	loc, input := "", pythonOf(x.input)
	if f.modern {
		loc, input = pythonQuote(location(x.loc)), pythonQuote(summary(x.input))
	} else {
		parts := []string{"'body'"}
		for _, part := range x.loc {
			parts = append(parts, pythonValue(part))
		}
		loc = "(" + strings.Join(parts, ", ") + ")"
		if len(parts) == 1 {
			loc = "('body',)"
		}
	}
	ctx := ""
	if x.ctx != "" {
		ctx = ", 'ctx': {" + x.ctx + "}"
	}
	return fmt.Sprintf("{'type': %s, 'loc': %s, 'msg': %s, 'input': %s%s}", pythonQuote(x.kind), loc, pythonQuote(x.text), input, ctx)
}

// summary is how later versions write a value that was wrong: containers by their size alone.
func summary(v any) string {
	const most = 200
	switch v := v.(type) {
	case string:
		if len(v) > most {
			return v[:most] + "...[truncated]"
		}
		return v
	case object:
		return fmt.Sprintf("<dict of %d items>", len(v))
	case []any:
		return fmt.Sprintf("<list of %d items>", len(v))
	}
	return pythonOf(v)
}

// An object is a JSON object with its keys in their order.
type object []member

type member struct {
	name  string
	value any
}

// get returns a member; a later one of the same name counts.
func (o object) get(name string) (v any, ok bool) {
	for _, m := range o {
		if m.name == name {
			v, ok = m.value, true
		}
	}
	return v, ok
}

// decode reads JSON into nil, bool, json.Number, string, []any and object. What it is given is valid.
func decode(text []byte) any {
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	return decodeNext(d)
}

func decodeNext(d *json.Decoder) any {
	t, err := d.Token()
	if err != nil { // only for what is not valid
		return nil
	}
	switch t {
	case json.Delim('{'):
		o := object{}
		for d.More() {
			name, _ := d.Token() // a string, as the text is valid
			o = append(o, member{fmt.Sprint(name), decodeNext(d)})
		}
		_, _ = d.Token() // the brace
		return o
	case json.Delim('['):
		list := []any{}
		for d.More() {
			list = append(list, decodeNext(d))
		}
		_, _ = d.Token() // the bracket
		return list
	}
	return t
}

// pythonJSON writes a JSON text as Python's repr of what it is.
func pythonJSON(text string) string { return pythonOf(decode([]byte(text))) }

// pythonOf writes a value of JSON as Python's repr does.
func pythonOf(v any) string {
	switch v := v.(type) {
	case object:
		pairs := make([]string, len(v))
		for i, m := range v {
			pairs[i] = pythonQuote(m.name) + ": " + pythonOf(m.value)
		}
		return "{" + strings.Join(pairs, ", ") + "}"
	case []any:
		texts := make([]string, len(v))
		for i, x := range v {
			texts[i] = pythonOf(x)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case json.Number:
		if _, err := strconv.ParseInt(v.String(), 10, 64); err == nil {
			return v.String()
		}
		x, err := v.Float64()
		if err != nil {
			return v.String()
		}
		return pythonRepr(x)
	}
	return pythonValue(v)
}

// jsonOf writes a value of JSON as Python's json.dumps does, but for characters beyond ASCII, which stay as they are.
func jsonOf(v any) string {
	switch v := v.(type) {
	case object:
		pairs := make([]string, len(v))
		for i, m := range v {
			pairs[i] = quoteJSON(m.name) + ": " + jsonOf(m.value)
		}
		return "{" + strings.Join(pairs, ", ") + "}"
	case []any:
		texts := make([]string, len(v))
		for i, x := range v {
			texts[i] = jsonOf(x)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case string:
		return quoteJSON(v)
	case nil:
		return "null"
	}
	return fmt.Sprint(v) // a bool or a number
}

// A bodyField is one field of a request that the simulation checks.
type bodyField struct {
	name string
	kind string // int, float, bool, str, object, stop, bias or prompt
}

// The fields in the order of vLLM's classes, which is that of the findings (CompletionRequest and ChatCompletionRequest).
var (
	completionFields = []bodyField{{"model", "str"}, {"prompt", "prompt"}, {"echo", "bool"}, {"frequency_penalty", "float"}, {"logit_bias", "bias"}, {"max_tokens", "int"},
		{"n", "int"}, {"presence_penalty", "float"}, {"seed", "int"}, {"stop", "stop"}, {"stream", "bool"}, {"stream_options", "object"}, {"temperature", "float"},
		{"top_p", "float"}, {"top_k", "int"}, {"min_p", "float"}, {"repetition_penalty", "float"}, {"ignore_eos", "bool"}, {"min_tokens", "int"}}
	chatFields = []bodyField{{"model", "str"}, {"frequency_penalty", "float"}, {"logit_bias", "bias"}, {"max_tokens", "int"}, {"max_completion_tokens", "int"},
		{"n", "int"}, {"presence_penalty", "float"}, {"seed", "int"}, {"stop", "stop"}, {"stream", "bool"}, {"stream_options", "object"}, {"temperature", "float"},
		{"top_p", "float"}, {"top_k", "int"}, {"min_p", "float"}, {"repetition_penalty", "float"}, {"ignore_eos", "bool"}, {"min_tokens", "int"}}
)

// check returns what is wrong with a value of a field. Null is a field that is not given.
func (f *release) check(x bodyField, v any) []finding {
	loc := []any{x.name}
	if v == nil {
		return nil
	}
	switch x.kind {
	case "prompt":
		return f.checkPrompt(v)
	case "stop":
		return f.checkStop(v)
	case "bias":
		biases, ok := v.(object)
		if !ok {
			return []finding{{kind: "dict_type", loc: loc, text: "Input should be a valid dictionary", input: v}}
		}
		var found []finding
		for _, m := range biases {
			found = append(found, checkScalar("float", []any{x.name, m.name}, m.value)...)
		}
		return found
	case "object":
		if _, ok := v.(object); !ok {
			return []finding{{kind: "model_attributes_type", loc: loc, text: "Input should be a valid dictionary or object to extract fields from", input: v}}
		}
		return nil
	}
	return checkScalar(x.kind, loc, v)
}

// checkScalar returns what is wrong with a value that is to be an int, a float, a bool or a str: at most one finding.
func checkScalar(as string, loc []any, v any) []finding {
	wrong := func(kind, text string) []finding {
		return []finding{{kind: kind, loc: loc, text: text, input: v}}
	}
	number, isNumber := v.(json.Number)
	text, isText := v.(string)
	_, isBool := v.(bool)
	switch {
	case as == "str" && !isText:
		return wrong("string_type", "Input should be a valid string")
	case as == "bool" && isText && !slices.Contains(boolWords, strings.ToLower(text)):
		return wrong("bool_parsing", "Input should be a valid boolean, unable to interpret input")
	case as == "bool" && isNumber && number != "0" && number != "1":
		return wrong("bool_parsing", "Input should be a valid boolean, unable to interpret input")
	case as == "bool" && !isText && !isNumber && !isBool:
		return wrong("bool_type", "Input should be a valid boolean")
	case as == "int" && isText && !parses(parseInt, text):
		return wrong("int_parsing", "Input should be a valid integer, unable to parse string as an integer")
	case as == "int" && isNumber && !whole(number):
		return wrong("int_from_float", "Input should be a valid integer, got a number with a fractional part")
	case as == "int" && isNumber && strings.ContainsAny(number.String(), ".eE") && math.Abs(numberOf(v)) >= 1<<63:
		return wrong("int_parsing_size", "Unable to parse input string as an integer, exceeded maximum size")
	case as == "int" && !isText && !isNumber && !isBool:
		return wrong("int_type", "Input should be a valid integer")
	case as == "float" && isText && !parses(parseFloat, text):
		return wrong("float_parsing", "Input should be a valid number, unable to parse string as a number")
	case as == "float" && !isText && !isNumber && !isBool:
		return wrong("float_type", "Input should be a valid number")
	}
	return nil
}

// checkPrompt finds a prompt of another type than those that pydantic tries in turn. Since 0.32.0 a token's number is no
// negative one.
func (f *release) checkPrompt(prompt any) []finding {
	list, isList := prompt.([]any)
	if _, isText := prompt.(string); isText || isList && len(list) == 0 {
		return nil
	}
	const ints, lists, text, texts = "list[int]", "list[list[int]]", "str", "list[str]"
	noText := finding{kind: "string_type", loc: []any{"prompt", text}, text: "Input should be a valid string", input: prompt}
	noList := func(input any, loc ...any) finding {
		return finding{kind: "list_type", loc: append([]any{"prompt"}, loc...), text: "Input should be a valid list", input: input}
	}
	if !isList {
		return []finding{noList(prompt, ints), noList(prompt, lists), noText, noList(prompt, texts)}
	}
	var asInts, asLists, asTexts []finding
	for i, v := range list {
		asInts = append(asInts, f.checkToken(v, "prompt", ints, i)...)
		asTexts = append(asTexts, checkScalar("str", []any{"prompt", texts, i}, v)...)
		inner, ok := v.([]any)
		if !ok {
			asLists = append(asLists, noList(v, lists, i))
		}
		for j, w := range inner {
			asLists = append(asLists, f.checkToken(w, "prompt", lists, i, j)...)
		}
	}
	if len(asInts) == 0 || len(asLists) == 0 || len(asTexts) == 0 {
		return nil
	}
	return slices.Concat(asInts, asLists, []finding{noText}, asTexts)
}

// checkToken finds what is no number of a token.
func (f *release) checkToken(v any, loc ...any) []finding {
	found := checkScalar("int", loc, v)
	if v == nil {
		return []finding{{kind: "int_type", loc: loc, text: "Input should be a valid integer"}}
	}
	if f.modern && len(found) == 0 && numberOf(v) < 0 {
		return []finding{{kind: "greater_than_equal", loc: loc, text: "Input should be greater than or equal to 0", input: v, ctx: "'ge': 0"}}
	}
	return found
}

// mostStops is how many texts that end an answer later versions take (VLLM_MAX_STOP_STRINGS).
const mostStops = 4

// checkStop finds what is neither a text nor a list of texts.
func (f *release) checkStop(v any) []finding {
	if _, ok := v.(string); ok {
		return nil
	}
	found := checkScalar("str", []any{"stop", "str"}, v)
	list, ok := v.([]any)
	switch {
	case !ok:
		return append(found, finding{kind: "list_type", loc: []any{"stop", "list[str]"}, text: "Input should be a valid list", input: v})
	case f.modern && len(list) > mostStops:
		return append(found, finding{kind: "too_long", loc: []any{"stop", "list[str]"}, text: fmt.Sprintf("List should have at most %d items after validation, not %d", mostStops, len(list)),
			input: v, ctx: fmt.Sprintf("'field_type': 'List', 'max_length': %d, 'actual_length': %d", mostStops, len(list))})
	}
	for i, one := range list {
		found = append(found, checkScalar("str", []any{"stop", "list[str]", i}, one)...)
	}
	if len(found) == 1 { // it is a list, and all of it are texts
		return nil
	}
	return found
}

// boolWords are the words that pydantic takes for a bool.
var boolWords = []string{"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}

// parseFloat reads a number as Python does, which has no hexadecimal ones, and for which one that is too large is infinite.
func parseFloat(s string) (float64, error) {
	x, err := strconv.ParseFloat(s, 64)
	switch {
	case strings.ContainsAny(s, "xX_"):
		return 0, strconv.ErrSyntax
	case errors.Is(err, strconv.ErrRange):
		return x, nil
	}
	return x, err
}

// parseInt reads an integer. Python's have no end: one that does not fit 64 bits is the last that does.
func parseInt(s string) (int, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return int(n), nil
	}
	return int(n), err
}

func parses[T any](parse func(string) (T, error), text string) bool {
	_, err := parse(strings.TrimSpace(text))
	return err == nil
}

func whole(n json.Number) bool {
	x, err := n.Float64()
	return (err == nil || errors.Is(err, strconv.ErrRange)) && x == math.Trunc(x)
}

// numberOf returns a checked value of a field as a number.
func numberOf(v any) float64 {
	switch v := v.(type) {
	case json.Number:
		x, _ := v.Float64() // was checked
		return x
	case string:
		x, _ := parseFloat(strings.TrimSpace(v)) // likewise
		return x
	case bool:
		if v {
			return 1
		}
	}
	return 0
}

// wholeOf returns a checked value of a field as an integer.
func wholeOf(v any) int {
	text, isText := v.(string)
	if number, ok := v.(json.Number); ok {
		text, isText = number.String(), true
	}
	if n, err := parseInt(strings.TrimSpace(text)); isText && err == nil {
		return n
	}
	return int(numberOf(v)) // less than 1<<63: that was checked
}

// truth returns a checked value of a field as a bool.
func truth(v any) bool {
	if text, ok := v.(string); ok {
		return slices.Index(boolWords, strings.ToLower(text)) >= len(boolWords)/2
	}
	return numberOf(v) != 0
}

// isJSON reports whether a body says that it is JSON (validate_json_request in vllm/entrypoints/openai/utils.py).
func isJSON(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && media == "application/json"
}

// notJSON is the refusal of a body of another media type.
func (f *release) notJSON() *refusal {
	const text = "Unsupported Media Type: Only 'application/json' is allowed"
	r := &refusal{status: http.StatusBadRequest, kind: "Bad Request", message: "1 validation error:\n  " + text}
	if !f.modern {
		r.message += " [" + strconv.Quote(text) + "]"
	}
	return r
}

// body reads the body of a request as an object.
func (f *release) body(at place, contentType string, text []byte) (object, *refusal) {
	if !isJSON(contentType) {
		return nil, f.notJSON()
	}
	if len(text) == 0 {
		return nil, f.invalid(at, finding{kind: "missing", text: "Field required"})
	}
	valid, said, pos := json.Valid(text), "", 0
	if !valid || bytes.Count(text, []byte("["))+bytes.Count(text, []byte("{")) > deepest {
		said, pos = pythonSyntax(text)
	}
	switch {
	case said == tooDeep:
		return nil, &refused400
	case !valid:
		return nil, f.invalid(at, finding{kind: "json_invalid", loc: []any{pos}, text: "JSON decode error", input: object{}, ctx: "'error': " + pythonQuote(said)})
	}
	o, ok := decode(text).(object)
	if ok {
		return o, nil
	}
	if f.modern {
		return nil, f.invalid(at, finding{kind: "model_attributes_type", text: "Input should be a valid dictionary or object to extract fields from", input: decode(text)})
	}
	return nil, &refusal{status: http.StatusInternalServerError, message: internalServerError} // a validator of vLLM's stumbles
}

// internalServerError is Starlette's whole answer to an exception that nobody has caught.
const internalServerError = "Internal Server Error"

// refused answers with a refusal.
func refused(w http.ResponseWriter, r *refusal) {
	if r.message == internalServerError {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(r.status)
		_, _ = w.Write([]byte(r.message)) // a client that has gone is no error of the server's
		return
	}
	r.write(w)
}

// invalidQuery is the refusal of a word that a parameter of the query may not be.
func (f *release) invalidQuery(name, value, expected string) *refusal {
	loc, ctx := "('query', "+pythonQuote(name)+")", "{'expected': "+pythonQuote(expected)+"}"
	if f.modern {
		loc = "'query." + name + "'"
	}
	text := fmt.Sprintf("{'type': 'literal_error', 'loc': %s, 'msg': %s, 'input': %s, 'ctx': %s}", loc, pythonQuote("Input should be "+expected), pythonQuote(value), ctx)
	r := &refusal{status: http.StatusBadRequest, kind: "Bad Request", message: "1 validation error:\n  " + text}
	if f.modern {
		r.param = "query." + name
		return r
	}
	r.message += fmt.Sprintf("\n\n  File \"%s/vllm/entrypoints/serve/instrumentator/server_info.py\", line 35, in show_server_info\n    GET /server_info [%s]", packages, text)
	return r
}
