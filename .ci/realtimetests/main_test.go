package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFind(t *testing.T) {
	root := t.TempDir()
	write(t, root+"/b/b_test.go", `package b
func TestLong(t *testing.T) { t.Run("row", func(t *testing.T) { realtime.Only(t, "an hour") }) }
func TestShort(t *testing.T) { other.Only(t) }
`)
	write(t, root+"/a/a_test.go", "package a\nfunc TestClock(t *testing.T) { realtime.Long(t, \"a clock\") }\n")
	write(t, root+"/a/a.go", "package a\nfunc TestNot(t *testing.T) { realtime.Only(t, \"no test file\") }\n")
	tests, packages, err := find(root)
	if err != nil || !slices.Equal(tests, []string{"TestClock", "TestLong"}) || !slices.Equal(packages, []string{"./a", "./b"}) {
		t.Errorf("find = %q, %q, %v, want TestClock and TestLong of ./a and ./b", tests, packages, err)
	}
}

func TestFindRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"package a\nfunc helper(t *testing.T) { realtime.Only(t, \"\") }\n": "helper calls realtime.Only, but it is not a test",
		"package a\nfunc TestA(t *testing.T) {}\n":                          "no test below",
		"package a\nfunc TestA(":                                            "expected",
	} {
		root := t.TempDir()
		write(t, root+"/a/a_test.go", text)
		if tests, packages, err := find(root); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: find = %q, %q, %v, want an error with %q", text, tests, packages, err, want)
		}
	}
}
