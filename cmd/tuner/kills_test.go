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

// everyStep makes the command print every step to standard error, not only one every ten seconds.
const everyStep = "TUNER_TEST_EVERY_STEP"

// A victim is a simulated study whose tuner is killed again and again.
type victim struct {
	file, root string
	random     *rand.Rand
	whole      studies.Study // the same study without a kill
	answer     string
	took       time.Duration   // the whole run took so long
	had        []studies.Trial // what was stored after the last run
}

// newVictim runs the study once without a kill.
func newVictim(t *testing.T, random *rand.Rand, trials int) *victim {
	t.Helper()
	text := strings.Replace(fmt.Sprintf(smallStudy, inVirtual, trials, 60.0), "seed: 3", fmt.Sprintf("seed: %d", random.IntN(1e6)), 1)
	v := &victim{file: filepath.Join(t.TempDir(), "study.yaml"), root: t.TempDir(), random: random}
	if err := os.WriteFile(v.file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	began := time.Now()
	v.answer = answer(command(t, "run", v.file, "--root", root))
	v.took = time.Since(began)
	v.whole = snapshot(t, filepath.Join(root, "small"))
	return v
}

// run starts the tuner, kills it after a while, and compares the store with the output. It returns false if the tuner ended
// before the kill.
func (v *victim) run(t *testing.T) (killed bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), tunerPath(t), "run", v.file, "--root", v.root)
	cmd.Env = append(os.Environ(), everyStep+"=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	delay := time.Duration(v.random.Int64N(int64(v.took * 4 / 10)))
	time.AfterFunc(delay, func() { _ = cmd.Process.Kill() }) // it may have ended
	err := cmd.Wait()
	switch {
	case err == nil:
		if is := answer(stdout.String()); is != v.answer {
			t.Errorf("the answer is\n%swithout kills it was\n%s", is, v.answer)
		}
	case err.Error() != "signal: killed":
		t.Fatalf("the tuner ends by itself with %v\n%s", err, &stderr)
	}
	v.check(t, stderr.String(), err == nil)
	return err != nil
}

// answer is what a run prints at its end, without the study's directory, and without the time and GPU time of the load after
// the search. Nothing of that load is stored, and after a kill it runs on a freshly started server.
func answer(printed string) string {
	printed, _, _ = strings.Cut(printed, "\nThe study is in")
	return afterSearch.ReplaceAllString(printed, "")
}

var afterSearch = regexp.MustCompile(`after the search \(.*\)|(?m:^GPU time .*$)`)

var (
	probeLine = regexp.MustCompile(`: trial (\d+), (\S+ req/s (?:passed|failed))$`)
	trialLine = regexp.MustCompile(`^trial +(\d+)  `)
)

// check compares the store with its earlier contents and with the output of the run. The store has all of that, and at most
// one more probe.
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
			t.Errorf("trial %d was said to be done and is %s", trial.Number, trial.State)
		}
		for i, p := range trial.Probes {
			if !equalJSON(t, p, v.whole.Trials[trial.Number].Probes[i]) {
				t.Errorf("probe %d of trial %d is not that of the run without kills", i, trial.Number)
			}
		}
	}
	if extra > 1 || finished && extra > 0 {
		t.Errorf("%d probes are stored of which nothing was said", extra)
	}
	v.had = is
}

// verdict is the word for a probe in the progress.
func verdict(rate float64, pass bool) string {
	word := "passed"
	if !pass {
		word = "failed"
	}
	return fmt.Sprintf("%.3g req/s %s", rate, word)
}

// stored returns what the next owner will find. It reads a copy, so that the study stays as the kill left it.
func (v *victim) stored(t *testing.T) []studies.Trial {
	t.Helper()
	dir, copied := filepath.Join(v.root, "small"), filepath.Join(v.root, "copy")
	if _, err := os.Stat(dir); err != nil {
		return nil // killed before the directory was made
	}
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	store, _, err := studies.Open(context.Background(), copied, studies.New{Name: "small"}, studies.Options{AcceptDrift: true})
	if err != nil {
		t.Fatalf("what the kill left cannot be opened: %v", err)
	}
	study, err := store.Study()
	if err == nil {
		err = store.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(copied); err != nil {
		t.Fatal(err)
	}
	return study.Trials
}

// A tuner that is killed again and again, at any moment, loses nothing that it printed, and finds the same answer.
// TUNER_KILLS says how often, TUNER_KILL_SEED when.
func TestKills(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	t.Parallel()
	kills, seed := 20, uint64(time.Now().UnixNano())
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
				t.Fatalf("at kill %d", killed)
			}
			if killed >= kills {
				v.took *= 100 // nobody kills it any more
			}
		}
		finished++
		for i, w := range v.whole.Trials {
			probes += len(w.Probes)
			if g := v.had[i]; g.Point.String() != w.Point.String() || !equalJSON(t, g.Result.Capacity, w.Result.Capacity) || len(g.Probes) != len(w.Probes) {
				t.Errorf("trial %d is %+v, without kills it was %+v", i, g, w)
			}
		}
		if t.Failed() {
			t.Fatalf("study %d, after kill %d", finished, killed)
		}
	}
	t.Logf("%d kills in %d studies with %d probes, none of which was lost", killed, finished, probes)
}
