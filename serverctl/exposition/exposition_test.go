package exposition

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, row := range []struct {
		name, text string
		want       []Sample // nil means that Parse must return an error
	}{
		{"no labels", "up 1", []Sample{{"up", nil, 1}}},
		{"empty labels", "up{} 1", []Sample{{"up", map[string]string{}, 1}}},
		{"a timestamp", `a{b="c"} 2.5 1700000000000`, []Sample{{"a", map[string]string{"b": "c"}, 2.5}}},
		{"a trailing comma, and spaces", `a{ b = "c" , d="", } 1e3`, []Sample{{"a", map[string]string{"b": "c", "d": ""}, 1000}}},
		{"escapes, and a brace in a value", `a{b="\"}\\\n"} 0`, []Sample{{"a", map[string]string{"b": "\"}\\\n"}, 0}}},
		{"comments and empty lines", "# TYPE a counter\na 1\n\nb 2\n", []Sample{{"a", nil, 1}, {"b", nil, 2}}},
		{"no value", `a{b="c"}`, nil},
		{"no number", "a b", nil},
		{"an open quote", `a{b="c 1`, nil},
		{"an open brace", `a{b="c", 1`, nil},
		{"no quotes", "a{b=c} 1", nil},
		{"no name", `{b="c"} 1`, nil},
	} {
		got, err := Parse(row.text)
		if !reflect.DeepEqual(got, row.want) || (err == nil) != (row.want != nil) {
			t.Errorf("%s: Parse(%s) = %+v, %v, want %+v", row.name, row.text, got, err, row.want)
		}
	}
	if _, err := Parse("a 1\n" + strings.Repeat("x", 1<<20)); err == nil || !strings.HasPrefix(err.Error(), "line 2 ") || len(err.Error()) > 300 {
		t.Errorf("Parse of a long line = %v, want a short error with the line's number", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("#0\n{}") // expfmt 0.67.5 panics on this text
	f.Add("a{b=\"\\\\\"} NaN\n}{")
	f.Fuzz(func(t *testing.T, text string) {
		samples, err := Parse(text)
		if err != nil && samples != nil {
			t.Errorf("samples beside an error: %v, %v", samples, err)
		}
	})
}
