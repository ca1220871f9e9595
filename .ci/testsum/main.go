// Command testsum reads the events of go test -json and prints a summary: a line for each package, the output of failed
// tests, the number of tests, and each skipped test with its reason. It exits with 1 if a test or a package failed, or
// if no test passed.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
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
	Action  string
	Package string
	Test    string
	Elapsed float64 // seconds
	Output  string
}

// A testID names a test of a package. An empty name means the package itself.
type testID struct{ pkg, name string }

// A summary adds up the events that have been read.
type summary struct {
	out            io.Writer
	output         map[testID][]string // output of packages that still run, and of their tests that still run or have failed
	running        map[string]bool     // packages that have started and not ended
	passed, failed int
	packages       int
	brokenPackages int
	skipped        []string
}

// summarize reads the events in r and writes the summary to w. It returns true if at least one test passed and no test
// or package failed.
func summarize(r io.Reader, w io.Writer) (bool, error) {
	s := &summary{out: w, output: make(map[testID][]string), running: make(map[string]bool)}
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
	s.endRunning()
	s.end()
	return s.failed == 0 && s.brokenPackages == 0 && s.passed > 0, nil
}

// read reads one line. If the line is not an event, such as a warning of the go command, read prints it unchanged.
func (s *summary) read(line string) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(s.out, line)
		return
	}
	id := testID{e.Package, e.Test}
	switch e.Action {
	case "start":
		s.running[e.Package] = true
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

// endTest counts a test that has ended. It keeps the output of a failed test until the package ends.
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

// endPackage prints the package's line. If the package failed, it also prints the output of every test that failed or
// never ended.
func (s *summary) endPackage(e event) {
	own := testID{e.Package, ""}
	delete(s.running, e.Package)
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

// endRunning fails each package that started and never ended, as when go test is killed.
func (s *summary) endRunning() {
	for _, pkg := range slices.Sorted(maps.Keys(s.running)) {
		s.endPackage(event{Action: "fail", Package: pkg})
	}
}

// tests returns those tests of a package that still have output in s.output, sorted by name.
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

// end prints the number of tests, and the skipped tests with their reasons.
func (s *summary) end() {
	fmt.Fprintf(s.out, "tests: %d passed, %d failed, %d skipped in %d packages\n",
		s.passed, s.failed, len(s.skipped), s.packages)
	slices.Sort(s.skipped)
	for _, line := range s.skipped {
		fmt.Fprintln(s.out, line)
	}
}

// skipLocation matches the file and line that go test prints before the reason of a skip.
var skipLocation = regexp.MustCompile(`^[\w.-]+\.go:\d+: `)

// reason returns on one line why a test was skipped. It takes the output of the test and leaves out the lines that go
// test adds.
func reason(output []string) string {
	var words []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		words = append(words, skipLocation.ReplaceAllString(line, ""))
	}
	if len(words) == 0 {
		return "no reason given"
	}
	return strings.Join(words, "; ")
}
