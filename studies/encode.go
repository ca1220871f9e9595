package studies

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"
)

// encode returns v as JSON. JSON has no NaN and no infinities; the error names the field that has such a number.
func encode(v any) (string, error) {
	if err := checkFinite("", reflect.ValueOf(v)); err != nil {
		return "", err
	}
	text, err := json.Marshal(v)
	return string(text), err
}

// checkFinite returns an error for the first number that is NaN or infinite.
func checkFinite(path string, v reflect.Value) error {
	switch v.Kind() {
	case reflect.Float64:
		if f := v.Float(); math.IsNaN(f) || math.IsInf(f, 0) {
			return fmt.Errorf("%s is %v, which cannot be stored", strings.TrimPrefix(path, "."), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if err := checkFinite(path+"."+v.Type().Field(i).Name, v.Field(i)); err != nil {
				return err
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if err := checkFinite(fmt.Sprintf("%s[%d]", path, i), v.Index(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// timeLayout is the format of times in the database. Texts in this format sort by time, and SQLite's date functions
// read them.
const timeLayout = "2006-01-02T15:04:05.000000000Z"

func formatTime(t time.Time) string { return t.UTC().Format(timeLayout) }

func decode(text string, v any) error { return json.Unmarshal([]byte(text), v) }

// parseTime reads what formatTime wrote. It uses RFC3339Nano, because Go parses this layout faster than others.
func parseTime(text string, t *time.Time) (err error) {
	*t, err = time.Parse(time.RFC3339Nano, text)
	return err
}
