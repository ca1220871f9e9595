package main

import (
	"archive/zip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A tuner that knew only schema 4 wrote testdata/schema-4-study.zip and these tables. The study has priors and an accepted change of
// the world, and was interrupted in trial 5. Trial 5 in schema4After differs from the old tuner's in one figure. The lower end of
// its interval was 3.732, because the old tuner's approximation of Student's t was 0.3 % too small.
const (
	schema4Head = `number,origin,state,outcome,class,world,max-num-seqs,capacity_rps,bound,lowest_rps,highest_rps,passed_rps,failed_rps,binding,in_flight,kv_tokens
0,default,done,measured,,1,,16.3,exact,5.466947053880214,16.3,16.3,22,p99 TTFT,28.662121293129328,47296
1,prior,done,measured,,1,55,16.3,exact,3.9919427655722806,16.3,16.3,18.9,p99 TTFT,38.22640809975693,50512
2,default,done,measured,,2,,16.3,exact,5.466947053880214,16.3,16.3,22,p99 TTFT,28.662121293129328,47296
3,prior,done,measured,,2,55,16.3,exact,3.9919427655722806,16.3,16.3,18.9,p99 TTFT,38.22640809975693,50512
4,sampler,done,measured,,2,16,2.7,exact,1.5847263476433784,3.8656763055896532,2.7,6.64,p99 TTFT,1.9150213442671988,50624
`
	schema4Before = schema4Head + "5,sampler,running,,,2,63,,,,,,,,,\n"
	schema4After  = schema4Head + "5,sampler,done,measured,,2,63,16.3,exact,3.71769048305736,16.3,16.3,18.9,p99 TTFT,38.22979421336,50384\n"
)

// This tuner reads a study of schema 4 as the old tuner did, resumes it, and gets the results in schema4After.
func TestAStudyOfSchema4GoesOn(t *testing.T) {
	files, err := zip.OpenReader("testdata/schema-4-study.zip")
	must(t, err)
	defer files.Close()
	root := t.TempDir()
	must(t, os.CopyFS(root, files))
	check := func(want string) {
		t.Helper()
		var got strings.Builder
		for line := range strings.Lines(command(t, "export", "small", "--root", root, "-f", "csv")) {
			fields := strings.Split(strings.TrimSpace(line), ",")
			got.WriteString(strings.Join(fields[:16], ",") + "\n")
		}
		if got.String() != want {
			t.Errorf("the trials are\n%swant\n%s", &got, want)
		}
		var best struct {
			Best   struct{ Number int }
			Drifts []struct{ Text string }
			Priors []struct{ Source string }
		}
		must(t, json.Unmarshal([]byte(command(t, "best", "small", "--root", root, "-o", "json")), &best))
		drifts := []struct{ Text string }{{"server args: (nothing) → --max-model-len=1536"}}
		if best.Best.Number != 2 || !slices.Equal(best.Drifts, drifts) || len(best.Priors) != 1 || best.Priors[0].Source != "elsewhere.db" {
			t.Errorf("best prints %+v, want trial 2 with the drift and the prior of the old study", best)
		}
	}
	check(schema4Before)
	command(t, "run", filepath.Join(root, "small.yaml"), "--root", root)
	check(schema4After)
	if _, err := os.Stat(filepath.Join(root, "small", "backup", "schema-4.db")); err != nil {
		t.Errorf("the old database was not kept: %v", err)
	}
}
