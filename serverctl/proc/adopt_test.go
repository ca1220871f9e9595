package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The code that starts a child always gets the exit status of this child, even while orphans die and are reaped. Each
// child is dead while a scan runs. A wrong scan would reap the child and so steal its status. Sixty children are
// enough: without the check for direct children, the status of every child is stolen.
func TestNoStatusIsStolen(t *testing.T) {
	for _, row := range []struct {
		name     string
		children int
		pidfds   bool
		leaves   manner // how every second child starts; without pidfds, a child that leaves our session looks like an orphan
	}{
		{"children are known by our pidfds", 60, true, leaving},
		{"without pidfds they are known by their session", 30, false, inSession},
	} {
		t.Run(row.name, func(t *testing.T) {
			if !row.pidfds {
				withoutPidfds(t)
			}
			p, said := startTalking(t, "zombie-maker", "made one")
			if home.pidfds != row.pidfds {
				t.Fatalf("pidfds are used: %v, want %v", home.pidfds, row.pidfds)
			}
			made := strings.Count(said.String(), "made one")
			const atOnce = 10
			orphans := func() int { return strings.Count(said.String(), "made one") - made }
			for first := 0; first < row.children || orphans() == 0 && first < 250; first += atOnce { // the highest exit code is 255
				waitForMany(t, first, atOnce, row.leaves)
			}
			if orphans() == 0 {
				t.Error("no orphan was made meanwhile")
			}
			if err := p.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t)
		})
	}
}

// waitForMany starts n children, whose exit codes count up from firstCode. It scans when all are dead, and only then
// waits for them.
func waitForMany(t *testing.T, firstCode, n int, leaves manner) {
	t.Helper()
	children := map[int]*exec.Cmd{}
	for code := firstCode; code < firstCode+n; code++ {
		m := inSession
		if code%2 == 1 {
			m = leaves
		}
		cmd := command(fmt.Sprint("exit ", code), m)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		children[code] = cmd
	}
	for _, cmd := range children {
		eventually(t, "a child dies", func() bool { return !alive(cmd.Process.Pid) })
	}
	home.scanOnce()
	for code, cmd := range children {
		exit, ok := errors.AsType[*exec.ExitError](cmd.Wait())
		if code != 0 && (!ok || exit.ExitCode() != code) || code == 0 && !cmd.ProcessState.Success() {
			t.Errorf("the child with exit code %d ended with %v", code, cmd.ProcessState)
		}
	}
}

// withoutPidfds hides the pidfds that os/exec holds, as if the kernel had none.
func withoutPidfds(t *testing.T) {
	t.Helper()
	set := func(held func() (map[int]bool, error)) {
		home.mu.Lock()
		defer home.mu.Unlock()
		home.held, home.pidfds = held, false
	}
	set(func() (map[int]bool, error) { return nil, nil })
	t.Cleanup(func() { set(heldPidfds) })
}

// Orphans are reaped while the server is alive, and not only when it is stopped.
func TestOrphansAreReapedWhileTheServerLives(t *testing.T) {
	p, said := startTalking(t, "zombie-maker", "made one")
	eventually(t, "ten orphans", func() bool { return strings.Count(said.String(), "made one") >= 10 })
	freeze(t, p.record.PID) // a frozen server makes no more orphans; orphans that are already dying still die
	eventually(t, "all orphans are reaped", func() bool {
		left, err := descendants()
		return err == nil && !slices.ContainsFunc(left, func(s stat) bool { return s.dead() && s.parent == os.Getpid() })
	})
	if !alive(p.record.PID) {
		t.Error("the server is dead")
	}
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}

// In a container the tuner is the first process. Every orphan becomes its child, and nobody else can reap it.
func TestTheFirstProcessOfAPIDNamespace(t *testing.T) {
	cmd := command("init", inSession)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS,
	}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	late := time.AfterFunc(3*waitLimit, func() { cmd.Process.Kill() }) // when the first process dies, its whole namespace dies
	defer late.Stop()
	text, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EINVAL):
		t.Skipf("no PID namespace may be made here: %v", err)
	case strings.Contains(string(text), cannotMount):
		t.Skipf("no PID namespace may be used here: %s", text)
	case err != nil || !strings.Contains(string(text), "all is well"):
		t.Errorf("the first process says, with %v:\n%s", err, text)
	}
}

const cannotMount = "cannot mount /proc"

// playInit plays the first process of a PID namespace. It has an orphan that is not the server's, children of its own,
// and a server with a daemon.
func playInit() error {
	if os.Getpid() != 1 {
		return fmt.Errorf("this is process %d", os.Getpid())
	}
	if _, err := Start(Spec{Argv: []string{os.Args[0]}}); err == nil || !strings.Contains(err.Error(), "mount the right one") {
		return fmt.Errorf("with the /proc of another namespace Start says %v", err)
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("%s: %w", cannotMount, err)
	}
	if err := command("bear-and-exit stubborn", clean).Run(); err != nil {
		return err
	}
	orphans, err := descendants()
	if err != nil || len(orphans) != 1 {
		return fmt.Errorf("before the start our children are %+v, %v; want one orphan", orphans, err)
	}
	time.Sleep(50 * time.Millisecond) // start times have steps of 10 ms, and the leader must start in a later step than the orphan
	if err := initServes(); err != nil {
		return err
	}
	left, err := descendants()
	if err != nil || len(left) != 1 || left[0].pid != orphans[0].pid {
		return fmt.Errorf("after the stop our children are %+v, %v; want the orphan %d alone", left, err, orphans[0].pid)
	}
	if err := WatchdogSupport(); err != nil {
		return err
	}
	fmt.Println("all is well")
	return nil
}

func initServes() error {
	p, err := startReady("daemonise")
	if err != nil {
		return err
	}
	if members, err := p.Members(); err != nil || len(members) != 2 {
		return fmt.Errorf("members = %v, %v; want the leader and its daemon", members, err)
	}
	for code := 1; code <= 10; code++ {
		cmd := command(fmt.Sprint("exit ", code), leaving)
		if err := cmd.Start(); err != nil {
			return err
		}
		for alive(cmd.Process.Pid) {
			time.Sleep(time.Millisecond)
		}
		home.scanOnce()
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != code {
			return fmt.Errorf("the child with exit code %d ended with %v", code, cmd.ProcessState)
		}
	}
	return p.Stop(context.Background(), 0)
}
