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

// aLongProbe has what is stored compressed, of some kilobytes that cannot be made smaller.
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

// Readers find the committed study, in bases and deltas of every age, and so does a resumed run.
func TestSnapshotsAreTheStudy(t *testing.T) {
	t.Parallel()
	compareSnapshots(t, 4)
}

func TestEachSnapshotIsTheStudy(t *testing.T) {
	realtime.Only(t, "half a minute")
	compareSnapshots(t, 1)
}

// compareSnapshots writes a study of two owners and compares the snapshot after every so many trials with it.
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
			bases[newest.of()] = true
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
				t.Fatalf("trial %d: the snapshot has %d trials and %d commits, the study %d and %d, or they differ", n, len(got.Trials), got.Commits, len(want.Trials), want.Commits)
			}
			whole := filepath.Join(t.TempDir(), "one.db")
			try(t, newest.write(t.Context(), dir, whole))
			db, err := openFile(whole, published)
			try(t, err)
			again, err := load(db)
			try(t, err, db.Close())
			if !reflect.DeepEqual(again, want) {
				t.Fatalf("trial %d: the snapshot as one file is not the study", n)
			}
		}
		try(t, s.Close())
		if files := names(t, filepath.Join(dir, snapshotDir)); len(files) > 7 { // CURRENT, 3 and their bases
			t.Errorf("there are still %v", files)
		}
	}
	if len(bases) < 5 || deltas < 15 {
		t.Errorf("%d bases, %d deltas: the test tested little", len(bases), deltas)
	}
}

// Of a long study a reader gets what the trials came to, and what else it asks for.
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
		t.Errorf("trial 2 is wanted whole, and is\n%+v, not\n%+v", got.Trials[2], want.Trials[2])
	}
	if !reflect.DeepEqual(got.Trials[0], want.Trials[0]) {
		t.Errorf("trial 0 is %+v, want %+v", got.Trials[0], want.Trials[0])
	}
	short := want.Trials[1]
	short.Probes, short.Result.Notes, short.Result.Capacity.Why, short.Result.Capacity.Probes = nil, nil, "", 0
	if !reflect.DeepEqual(got.Trials[1], short) {
		t.Errorf("trial 1 is\n%+v, want\n%+v", got.Trials[1], short)
	}
	history, err := s.History()
	try(t, err)
	if !reflect.DeepEqual(history.Trials[3], want.Trials[3]) || history.Trials[2].Probes != nil {
		t.Errorf("the history has the running trial as %+v, and trial 2 with %d probes", history.Trials[3], len(history.Trials[2].Probes))
	}
}

func TestParseSnapshot(t *testing.T) {
	for _, n := range []snapshot{{1, 2, -1}, {12, 345, 300}, {1, 0, -1}} {
		if got, ok := parseSnapshot(filepath.Base(n.file())); !ok || got != n {
			t.Errorf("%s is %v, %t", n.file(), got, ok)
		}
	}
	for _, name := range []string{"", "CURRENT", "000000000001-00000000000", "000000000001-000000000002.db.tmp", "../../etc/passwd", "000000000001-000000000002-.delta"} {
		if n, ok := parseSnapshot(name); ok {
			t.Errorf("%q is taken for %v", name, n)
		}
	}
}

// Who reads a study whose newest snapshot is damaged is told that this is not all.
func TestWhatIsBehindIsSaidToBe(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)), s.Begin(aTrial(1)), s.Close())
	study, err := ReadSnapshot(dir)
	if err != nil || study.Behind != "" {
		t.Fatalf("of a whole study %q is said, %v", study.Behind, err)
	}
	all, err := snapshots(dir)
	try(t, err, os.WriteFile(filepath.Join(dir, all[0].file()), []byte("damaged"), 0o644))
	study, err = ReadSnapshot(dir)
	if err != nil || !strings.Contains(study.Behind, all[0].file()) || study.Commits >= all[0].commits {
		t.Errorf("of a damaged one %q is said, with %d commits: %v", study.Behind, study.Commits, err)
	}
}

// A pipe or a huge file in the place of a study's file neither blocks a reader nor fills its memory. Readers use other
// snapshots, and a run says it.
func TestAPipeInTheStudysDirectoryIsNotWaitedFor(t *testing.T) {
	for name, tt := range map[string]struct {
		at     func(dir string, newest snapshot) string
		behind bool     // readers find what was published before, and say why
		wants  []string // of a run; nil where it goes on
	}{
		"CURRENT":  {func(dir string, _ snapshot) string { return filepath.Join(dir, currentFile) }, false, []string{currentFile, "is not a file"}},
		"snapshot": {func(dir string, n snapshot) string { return filepath.Join(dir, n.file()) }, true, nil},
		"slot": {func(dir string, _ snapshot) string {
			slots := names(t, filepath.Join(dir, fence.SlotDir))
			return filepath.Join(dir, fence.SlotDir, slots[len(slots)-1])
		}, false, []string{fence.SlotDir + "/0", "is not a file", "from a backup"}},
		"database": {func(dir string, _ snapshot) string { return database(t, dir) }, false, []string{fence.Database + " is not a file", "from a backup"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := left(t)
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
						t.Errorf("readers find %d commits of %d, and say %q: %v, %v", study.Commits, all[0].commits, study.Behind, err, exportErr)
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
			case <-time.After(20 * time.Second):
				t.Fatal("somebody waits for a pipe")
			}
		})
	}
}

// Of CURRENT no more is read than it ever has.
func TestAHugeCurrentIsNotReadWhole(t *testing.T) {
	dir := left(t)
	all, err := snapshots(dir)
	try(t, err, os.Truncate(filepath.Join(dir, currentFile), 1<<30))
	content, err := readCurrent(dir)
	try(t, err)
	if again, err := snapshots(dir); err != nil || len(content) > currentSize || !slices.Equal(again, all) {
		t.Errorf("%d bytes are read, and found are %v, %v; want %v", len(content), again, err, all)
	}
}

// What somebody has removed is named once, in words and not by the call that did not find it.
func TestAMissingSnapshotIsNamedOnce(t *testing.T) {
	for _, tt := range []struct {
		name string
		part func(n snapshot) snapshot
		want string // what the reader is told after the name of the snapshot
	}{
		{"itself", func(n snapshot) snapshot { return n }, ": no such file or directory"},
		{"its base", snapshot.of, ": its base %s: no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := left(t)
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
				t.Errorf("told %q, want %q", study.Behind, want)
			}
		})
	}
}
