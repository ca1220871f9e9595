package proc

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/realtime"
)

// An owner is a tuner in its own process, which a test kills.
type owner struct {
	report
	cmd *exec.Cmd
}

// startOwner starts an owner and waits for its report. The cleanup of the test kills the owner, and waits for its
// watchdog.
func startOwner(t *testing.T, role string) *owner {
	t.Helper()
	o := &owner{cmd: command(role, inSession)}
	if groupsOff {
		o.cmd.Env = append(o.cmd.Env, groupsVariable+"=off")
	}
	o.cmd.Stderr = os.Stderr
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(waitLimit, func() { o.cmd.Process.Kill() }) // if the owner does not report in time, it is killed, and Decode below fails
	defer late.Stop()
	err = json.NewDecoder(out).Decode(&o.report)
	t.Cleanup(func() {
		o.kill(t)
		eventually(t, "the owner's watchdog ends", func() bool { return !alive(o.Watchdog) })
		home.scanOnce() // reaps the owner's orphans, which we have inherited
	})
	if err != nil {
		t.Fatalf("the owner does not report: %v", err)
	}
	return o
}

// kill kills the owner with SIGKILL and returns when it is gone.
func (o *owner) kill(t *testing.T) {
	t.Helper()
	if o.cmd.ProcessState == nil {
		o.cmd.Process.Kill() // the owner may have ended by itself
		o.cmd.Wait()         // the error only says that the process was killed
	}
}

// end sends a signal to a process and waits until the process is dead.
func (o *owner) end(t *testing.T, pid int, signal syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, signal); err != nil {
		t.Fatal(err)
	}
	eventually(t, fmt.Sprintf("process %d dies", pid), func() bool { return !alive(pid) })
}

// survivors returns the living members of the owner's trees. It looks for them by the records, and by the members that
// the owner has reported.
func (o *owner) survivors(t *testing.T) []int {
	t.Helper()
	var left []int
	for _, r := range o.Records {
		f, err := r.state()
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, pidsOf(f.living)...)
	}
	for _, pid := range o.Members {
		if alive(pid) {
			left = append(left, pid)
		}
	}
	slices.Sort(left)
	return slices.Compact(left)
}

func TestTheWatchdogLeavesNothingOfAKilledOwner(t *testing.T) {
	inBothWays(t, testWatchdogLeavesNothing)
}

func testWatchdogLeavesNothing(t *testing.T) {
	for _, row := range []struct {
		name    string
		role    string
		members int
		cgroup  bool // whether only a cgroup can prove that the processes are ours
	}{
		{"a stubborn family, one of them in another session", "own family", 3, false},
		{"a daemon that shed every mark but its cgroup", "own daemonise", 2, true},
		{"two servers, and the second got a new watchdog", "own-twice family", 6, false},
		{"an owner that was killed before it used the server", "own-unready family", 0, false},
		{"an owner that was killed while it forked: the watchdog knows only the token", "own-untold", 1, false},
		{"processes that live for a few milliseconds", "own hoppers", 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.cgroup && CgroupSupport() != nil {
				t.Skip("without a cgroup nobody can prove that the daemon is ours")
			}
			o := startOwner(t, row.role)
			if row.members > 0 && len(o.Members) != row.members {
				t.Fatalf("members = %v, want %d", o.Members, row.members)
			}
			o.kill(t)
			eventually(t, "nothing is left", func() bool { return len(o.survivors(t)) == 0 })
			for _, r := range o.Records {
				eventually(t, "the cgroup is removed", func() bool { return !exists(r.Cgroup) })
			}
		})
	}
}

// A watchdog needs at most three seconds to end what its owner left behind, and to end itself.
func TestTheWatchdogIsQuick(t *testing.T) {
	realtime.Only(t, "a limit of three seconds")
	const limit = 3 * time.Second
	inBothWays(t, func(t *testing.T) {
		o := startOwner(t, "own family")
		o.kill(t)
		begin := time.Now()
		eventually(t, "nothing is left", func() bool { return len(o.survivors(t)) == 0 && !alive(o.Watchdog) })
		if took := time.Since(begin); took > limit {
			t.Errorf("it took %v, want at most %v", took, limit)
		} else {
			t.Logf("nothing is left after %v", took.Round(time.Millisecond))
		}
	})
}

// The watchdog is told about a server before the fork, again when the server's process exists, and when it is gone.
func TestTheWatchdogIsToldInTime(t *testing.T) {
	if err := WatchdogSupport(); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	listenIn := func(orders *os.File) (before *os.File) {
		home.watchdog.mu.Lock()
		defer home.watchdog.mu.Unlock()
		before, home.watchdog.orders = home.watchdog.orders, orders
		return before
	}
	defer listenIn(listenIn(w))
	p := start(t, "polite", "ready")
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	w.Close()
	record := p.Record()
	lines := json.NewDecoder(r)
	for _, want := range []order{
		{Keep: &Record{Token: record.Token, BootID: record.BootID, PIDNamespace: record.PIDNamespace, Cgroup: record.Cgroup}},
		{Keep: &record},
		{Drop: record.Token},
	} {
		var got order
		if err := lines.Decode(&got); err != nil {
			t.Fatal(err)
		}
		if string(asJSON(t, got)) != string(asJSON(t, want)) {
			t.Errorf("the watchdog is told %s, want %s", asJSON(t, got), asJSON(t, want))
		}
	}
}

// When an owner is killed, its own servers end, and nobody else's.
func TestTwoOwnersSideBySide(t *testing.T) {
	inBothWays(t, func(t *testing.T) {
		first, second := startOwner(t, "own family"), startOwner(t, "own family")
		first.kill(t)
		eventually(t, "nothing of the first is left", func() bool { return len(first.survivors(t)) == 0 })
		eventually(t, "the first's watchdog ends", func() bool { return !alive(first.Watchdog) })
		if left := second.survivors(t); !slices.Equal(left, second.Members) {
			t.Errorf("of the second %v are left, want %v", left, second.Members)
		}
		if killed, err := Reclaim(first.Records[0]); err != nil || len(killed) > 0 {
			t.Errorf("Reclaim() of the first = %v, %v; want nothing to do", killed, err)
		}
		if left := second.survivors(t); !slices.Equal(left, second.Members) {
			t.Errorf("after the first's Reclaim, of the second %v are left, want %v", left, second.Members)
		}
		second.kill(t)
		eventually(t, "nothing of the second is left", func() bool { return len(second.survivors(t)) == 0 })
	})
}

func TestAnOrderlyOwnerEndsItsWatchdog(t *testing.T) {
	o := startOwner(t, "own-orderly polite")
	if err := o.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the watchdog ends", func() bool { return !alive(o.Watchdog) })
}

// The watchdog survives the signals that end a terminal, a session or a process group. It holds no file of ours, and
// ps says what it is.
func TestTheWatchdogStaysAtItsPost(t *testing.T) {
	home.watchdog.mu.Lock()
	if home.watchdog.cmd != nil {
		home.watchdog.end() // this makes the next watchdog start while we hold a file that a child would inherit
	}
	home.watchdog.mu.Unlock()
	inherited, err := unix.Dup(int(os.Stdin.Fd())) // the copy is not close-on-exec (dup(2))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	p := start(t, "family", "ready")
	pid := home.watchdog.pid()
	signals := []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM}
	eventually(t, "ps -e says tuner-watchdog", func() bool { return status(t, pid, "Name") == "tuner-watchdog" })
	eventually(t, "the watchdog ignores signals", func() bool {
		ignored, err := strconv.ParseUint(status(t, pid, "SigIgn"), 16, 64)
		return err == nil && !slices.ContainsFunc(signals, func(s syscall.Signal) bool { return ignored&(1<<(s-1)) == 0 })
	})
	for _, s := range signals {
		if err := syscall.Kill(pid, s); err != nil {
			t.Fatal(err)
		}
	}
	if err := WatchdogSupport(); err != nil || home.watchdog.pid() != pid {
		t.Errorf("after signals the watchdog is %d, %v; want %d", home.watchdog.pid(), err, pid)
	}
	if s, err := readStat(pid); err != nil || s.session != pid || s.parent != os.Getpid() {
		t.Errorf("the watchdog %d is %+v, %v; want it in a session of its own", pid, s, err)
	}
	if got, want := arguments(t, pid), []string{os.Args[0], fmt.Sprintf("watchdog of process %d", os.Getpid())}; !slices.Equal(got, want) {
		t.Errorf("ps says %q, want %q", got, want)
	}
	pipe := ordersPipe(t)
	files := openIn(t, pid)
	if files["0"] != pipe {
		t.Errorf("the watchdog reads %q, want our %s", files["0"], pipe)
	}
	for fd, target := range files {
		if !slices.Contains([]string{"0", "1", "2"}, fd) && !closesOnExec(t, pid, fd) {
			t.Errorf("the watchdog has inherited %s: %s", fd, target)
		}
	}
	for _, member := range members(t, p) {
		for fd, target := range openIn(t, member) {
			if target == pipe {
				t.Errorf("process %d of the server holds the watchdog's pipe as %s: it would not end with us", member, fd)
			}
		}
	}
	t.Logf("the watchdog's memory is %s, and %s of it is its own", status(t, pid, "VmRSS"), status(t, pid, "RssAnon"))
}

// status returns the value of one line of /proc/PID/status.
func status(t *testing.T, pid int, name string) string {
	t.Helper()
	f, err := os.Open(procPath(pid, "status"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("process %d has no %s", pid, name)
	return ""
}

func arguments(t *testing.T, pid int) []string {
	t.Helper()
	text, err := os.ReadFile(procPath(pid, "cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
}

// openIn returns the names of the files that a process holds open, by descriptor.
func openIn(t *testing.T, pid int) map[string]string {
	t.Helper()
	names, err := filepath.Glob(procPath(pid, "fd/*"))
	if err != nil || len(names) == 0 {
		t.Fatalf("process %d has no open files, %v", pid, err)
	}
	files := map[string]string{}
	for _, name := range names {
		if target, err := os.Readlink(name); err == nil { // an error means that the file was closed meanwhile
			files[filepath.Base(name)] = target
		}
	}
	return files
}

// closesOnExec reports whether a file is close-on-exec. A process opens its own files close-on-exec, as Go does. An
// inherited file is not close-on-exec, because it has survived an exec.
func closesOnExec(t *testing.T, pid int, fd string) bool {
	t.Helper()
	text, err := os.ReadFile(procPath(pid, "fdinfo/"+fd))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if octal, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(octal), 8, 64)
			if err != nil {
				t.Fatal(err)
			}
			return flags&unix.O_CLOEXEC != 0
		}
	}
	t.Fatalf("file %s of process %d has no flags", fd, pid)
	return false
}

// ordersPipe returns the name of the watchdog's pipe in /proc.
func ordersPipe(t *testing.T) string {
	t.Helper()
	info, err := home.watchdog.orders.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("pipe:[%d]", info.Sys().(*syscall.Stat_t).Ino)
}

// A watchdog that dies while a server runs is replaced at once, and not only by the next Start.
func TestAWatchdogThatDiedIsReplaced(t *testing.T) {
	p := start(t, "polite", "ready")
	pid := home.watchdog.pid()
	home.watchdog.mu.Lock()
	home.watchdog.since = home.watchdog.since.Add(-replaceAfter) // as if the watchdog had lived long enough to be replaced
	home.watchdog.mu.Unlock()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another one takes its post", func() bool { return home.watchdog.pid() != 0 && home.watchdog.pid() != pid })
	if exists(procPath(pid, "")) {
		t.Error("the dead one was not waited for")
	}
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}

// A watchdog that hangs is as useless as a dead watchdog, so it is replaced after tellLimit.
func TestAWatchdogThatDoesNotReadIsReplaced(t *testing.T) {
	p := start(t, "polite", "ready")
	pid := home.watchdog.pid()
	freeze(t, pid)
	const pipeHolds = 64 << 10 // pipe(7)
	for sent := 0; sent < 2*pipeHolds && home.watchdog.pid() == pid; sent += len(p.record.Token) {
		home.watchdog.keep(p.record)
	}
	if now := home.watchdog.pid(); now == pid || now == 0 || alive(pid) {
		t.Errorf("the watchdog is %d after %d, which lives: %v; want another", now, pid, alive(pid))
	}
	if err := WatchdogSupport(); err != nil {
		t.Error(err)
	}
}

// A second process of a program without Main would not become a watchdog. It would run as the program itself, start
// another process, and so on.
func TestAProgramWithoutMainHasNoWatchdog(t *testing.T) {
	home.watchdog.mu.Lock()
	if home.watchdog.cmd != nil {
		home.watchdog.end()
	}
	home.watchdog.mu.Unlock()
	mainCalled.Store(false)
	defer mainCalled.Store(true)
	p := start(t, "polite", "ready")
	if err := WatchdogSupport(); err == nil || !strings.Contains(err.Error(), "proc.Main") || home.watchdog.pid() != 0 {
		t.Errorf("WatchdogSupport() = %v with process %d, want a reason and none", err, home.watchdog.pid())
	}
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
	mainCalled.Store(true)
	if err := WatchdogSupport(); err != nil || home.watchdog.pid() == 0 {
		t.Errorf("WatchdogSupport() = %v with process %d, want one", err, home.watchdog.pid())
	}
}

func TestGuardEndsWhatItWasTold(t *testing.T) {
	keep := func(r Record) string { return string(asJSON(t, order{Keep: &r})) + "\n" }
	for _, row := range []struct {
		name   string
		orders func(Record) string
		spared bool
	}{
		{"a server that still has an owner's record is killed", keep, false},
		{"the number comes after the token", func(r Record) string {
			return keep(Record{Token: r.Token, BootID: r.BootID}) + keep(r)
		}, false},
		{"the token alone is enough", func(r Record) string { return keep(Record{Token: r.Token, BootID: r.BootID}) }, false},
		{"one that was dropped is spared", func(r Record) string {
			return keep(r) + string(asJSON(t, order{Drop: r.Token})) + "\n"
		}, true},
		{"the owner died in the middle of a line", func(r Record) string {
			return keep(r) + strings.TrimSuffix(keep(Record{Token: "other"}), "}}\n")
		}, false},
		{"a line that cannot be read does not hide what came before", func(r Record) string { return keep(r) + "?\n" }, false},
		{"an order without a token would mean every process", func(r Record) string { return keep(Record{BootID: r.BootID}) }, true},
		{"no orders, nothing to do", func(Record) string { return "" }, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := start(t, "stubborn", "ready")
			if err := guard(strings.NewReader(row.orders(p.Record()))); err != nil {
				t.Errorf("guard() = %v", err)
			}
			if alive(p.record.PID) != row.spared {
				t.Errorf("the server lives: %v, want %v", alive(p.record.PID), row.spared)
			}
		})
	}
}

func asJSON(t *testing.T, v any) []byte {
	t.Helper()
	var text bytes.Buffer
	if err := json.NewEncoder(&text).Encode(v); err != nil {
		t.Fatal(err)
	}
	return bytes.TrimSpace(text.Bytes())
}
