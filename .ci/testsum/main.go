// Command testsum reads the events of go test -json and prints what a person wants to know: one line a package, the
// output of what failed, and at the end the count of the tests with every skipped one and its reason.
// It exits with 1 when a test failed or none ran.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	ok, err := summarize(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// An event is one line of go test -json, as `go doc cmd/test2json` and `go help buildjson` describe it.
type event struct {
	Action     string
	Package    string
	ImportPath string // of a build event
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// A testID is a test within its package; the empty name is the package itself.
type testID struct{ pkg, name string }

// A summary is what has been read so far.
type summary struct {
	out            io.Writer
	output         map[testID][]string // of tests that have not passed
	passed, failed int
	packages       int
	brokenPackages int
	skipped        []string
}

// summarize copies what matters from the events in r to w. It reports whether tests ran and all of them passed.
func summarize(r io.Reader, w io.Writer) (bool, error) {
	s := &summary{out: w, output: make(map[testID][]string)}
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			s.read(line)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return false, fmt.Errorf("read test events: %w", err)
		}
	}
	s.end()
	return s.failed == 0 && s.brokenPackages == 0 && s.passed > 0, nil
}

// read takes one line. A line that is no event, such as a warning of the go command, is passed on as it is.
func (s *summary) read(line string) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(s.out, line)
		return
	}
	id := testID{e.Package, e.Test}
	switch e.Action {
	case "output":
		s.output[id] = append(s.output[id], e.Output)
	case "build-output":
		fmt.Fprint(s.out, e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.endTest(id, e.Action)
		}
	}
}

// endTest counts one test. The output of a failed one is kept until its package ends.
func (s *summary) endTest(id testID, action string) {
	switch action {
	case "pass":
		s.passed++
	case "skip":
		s.skipped = append(s.skipped, fmt.Sprintf("SKIP %s %s: %s", id.pkg, id.name, reason(s.output[id])))
	case "fail":
		s.failed++
		return
	}
	delete(s.output, id)
}

// endPackage prints the package's line and, when it failed, the output of every test that failed or never ended.
func (s *summary) endPackage(e event) {
	own := testID{e.Package, ""}
	switch e.Action {
	case "pass":
		s.packages++
		fmt.Fprintf(s.out, "ok   %s (%.1f s)\n", e.Package, e.Elapsed)
	case "fail":
		s.packages++
		s.brokenPackages++
		for _, id := range s.tests(e.Package) {
			fmt.Fprint(s.out, strings.Join(s.output[id], ""))
			delete(s.output, id)
		}
		fmt.Fprint(s.out, strings.Join(s.output[own], ""))
		fmt.Fprintf(s.out, "FAIL %s (%.1f s)\n", e.Package, e.Elapsed)
	}
	delete(s.output, own)
}

// tests lists the tests of a package that have output left, in the order of their names.
func (s *summary) tests(pkg string) []testID {
	var ids []testID
	for id := range s.output {
		if id.pkg == pkg && id.name != "" {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b testID) int { return strings.Compare(a.name, b.name) })
	return ids
}

// end prints the count, and the skipped tests with their reasons.
func (s *summary) end() {
	fmt.Fprintf(s.out, "tests: %d passed, %d failed, %d skipped in %d packages\n",
		s.passed, s.failed, len(s.skipped), s.packages)
	slices.Sort(s.skipped)
	for _, line := range s.skipped {
		fmt.Fprintln(s.out, line)
	}
}

// place is where t.Skip was called; the reason follows it.
var place = regexp.MustCompile(`^[\w.-]+\.go:\d+: `)

// reason is what a skipped test wrote, on one line, without the test runner's own lines.
func reason(output []string) string {
	var words []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		words = append(words, place.ReplaceAllString(line, ""))
	}
	if len(words) == 0 {
		return "no reason given"
	}
	return strings.Join(words, "; ")
}
