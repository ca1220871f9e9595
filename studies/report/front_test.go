package report

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// onGPUs makes a trial of a server with that many GPUs.
func onGPUs(t studies.Trial, gpus int, origin studies.Origin, args ...string) studies.Trial {
	return withArgs(t, origin, append(args, "--tensor-parallel-size", strconv.Itoa(gpus))...)
}

// lost makes a trial that lost the race, with an estimated capacity.
func lost(rate float64) studies.Trial {
	t := sure(rate, 0.08)
	t.Result.Outcome, t.Result.Class, t.Result.Capacity.Bound = trial.Dropped, serverctl.DroppedByRace, capacity.Estimated
	return t
}

// gpusStudy has servers with one, two, four and eight GPUs. The server with two GPUs has the highest capacity per GPU.
// The server with eight carries less than the one with four.
func gpusStudy(o studies.Objective) studies.Study {
	const util, seqs = "--gpu-memory-utilization", "--max-num-seqs"
	study := studyOf(studies.Done, "", withArgs(sure(1.02, 0.04), studies.Default),
		onGPUs(sure(2.9, 0.04), 2, studies.Sampled, util, "0.95", seqs, "256"), onGPUs(sure(2.5, 0.04), 2, studies.Sampled, util, "0.9", seqs, "64"),
		onGPUs(sure(4.81, 0.04), 4, studies.Sampled, util, "0.95", seqs, "512"), onGPUs(lost(4.5), 8, studies.Sampled, util, "0.95", seqs, "1024"),
		onGPUs(lost(1.31), 1, studies.Sampled, util, "0.97", seqs, "128"),
		onGPUs(failed(trial.Infeasible, serverctl.OOMStart, "CUDA out of memory"), 1, studies.Sampled, util, "0.97", seqs, "1024"))
	study.World = map[string]string{studies.ObjectiveKey: string(o)}
	return study
}

// `tuner best` shows the front, and the objective decides the winner. Each objective has its own winner.
func TestFront(t *testing.T) {
	var got bytes.Buffer
	fmt.Fprintln(&got, "servers with 1, 2, 4 and 8 GPUs: 8 GPUs carry less than 4, and 2 carry most per GPU")
	for _, o := range studies.Objectives {
		study := gpusStudy(o)
		for _, width := range []int{80, 50} {
			fmt.Fprintf(&got, "-- best, objective %s, %d columns --\n%s", o, width, written(t, BestText, study, Options{Width: width}))
		}
		fmt.Fprintf(&got, "-- status, objective %s --\n%s", o, written(t, StatusText, study, Options{}))
	}
	fmt.Fprintf(&got, "-- best -o yaml, per GPU --\n%s", written(t, BestYAML, gpusStudy(studies.CapacityPerGPU), Options{}))
	fmt.Fprintf(&got, "-- best -o json, per GPU --\n%s", written(t, BestJSON, gpusStudy(studies.CapacityPerGPU), Options{}))
	for line := range strings.Lines(got.String()) {
		if columns := len([]rune(strings.TrimSuffix(line, "\n"))); columns > 80 && !strings.HasPrefix(line, "# ") && !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "servers") {
			t.Errorf("%d columns: %s", columns, line)
		}
	}
	golden(t, "front", got.Bytes())
}

// Confirmations are compared with each other, and trials of the search with each other.
func TestFrontComparesTheSameRequests(t *testing.T) {
	at := func(origin studies.Origin, gpus int, rate float64) studies.Trial {
		return onGPUs(sure(rate, 0.04), gpus, origin)
	}
	failing := onGPUs(atMost(1, 66), 4, studies.Confirmed)
	for _, row := range []struct {
		name   string
		trials []studies.Trial
		want   string // trials on the front, with their GPUs
	}{
		{"all servers have as many GPUs", []studies.Trial{at(studies.Sampled, 2, 3), at(studies.Sampled, 2, 4)}, ""},
		{"more GPUs carry more", []studies.Trial{at(studies.Sampled, 1, 3), at(studies.Sampled, 2, 4)}, "0:1 1:2"},
		{"more GPUs carry as much", []studies.Trial{at(studies.Sampled, 1, 4), at(studies.Sampled, 2, 4)}, "0:1"},
		{"a confirmation is shown", []studies.Trial{at(studies.Sampled, 1, 3), at(studies.Sampled, 2, 4), at(studies.Confirmed, 2, 3.7)}, "0:1 2:2"},
		{"a confirmed winner carries less than a trial of the search", []studies.Trial{at(studies.Sampled, 1, 3), at(studies.Sampled, 2, 4), at(studies.Confirmed, 2, 2.9)}, "0:1 2:2"},
		{"two confirmations decide", []studies.Trial{at(studies.Sampled, 1, 3), at(studies.Sampled, 2, 4), at(studies.Confirmed, 2, 2.8), at(studies.Confirmed, 1, 2.9)}, "3:1"},
		{"a point that does not hold is left out", []studies.Trial{at(studies.Sampled, 1, 3), at(studies.Sampled, 4, 4), failing}, "0:1"},
		{"nothing met the SLO", []studies.Trial{onGPUs(atMost(1, 66), 1, studies.Sampled), onGPUs(atMost(1, 66), 2, studies.Sampled)}, ""},
	} {
		var got []string
		for _, r := range frontOf(studyOf(studies.Done, "", row.trials...)) {
			got = append(got, fmt.Sprintf("%d:%d", r.Trial, r.GPUs))
		}
		if text := strings.Join(got, " "); text != row.want {
			t.Errorf("%s: the front is %q, want %q", row.name, text, row.want)
		}
	}
}

// If the objective is the capacity per GPU, the gain, its reference and its certainty are per GPU too.
func TestGainPerGPU(t *testing.T) {
	best, ok := Best(gpusStudy(studies.CapacityPerGPU))
	if !ok || best.Trial.Number != 1 || best.Gain.reference.Rate != 1.02 || best.Gain.Ratio < 0.42 || best.Gain.Ratio > 0.43 {
		t.Errorf("the winner is trial %d with the gain %+v; want trial 1 with 42 %%", best.Trial.Number, best.Gain)
	}
	if best, _ := Best(gpusStudy(studies.TotalCapacity)); best.Trial.Number != 3 || best.Gain.Ratio < 3.7 {
		t.Errorf("the winner is trial %d with the gain %+v; want trial 3 with 372 %%", best.Trial.Number, best.Gain)
	}
}

func TestDifferingFlags(t *testing.T) {
	p := func(words ...string) frontRow {
		row := frontRow{Point: space.Point{}}
		for i := 0; i < len(words); i += 2 {
			row.Point[words[i]] = words[i+1]
		}
		return row
	}
	for _, row := range []struct {
		name  string
		front []frontRow
		want  string
	}{
		{"only those that differ", []frontRow{p("a", "1", "b", "2"), p("a", "1", "b", "3")}, "b"},
		{"one is not set", []frontRow{p("a", "1"), p("a", "1", "b", "3")}, "b"},
		{"a single row", []frontRow{p("a", "1", "b", "2")}, "a b"},
	} {
		if got := strings.Join(differing(row.front), " "); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}
