package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/serverctl/sim"
)

// nonDefault returns the dict that vLLM logs after "non-default args", in the order of vLLM's parser. The package
// serverctl reads this dict from the log.
func nonDefault(o sim.Options) string {
	r := releaseOf(o)
	var pairs []string
	add := func(name string, v any) {
		if slices.Contains(secretArgs, name) && r.since032 {
			v = "***"
		}
		pairs = append(pairs, pythonValue(name)+": "+pythonValue(v))
	}
	if o.Leader != "" {
		add("model_tag", o.Leader)
	}
	seen := map[string]bool{}
	for _, f := range sim.Flags(r.version) {
		v, given := o.Given[f.Dest]
		switch {
		case seen[f.Dest]:
		case f.Dest == "model" && o.Leader != "":
			add("model", o.Leader)
		case given && (f.Default == nil || pythonValue(v) != *f.Default):
			add(f.Dest, v)
		}
		seen[f.Dest] = true
	}
	return "{" + strings.Join(pairs, ", ") + "}"
}

// secretArgs are the args whose values vLLM hides in its log since 0.32.0 (redact_sensitive_args in
// vllm/entrypoints/serve/utils/api_utils.py).
var secretArgs = []string{"api_key", "hf_token", "watermark_config"}

// pythonValue writes a value of a flag as Python's repr does.
func pythonValue(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return pythonBool(v)
	case float64:
		return pythonRepr(v)
	case json.RawMessage:
		var value any
		d := json.NewDecoder(bytes.NewReader(v))
		d.UseNumber()
		_ = d.Decode(&value) // the parser has checked that it is JSON
		return pythonValue(value)
	case map[string]any:
		var pairs []string
		for _, name := range slices.Sorted(maps.Keys(v)) {
			pairs = append(pairs, pythonQuote(name)+": "+pythonValue(v[name]))
		}
		return "{" + strings.Join(pairs, ", ") + "}"
	case []any:
		texts := make([]string, len(v))
		for i, element := range v {
			texts[i] = pythonValue(element)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case []string:
		texts := make([]string, len(v))
		for i, s := range v {
			texts[i] = pythonValue(s)
		}
		return "[" + strings.Join(texts, ", ") + "]"
	case string:
		return pythonQuote(v)
	}
	return fmt.Sprint(v)
}

func pythonBool(b bool) string {
	text := strconv.FormatBool(b)
	return strings.ToUpper(text[:1]) + text[1:]
}

// pythonQuote writes a text as Python's repr does. It uses double quotes if the text has single quotes and no double
// quotes, and single quotes otherwise.
func pythonQuote(s string) string {
	quote := `'`
	if strings.Contains(s, `'`) && !strings.Contains(s, `"`) {
		quote = `"`
	}
	escaped := strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`, quote, `\`+quote).Replace(s)
	return quote + escaped + quote
}

// pythonRepr writes a float as Python's repr does: with the shortest digits that give the same value. The text has an
// exponent if the absolute value is below 1e-4 or at least 1e16.
func pythonRepr(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case math.IsInf(x, 0):
		return strings.TrimPrefix(strings.ToLower(fmt.Sprint(x)), "+")
	}
	if size := math.Abs(x); size != 0 && (size < 1e-4 || size >= 1e16) {
		return strconv.FormatFloat(x, 'e', -1, 64)
	}
	text := strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}
