package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/studies"
)

// everyStep is an environment variable. If it is set, the command prints every step to standard error, not only one
// every ten seconds.
const everyStep = "TUNER_TEST_EVERY_STEP"

// A victim is a simulated study whose tuner is killed again and again.
type victim struct {
	file, root string
	random     *rand.Rand
	whole      studies.Study   // the same study, run without a kill
	answer     string          // answer of the run without a kill
	took       time.Duration   // duration of the run without a kill
	had        []studies.Trial // the trials that were stored after the previous run
}

// newVictim runs the study once without a kill.
func newVictim(t *testing.T, random *rand.Rand, trials int) *victim {
	t.Helper()
	text := strings.Replace(fmt.Sprintf(smallStudy, inVirtual, trials, 60.0), "seed: 3", fmt.Sprintf("seed: %d", random.IntN(1e6)), 1)
	v := &victim{file: filepath.Join(t.TempDir(), "study.yaml"), root: t.TempDir(), random: random}
	must(t, os.WriteFile(v.file, []byte(text), 0o644))
	root := t.TempDir()
	began := time.Now()
	v.answer = answer(command(t, "run", v.file, "--root", root))
	v.took = time.Since(began)
	v.whole = snapshot(t, filepath.Join(root, "small"))
	return v
}

// run starts the tuner, kills it after a random delay, and compares the store with the output. It returns false if the
// tuner ended before the kill.
func (v *victim) run(t *testing.T) (killed bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), tunerPath(t), "run", v.file, "--root", v.root)
	cmd.Env = append(os.Environ(), everyStep+"=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	must(t, cmd.Start())
	delay := time.Duration(v.random.Int64N(int64(v.took * 4 / 10)))
	time.AfterFunc(delay, func() { _ = cmd.Process.Kill() }) // the process may have ended
	err := cmd.Wait()
	switch {
	case err == nil:
		if is := answer(stdout.String()); is != v.answer {
			t.Errorf("the answer is\n%swant the answer of the run without kills\n%s", is, v.answer)
		}
	case err.Error() != "signal: killed":
		t.Fatalf("the tuner ends by itself with %v\n%s", err, &stderr)
	}
	v.check(t, stderr.String(), err == nil)
	return err != nil
}

// answer removes from a run's output the study's directory, the GPU time, and the time after the search. The load after
// the search is not stored, and after a kill it runs on a newly started server, so these times differ.
func answer(printed string) string {
	printed, _, _ = strings.Cut(printed, "\nThe study is in")
	return afterSearch.ReplaceAllString(printed, "")
}

var afterSearch = regexp.MustCompile(`after the search \(.*\)|(?m:^GPU time .*$(?:\n {10}.*$)*)`)

var (
	probeLine = regexp.MustCompile(`: trial (\d+), (\S+ req/s (?:passed|failed))$`)
	trialLine = regexp.MustCompile(`^trial +(\d+)  `)
)

// check compares the store with its earlier contents and with the output of the run. The store must have every probe
// that it had before or that the run printed, and at most one more.
func (v *victim) check(t *testing.T, said string, finished bool) {
	t.Helper()
	want := map[int][]string{}
	for _, trial := range v.had {
		for _, p := range trial.Probes {
			want[trial.Number] = append(want[trial.Number], verdict(p.Rate, p.Verdict.Pass))
		}
	}
	done := map[int]bool{}
	for lines := bufio.NewScanner(strings.NewReader(said)); lines.Scan(); {
		if m := probeLine.FindStringSubmatch(lines.Text()); m != nil {
			number, _ := strconv.Atoi(m[1])
			want[number] = append(want[number], m[2])
		}
		if m := trialLine.FindStringSubmatch(lines.Text()); m != nil {
			number, _ := strconv.Atoi(m[1])
			done[number] = true
		}
	}
	is := v.stored(t)
	extra := 0
	for number, lines := range want {
		if number >= len(is) || len(is[number].Probes) < len(lines) {
			t.Fatalf("trial %d has lost probes: it had %q, and there are %+v\n%s", number, lines, is, said)
		}
		for i, line := range lines {
			if p := is[number].Probes[i]; verdict(p.Rate, p.Verdict.Pass) != line {
				t.Errorf("probe %d of trial %d was %q and is %q", i, number, line, verdict(p.Rate, p.Verdict.Pass))
			}
		}
	}
	for _, trial := range is {
		extra += len(trial.Probes) - len(want[trial.Number])
		if done[trial.Number] && trial.State != studies.Done {
			t.Errorf("trial %d was printed as done and is stored as %s", trial.Number, trial.State)
		}
		for i, p := range trial.Probes {
			if !equalJSON(t, p, v.whole.Trials[trial.Number].Probes[i]) {
				t.Errorf("probe %d of trial %d differs from the run without kills", i, trial.Number)
			}
		}
	}
	if extra > 1 || finished && extra > 0 {
		t.Errorf("%d probes are stored that were not printed; want at most one, and none after the end", extra)
	}
	v.had = is
}

// verdict returns the text that a run prints for a probe.
func verdict(rate float64, pass bool) string {
	word := "passed"
	if !pass {
		word = "failed"
	}
	return fmt.Sprintf("%.3g req/s %s", rate, word)
}

// stored returns the trials that the next owner will find. It opens a copy of the study, so that the study does not
// change.
func (v *victim) stored(t *testing.T) []studies.Trial {
	t.Helper()
	dir, copied := filepath.Join(v.root, "small"), filepath.Join(v.root, "copy")
	if _, err := os.Stat(dir); err != nil {
		return nil // the kill came before the tuner made the directory
	}
	must(t, os.CopyFS(copied, os.DirFS(dir)))
	store, _, err := studies.Open(context.Background(), copied, studies.New{Name: "small"}, studies.Options{AcceptDrift: true})
	if err != nil {
		t.Fatalf("after the kill the study cannot be opened: %v", err)
	}
	study, err := store.Study()
	if err == nil {
		err = store.Close()
	}
	must(t, err)
	must(t, os.RemoveAll(copied))
	return study.Trials
}

// A tuner that is killed repeatedly, at random moments, loses no probe that it printed, and finds the same answer.
// TUNER_KILLS is the number of kills; TUNER_KILL_SEED seeds their moments.
func TestKills(t *testing.T) {
	realtime.Long(t, "dozens of starts")
	t.Parallel()
	kills, seed := realtime.Rounds(10, 100), uint64(time.Now().UnixNano())
	if n, err := strconv.Atoi(os.Getenv("TUNER_KILLS")); err == nil {
		kills = n
	}
	if n, err := strconv.ParseUint(os.Getenv("TUNER_KILL_SEED"), 10, 64); err == nil {
		seed = n
	}
	t.Logf("%d kills, TUNER_KILL_SEED=%d", kills, seed)
	random := rand.New(rand.NewPCG(seed, 0))
	killed, finished, probes := 0, 0, 0
	for killed < kills {
		v := newVictim(t, random, 10)
		for v.run(t) {
			killed++
			if t.Failed() {
				t.Fatalf("the checks above failed after kill %d", killed)
			}
			if killed >= kills {
				v.took *= 100 // the next run almost always ends long before its kill
			}
		}
		finished++
		for i, w := range v.whole.Trials {
			probes += len(w.Probes)
			if g := v.had[i]; g.Point.String() != w.Point.String() || !equalJSON(t, g.Result.Capacity, w.Result.Capacity) || len(g.Probes) != len(w.Probes) {
				t.Errorf("trial %d is %+v, want %+v as without kills", i, g, w)
			}
		}
		if t.Failed() {
			t.Fatalf("the checks above failed for study %d, after kill %d", finished, killed)
		}
	}
	t.Logf("%d kills in %d studies with %d probes; no probe was lost", killed, finished, probes)
}
