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
	return finish(s, func(line string) { fmt.Println(line) })
}

// finish runs what is left of the study.
func finish(s *Store, say func(string)) error {
	study, err := s.Study()
	if err != nil {
		return err
	}
	say("open")
	for number := range faultTrials {
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
		for seq := had; seq < faultProbes; seq++ {
			if err := s.Record(number, aProbe(seq, float64(seq+1))); err != nil {
				return err
			}
			say(fmt.Sprintf("ack %d %d", number, seq))
		}
		if err := s.Finish(number, aResult(float64(number+1))); err != nil {
			return err
		}
	}
	return s.SetState(Done, "")
}

// A harm is one way in which a disk, or a host, can fail at a call.
type harm struct {
	name  string
	at    func(faultfs.Call) bool // the calls that it can hit
	lasts bool                    // it hits all from then on
	fault faultfs.Fault
	dies  bool          // the tuner is killed too
	cut   *faultfs.Loss // the power is
	slow  bool          // it only takes long
}

func anyCall(faultfs.Call) bool { return true }

func changing(c faultfs.Call) bool { return c.Changes() }

// fills are the calls at which a disk may be full; some disks report it only at a sync.
func fills(c faultfs.Call) bool {
	return c.Changes() && c.Op != "unlink" && c.Op != "rmdir" || keeps(c)
}

func keeps(c faultfs.Call) bool { return c.Op == "fsync" || c.Op == "fsyncdir" || c.Op == "flush" }

func counts(c faultfs.Call) bool { return c.Changes() || keeps(c) || c.Op == "setlk" }

func writes(c faultfs.Call) bool { return c.Op == "write" }

func notLookup(c faultfs.Call) bool { return c.Op != "lookup" }

// slowness is more than the half of impatience after which an owner gives up.
const (
	slowness   = 1200 * time.Millisecond
	impatience = 2 * time.Second
)

var harms = []harm{
	{name: "an error", at: anyCall, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "a stale handle", at: notLookup, fault: faultfs.Fault{Skip: true, Errno: syscall.ESTALE}},
	{name: "full once", at: fills, fault: faultfs.Fault{Skip: true, Errno: syscall.ENOSPC}},
	{name: "over quota once", at: fills, fault: faultfs.Fault{Skip: true, Errno: syscall.EDQUOT}},
	{name: "half is written", at: writes, fault: faultfs.Fault{Half: true}},
	{name: "half is written, then an error", at: writes, fault: faultfs.Fault{Half: true, Errno: syscall.EIO}},
	{name: "done, and an error", at: counts, fault: faultfs.Fault{Errno: syscall.EIO}},
	{name: "slow", at: counts, slow: true, fault: faultfs.Fault{Before: func() { time.Sleep(slowness) }}},
	{name: "killed before", at: counts, dies: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "killed after", at: changing, dies: true},
	{name: "power cut", at: counts, dies: true, cut: &faultfs.Loss{Names: true, Text: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "power cut, names stay", at: counts, dies: true, cut: &faultfs.Loss{Text: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "power cut, contents stay", at: counts, dies: true, cut: &faultfs.Loss{Names: true}, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
	{name: "full from then on", at: fills, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.ENOSPC}},
	{name: "over quota from then on", at: fills, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EDQUOT}},
	{name: "read-only from then on", at: changing, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EROFS}},
	{name: "dead from then on", at: counts, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}},
}

// A strike is one run of a tuner whose disk fails at the nth of the calls that a harm can hit.
type strike struct {
	harm
	nth   int
	begun string   // a directory with the study as it was before; empty for none
	owed  []string // what was acknowledged there
	look  func()   // is called before each call; nil for nothing

	mu     sync.Mutex
	seen   int
	kill   func()
	dead   bool
	hit    faultfs.Call // N is 0 where there were fewer calls
	slots  int          // that this run took
	before int          // of them before the hit

	said  string // on its standard error
	err   error  // how it ended
	acked []string
}

// next is the fault of a call.
func (s *strike) next(c faultfs.Call) faultfs.Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.look != nil {
		s.look()
	}
	if c.Op == "create" && strings.HasPrefix(c.Path, "llama/fence/0") {
		s.slots++
	}
	if s.dead {
		return faultfs.Fault{Skip: true, Errno: syscall.EIO}
	}
	if !s.at(c) {
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

// run lets the tuner go on with the study, and returns the directory that is left.
func (s *strike) run(t *testing.T, root string) (left string) {
	from, at := filepath.Join(root, "disk"), filepath.Join(root, "mount")
	try(t, os.MkdirAll(from, 0o755), os.MkdirAll(at, 0o755))
	if s.begun != "" {
		try(t, os.CopyFS(from, os.DirFS(s.begun)))
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	cmd := exec.CommandContext(ctx, os.Args[0])
	started := make(chan struct{}) // it may ask for something before it is known here
	s.kill = func() {
		<-started
		_ = cmd.Process.Kill() // it may have ended
	}
	m, err := faultfs.New(from, at, s.next)
	if err != nil {
		t.Skipf("no disk can be mounted that fails: %v", err)
	}
	cmd.Env = append(os.Environ(), childDir+"="+filepath.Join(at, "llama"), childRole+"=finish")
	if s.slow { // others are not to give up because this machine is slow
		cmd.Env = append(cmd.Env, childTakeover+"="+impatience.String())
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
		t.Errorf("%s: the tuner hangs\n%s", s, s.said)
	}
	if s.cut != nil {
		left = filepath.Join(root, "left")
		try(t, m.PowerCut(left, *s.cut))
		from = left
	}
	err = m.Close()
	for range 100 { // what a killed process had open is closed a moment after its end
		if !errors.Is(err, syscall.EBUSY) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		err = m.Close()
	}
	try(t, err)
	return filepath.Join(from, "llama")
}

func (s *strike) String() string {
	return fmt.Sprintf("%s at call %d, %s %s (%d)", s.name, s.hit.N, s.hit.Op, plain(s.hit.Path), s.nth)
}

// plain names a file without what differs from run to run.
func plain(path string) string {
	path = regexp.MustCompile(`[0-9]{6,}`).ReplaceAllString(path, "#")
	return regexp.MustCompile(`[a-z2-7]{26}`).ReplaceAllString(path, "OWNER")
}

// tolerable says that a run may go on as if nothing was.
func (s *strike) tolerable() bool {
	c := s.hit
	name := filepath.Base(c.Path)
	switch {
	case s.fault.Half && s.fault.Errno == 0: // the rest is written next
		return true
	case s.fault.Errno == syscall.ESTALE: // the kernel asks once more
		return true
	case c.Op == "lookup", c.Op == "getattr": // what must be known is asked again
		return true
	case s.before == 0 && !c.Changes() && !slices.Contains([]string{"fsync", "fsyncdir", "setlk"}, c.Op): // a first look, which decides nothing
		return true
	case s.before <= 1 && strings.HasPrefix(c.Path, "llama/snap"): // before it is open: another study is refused at once, and what was published is compared, where it can be read
		return true
	case name == "study.db-journal" && c.Op == "open": // SQLite takes it for one that must be rolled back, and looks again when it has the lock
		return true
	case strings.HasSuffix(name, ".tmp-journal"): // SQLite's, for a snapshot that nobody wants if it fails
		return true
	case name == "study.db-journal" && c.Op == "fsync": // SQLite's last, when it gives the file back
		return s.slots-s.before <= 1
	case strings.HasSuffix(name, ".tmp"), name == "study.db", name == "study.db-journal": // SQLite gives a lock or the file back, which it has synced
		return c.Op == "setlk" || c.Op == "flush" || c.Op == "setattr"
	case name == "snap", strings.HasPrefix(name, "e0"): // SQLite's, of names that the Store syncs too
		return c.Op == "fsyncdir" || c.Op == "opendir"
	case c.Path == "llama/fence": // to remove an old slot, which the next heartbeat tries again
		return c.Op == "opendir"
	case filepath.Dir(c.Path) == "llama/fence":
		return c.Op == "unlink"
	}
	return false
}

// judge looks at what is left, and has the study finished.
func (s *strike) judge(t *testing.T, dir string) {
	t.Helper()
	if strings.Contains(s.said, "panic:") || strings.Contains(s.said, "goroutine ") {
		t.Errorf("%s: %s", s, s.said)
	}
	switch {
	case s.hit.N == 0:
		if s.err != nil {
			t.Errorf("%s: nothing was hit, and the run ends with %v: %s", s, s.err, s.said)
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
		t.Errorf("%s: nobody was told", s)
	case s.err == nil:
	case !strings.Contains(s.said, "llama"):
		t.Errorf("%s: the error does not say where: %s", s, s.said)
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) && len(s.acked)+len(s.owed) == 0 {
		return // it has not come so far as to make the directory
	}
	if _, err := ReadSnapshot(dir); err != nil && !strings.Contains(err.Error(), "no study") && !strings.Contains(err.Error(), "no snapshot yet") {
		t.Errorf("%s: a reader is told: %v\n%s", s, err, s.said)
	}
	age(t, dir)
	store, _, err := Open(context.Background(), dir, llama, Options{})
	for range 20 { // another test may be between fork and exec, and has then the lock too
		if !errors.Is(err, ErrOwned) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		store, _, err = Open(context.Background(), dir, llama, Options{})
	}
	if err != nil {
		t.Errorf("%s: the next run cannot open the study: %v\nthe one before said: %s", s, err, s.said)
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
			t.Errorf("%s: %q is lost; %d of %d are there\n%s", s, a, len(stored), len(acked), s.said)
		}
	}
	if len(stored) > len(acked)+1 {
		t.Errorf("%s: %d probes are stored, %d were acknowledged", s, len(stored), len(acked))
	}
	var integrity string
	try(t, store.db.QueryRow("PRAGMA integrity_check").Scan(&integrity))
	if integrity != "ok" {
		t.Errorf("%s: integrity_check: %s", s, integrity)
	}
	if err := errors.Join(finishQuietly(store), store.Close()); err != nil {
		t.Errorf("%s: the next run ends with %v", s, err)
	}
	if study, err = ReadSnapshot(dir); err != nil || study.State != Done || len(study.Trials) != faultTrials || len(study.Trials[1].Probes) != faultProbes {
		t.Errorf("%s: in the end there is %+v, %v", s, study, err)
	}
	s.tidy(t, dir)
}

// age has an hour go by for what is left.
func age(t *testing.T, dir string) {
	t.Helper()
	old := time.Now().Add(-sweepAfter - time.Minute)
	try(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(path, old, old))
	}))
}

// tidy wants nothing of a run that failed to stay for ever.
func (s *strike) tidy(t *testing.T, dir string) {
	t.Helper()
	var left []string
	files := 0
	try(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		files++
		name := d.Name()
		if strings.HasSuffix(name, ".tmp") || strings.HasPrefix(name, "look-") || strings.HasPrefix(path, filepath.Join(dir, "owners")+"/") {
			left = append(left, plain(strings.TrimPrefix(path, dir)))
		}
		return err
	}))
	if len(left) > 0 {
		t.Errorf("%s: there are left %q", s, left)
	}
	if files > 60 { // four snapshots, four epochs, and the slots of three owners
		t.Errorf("%s: %d files are left", s, files)
	}
}

func finishQuietly(s *Store) error { return finish(s, func(string) {}) }

// faultEvery is how many calls are left out between two that are tried; 1 is all of them.
func faultEvery(t *testing.T, usual int) (every int, random *rand.Rand) {
	every = usual
	if n, err := strconv.Atoi(os.Getenv("FAULT_EVERY")); err == nil {
		every = n
	}
	seed := uint64(time.Now().UnixNano())
	if n, err := strconv.ParseUint(os.Getenv("FAULT_SEED"), 10, 64); err == nil {
		seed = n
	}
	t.Logf("every %dth call, FAULT_SEED=%d", every, seed)
	return every, rand.New(rand.NewPCG(seed, 0))
}

// Whatever the disk does at any call, nothing acknowledged is lost, and the next run goes on.
func TestTheDiskFailsAtAnyCall(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	strikeAll(t, 197, "", nil)
}

// The same while a study is taken over whose owner was killed in the middle of a commit.
func TestTheDiskFailsAtAnyCallOfATakeover(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	begun, owed := killedInACommit(t)
	strikeAll(t, 997, begun, owed)
}

// killedInACommit returns a disk with a study whose owner was killed during a commit, and what that owner had acknowledged.
func killedInACommit(t *testing.T) (begun string, owed []string) {
	t.Helper()
	slots := 0 // claim, open, the study, and each commit after that
	inCommit := func(c faultfs.Call) bool {
		if c.Op == "create" && strings.HasPrefix(c.Path, "llama/fence/0") {
			slots++
		}
		return slots == 10 && c.Op == "write" && filepath.Base(c.Path) == "study.db"
	}
	killed := &strike{harm: harm{name: "killed in a commit", at: inCommit, dies: true}, nth: 2}
	root := faultRoot(t)
	left := killed.run(t, root)
	if len(killed.acked) < faultProbes || len(killed.acked) == faultTrials*faultProbes {
		t.Fatalf("%s: acknowledged were %q", killed, killed.acked)
	}
	if hot, err := isHot(database(t, left)); err != nil || !hot {
		t.Fatalf("%s: no transaction is there to take back: %v", killed, err)
	}
	return filepath.Dir(left), killed.acked
}

// SQLite treats a journal that it cannot see as missing, and half a transaction as a whole one.
func TestAJournalThatCannotBeSeenIsNotForgotten(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	t.Parallel()
	begun, owed := killedInACommit(t)
	const copied = 4 // looks when it is made, a lookup and a getattr in each of two rounds
	refused := 0
	for few := range 6 {
		looks := 0
		journal := func(c faultfs.Call) bool { // of the copy, when it is made
			is := (c.Op == "lookup" || c.Op == "getattr") && filepath.Base(c.Path) == "study.db-journal" && c.Path != "llama/e000000000001/study.db-journal"
			if is {
				looks++
			}
			return is && looks <= few+copied+1
		}
		s := &strike{harm: harm{name: "unseen", at: journal, lasts: true, fault: faultfs.Fault{Skip: true, Errno: syscall.EIO}}, nth: copied + 1, begun: begun, owed: owed}
		dir := s.run(t, filepath.Join(faultRoot(t), "study"))
		s.judge(t, dir)
		if strings.Contains(s.said, "was not rolled back") {
			refused++
		}
	}
	if refused == 0 {
		t.Error("SQLite saw the journal each time: the test tested nothing")
	}
}

// Before each call of a small study, and of a takeover, a reader finds a whole study. It never goes back.
func TestReadersFindAWholeStudyBeforeEachCall(t *testing.T) {
	realtime.Only(t, "hundreds of starts")
	t.Parallel()
	begun, owed := killedInACommit(t)
	for name, begun := range map[string]string{"begun": "", "taken over": begun} {
		root, reads, commits := faultRoot(t), 0, int64(0)
		s := &strike{harm: harm{name: "none", at: func(faultfs.Call) bool { return false }}, begun: begun}
		if begun != "" {
			s.owed = owed
		}
		s.look = func() {
			study, err := ReadSnapshot(filepath.Join(root, "disk", "llama"))
			switch {
			case err != nil && begun == "" && commits == 0: // nothing is published yet
			case err != nil:
				t.Errorf("%s: after %d reads: %v", name, reads, err)
			case study.Commits < commits:
				t.Errorf("%s: after %d reads: %d commits, and before there were %d", name, reads, study.Commits, commits)
			default:
				reads, commits = reads+1, study.Commits
			}
		}
		s.judge(t, s.run(t, root))
		t.Logf("%s: %d reads, %d commits", name, reads, commits)
	}
}

// faultShards is how many runs of one harm there are at a time: the takeover mostly waits.
const faultShards = 4

// strikeAll tries all harms, each at every so-manyth of the calls that it can hit.
func strikeAll(t *testing.T, usual int, begun string, owed []string) {
	every, random := faultEvery(t, usual)
	var runs atomic.Int64
	t.Cleanup(func() { t.Logf("%d runs in which something was hit", runs.Load()) })
	for _, h := range harms {
		if only := os.Getenv("FAULT_ONLY"); only != "" && only != h.name {
			continue
		}
		first := 1 + random.IntN(every)
		for shard := range faultShards {
			t.Run(fmt.Sprintf("%s %d", h.name, shard), func(t *testing.T) {
				t.Parallel()
				root := faultRoot(t)
				for nth := first + shard*every; ; nth += faultShards * every {
					s := &strike{harm: h, nth: nth, begun: begun, owed: owed}
					place := filepath.Join(root, strconv.Itoa(nth))
					dir := s.run(t, place)
					if s.hit.N == 0 { // there are fewer calls
						return
					}
					runs.Add(1)
					s.judge(t, dir)
					try(t, os.RemoveAll(place))
				}
			})
		}
	}
}

// faultRoot is a directory in memory if there is one: the disk below the faulty one need not be slow.
func faultRoot(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "tuner-faults-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
