package serverctl

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

// constants returns the values of all constants in serverctl.go that have the named type.
func constants(t *testing.T, name string) (values []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "serverctl.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); !ok || kind.Name != name {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, value)
		return true
	})
	return values
}

// The golden file lists every class and cause, with its remedy and who is at fault. Read the file as a whole.
func TestRemedies(t *testing.T) {
	var text strings.Builder
	classNames, causeNames := constants(t, "Class"), constants(t, "Cause")
	if len(classNames) != len(classVerdicts) || len(causeNames) != len(causeVerdicts) {
		t.Errorf("%d classes and %d causes, but the tables have %d and %d", len(classNames), len(causeNames), len(classVerdicts), len(causeVerdicts))
	}
	say := func(name, whose, remedy string) {
		if remedy == "" {
			remedy = "-"
		}
		fmt.Fprintf(&text, "%-20s %-8s %s\n", name, whose, remedy)
	}
	fmt.Fprintln(&text, "Every class and cause of a failure, whose fault it is, and what the user is told to do about it.")
	for _, class := range classNames {
		if _, ok := classVerdicts[Class(class)]; !ok {
			t.Errorf("the table lacks class %s", class)
		}
		say(class, culprit(&ExitError{Class: Class(class)}), Remedy(Class(class), ""))
	}
	fmt.Fprintln(&text)
	for _, cause := range causeNames {
		if _, ok := causeVerdicts[Cause(cause)]; !ok {
			t.Errorf("the table lacks cause %s", cause)
		}
		faults := []string{}
		for _, d := range deathPatterns {
			for _, class := range []Class{d.start, d.load} {
				word := culprit(&ExitError{Class: class, Cause: d.cause})
				if string(d.cause) == cause && class != "" && !slices.Contains(faults, word) {
					faults = append(faults, word)
				}
			}
		}
		say(cause, strings.Join(faults, ","), Remedy(Infrastructure, Cause(cause)))
	}
	const golden = "testdata/remedies.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || text.String() != string(want) {
		t.Errorf("the table is\n%s\nwant %s (%v)", text.String(), golden, err)
	}
}
