package studies

import (
	"reflect"
	"testing"
)

// FuzzDecode compares the fast decoders with the JSON library, for text from encode and for any other text.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{`[]`, `{}`, `["a","b c"]`, `["a", "b"]`, `[""]`, `["\"",">"]`, `{"a":"b","c":""}`, `{"a":1}`, `["a" "b"]`, `{"":""}`, `null`, `["a","b"`, `[","]`, `{"a":","}`} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		written, err := encode([]string{a, b})
		try(t, err)
		pair, err := encode(map[string]string{a: b, b: a})
		try(t, err)
		for _, text := range []string{written, pair} {
			checkDecode(t, text)
		}
		for _, r := range a + b {
			if r < ' ' || r == '\uFFFD' {
				return // the JSON library refuses or replaces these; encode never writes them
			}
		}
		checkDecode(t, a)
	})
}

// checkDecode compares decodeList and decodeMap with decode.
func checkDecode(t *testing.T, text string) {
	t.Helper()
	var list, wantList []string
	var m, wantMap map[string]string
	if got, want := decodeList(text, &list), decode(text, &wantList); (got == nil) != (want == nil) || want == nil && !reflect.DeepEqual(list, wantList) {
		t.Errorf("decodeList(%s) = %q, %v; want %q, %v", text, list, got, wantList, want)
	}
	got, want := decodeMap(text, &m), decode(text, &wantMap)
	if (got == nil) != (want == nil) || want == nil && !reflect.DeepEqual(m, wantMap) {
		t.Errorf("decodeMap(%s) = %q, %v; want %q, %v", text, m, got, wantMap, want)
	}
}
