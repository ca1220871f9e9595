package studies

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
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

// The test binary also runs as a child: with childDir set it is a tuner that writes until it is killed, or plays the
// role in childRole.
const (
	childDir      = "STUDIES_TEST_CHILD_DIR"
	childRole     = "STUDIES_TEST_ROLE"
	childTakeover = "STUDIES_TEST_TAKEOVER"
	childSnapshot = "STUDIES_TEST_FROM_SNAPSHOT"
)

// childRoles are what a child may be.
var childRoles = map[string]func(dir string) error{"": writeForEver, "write": writeForEver, "read": readForEver, "verify": verify, "finish": finishStudy, "list": printList}

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

// printList prints which studies a directory has.
func printList(dir string) error {
	names, err := List(dir)
	fmt.Println(names)
	return err
}

// openAsChild opens the study as the child is told to.
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

// readForEver reads the study again and again, and says so. What it finds never goes back.
func readForEver(dir string) error {
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

// verify looks for all probes that are said to be acknowledged on its standard input.
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
			return fmt.Errorf("probe %d of trial %d was acknowledged and is lost; there are %d trials", seq, number, len(study.Trials))
		}
		if acked[[2]int{number, seq}] {
			return fmt.Errorf("probe %d of trial %d was acknowledged twice", seq, number)
		}
		acked[[2]int{number, seq}] = true
	}
	for _, t := range study.Trials {
		extra += len(t.Probes)
	}
	damage := ""
	if err := s.db.QueryRow("PRAGMA integrity_check").Scan(&damage); err != nil || damage != "ok" {
		return fmt.Errorf("integrity: %s %w", damage, err)
	}
	fmt.Printf("all %d acknowledged probes are there, and %d that were not acknowledged\n", n, extra+1-n)
	return s.Close()
}

// writeForEver goes on with the study and prints a line for each probe that was acknowledged.
func writeForEver(dir string) error {
	s, err := openAsChild(dir)
	if err != nil {
		return err
	}
	study, err := s.Study()
	if err != nil {
		return err
	}
	fmt.Println("open")
	number, seq := len(study.Trials), 0
	if number > 0 && study.Trials[number-1].State == Running {
		number, seq = number-1, len(study.Trials[number-1].Probes)
	}
	for ; ; number, seq = number+1, 0 {
		if err := s.Begin(aTrial(number)); err != nil {
			return err
		}
		for ; seq < 4; seq++ {
			if err := s.Record(number, aProbe(seq, float64(seq+1))); err != nil {
				return err
			}
			fmt.Println("ack", number, seq)
		}
		if err := s.Finish(number, aResult(float64(number+1))); err != nil {
			return err
		}
	}
}

// child starts a writer in the directory. It is killed when the test ends, at the latest.
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

// An acknowledged probe survives a SIGKILL at any moment. At most one probe more is stored.
func TestKillAtAnyMoment(t *testing.T) { killAtAnyMoment(t, 12) }

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
		if round%2 == 0 { // the others are killed somewhere in their start
			_, err := out.ReadString('\n')
			if err != nil {
				t.Fatalf("round %d: the child did not open the study: %v: %s", round, err, stderr)
			}
		}
		time.Sleep(delay)
		try(t, cmd.Process.Kill())
		rest, err := io.ReadAll(out)
		try(t, err)
		if state := cmd.Wait(); !strings.Contains(fmt.Sprint(state), "killed") {
			t.Fatalf("round %d: the child ended by itself: %v: %s", round, state, stderr)
		}
		acked := strings.Count(string(rest), "ack ")
		if acked == 0 {
			early++
		}
		got := countProbes(t, dir)
		if got < stored+acked || got > stored+acked+1 {
			t.Fatalf("round %d, after %s: %d probes are stored, %d were there before and %d were acknowledged", round, delay, got, stored, acked)
		}
		stored = got
	}
	if stored == 0 || early == rounds {
		t.Errorf("the test tested nothing: %d probes, %d rounds without one", stored, early)
	}
	t.Logf("%d probes, %d rounds ended before the first one", stored, early)
}

// countProbes checks what a killed owner left: the snapshot is whole, and the study resumes whole.
func countProbes(t *testing.T, dir string) int {
	t.Helper()
	if _, err := ReadSnapshot(dir); err != nil && !strings.Contains(err.Error(), "no study") && !strings.Contains(err.Error(), "no snapshot yet") {
		t.Fatalf("the snapshot of a killed owner: %v", err)
	}
	s, _, err := Open(context.Background(), dir, llama, Options{})
	try(t, err)
	study, err := s.Study()
	try(t, err)
	var integrity string
	try(t, s.db.QueryRow("PRAGMA integrity_check").Scan(&integrity), s.Close())
	if integrity != "ok" {
		t.Fatalf("integrity_check: %s", integrity)
	}
	n := 0
	for i, trial := range study.Trials {
		n += len(trial.Probes)
		if trial.Number != i || (trial.State == Running) != (i == len(study.Trials)-1) && trial.State == Running {
			t.Fatalf("trial %d of %d is number %d, %s", i, len(study.Trials), trial.Number, trial.State)
		}
	}
	return n
}

func TestTwoOwners(t *testing.T) {
	dir := t.TempDir()
	cmd, out, stderr := child(t, dir)
	if _, err := out.ReadString('\n'); err != nil {
		t.Fatalf("%v: %s", err, stderr)
	}
	_, _, err := Open(context.Background(), dir, llama, Options{})
	host, hostErr := os.Hostname()
	try(t, hostErr)
	wantError(t, err, "open study llama70b", "another tuner owns this study", fmt.Sprintf("pid %d on %s since 20", cmd.Process.Pid, host))
	if !errors.Is(err, ErrOwned) {
		t.Errorf("%v does not wrap ErrOwned", err)
	}
	try(t, cmd.Process.Kill())
	if err := cmd.Wait(); err == nil {
		t.Error("the child ended well")
	}
	open(t, dir) // a killed owner owns nothing
}

// Of two tuners that are started at once on one study one runs, and the other says who does.
func TestTwoBeginAtOnce(t *testing.T) {
	rounds := 4
	if n, err := strconv.Atoi(os.Getenv("TWO_OWNERS_ROUNDS")); err == nil {
		rounds = n
	}
	root := t.TempDir()
	host, err := os.Hostname()
	try(t, err)
	for round := range rounds {
		dir := filepath.Join(root, fmt.Sprint(round/2)) // every second round resumes what a killed one left
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
			both[i].line, _ = both[i].out.ReadString('\n') // "" where it ended
		}
		winner, loser := both[0], both[1]
		if winner.line == "" {
			winner, loser = loser, winner
		}
		if winner.line != "open\n" || loser.line != "" {
			t.Fatalf("round %d: the tuners say %q (%s) and %q (%s); want one that opens the study", round, winner.line, winner.stderr, loser.line, loser.stderr)
		}
		if err := loser.cmd.Wait(); err == nil {
			t.Errorf("round %d: the loser ended well", round)
		}
		want := fmt.Sprintf("another tuner owns this study: pid %d on %s since 20", winner.cmd.Process.Pid, host)
		if !strings.Contains(loser.stderr.String(), want) {
			t.Errorf("round %d: the loser says %q, want %q", round, loser.stderr, want)
		}
		try(t, winner.cmd.Process.Kill())
		if err := winner.cmd.Wait(); err == nil {
			t.Errorf("round %d: the winner was killed and ended well", round)
		}
	}
}

// Files of killed tuners are removed after an hour, except the lock of a living owner and the user's files. A released
// study has few slots.
func TestWhatKilledTunersLeftIsSwept(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 20 {
		try(t, s.Begin(aTrial(n)), s.Finish(n, aResult(1)))
	}
	try(t, s.Close())
	if slots := names(t, filepath.Join(dir, fence.SlotDir)); len(slots) > 5 {
		t.Errorf("an owner that went has left the slots %q", slots)
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
			t.Errorf("%s is left: %v", name, err)
		}
	}
	for _, name := range stay {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	try(t, lock.Close(), folder.Close())
}

// An owner that was killed before it could say who it is holds up nobody.
func TestAnOwnerThatNeverSaidWhoItIs(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{fence.SlotDir, fence.OwnerDir} {
		try(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	try(t, os.WriteFile(filepath.Join(dir, fence.SlotDir, "000000000001"), nil, 0o644))
	open(t, dir)
}
