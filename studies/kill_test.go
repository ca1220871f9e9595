package studies

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/studies/fence"
)

// The test binary also runs as a child process. If childDir is set, it plays the role in childRole. Without a role it
// is a tuner that writes until it is killed.
const (
	childDir      = "STUDIES_TEST_CHILD_DIR"
	childRole     = "STUDIES_TEST_ROLE"
	childTakeover = "STUDIES_TEST_TAKEOVER"
	childSnapshot = "STUDIES_TEST_FROM_SNAPSHOT"
)

// childRoles maps the name of a role to its function, which gets the value of childDir.
var childRoles = map[string]func(dir string) error{"": writeUntilKilled, "write": writeUntilKilled, "read": readUntilKilled, "verify": verify, "finish": finishStudy, "list": printList}

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := childRoles[os.Getenv(childRole)](dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// printList prints the names of the studies in a directory.
func printList(dir string) error {
	names, err := List(dir)
	fmt.Println(names)
	return err
}

// openAsChild opens the study with the options in the environment.
func openAsChild(dir string) (*Store, error) {
	options := Options{FromSnapshot: os.Getenv(childSnapshot) != ""}
	if after := os.Getenv(childTakeover); after != "" {
		var err error
		if options.TakeoverAfter, err = time.ParseDuration(after); err != nil {
			return nil, err
		}
	}
	s, _, err := Open(context.Background(), dir, llama, options)
	return s, err
}

// readUntilKilled reads the study again and again, and prints a line for each read. It fails if a read finds an older
// study than before.
func readUntilKilled(dir string) error {
	var commits int64
	for n := 1; ; n++ {
		study, err := ReadSnapshot(dir)
		switch {
		case err != nil:
			return fmt.Errorf("FAIL read %d: %w", n, err)
		case study.Commits < commits:
			return fmt.Errorf("FAIL read %d: %d commits after %d", n, study.Commits, commits)
		}
		commits = study.Commits
		fmt.Printf("%d reads, %d trials, %d commits, %s old\n", n, len(study.Trials), commits, time.Since(study.Updated).Round(time.Second/10))
		time.Sleep(time.Second / 5)
	}
}

// verify opens the study, and Open checks the database. After that, verify checks that the study has every probe that
// standard input lists as acknowledged.
func verify(dir string) error {
	s, err := openAsChild(dir)
	if err != nil {
		return err
	}
	study, err := s.Study()
	if err != nil {
		return err
	}
	n, extra := 0, -1
	acked := map[[2]int]bool{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var number, seq int
		if _, err := fmt.Sscanf(lines.Text(), "ack %d %d", &number, &seq); err != nil {
			continue
		}
		if n++; number >= len(study.Trials) || seq >= len(study.Trials[number].Probes) {
			return fmt.Errorf("probe %d of trial %d was acknowledged and is lost; the study has %d trials", seq, number, len(study.Trials))
		}
		if acked[[2]int{number, seq}] {
			return fmt.Errorf("probe %d of trial %d was acknowledged twice", seq, number)
		}
		acked[[2]int{number, seq}] = true
	}
	for _, t := range study.Trials {
		extra += len(t.Probes)
	}
	fmt.Printf("all %d acknowledged probes are there, and %d that were not acknowledged\n", n, extra+1-n)
	return s.Close()
}

// writeUntilKilled resumes the study, and prints a line for each acknowledged probe.
func writeUntilKilled(dir string) error {
	s, err := openAsChild(dir)
	if err != nil {
		return err
	}
	return finish(s, math.MaxInt, 4, func(line string) { fmt.Println(line) })
}

// child starts a process that writes the study in the directory. The process is killed when the test ends.
func child(t *testing.T, dir string) (*exec.Cmd, *bufio.Reader, *strings.Builder) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	stderr := &strings.Builder{}
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	try(t, err, cmd.Start())
	return cmd, bufio.NewReader(stdout), stderr
}

// An acknowledged probe survives a SIGKILL at any moment. At most one probe that was not acknowledged is stored.
func TestKillAtAnyMoment(t *testing.T) { killAtAnyMoment(t, 12) }

// TestManyKillsAtAnyMoment is TestKillAtAnyMoment with more kills.
func TestManyKillsAtAnyMoment(t *testing.T) {
	realtime.Only(t, "each start takes a third of a second")
	killAtAnyMoment(t, 32)
}

func killAtAnyMoment(t *testing.T, rounds int) {
	t.Helper()
	dir := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	stored, early := 0, 0
	for round := range rounds {
		cmd, out, stderr := child(t, dir)
		delay := time.Duration(random.Int64N(int64(30 * time.Millisecond)))
		// In odd rounds the child is killed while it starts, and in even rounds while it writes. In every fourth round
		// it has acknowledged a probe before the kill, however slow the machine is.
		var read strings.Builder
		for waitFor := [...]string{"open", "", "ack ", ""}[round%4]; !strings.Contains(read.String(), waitFor); {
			line, err := out.ReadString('\n')
			if err != nil {
				t.Fatalf("round %d: the child ended before it said %q: %v: %s", round, waitFor, err, stderr)
			}
			read.WriteString(line)
		}
		time.Sleep(delay)
		try(t, cmd.Process.Kill())
		_, err := io.Copy(&read, out)
		try(t, err)
		if state := cmd.Wait(); !strings.Contains(fmt.Sprint(state), "killed") {
			t.Fatalf("round %d: the child ended before it was killed: %v: %s", round, state, stderr)
		}
		acked := strings.Count(read.String(), "ack ")
		if acked == 0 {
			early++
		}
		got := countProbes(t, dir)
		if got < stored+acked || got > stored+acked+1 {
			t.Fatalf("round %d, after %s: %d probes are stored; %d were stored before, and %d were acknowledged since", round, delay, got, stored, acked)
		}
		stored = got
	}
	if stored == 0 || early == rounds {
		t.Errorf("%d probes were stored, and %d of %d rounds stored none; the kills came too early", stored, early, rounds)
	}
	t.Logf("%d probes were stored; %d rounds ended before their first probe", stored, early)
}

// countProbes checks that a killed owner left a complete snapshot, and a study that can be resumed. It returns the
// number of stored probes.
func countProbes(t *testing.T, dir string) int {
	t.Helper()
	if _, err := ReadSnapshot(dir); err != nil && !strings.Contains(err.Error(), "no study") && !strings.Contains(err.Error(), "no snapshot yet") {
		t.Fatalf("ReadSnapshot = %v after the owner was killed", err)
	}
	s, _, err := Open(context.Background(), dir, llama, Options{})
	try(t, err)
	study, err := s.Study()
	try(t, err)
	try(t, s.Close())
	n := 0
	for i, trial := range study.Trials {
		n += len(trial.Probes)
		if trial.Number != i || (trial.State == Running) != (i == len(study.Trials)-1) && trial.State == Running {
			t.Fatalf("trial %d of %d is number %d, %s", i, len(study.Trials), trial.Number, trial.State)
		}
	}
	return n
}

// fromEnv returns the number in an environment variable, or a default if it is not set.
func fromEnv[N int | uint64](t *testing.T, name string, byDefault N) N {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return byDefault
	}
	n, err := strconv.ParseUint(text, 10, 64)
	try(t, err)
	return N(n)
}

// If two tuners are started on one study at the same time, only one runs. The other fails, and its error names the one
// that runs.
func TestTwoBeginAtOnce(t *testing.T) {
	rounds := fromEnv(t, "TWO_OWNERS_ROUNDS", 4)
	root := t.TempDir()
	host, err := os.Hostname()
	try(t, err)
	for round := range rounds {
		dir := filepath.Join(root, fmt.Sprint(round/2)) // every second round resumes the study of the round before
		type tuner struct {
			cmd    *exec.Cmd
			out    *bufio.Reader
			stderr *strings.Builder
			line   string
		}
		var both [2]tuner
		for i := range both {
			both[i].cmd, both[i].out, both[i].stderr = child(t, dir)
		}
		for i := range both {
			both[i].line, _ = both[i].out.ReadString('\n') // "" when the tuner has ended
		}
		winner, loser := both[0], both[1]
		if winner.line == "" {
			winner, loser = loser, winner
		}
		if winner.line != "open\n" || loser.line != "" {
			t.Fatalf("round %d: the tuners say %q (%s) and %q (%s); want that one of them opens the study", round, winner.line, winner.stderr, loser.line, loser.stderr)
		}
		if err := loser.cmd.Wait(); err == nil {
			t.Errorf("round %d: the loser has exit code 0", round)
		}
		want := fmt.Sprintf("another tuner owns this study: pid %d on %s since 20", winner.cmd.Process.Pid, host)
		if !strings.Contains(loser.stderr.String(), want) {
			t.Errorf("round %d: the loser says %q, want %q", round, loser.stderr, want)
		}
		try(t, winner.cmd.Process.Kill())
		if err := winner.cmd.Wait(); err == nil {
			t.Errorf("round %d: the killed winner has exit code 0", round)
		}
	}
}

// Open removes files that killed tuners left more than an hour ago. The locks of living owners and the user's files
// stay.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 20 {
		try(t, s.Begin(aTrial(n)), s.Finish(n, aResult(1)))
	}
	try(t, s.Close())
	if slots := namesIn(t, filepath.Join(dir, fence.SlotDir)); len(slots) > 5 {
		t.Errorf("a released study has the slots %q, want at most 5", slots)
	}
	id := func(begins string) string { return begins + strings.Repeat("2", 26-len(begins)) }
	lives, young := "owners/"+id("lives"), "look-"+id("young")
	old := []string{
		"write-check-1.tmp", "look-" + id("a"), "fence/look-" + id("a"), "owners/" + id("dead"), "owners/" + thisOwner().ID, "snap/000000000001-000000000009.db.tmp",
		"snap/000000000001-000000000009.db.tmp-journal", "snap/000000000001-000000000009-000000000002.delta.tmp", "backup/schema-2.db.tmp",
	}
	stay := []string{
		young, lives, "notes.txt", "write-check-list.tmp", "look-at-me.txt", "look-results/of-mine", "fence/look-here", "owners/README", "owners/" + id("folder") + "/mine",
		"owners/" + strings.ToUpper(id("upper")), "snap/notes.tmp", "snap/000000000001-000000000009.db.tmp.mine", "backup/mine.tmp",
	}
	hour := time.Now().Add(-sweepAfter - time.Minute)
	for _, name := range slices.Concat(old, stay) {
		path := filepath.Join(dir, name)
		try(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644))
		if name != young {
			try(t, os.Chtimes(path, hour, hour), os.Chtimes(filepath.Dir(path), hour, hour))
		}
	}
	folder, err := fence.OpenFolder(dir, fence.CertainLocks)
	try(t, err)
	lock, err := folder.Lock(lives)
	try(t, err)
	open(t, dir)
	for _, name := range old {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s still exists: %v", name, err)
		}
	}
	for _, name := range stay {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	try(t, lock.Close(), folder.Close())
}

// An owner may be killed after it created its first slot and before it wrote the content. Another tuner can then open
// the study.
func TestEmptyFirstSlot(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{fence.SlotDir, fence.OwnerDir} {
		try(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	try(t, os.WriteFile(filepath.Join(dir, fence.SlotDir, "000000000001"), nil, 0o644))
	open(t, dir)
}
