package proc

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// becomeSubreaper makes this process the parent of every descendant whose own parent dies (PR_SET_CHILD_SUBREAPER,
// Linux 3.4, prctl(2)). Children do not inherit the setting. The first process of a container is a subreaper anyway.
var becomeSubreaper = sync.OnceValue(func() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphaned server processes: %w", err)
	}
	return nil
})

// SubreaperSupport returns why orphaned descendants do not become our children; nil means they do.
func SubreaperSupport() error { return becomeSubreaper() }

// isDirect reports whether this program forked the child itself. Otherwise the child is adopted, because its parent
// died. Only the code that started a direct child may wait for it, because that code needs the exit status. Nobody but
// us can reap an adopted child.
//
// Pidfds tell direct and adopted children apart. Go's os package forks with CLONE_PIDFD, and keeps the pidfd until it
// has the exit status (ensurePidfd and pidfdWait in os/pidfd_linux.go of Go 1.26). So we always hold the pidfd of a
// direct child, and never the pidfd of an adopted child.
//
// A kernel or sandbox may have no pidfds; the first leader shows this. Then a child counts as direct if it is in our
// session. A direct child stays in our session, except the leaders and the watchdog, whose PIDs we know. A descendant
// of a tree has left our session and cannot return, because setsid(2) only makes new sessions. If another child of ours
// leaves an orphan in our session, we do not reap the orphan. It stays a zombie. That is better than to take an exit
// status for which other code waits.
//
// A child that a C library forks without Go would look adopted. The tuner links no such library.
func (sc *scan) isDirect(s stat) bool {
	if s.pid == sc.home.watchdog.pid() {
		return true
	}
	for _, p := range sc.home.trees {
		if p.record.PID == s.pid {
			return true
		}
	}
	if !sc.home.pidfds {
		return s.session == sc.all[sc.self].session || sc.starting()
	}
	held, err := sc.held()
	return err != nil || held[s.pid] // when in doubt, the child counts as direct, and we do not wait for it
}

// isAdopted reports whether a child of ours is adopted. A direct child looks adopted if it was reaped after we read
// /proc and before we read our pidfds. Such a child is gone, so isAdopted reads the process again.
func (sc *scan) isAdopted(s stat) bool {
	if sc.isDirect(s) {
		return false
	}
	again, err := readStat(s.pid)
	return err == nil && again.startTime == s.startTime
}

// starting reports whether a tree is just being forked. The PID of its leader is not known yet.
func (sc *scan) starting() bool {
	for _, p := range sc.home.trees {
		if p.record.PID == 0 {
			return true
		}
	}
	return false
}

// ownerByAdoption finds the tree of a child of ours that has no mark. Such a child left its session and cleared its
// environment, and its parent died before any scan saw it. If only one tree is older than the child, the child belongs
// to that tree. If several trees are older, ownerByAdoption does not decide yet, because killing another server's
// process would spoil a measurement. When only one of these trees is left, it gets the child, so that no orphan
// survives.
//
// A direct child belongs to no tree. An orphan belongs to no tree if it is in our own session or older than all trees.
// The first process of a container also inherits the orphans of other programs. If a scan saw such an orphan below its
// own program, the orphan's mark (see the type mark) says so. Otherwise the orphan counts as ours, because the
// container exists for the server.
func (sc *scan) ownerByAdoption(s stat) (owner *Process, known bool) {
	if sc.isDirect(s) {
		return nil, !sc.starting() // the process may be a leader that is just being started
	}
	if s.session == sc.all[sc.self].session {
		return nil, true
	}
	var older []*Process
	for _, p := range sc.home.trees {
		if p.record.PID == 0 || p.record.StartTime <= s.startTime {
			older = append(older, p)
		}
	}
	switch {
	case len(older) == 0:
		return nil, true
	case len(older) > 1 || older[0].record.PID == 0 || !sc.isAdopted(s):
		return nil, false
	}
	return older[0], true
}

// reap waits for each adopted dead process by its PID. An adopted zombie keeps its PID until we wait for it, so the PID
// cannot mean another process.
func (sc *scan) reap() {
	for _, s := range sc.all {
		if s.parent == sc.self && s.dead() && sc.isAdopted(s) {
			_ = unix.Waitid(unix.P_PID, s.pid, nil, unix.WEXITED|unix.WNOHANG, nil) // if it fails, the next scan tries again
		}
	}
}

// heldPidfds returns the PIDs of the processes whose pidfds this process holds. It reads them from /proc/self/fdinfo
// (proc(5)).
func heldPidfds() (map[int]bool, error) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, fmt.Errorf("list the pidfds of the tuner: %w", err)
	}
	held := map[int]bool{}
	for _, fd := range fds {
		target, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err != nil || !strings.Contains(target, "pidfd") { // the file was closed meanwhile, or is no pidfd: the target of a pidfd is "anon_inode:[pidfd]"
			continue
		}
		info, err := os.ReadFile("/proc/self/fdinfo/" + fd.Name())
		if err != nil {
			continue // the pidfd was closed meanwhile
		}
		for line := range strings.Lines(string(info)) {
			if number, ok := strings.CutPrefix(line, "Pid:"); ok {
				pid, err := strconv.Atoi(strings.TrimSpace(number))
				if err != nil {
					return nil, fmt.Errorf("read the pidfd %s: %w", fd.Name(), err)
				}
				held[pid] = true
			}
		}
	}
	return held, nil
}

const (
	// idleScanRatio makes the pause after a scan 1000 times as long as the scan. So scans cost at most 1/1000 of a core
	// while nothing happens. A scan takes about 1 ms for 100 processes.
	idleScanRatio = 1000
	// The pause is at least minPause, even after a very fast scan, and at most maxPause, even after a slow one.
	minPause, maxPause = time.Second, 10 * time.Second
	// burstPause is the shortest pause between two scans while many children die.
	burstPause = 100 * time.Millisecond
)

// startReaper starts a goroutine that scans when a child dies, and from time to time. Scans reap dead orphans. They
// also see processes while their parents are still alive. The caller ends the goroutine with the returned function,
// which waits until the goroutine is gone.
func (h *registry) startReaper() (stop func()) {
	quit := make(chan struct{})
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD) // the kernel also sends it when we adopt a child that is already dead
	var work sync.WaitGroup
	work.Go(func() { h.reapUntil(quit, children) })
	return func() {
		close(quit)
		work.Wait()
		signal.Stop(children)
	}
}

func (h *registry) reapUntil(quit chan struct{}, children chan os.Signal) {
	timer := time.NewTimer(minPause)
	defer timer.Stop()
	for {
		select {
		case <-quit:
			return
		case <-children:
			if !childWaits() {
				continue // os/exec has already reaped the child, as it usually does
			}
		case <-timer.C:
		}
		pause, lost := h.scanOnce()
		timer.Reset(pause)
		if lost {
			h.watchdog.replace()
		}
		select {
		case <-quit:
			return
		case <-time.After(burstPause):
		}
	}
}

// scanOnce scans. It returns the pause until the next scan, and whether it found the watchdog dead.
func (h *registry) scanOnce() (pause time.Duration, lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	begin := time.Now()
	all, _ := h.scan() // after an error the next scan tries again; Stop and Members report the error
	dead, found := all[h.watchdog.pid()]
	return min(max(minPause, idleScanRatio*time.Since(begin)), maxPause), found && dead.dead()
}

// childWaits reports whether a dead child waits to be reaped. With WNOWAIT, the call does not reap the child.
func childWaits() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}
