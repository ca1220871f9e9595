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

// constants returns the values of all constants of a type in serverctl.go.
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

// The table of all classes and causes with whose fault each is and its remedy is read as a whole.
func TestRemedies(t *testing.T) {
	var text strings.Builder
	classes, causes := constants(t, "Class"), constants(t, "Cause")
	if len(classes) != len(classRemedies) || len(causes) != len(causeRemedies) {
		t.Errorf("%d classes and %d causes, with remedies for %d and %d", len(classes), len(causes), len(classRemedies), len(causeRemedies))
	}
	say := func(name, whose, remedy string) {
		if remedy == "" {
			remedy = "-"
		}
		fmt.Fprintf(&text, "%-20s %-8s %s\n", name, whose, remedy)
	}
	fmt.Fprintln(&text, "Every class and cause of a failure, whose fault it is, and what the user is told to do about it.")
	for _, class := range classes {
		if _, ok := classRemedies[Class(class)]; !ok {
			t.Errorf("no word about the remedy of class %s", class)
		}
		say(class, whose(&ExitError{Class: Class(class)}), Remedy(Class(class), ""))
	}
	fmt.Fprintln(&text)
	for _, cause := range causes {
		if _, ok := causeRemedies[Cause(cause)]; !ok {
			t.Errorf("no word about the remedy of cause %s", cause)
		}
		classes := []string{}
		for _, d := range deaths {
			for _, class := range []Class{d.start, d.load} {
				word := whose(&ExitError{Class: class, Cause: d.cause})
				if string(d.cause) == cause && class != "" && !slices.Contains(classes, word) {
					classes = append(classes, word)
				}
			}
		}
		say(cause, strings.Join(classes, ","), Remedy(Infrastructure, Cause(cause)))
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
