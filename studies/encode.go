package studies

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"
)

// encode returns v as JSON. NaN and infinities have no JSON; the error names the field.
func encode(v any) (string, error) {
	if err := finite("", reflect.ValueOf(v)); err != nil {
		return "", err
	}
	text, err := json.Marshal(v)
	return string(text), err
}

// finite returns an error for the first number that is NaN or infinite.
func finite(path string, v reflect.Value) error {
	switch v.Kind() {
	case reflect.Float64:
		if f := v.Float(); math.IsNaN(f) || math.IsInf(f, 0) {
			return fmt.Errorf("%s is %v, which cannot be stored", strings.TrimPrefix(path, "."), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if err := finite(path+"."+v.Type().Field(i).Name, v.Field(i)); err != nil {
				return err
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if err := finite(fmt.Sprintf("%s[%d]", path, i), v.Index(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// timeLayout sorts as text, and SQLite's date functions read it.
const timeLayout = "2006-01-02T15:04:05.000000000Z"

func formatTime(t time.Time) string { return t.UTC().Format(timeLayout) }

// decodeList is decode for a list of strings. A list from encode without escapes is cut at its separators, which takes
// a tenth of the time.
func decodeList(text string, list *[]string) error {
	inner, ok := unescaped(text, `["`, `"]`)
	if !ok {
		return decode(text, list)
	}
	parts := make([]string, 0, 8)
	for {
		i := strings.IndexByte(inner, '"')
		if i < 0 {
			*list = append(parts, inner)
			return nil
		}
		if !strings.HasPrefix(inner[i:], `","`) { // encode did not write it
			return decode(text, list)
		}
		parts, inner = append(parts, inner[:i]), inner[i+3:]
	}
}

// decodeMap is decodeList for an object whose values are strings.
func decodeMap(text string, m *map[string]string) error {
	inner, ok := unescaped(text, `{"`, `"}`)
	if !ok {
		return decode(text, m)
	}
	out := map[string]string{}
	for pair := range strings.SplitSeq(inner, `","`) {
		key, value, ok := strings.Cut(pair, `":"`)
		if !ok || strings.Contains(key+value, `"`) {
			return decode(text, m)
		}
		out[key] = value
	}
	*m = out
	return nil
}

func unescaped(text, open, end string) (inner string, ok bool) {
	inner, ok = strings.CutPrefix(text, open)
	if ok {
		inner, ok = strings.CutSuffix(inner, end)
	}
	return inner, ok && !strings.Contains(inner, `\`)
}
