package studies

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/studies/faultfs"
)

const (
	faultTrials = 2
	faultProbes = 3
)

// finishStudy runs a small study to its end, and prints a line for each acknowledged probe.
func finishStudy(dir string) (err error) {
	s, err := openAsChild(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(), s.Err()) }()
	return finish(s, faultTrials, faultProbes, func(line string) { fmt.Println(line) })
}

// finish runs the trials and probes that the study still lacks. It calls report for each acknowledged probe.
func finish(s *Store, trials, probes int, report func(string)) error {
	study, err := s.Study()
	if err != nil {
		return err
	}
	report("open")
	for number := range trials {
		had := 0
		if number < len(study.Trials) {
			if study.Trials[number].State == Done {
				continue
			}
			had = len(study.Trials[number].Probes)
		}
		if err := s.Begin(aTrial(number)); err != nil {
			return err
		}
		for seq := had; seq < probes; seq++ {
			if err := s.Record(number, aProbe(seq, float64(seq+1))); err != nil {
				return err
			}
			report(fmt.Sprintf("ack %d %d", number, seq))
		}
		if err := s.Finish(number, aResult(float64(number+1))); err != nil {
			return err
		}
	}
	return s.SetState(Done, "")
}

// A failure is one way in which a disk or a host can fail at a call.
type failure struct {
	name    string
	selects func(faultfs.Call) bool // selects the calls at which the failure can happen
	lasts   bool                    // the failure also happens at all later selected calls
	fault   faultfs.Fault
	dies    bool          // the tuner is killed at the call
	cut     *faultfs.Loss // what a power cut loses; nil means no power cut
	slow    bool          // the call succeeds, but takes long
}

func anyCall(faultfs.Call) bool { return true }

// mayBeFull selects the calls at which a disk may report that it is full. Some disks report it only at a sync.
func mayBeFull(c faultfs.Call) bool {
	return c.Changes() && c.Op != "unlink" && c.Op != "rmdir" || syncs(c)
}

func syncs(c faultfs.Call) bool { return c.Op == "fsync" || c.Op == "fsyncdir" || c.Op == "flush" }

func changesOrSyncs(c faultfs.Call) bool { return c.Changes() || syncs(c) || c.Op == "setlk" }

func isWrite(c faultfs.Call) bool { return c.Op == "write" }

func notLookup(c faultfs.Call) bool { return c.Op != "lookup" }

// An owner gives up when its disk is silent for half of shortTTL. slowCall is longer than that.
const (
	slowCall = 1200 * time.Millisecond
	shortTTL = 2 * time.Second
)

var failures = []failure{
	{name: "an error", selects: anyCall, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "a stale handle", selects: notLookup, fault: faultfs.Fault{Skip: true, Errno: syscall.ESTALE}},
	{name: "full once", selects: mayBeFull, fault: faultfs.Fault{Skip: true, Errno: syscall.ENOSPC}},
	{name: "over quota once", selects: mayBeFull, fault: faultfs.Fault{Skip: true, Errno: syscall.EDQUOT}},
	{name: "half a write", selects: isWrite, fault: faultfs.Fault{Half: true}},
	{name: "half a write, then an error", selects: isWrite, fault: faultfs.Fault{Half: true, Errno: syscall.EIO}},
	{name: "done, and an error", selects: changesOrSyncs, fault: faultfs.Fault{Errno: syscall.EIO}},
	{name: "slow", selects: changesOrSyncs, slow: true, fault: faultfs.Fault{Before: func() { time.Sleep(slowCall) }}},
	{name: "killed before", selects: changesOrSyncs, dies: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "killed after", selects: faultfs.Call.Changes, dies: true},
	{name: "power cut", selects: changesOrSyncs, dies: true, cut: &faultfs.Loss{Names: true, Text: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "power cut, names stay", selects: changesOrSyncs, dies: true, cut: &faultfs.Loss{Text: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "power cut, contents stay", selects: changesOrSyncs, dies: true, cut: &faultfs.Loss{Names: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "full from then on", selects: mayBeFull, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.ENOSPC}},
	{name: "over quota from then on", selects: mayBeFull, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EDQUOT}},
	{name: "read-only from then on", selects: faultfs.Call.Changes, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EROFS}},
	{name: "dead from then on", selects: changesOrSyncs, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
}

// A faultRun is one run of a tuner whose disk fails at the nth call that the failure selects.
type faultRun struct {
	failure
	nth   int
	begun string   // a directory with the study before the run; "" for a new study
	owed  []string // probes that were acknowledged before the run
	peek  func()   // called before each call; may be nil

	mu     sync.Mutex   // guards the fields from seen to before
	seen   int          // number of selected calls so far
	kill   func()       // kills the tuner
	dead   bool         // the tuner was killed
	hit    faultfs.Call // the call that failed; N is 0 if no call failed
	slots  int          // number of slots that this run made
	before int          // number of slots that this run made before the failed call

	said  string   // standard error of the tuner
	err   error    // exit status of the tuner
	acked []string // probes that the tuner acknowledged
}

// next returns the fault for a call.
func (s *faultRun) next(c faultfs.Call) faultfs.Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.peek != nil {
		s.peek()
	}
	if c.Op == "create" && strings.HasPrefix(c.Path, "llama/fence/0") {
		s.slots++
	}
	if s.dead {
		return faultfs.Fault{Skip: true, Errno: syscall.EIO}
	}
	if !s.selects(c) {
		return faultfs.Fault{}
	}
	s.seen++
	if s.seen != s.nth && !(s.lasts && s.seen > s.nth) {
		return faultfs.Fault{}
	}
	if s.hit.N == 0 {
		s.hit, s.before = c, s.slots
	}
	f := s.fault
	switch {
	case s.dies && f.Skip:
		s.dead = true
		f.Before = s.kill
	case s.dies:
		s.dead = true
		f.After = s.kill
	}
	return f
}

// run starts the tuner, and returns the study's directory as the tuner left it.
func (s *faultRun) run(t *testing.T, root string) (left string) {
	from, at := filepath.Join(root, "disk"), filepath.Join(root, "mount")
	try(t, os.MkdirAll(from, 0o755), os.MkdirAll(at, 0o755))
	if s.begun != "" {
		try(t, os.CopyFS(from, os.DirFS(s.begun)))
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) } // a tuner that hangs writes where its goroutines wait
	cmd.WaitDelay = 10 * time.Second
	started := make(chan struct{}) // closed when cmd.Start has returned; the tuner may make calls before that
	s.kill = func() {
		<-started
		_ = cmd.Process.Kill() // an error means that the process has ended already
	}
	m, err := faultfs.New(from, at, s.next)
	if err != nil {
		t.Skipf("faultfs cannot be mounted: %v", err)
	}
	cmd.Env = append(os.Environ(), childDir+"="+filepath.Join(at, "llama"), childRole+"=finish")
	// Only these runs have a short TTL. In the other runs a slow machine must not end the tuner.
	if s.slow {
		cmd.Env = append(cmd.Env, childTakeover+"="+shortTTL.String())
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	var out strings.Builder
	cmd.Stdout = &out
	try(t, cmd.Start())
	close(started)
	s.err = cmd.Wait()
	s.said = stderr.String()
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "ack ") {
			s.acked = append(s.acked, strings.TrimSpace(line))
		}
	}
	if ctx.Err() != nil {
		t.Errorf("%s: the tuner has not ended within a minute\n%s", s, s.said)
	}
	if s.cut != nil {
		left = filepath.Join(root, "left")
		try(t, m.PowerCut(left, *s.cut))
		from = left
	}
	err = m.Close()
	for range 100 { // the files of a killed process are closed a moment after its end
		if !errors.Is(err, syscall.EBUSY) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		err = m.Close()
	}
	try(t, err)
	return filepath.Join(from, "llama")
}

func (s *faultRun) String() string {
	return fmt.Sprintf("%s at call %d, %s %s (%d)", s.name, s.hit.N, s.hit.Op, withoutIDs(s.hit.Path), s.nth)
}

// withoutIDs replaces the parts of a path that differ from run to run.
func withoutIDs(path string) string {
	path = regexp.MustCompile(`[0-9]{6,}`).ReplaceAllString(path, "#")
	return regexp.MustCompile(`[a-z2-7]{26}`).ReplaceAllString(path, "OWNER")
}

// tolerable reports whether a run may succeed in spite of the failed call.
func (s *faultRun) tolerable() bool {
	c := s.hit
	name := filepath.Base(c.Path)
	switch {
	case s.fault.Half && s.fault.Errno == 0: // the caller writes the other half then
		return true
	case s.fault.Errno == syscall.ESTALE: // the kernel repeats the call
		return true
	case c.Op == "lookup", c.Op == "getattr": // the tuner repeats the calls whose answers it needs
		return true
	case s.before == 0 && !c.Changes() && !slices.Contains([]string{"fsync", "fsyncdir", "setlk"}, c.Op): // such a call decides nothing before the claim
		return true
	case s.before <= 1 && strings.HasPrefix(c.Path, "llama/snap"): // while the epoch is not open, snapshots are only compared with the database, if they can be read
		return true
	case name == "study.db-journal" && c.Op == "open": // SQLite assumes a hot journal, and checks again when it has the lock
		return true
	case strings.HasSuffix(name, ".tmp-journal"): // the journal of a snapshot that is being made; after a crash nobody needs it
		return true
	case name == "study.db-journal" && c.Op == "fsync": // SQLite's last sync, when it closes the file
		return s.slots-s.before <= 1
	case strings.HasSuffix(name, ".tmp"), name == "study.db", name == "study.db-journal": // SQLite unlocks or closes a file that it has synced
		return c.Op == "setlk" || c.Op == "flush" || c.Op == "setattr"
	case name == "snap", strings.HasPrefix(name, "e0"): // SQLite syncs names that the Store syncs again
		return c.Op == "fsyncdir" || c.Op == "opendir"
	case c.Path == "llama/fence": // the owner removes an old slot; if that fails, its next heartbeat tries again
		return c.Op == "opendir"
	case filepath.Dir(c.Path) == "llama/fence":
		return c.Op == "unlink"
	}
	return false
}

// check checks how the run ended and what it left, and finishes the study in another run.
func (s *faultRun) check(t *testing.T, dir string) {
	t.Helper()
	if strings.Contains(s.said, "panic:") || strings.Contains(s.said, "goroutine ") {
		t.Errorf("%s: %s", s, s.said)
	}
	switch {
	case s.hit.N == 0:
		if s.err != nil {
			t.Errorf("%s: no call failed, and the run ends with %v: %s", s, s.err, s.said)
		}
	case s.dies:
		if !strings.Contains(fmt.Sprint(s.err), "killed") {
			t.Errorf("%s: the run was killed and ends with %v: %s", s, s.err, s.said)
		}
	case s.slow:
		if s.err != nil && !strings.Contains(s.said, "does not answer") {
			t.Errorf("%s: %s", s, s.said)
		}
	case s.err == nil && !s.tolerable():
		t.Errorf("%s: the run succeeds, want an error", s)
	case s.err == nil:
	case !strings.Contains(s.said, "llama"):
		t.Errorf("%s: the error does not name the study: %s", s, s.said)
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) && len(s.acked)+len(s.owed) == 0 {
		return // the run ended before it made the directory
	}
	if _, err := ReadSnapshot(dir); err != nil && !strings.Contains(err.Error(), "no study") && !strings.Contains(err.Error(), "no snapshot yet") {
		t.Errorf("%s: ReadSnapshot = %v\n%s", s, err, s.said)
	}
	age(t, dir)
	store, _, err := Open(context.Background(), dir, llama, Options{})
	for range 20 { // a child that another test is starting holds the lock until its exec
		if !errors.Is(err, ErrOwned) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		store, _, err = Open(context.Background(), dir, llama, Options{})
	}
	if err != nil {
		t.Errorf("%s: the next run cannot open the study: %v\nthe failed run said: %s", s, err, s.said)
		return
	}
	study, err := store.Study()
	try(t, err)
	stored := map[string]bool{}
	for _, trial := range study.Trials {
		for _, p := range trial.Probes {
			stored[fmt.Sprintf("ack %d %d", trial.Number, p.Seq)] = true
		}
	}
	acked := slices.Concat(s.owed, s.acked)
	for _, a := range acked {
		if !stored[a] {
			t.Errorf("%s: %q is lost; %d of %d acknowledged probes are stored\n%s", s, a, len(stored), len(acked), s.said)
		}
	}
	if len(stored) > len(acked)+1 {
		t.Errorf("%s: %d probes are stored, %d were acknowledged", s, len(stored), len(acked))
	}
	if err := errors.Join(finish(store, faultTrials, faultProbes, func(string) {}), store.Close()); err != nil {
		t.Errorf("%s: the next run ends with %v", s, err)
	}
	if study, err = ReadSnapshot(dir); err != nil || study.State != Done || len(study.Trials) != faultTrials || len(study.Trials[1].Probes) != faultProbes {
		t.Errorf("%s: after the next run the study is %+v, %v; want it done", s, study, err)
	}
	s.checkTidy(t, dir)
}

// age makes all files of a study older than an hour, so that the next run sweeps them.
func age(t *testing.T, dir string) {
	t.Helper()
	old := time.Now().Add(-sweepAfter - time.Minute)
	try(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(path, old, old))
	}))
}

// checkTidy checks that no temporary files of a failed run are left.
func (s *faultRun) checkTidy(t *testing.T, dir string) {
	t.Helper()
	var left []string
	files := 0
	try(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		files++
		name := d.Name()
		if strings.HasSuffix(name, ".tmp") || strings.HasPrefix(name, "look-") || strings.HasPrefix(path, filepath.Join(dir, "owners")+"/") {
			left = append(left, withoutIDs(strings.TrimPrefix(path, dir)))
		}
		return err
	}))
	if len(left) > 0 {
		t.Errorf("%s: the files %q are left", s, left)
	}
	if files > 60 { // four snapshots, four epochs, and the slots of three owners
		t.Errorf("%s: the study has %d files, want at most 60", s, files)
	}
}

// faultEvery returns the distance from one tried call to the next: FAULT_EVERY, or a default. With the distance 1,
// every call is tried. The seed of random is FAULT_SEED, or the time.
func faultEvery(t *testing.T, byDefault int) (every int, random *rand.Rand) {
	every = fromEnv(t, "FAULT_EVERY", byDefault)
	seed := fromEnv(t, "FAULT_SEED", uint64(time.Now().UnixNano()))
	t.Logf("FAULT_EVERY=%d FAULT_SEED=%d", every, seed)
	return every, rand.New(rand.NewPCG(seed, 0))
}

// If the disk fails at any call, no acknowledged probe is lost, and the next run finishes the study.
func TestTheDiskFailsAtAnyCall(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	tryFailures(t, 197, "", nil)
}

// TestTheDiskFailsAtAnyCallOfATakeover begins with a study whose owner was killed in the middle of a commit.
func TestTheDiskFailsAtAnyCallOfATakeover(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	begun, owed := killedInACommit(t)
	tryFailures(t, 997, begun, owed)
}

// killedInACommit returns a disk with a study whose owner was killed during a commit, and the probes that this owner
// had acknowledged.
func killedInACommit(t *testing.T) (begun string, owed []string) {
	t.Helper()
	// Number of slots so far: one for the claim, the opened epoch, the new study, and each later commit.
	slots := 0
	inCommit := func(c faultfs.Call) bool {
		if c.Op == "create" && strings.HasPrefix(c.Path, "llama/fence/0") {
			slots++
		}
		return slots == 10 && c.Op == "write" && filepath.Base(c.Path) == "study.db"
	}
	killed := &faultRun{failure: failure{name: "killed in a commit", selects: inCommit, dies: true}, nth: 2}
	root := faultRoot(t)
	left := killed.run(t, root)
	if len(killed.acked) < faultProbes || len(killed.acked) == faultTrials*faultProbes {
		t.Fatalf("%s: the probes %q were acknowledged, want some of the first trial at least, and not all", killed, killed.acked)
	}
	if hot, err := isHot(database(t, left)); err != nil || !hot {
		t.Fatalf("%s: the journal has no transaction to roll back: %v", killed, err)
	}
	return filepath.Dir(left), killed.acked
}

// SQLite ignores a journal that it cannot see, and would take half a transaction for a whole one. The tuner must refuse
// to go on then.
func TestHiddenJournal(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	t.Parallel()
	begun, owed := killedInACommit(t)
	// Number of calls while the journal is copied: a lookup and a getattr in each of two rounds.
	const copied = 4
	refused := 0
	for few := range 6 {
		looks := 0
		journal := func(c faultfs.Call) bool { // selects calls about the journal of the copy
			is := (c.Op == "lookup" || c.Op == "getattr") && filepath.Base(c.Path) == "study.db-journal" && c.Path != "llama/e000000000001/study.db-journal"
			if is {
				looks++
			}
			return is && looks <= few+copied+1
		}
		s := &faultRun{failure: failure{name: "unseen", selects: journal, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}}, nth: copied + 1, begun: begun, owed: owed}
		dir := s.run(t, filepath.Join(faultRoot(t), "study"))
		s.check(t, dir)
		if strings.Contains(s.said, "was not rolled back") {
			refused++
		}
	}
	if refused == 0 {
		t.Error("no run reported the journal, so SQLite saw it each time")
	}
}

// Before each call of a small study and of a takeover, a reader can read a whole study. It never gets an older study
// than before.
func TestReadersFindAWholeStudyBeforeEachCall(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	t.Parallel()
	begun, owed := killedInACommit(t)
	for name, begun := range map[string]string{"begun": "", "taken over": begun} {
		root, reads, commits := faultRoot(t), 0, int64(0)
		s := &faultRun{failure: failure{name: "none", selects: func(faultfs.Call) bool { return false }}, begun: begun}
		if begun != "" {
			s.owed = owed
		}
		s.peek = func() {
			study, err := ReadSnapshot(filepath.Join(root, "disk", "llama"))
			switch {
			case err != nil && begun == "" && commits == 0: // there is no snapshot yet
			case err != nil:
				t.Errorf("%s: after %d reads: %v", name, reads, err)
			case study.Commits < commits:
				t.Errorf("%s: after %d reads the study has %d commits, after %d before", name, reads, study.Commits, commits)
			default:
				reads, commits = reads+1, study.Commits
			}
		}
		s.check(t, s.run(t, root))
		t.Logf("%s: %d reads, %d commits", name, reads, commits)
	}
}

// faultShards is the number of parallel runs with one failure. Parallel runs save time, because a takeover mostly
// waits.
const faultShards = 4

// tryFailures tries each failure at every nth call that the failure selects. FAULT_EVERY sets n; without it, n is the
// value of every.
func tryFailures(t *testing.T, every int, begun string, owed []string) {
	every, random := faultEvery(t, every)
	var runs atomic.Int64
	t.Cleanup(func() { t.Logf("%d runs had a failed call", runs.Load()) })
	for _, f := range failures {
		if only := os.Getenv("FAULT_ONLY"); only != "" && only != f.name {
			continue
		}
		first := 1 + random.IntN(every)
		for shard := range faultShards {
			t.Run(fmt.Sprintf("%s %d", f.name, shard), func(t *testing.T) {
				t.Parallel()
				root := faultRoot(t)
				for nth := first + shard*every; ; nth += faultShards * every {
					s := &faultRun{failure: f, nth: nth, begun: begun, owed: owed}
					root := filepath.Join(root, strconv.Itoa(nth))
					dir := s.run(t, root)
					if s.hit.N == 0 { // the failure selects fewer calls than the number nth
						return
					}
					runs.Add(1)
					s.check(t, dir)
					try(t, os.RemoveAll(root))
				}
			})
		}
	}
}

// faultRoot returns a temporary directory in memory, or on disk if that is not possible.
func faultRoot(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "tuner-faults-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
