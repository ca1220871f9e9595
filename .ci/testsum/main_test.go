package main

import (
	"strings"
	"testing"
)

func TestSummarize(t *testing.T) {
	pass := `{"Action":"pass","Package":"a","Test":"TestOne","Elapsed":0.1}
{"Action":"pass","Package":"a","Elapsed":1.25}
`
	tests := []struct {
		name, events string
		ok           bool
		want         string
	}{
		{"all tests pass", pass, true, "ok   a (1.2 s)\ntests: 1 passed, 0 failed, 0 skipped in 1 packages\n"},
		{"a skipped test is named with its reason", pass +
			`{"Action":"output","Package":"b","Test":"TestRoot","Output":"=== RUN   TestRoot\n"}
{"Action":"output","Package":"b","Test":"TestRoot","Output":"    b_test.go:7: needs root\n"}
{"Action":"output","Package":"b","Test":"TestRoot","Output":"--- SKIP: TestRoot (0.00s)\n"}
{"Action":"skip","Package":"b","Test":"TestRoot"}
{"Action":"pass","Package":"b","Elapsed":0}
`, true, "ok   a (1.2 s)\nok   b (0.0 s)\ntests: 1 passed, 0 failed, 1 skipped in 2 packages\nSKIP b TestRoot: needs root\n"},
		{"a failed test shows its output, a passed one does not",
			`{"Action":"output","Package":"a","Test":"TestGood","Output":"chatter\n"}
{"Action":"pass","Package":"a","Test":"TestGood"}
{"Action":"output","Package":"a","Test":"TestBad","Output":"    a_test.go:3: got 1, want 2\n"}
{"Action":"fail","Package":"a","Test":"TestBad"}
{"Action":"fail","Package":"a","Elapsed":0.5}
`, false, "    a_test.go:3: got 1, want 2\nFAIL a (0.5 s)\ntests: 1 passed, 1 failed, 0 skipped in 1 packages\n"},
		{"a test that never ended shows its output", pass +
			`{"Action":"output","Package":"b","Test":"TestHang","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"b","Elapsed":9}
`, false, "ok   a (1.2 s)\npanic: test timed out\nFAIL b (9.0 s)\ntests: 1 passed, 0 failed, 0 skipped in 2 packages\n"},
		{"a package that does not compile fails and shows the compiler's errors", pass +
			`{"ImportPath":"b","Action":"build-output","Output":"b.go:1: undefined: x\n"}
{"ImportPath":"b","Action":"build-fail"}
{"Action":"fail","Package":"b","Elapsed":0,"FailedBuild":"b"}
`, false, "ok   a (1.2 s)\nb.go:1: undefined: x\nFAIL b (0.0 s)\ntests: 1 passed, 0 failed, 0 skipped in 2 packages\n"},
		{"a package that never ended has failed", `{"Action":"start","Package":"a"}
{"Action":"start","Package":"b"}
` + pass + `{"Action":"output","Package":"b","Test":"TestSlow","Output":"=== RUN   TestSlow\n"}
`, false, "ok   a (1.2 s)\n=== RUN   TestSlow\nFAIL b (0.0 s)\ntests: 1 passed, 0 failed, 0 skipped in 2 packages\n"},
		{"it is a failure if no test ran", "", false, "tests: 0 passed, 0 failed, 0 skipped in 0 packages\n"},
		{"a package without tests is not counted", pass + `{"Action":"skip","Package":"words","Elapsed":0}
`, true, "ok   a (1.2 s)\ntests: 1 passed, 0 failed, 0 skipped in 1 packages\n"},
		{"a line that is not an event is printed unchanged", "go: finding module\n" + pass, true,
			"go: finding module\nok   a (1.2 s)\ntests: 1 passed, 0 failed, 0 skipped in 1 packages\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			ok, err := summarize(strings.NewReader(tt.events), &out)
			if err != nil {
				t.Fatal(err)
			}
			if ok != tt.ok || out.String() != tt.want {
				t.Errorf("summarize = %v,\n%swant %v,\n%s", ok, out.String(), tt.ok, tt.want)
			}
		})
	}
}

func TestReasonIsNeverEmpty(t *testing.T) {
	if got := reason([]string{"=== RUN   TestX\n", "--- SKIP: TestX (0.00s)\n"}); got != "no reason given" {
		t.Errorf("reason = %q, want %q", got, "no reason given")
	}
}
