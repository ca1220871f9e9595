// Package vllmtuner_test checks the architecture: which package may import which other, and that each package comment
// says what its package is for. It never tests what a package does.
package vllmtuner_test

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "vllmtuner"

// rooms gives each package of the module (called a room) the number of its line in ARCHITECTURE.md. A package imports
// only packages on lines above its own, that is, with lower numbers. Packages on the same line do not import each
// other. No package imports cmd/tuner, which is on the last line.
var rooms = map[string]int{
	"foreign":                  0,
	"studies/rights":           0,
	"tuner/space":              0,
	"serverctl/cgroup":         0,
	"serverctl/exposition":     0,
	"realtime":                 1,
	"render":                   0,
	"bench/workload":           1,
	"serverctl/proc":           1,
	"serverctl/gpu":            1,
	"serverctl/host":           1,
	"serverctl/weights":        1,
	"serverctl/sim":            1,
	"studies/logs":             1,
	"studies/fence":            1,
	"studies/nfslab/pause":     1,
	"studies/faultfs":          1,
	"trial/vllmserve/fakevllm": 1,
	"tuner/space/landscape":    2,
	"bench":                    2,
	"bench/truth":              2,
	"serverctl":                2,
	"serverctl/sim/vllm":       2,
	"studies/silent":           2,
	"serverctl/doctor":         2,
	"trial/slo":                3,
	"trial/capacity":           3,
	"trial/vllmserve":          3,
	"trial":                    4,
	"trial/simload":            5,
	"studies":                  5,
	"trial/live":               5,
	"trial/loadtest":           5,
	"trial/sweep":              6,
	"tuner/sampler":            6,
	"tuner/studyfile":          6,
	"studies/logview":          6,
	"studies/report":           6,
	"studies/export":           6,
	"studies/optuna":           6,
	"tuner":                    7,
	"tuner/calibrate":          7,
	"studies/prior":            7,
	"deploy/guard":             1,
	"deploy/cluster":           2,
	"deploy":                   7,
	"tuner/plan":               7,
	"tuner/asktell":            7,
	"tuner/insight":            7,
	"tuner/metrics":            8,
	"tuner/forecast":           8,
	"cmd/tuner":                9,

	// These rooms are for tests only.
	"tuner/searchbench":             9,
	"tuner/searchbench/otherengine": 5,
}

// checkImport returns an error if the package importer must not import the package imported. Both names are without the
// module's path. A test may also import a package on the same line. For example, the test of a client needs the
// simulated server.
func checkImport(importer, imported string, inTest bool) error {
	from, ok := rooms[importer]
	if !ok {
		return unknown(importer)
	}
	to, ok := rooms[imported]
	switch {
	case !ok:
		return unknown(imported)
	case strings.HasPrefix(imported, "cmd/"):
		return fmt.Errorf("%s imports %s: no package imports a command; move what both need to a room above", importer, imported)
	case to > from:
		return fmt.Errorf("%s (line %d) imports %s (line %d): imports go up only; pass what is needed in from cmd/tuner, "+
			"or declare an interface in %s", importer, from, imported, to, importer)
	case to == from && !inTest:
		return fmt.Errorf("%s and %s are on the same line (%d), so neither may import the other: let cmd/tuner join them, "+
			"or move what both need to a room above", importer, imported, from)
	}
	return nil
}

func unknown(room string) error {
	return fmt.Errorf("%s is not a room: give it a line in rooms (architecture_test.go) and a row in ARCHITECTURE.md", room)
}

// A pkg is a directory with Go files.
type pkg struct {
	name    string
	doc     string          // package comment; empty if there is none
	imports map[string]bool // the imported rooms; the value is false if only tests import that room
}

// packages parses the module's files, whatever their build tags, and returns its packages by their rooms. It reads the
// files without the go command, so that go test knows when a cached result is out of date. It leaves out the
// directories that the go command leaves out, nested modules, and the module's root, which has only this test.
func packages(t *testing.T) map[string]*pkg {
	t.Helper()
	found := make(map[string]*pkg)
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil || path == ".":
			return err
		case entry.IsDir():
			if strings.ContainsAny(entry.Name()[:1], "._") || entry.Name() == "testdata" {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				return filepath.SkipDir
			}
			return nil
		case filepath.Ext(path) != ".go" || filepath.Dir(path) == ".":
			return nil
		}
		room := filepath.ToSlash(filepath.Dir(path))
		if found[room] == nil {
			found[room] = &pkg{imports: make(map[string]bool)}
		}
		return found[room].add(path)
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// add reads the imports and the package comment of one file.
func (p *pkg) add(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return err
	}
	inTest := strings.HasSuffix(path, "_test.go")
	for _, spec := range file.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return fmt.Errorf("%s: import %s: %w", path, spec.Path.Value, err)
		}
		if room, ok := strings.CutPrefix(imported, module+"/"); ok {
			p.imports[room] = p.imports[room] || !inTest
		}
	}
	if !inTest {
		p.name = file.Name.Name
		p.doc += file.Doc.Text()
	}
	return nil
}

func TestImportsGoUpOnly(t *testing.T) {
	for room, p := range packages(t) {
		for imported, inCode := range p.imports {
			if imported == room {
				continue // an external test imports its own package
			}
			if err := checkImport(room, imported, !inCode); err != nil {
				t.Error(err)
			}
		}
	}
}

// The simulator's engine computes in virtual time. Only serverctl/sim/vllm connects it to a network and to processes.
func TestTheSimulatorsEngineUsesNoNetworkAndNoProcesses(t *testing.T) {
	files, err := filepath.Glob("serverctl/sim/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("serverctl/sim has no Go files: %v", err)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range file.Imports {
			imported, _ := strconv.Unquote(spec.Path.Value) // the parser has accepted the path, so Unquote succeeds
			if imported == "net" || strings.HasPrefix(imported, "net/") || imported == "os/exec" {
				t.Errorf("%s imports %s: only serverctl/sim/vllm may do so", path, imported)
			}
		}
	}
}

func TestEveryPackageIsARoomAndSaysWhatItIsFor(t *testing.T) {
	found := packages(t)
	for room, p := range found {
		if _, ok := rooms[room]; !ok {
			t.Error(unknown(room))
		}
		want := "Package " + p.name + " "
		if p.name == "main" {
			want = "Command tuner "
		}
		if !strings.HasPrefix(p.doc, want) {
			t.Errorf("%s: the package comment begins with %.40q, want %q and what the package is for", room, p.doc, want)
		}
	}
	for room := range rooms {
		if found[room] == nil {
			t.Errorf("%s is in rooms but is not a package: remove it from architecture_test.go and ARCHITECTURE.md", room)
		}
	}
}

func TestArchitectureShowsEveryRoomOnItsLine(t *testing.T) {
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	for room, line := range rooms {
		if row := fmt.Sprintf("\n| %d | `%s` | ", line, room); !strings.Contains(string(text), row) {
			t.Errorf("ARCHITECTURE.md: no row begins with %q", row[1:])
		}
	}
}

func TestCheckImport(t *testing.T) {
	tests := []struct {
		name               string
		importer, imported string
		inTest             bool
		want               string // part of the error; empty means that the import is allowed
	}{
		{"a room imports a room above", "bench", "bench/workload", false, ""},
		{"the command imports any room", "cmd/tuner", "serverctl", false, ""},
		{"a room imports no room below", "bench/workload", "bench", false, "imports go up only"},
		{"measuring does not judge", "bench", "trial/slo", false, "bench (line 2) imports trial/slo (line 3)"},
		{"the client and the server do not import each other", "bench", "serverctl", false, "are on the same line (2)"},
		{"a test may import the simulated server", "bench", "serverctl/sim/vllm", true, ""},
		{"the engine does not import its server", "serverctl/sim", "serverctl/sim/vllm", false, "imports go up only"},
		{"a test imports no room below either", "bench", "trial", true, "imports go up only"},
		{"no package imports a command", "cmd/tuner", "cmd/tuner", false, "no package imports a command"},
		{"the importer has no line", "helpers", "bench", false, "helpers is not a room: give it a line"},
		{"the imported package has no line", "bench", "helpers", false, "helpers is not a room: give it a line"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := checkImport(tt.importer, tt.imported, tt.inTest)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("checkImport(%s, %s) = %v, want it allowed", tt.importer, tt.imported, err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("checkImport(%s, %s) = %v, want an error with %q", tt.importer, tt.imported, err, tt.want)
			}
		})
	}
}
