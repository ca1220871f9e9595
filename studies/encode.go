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

func decode(text string, v any) error { return json.Unmarshal([]byte(text), v) }

// parseTime reads what formatTime wrote. Go has a faster parser for RFC3339Nano than for other layouts.
func parseTime(text string, t *time.Time) (err error) {
	*t, err = time.Parse(time.RFC3339Nano, text)
	return err
}
