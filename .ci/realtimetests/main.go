// Command realtimetests prints arguments for go test: -run with a regular expression, and packages. They select exactly
// the tests that call realtime.Only or realtime.Long, because these tests are skipped under the race detector. The
// command reads the test files below the working directory.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	tests, packages, err := find(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "realtimetests:", err)
		os.Exit(1)
	}
	fmt.Printf("-run ^(%s)$ %s\n", strings.Join(tests, "|"), strings.Join(packages, " "))
}

// find returns the sorted names of the tests below root that call realtime.Only or realtime.Long, and their packages as
// ./path. It returns an error if no test calls one of them, or if a function that is not a test calls one.
func find(root string) (tests, packages []string, err error) {
	err = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		names, err := callers(path)
		if len(names) > 0 {
			dir, _ := filepath.Rel(root, filepath.Dir(path)) // both are relative
			tests, packages = append(tests, names...), append(packages, "./"+filepath.ToSlash(dir))
		}
		return err
	})
	if err == nil && len(tests) == 0 {
		err = fmt.Errorf("no test below %s calls realtime.Only", root)
	}
	slices.Sort(tests)
	slices.Sort(packages)
	return slices.Compact(tests), slices.Compact(packages), err
}

// callers returns the tests of a file that call realtime.Only or realtime.Long.
func callers(path string) (names []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return nil, err
	}
	for _, decl := range file.Decls {
		function, ok := decl.(*ast.FuncDecl)
		if !ok || !callsRealtime(function) {
			continue
		}
		name := function.Name.Name
		if !strings.HasPrefix(name, "Test") {
			return nil, fmt.Errorf("%s: %s calls realtime.Only, but it is not a test; call it from the tests that use %s", path, name, name)
		}
		names = append(names, name)
	}
	return names, nil
}

func callsRealtime(function *ast.FuncDecl) (calls bool) {
	ast.Inspect(function, func(node ast.Node) bool {
		if call, ok := node.(*ast.SelectorExpr); ok && (call.Sel.Name == "Only" || call.Sel.Name == "Long") {
			pkg, ok := call.X.(*ast.Ident)
			calls = calls || ok && pkg.Name == "realtime"
		}
		return !calls
	})
	return calls
}
