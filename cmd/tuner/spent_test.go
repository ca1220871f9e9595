package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// The parts of a study of a real child process add up to the time of its runs. They do so after an interruption too,
// and after a kill, which loses only the last seconds. A run also needs time before its study begins and after its
// study ends.
func TestThePartsAddUpToTheRuns(t *testing.T) {
	realtime.Only(t, "three runs of a real child process")
	t.Parallel()
	file, root := writePatientStudy(t, overHTTP, 3, 2), t.TempDir()
	var runs, afterKill time.Duration
	for _, stop := range []os.Signal{syscall.SIGINT, syscall.SIGKILL, nil} {
		r := launch(t, stepByStep(t, "run", file, "--root", root))
		r.waitFor(t, "starting the server")
		began := time.Now() // the run is not older than this by more than a step
		if stop != nil {
			r.waitFor(t, "req/s passed")
			must(t, r.cmd.Process.Signal(stop))
		}
		r.end(t)
		runs += time.Since(began)
		study := snapshot(t, root+"/small")
		sum := study.Spent.Sum()
		if stop == syscall.SIGKILL {
			afterKill += runs - sum // what the killed run did after its last write; at most this is lost
			continue
		}
		t.Logf("the runs took %s and booked %s: %v", runs, sum, study.Spent)
		// Two kinds of time make the sum differ from the runs. The slack allows for what a run does before its first
		// step and after its last step. afterKill is what the killed run did after its last write.
		if slack := 5*time.Second + runs/100; sum > runs+slack || sum < runs-afterKill-slack {
			t.Errorf("the runs took %s, %s of it after a kill, and their parts add up to %s: %v", runs, afterKill, sum, study.Spent)
		}
	}
	study := snapshot(t, root+"/small")
	for _, part := range []trial.Part{trial.Starting, trial.WarmingUp, trial.LeadIn, trial.Windows, trial.RunOut, trial.Stopping, trial.Choosing} {
		if study.Spent[part] <= 0 {
			t.Errorf("no time is booked as %s: %v", part, study.Spent)
		}
	}
	if study.State != studies.Done {
		t.Errorf("the study is %s", study.State)
	}
}

// stepByStep returns a command that prints each step.
func stepByStep(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := tunerCommand(t.Context(), t, args...)
	cmd.Env = append(cmd.Env, everyStep+"=1")
	return cmd
}
