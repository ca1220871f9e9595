package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
)

// slowLife is a server that starts and stops slowly, so that a test can kill the tuner in each of these stages. It
// starts a daemon in another session and without an environment.
const slowLife = `command: [tuner, sim, serve, --sim-profile=small-fast, --sim-fault=slow-start:for=1s, --sim-fault=slow-stop:for=1s, --sim-fault=daemon]`

// A moment is a stage of a study. The study has reached this stage when the function seen returns true.
type moment struct {
	name string
	seen func(dir, log string) bool
}

func logHas(text string) func(string, string) bool {
	return func(_, log string) bool { return strings.Contains(log, text) }
}

var moments = []moment{
	{"the study is opened", func(dir, _ string) bool { _, err := os.Stat(dir); return err == nil }},
	{"the server loads", logHas("Starting to load model")},
	{"the server is warmed up", logHas("Application startup complete")},
	{"a rate is probed", func(dir, _ string) bool {
		s, err := studies.ReadSnapshot(dir)
		return err == nil && len(s.Trials) > 0 && len(s.Trials[0].Probes) > 0
	}},
	{"the server ends", logHas("Shutting down")},
}

// someMoments returns all moments in make soak-server. Otherwise it returns only the moment when a kill could lose a
// stored probe, because each moment takes a whole study.
func someMoments() []moment {
	if os.Getenv(cyclesVariable) != "" {
		return moments
	}
	return moments[3:4]
}

// An owner is a tuner that runs a study of one trial.
type owner struct {
	*startedCommand
	dir   string
	study string
	root  string
}

func startOwner(t *testing.T) *owner {
	t.Helper()
	return startLongOwner(t, 1)
}

// startLongOwner is like startOwner, but sets how long each probe lasts, in seconds.
func startLongOwner(t *testing.T, seconds float64) *owner {
	t.Helper()
	o := &owner{study: writePatientStudy(t, slowLife, 1, seconds), root: t.TempDir()}
	o.dir = filepath.Join(o.root, "small")
	o.startedCommand = launch(t, tunerCommand(context.WithoutCancel(t.Context()), t, "run", o.study, "--root", o.root))
	return o
}

// await waits until the study has reached a moment in its first trial.
func (o *owner) await(t *testing.T, m moment) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		log, _ := os.ReadFile(filepath.Join(o.dir, "logs", "trial-0000.log")) // the log does not exist before the first server starts
		if m.seen(o.dir, string(log)) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s until %s\n%s\n%s", patience, m.name, o, log)
		}
	}
}

// awaitServerGone waits until no process of the owner's server runs, and returns how long that took.
func (o *owner) awaitServerGone(t *testing.T, record proc.Record, limit time.Duration) time.Duration {
	t.Helper()
	begin := time.Now()
	for {
		pids, err := record.Members()
		must(t, err)
		pids = append(pids, o.daemons(t)...)
		took := time.Since(begin)
		if len(pids) == 0 {
			return took
		}
		if took > limit {
			t.Fatalf("processes %v still run %v after their owner ended", pids, limit)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// daemons returns the running daemons of all servers of the study.
func (o *owner) daemons(t *testing.T) []int {
	t.Helper()
	logs, err := filepath.Glob(filepath.Join(o.dir, "logs", "*"))
	must(t, err)
	var alive []int
	for _, name := range logs {
		text, err := os.ReadFile(name)
		must(t, err)
		for _, part := range strings.Split(string(text), "daemon pid ")[1:] {
			pid := 0
			if fmt.Sscan(part, &pid); pid > 0 && syscall.Kill(pid, 0) == nil {
				alive = append(alive, pid)
			}
		}
	}
	return alive
}

// A tuner that is killed at any moment leaves no process behind. The next run keeps the stored probes and finishes the
// study.
func TestAKilledTunerLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, m := range someMoments() {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			plainTuner(t, "a killed tuner reports no race")
			o := startOwner(t)
			o.await(t, m)
			record, _ := serverRecord(o.dir) // there is no record before the first server starts
			must(t, o.cmd.Process.Kill())
			o.end(t)
			had, _ := studies.ReadSnapshot(o.dir) // there is no snapshot before the study is opened
			if record.PID != 0 {
				t.Logf("the server was gone %v after the tuner was killed", o.awaitServerGone(t, record, patience).Round(time.Millisecond))
			}
			out := command(t, "run", o.study, "--root", o.root)
			if !strings.Contains(out, "1 of 1 trial done") {
				t.Errorf("the next run prints\n%s", out)
			}
			is := snapshot(t, o.dir).Trials[0].Probes
			for _, trial := range had.Trials { // there is at most one trial
				for i, was := range trial.Probes {
					if i >= len(is) || !equalJSON(t, was, is[i]) {
						t.Errorf("probe %d was %+v, and after the next run the probes are %+v", i, was, is)
					}
				}
			}
			if left := o.daemons(t); len(left) > 0 {
				t.Errorf("daemons %v still run", left)
			}
		})
	}
}

// A tuner that gets one or two signals, at any moment, stops its server before it ends.
func TestATunerThatIsAskedToEndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, ask := range []struct {
		name    string
		signals []os.Signal
	}{
		{"SIGTERM", []os.Signal{syscall.SIGTERM}},
		{"Ctrl-C once", []os.Signal{os.Interrupt}},
		{"Ctrl-C twice", []os.Signal{os.Interrupt, os.Interrupt}},
	} {
		for _, m := range someMoments() {
			t.Run(ask.name+" when "+m.name, func(t *testing.T) {
				t.Parallel()
				if ask.name == "Ctrl-C once" {
					plainTuner(t, "the other two cases run with the race detector")
				}
				o := startOwner(t)
				o.await(t, m)
				record, _ := serverRecord(o.dir)
				for i, signal := range ask.signals {
					if i > 0 {
						time.Sleep(200 * time.Millisecond) // a person takes this long to press Ctrl-C twice
					}
					if err := o.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
						t.Fatal(err)
					}
				}
				if text, code := o.end(t); code != exitInterrupted && code != 0 {
					t.Errorf("exit code %d\n%s", code, text)
				}
				if record.PID != 0 {
					o.awaitServerGone(t, record, 0)
				}
			})
		}
	}
}

// Two studies and a process that looks like a server run at the same time. Each tuner stops only its own server.
func TestTunersDoNotTouchEachOthersServers(t *testing.T) {
	t.Parallel()
	plainTuner(t, "TestATunerThatIsAskedToEndLeavesNothing runs such a study with the race detector")
	neighbour := exec.CommandContext(t.Context(), "sleep", "600")
	neighbour.Args = []string{"vllm serve --model neighbour", "600"}
	must(t, neighbour.Start())
	defer neighbour.Wait()
	defer neighbour.Process.Kill()
	for seconds := 1.0; ; seconds *= 4 {
		first, second := startOwner(t), startLongOwner(t, seconds)
		first.await(t, moments[2])
		second.await(t, moments[2])
		ours, ok := serverRecord(first.dir)
		record, alsoOK := serverRecord(second.dir)
		if !ok || !alsoOK {
			t.Fatal("a tuner keeps no record of its server")
		}
		must(t, first.cmd.Process.Kill())
		first.end(t)
		first.awaitServerGone(t, ours, patience)
		members, err := record.Members()
		must(t, err)
		if text, code := second.end(t); code != 0 || !snapshot(t, second.dir).Trials[0].Met() {
			t.Fatalf("the second study ends with %d\n%s", code, text)
		}
		if len(members) > 0 {
			break
		}
		if seconds > 10 {
			t.Fatal("when the first tuner's server is gone, no process of the second tuner's server runs")
		}
		t.Logf("with probes of %g s the second study was done before the first tuner's server was gone", seconds) // the machine is busy
	}
	if err := neighbour.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process that looks like a server was ended: %v", err)
	}
}

// In a pod the tuner is the first process: it inherits orphans and must reap them.
func TestTheTunerAsTheFirstProcess(t *testing.T) {
	t.Parallel()
	const unshare = "unshare"
	own := []string{"--fork", "--pid", "--mount-proc", "--kill-child"}
	if out, err := exec.CommandContext(t.Context(), unshare, append(own, "true")...).CombinedOutput(); err != nil {
		t.Skipf("this user may not make a PID namespace: %v: %s", err, out)
	}
	study, root := writePatientStudy(t, slowLife, 1, 1), t.TempDir()
	out, err := exec.CommandContext(t.Context(), unshare, append(own, tunerPath(t), "run", study, "--root", root)...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "1 of 1 trial done") {
		t.Fatalf("the first process ends with %v:\n%s", err, out)
	}
	trial := snapshot(t, filepath.Join(root, "small")).Trials[0]
	if !trial.Met() || trial.Result.Ended.Took <= 0 {
		t.Errorf("trial 0 is %s, its server's end %+v", trial.Result.Outcome, trial.Result.Ended)
	}
}
