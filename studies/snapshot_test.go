package studies

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/bench"
	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// aLongProbe returns a probe with series and sketches: a few kilobytes that compression does not make smaller.
func aLongProbe(seq int, random *rand.Rand) trial.Probe {
	p := aProbe(seq, 2)
	server := &serverctl.Series{}
	for i := range 400 {
		p.Measurement.Series = append(p.Measurement.Series, bench.Second{Sent: random.IntN(1000), Ended: random.IntN(1000), Chunks: random.IntN(1 << 30)})
		server.At, server.Running = append(server.At, float64(i)), append(server.Running, random.Float64())
	}
	p.Server = server
	p.Verdict.Checks[0].Each, p.Verdict.Checks[1].Each = strings.Repeat(".", 300), strings.Repeat(".x", 150)
	p.Measurement.Sketches.TTFT = &bench.Sketch{First: 400, Counts: []int{1, 0, 299}}
	return p
}

// Each snapshot has the same content as the committed study. This holds for a base, for a delta soon after its base,
// and for a delta long after its base.
func TestSnapshotsEqualTheStudy(t *testing.T) {
	t.Parallel()
	compareSnapshots(t, 4)
}

// TestEachSnapshotEqualsTheStudy compares after every trial. TestSnapshotsEqualTheStudy compares after every fourth
// trial.
func TestEachSnapshotEqualsTheStudy(t *testing.T) {
	realtime.Only(t, "half a minute")
	compareSnapshots(t, 1)
}

// compareSnapshots writes a study with two owners, one after the other. After every nth trial it compares the newest
// snapshot with the study; n is the value of every.
func compareSnapshots(t *testing.T, every int) {
	t.Helper()
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	bases, deltas := map[snapshot]bool{}, 0
	for owner := range 2 {
		s, _, err := Open(context.Background(), dir, llama, Options{AcceptDrift: true})
		try(t, err)
		for round := range 14 {
			n := owner*14 + round
			try(t, s.Begin(aTrial(n)))
			for seq := range 2 {
				try(t, s.Record(n, aLongProbe(seq, random)))
			}
			if round%10 == 3 {
				try(t, s.AddPriors([]Source{{Path: "elsewhere", Trials: []Trial{aTrial(n)}}}))
			}
			try(t, s.Finish(n, aResult(float64(n))))
			newest, _, err := newest(dir, loadStudy)
			try(t, err)
			bases[newest.baseSnapshot()] = true
			if !newest.isBase() {
				deltas++
			}
			if round%every != every-1 {
				continue
			}
			want, err := s.Study()
			try(t, err)
			got, err := ReadSnapshot(dir)
			try(t, err)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("trial %d: the snapshot differs; it has %d trials and %d commits, the study %d and %d", n, len(got.Trials), got.Commits, len(want.Trials), want.Commits)
			}
			whole := filepath.Join(t.TempDir(), "one.db")
			try(t, newest.write(t.Context(), dir, whole))
			again, err := inFile(whole, publishedOptions, load)
			try(t, err)
			if !reflect.DeepEqual(again, want) {
				t.Fatalf("trial %d: the snapshot as one file differs from the study", n)
			}
		}
		try(t, s.Close())
		if files := namesIn(t, filepath.Join(dir, snapshotDir)); len(files) > 7 { // CURRENT, and 3 snapshots with their bases
			t.Errorf("the snapshots are %v, want at most 7 files", files)
		}
	}
	if len(bases) < 5 || deltas < 15 {
		t.Errorf("the study had %d bases and %d deltas, want at least 5 and 15", len(bases), deltas)
	}
}

// Summary has a short result of each trial. It has whole results and probes of those trials that the caller names.
func TestSummary(t *testing.T) {
	s := open(t, t.TempDir())
	failed := trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart, Cause: "a cause", Evidence: "CUDA out of memory", GPUTime: time.Minute}
	result := aResult(2.5)
	result.Capacity.Lowest, result.Capacity.Highest, result.Capacity.StdErr, result.Capacity.Doubt = 2.3, 2.7, 0.05, "a doubt"
	try(t, s.Begin(Trial{Number: 0, Origin: Default}), s.Finish(0, failed),
		s.Begin(aTrial(1)), s.Record(1, aProbe(0, 2)), s.Finish(1, result),
		s.Begin(aTrial(2)), s.Record(2, aProbe(0, 2)), s.Finish(2, result),
		s.Begin(aTrial(3)), s.Record(3, aProbe(0, 2)))
	want, err := s.Study()
	try(t, err)
	got, err := s.Summary(func(Study) []int { return []int{2} })
	try(t, err)
	if !reflect.DeepEqual(got.Trials[2], want.Trials[2]) {
		t.Errorf("trial 2, which is read whole, is\n%+v, want\n%+v", got.Trials[2], want.Trials[2])
	}
	if !reflect.DeepEqual(got.Trials[0], want.Trials[0]) {
		t.Errorf("trial 0 is %+v, want %+v", got.Trials[0], want.Trials[0])
	}
	short := want.Trials[1]
	short.Probes, short.Result.Notes, short.Result.Capacity.Why, short.Result.Capacity.Probes = nil, nil, "", 0
	if !reflect.DeepEqual(got.Trials[1], short) {
		t.Errorf("trial 1 is\n%+v, want\n%+v", got.Trials[1], short)
	}
	history, err := s.History(func(Study) []int { return nil })
	try(t, err)
	if !reflect.DeepEqual(history.Trials[3], want.Trials[3]) || history.Trials[2].Probes != nil {
		t.Errorf("History has %+v and trial 2 with %d probes, want the running trial whole and trial 2 without probes", history.Trials[3], len(history.Trials[2].Probes))
	}
}

func TestParseSnapshot(t *testing.T) {
	for _, n := range []snapshot{{1, 2, -1}, {12, 345, 300}, {1, 0, -1}} {
		if got, ok := parseSnapshot(filepath.Base(n.file())); !ok || got != n {
			t.Errorf("parseSnapshot(%s) = %v, %t; want %v", n.file(), got, ok, n)
		}
	}
	for _, name := range []string{"", "CURRENT", "000000000001-00000000000", "000000000001-000000000002.db.tmp", "../../etc/passwd", "000000000001-000000000002-.delta"} {
		if n, ok := parseSnapshot(name); ok {
			t.Errorf("parseSnapshot(%q) = %v, want none", name, n)
		}
	}
}

// A pipe in the place of a study's file blocks neither a reader nor a run. Readers use an older snapshot, and Open
// returns an error.
func TestPipeInAStudysDirectory(t *testing.T) {
	for name, tt := range map[string]struct {
		at     func(dir string, newest snapshot) string
		behind bool     // readers must get an older snapshot, and Behind must say why
		wants  []string // words of Open's error; nil when Open succeeds
	}{
		"CURRENT":  {func(dir string, _ snapshot) string { return filepath.Join(dir, currentFile) }, false, []string{currentFile, "is not a file"}},
		"snapshot": {func(dir string, n snapshot) string { return filepath.Join(dir, n.file()) }, true, nil},
		"slot": {func(dir string, _ snapshot) string {
			slots := namesIn(t, filepath.Join(dir, fence.SlotDir))
			return filepath.Join(dir, fence.SlotDir, slots[len(slots)-1])
		}, false, []string{fence.SlotDir + "/0", "is not a file", "from a backup"}},
		"database": {func(dir string, _ snapshot) string { return database(t, dir) }, false, []string{fence.Database + " is not a file", "from a backup"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := interruptedStudy(t)
			all, err := snapshots(dir)
			try(t, err)
			path := tt.at(dir, all[0])
			try(t, os.Remove(path), unix.Mkfifo(path, 0o644))
			done := make(chan bool)
			go func() {
				defer close(done)
				study, err := ReadSnapshot(dir)
				copied, exportErr := Export(t.Context(), dir, filepath.Join(t.TempDir(), "one.db"))
				for _, study := range []Study{study, copied} {
					if said := strings.Contains(study.Behind, path) && strings.Contains(study.Behind, "it is not a file"); err != nil || exportErr != nil || said != tt.behind {
						t.Errorf("ReadSnapshot and Export = %v, %v with %d of %d commits; Behind = %q", err, exportErr, study.Commits, all[0].commits, study.Behind)
					}
				}
				s, _, err := Open(context.Background(), dir, llama, Options{})
				if err == nil {
					err = s.Close()
				}
				if tt.wants != nil {
					wantUnusable(t, err, tt.wants...)
				} else {
					try(t, err)
				}
			}()
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Fatal("a reader or Open still waits for the pipe after a minute")
			}
		})
	}
}

// readCurrent reads at most currentSize bytes of a huge file.
func TestHugeCurrent(t *testing.T) {
	dir := interruptedStudy(t)
	all, err := snapshots(dir)
	try(t, err, os.Truncate(filepath.Join(dir, currentFile), 1<<30))
	content, err := readCurrent(dir)
	try(t, err)
	if again, err := snapshots(dir); err != nil || len(content) > currentSize || !slices.Equal(again, all) {
		t.Errorf("readCurrent has %d bytes and snapshots = %v, %v; want %v", len(content), again, err, all)
	}
}

// The error for a removed snapshot names its file once, without the system call.
func TestRemovedSnapshot(t *testing.T) {
	for _, tt := range []struct {
		name string
		part func(n snapshot) snapshot
		want string // what follows the snapshot's name in Behind
	}{
		{"the delta", func(n snapshot) snapshot { return n }, ": no such file or directory"},
		{"its base", snapshot.baseSnapshot, ": its base %s: no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := interruptedStudy(t)
			all, err := snapshots(dir)
			try(t, err)
			if all[0].isBase() {
				t.Fatalf("%s has no base", all[0].file())
			}
			removed := filepath.Join(dir, tt.part(all[0]).file())
			try(t, os.Remove(removed))
			said := strings.Replace(tt.want, "%s", removed, 1)
			study, err := ReadSnapshot(dir)
			if err != nil {
				study.Behind = err.Error()
			}
			if want := "read " + filepath.Join(dir, all[0].file()) + said; !strings.HasPrefix(study.Behind, want) || strings.Contains(study.Behind, "stat ") {
				t.Errorf("Behind = %q, want %q", study.Behind, want)
			}
		})
	}
}
