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
		return fmt.Errorf("become the parent of our orphans: %w", err)
	}
	return nil
})

// SubreaperSupport returns why orphaned descendants do not become our children; nil means they do.
func SubreaperSupport() error { return becomeSubreaper() }

// direct reports whether this program forked the child itself. Otherwise the child is adopted: its parent died. A
// direct child must be waited for by the code that started it, which needs its status. An adopted child has nobody
// but us to reap it.
//
// Go's os package tells them apart. It forks with CLONE_PIDFD and keeps the pidfd until it has the status
// (ensurePidfd and pidfdWait in os/pidfd_linux.go of Go 1.26). So a direct child always has a pidfd in our descriptor
// table, and an adopted one never.
//
// A kernel or sandbox may have no pidfds, which the first leader shows. Then the session tells them apart. A direct
// child stays in our session, except the leaders and the watchdog, whose PIDs we know. A descendant of a tree has
// left our session and cannot return (setsid(2) only makes new ones). An orphan that a plain child leaves in our
// session is not reaped then: a zombie is better than a stolen status.
//
// A C library that forks without Go would look adopted; the tuner links none that does.
func (sc *scan) direct(s stat) bool {
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
	return err != nil || held[s.pid] // when in doubt, it is not ours to wait for
}

// adopted reports whether a child of ours is adopted. It reads the process again to be certain: a direct child that
// was reaped between the readings of /proc and of our pidfds looks adopted, but then it is gone.
func (sc *scan) adopted(s stat) bool {
	if sc.direct(s) {
		return false
	}
	again, err := readStat(s.pid)
	return err == nil && again.startTime == s.startTime
}

// starting reports whether a tree is being forked, so that its leader's PID is not known yet.
func (sc *scan) starting() bool {
	for _, p := range sc.home.trees {
		if p.record.PID == 0 {
			return true
		}
	}
	return false
}

// byAdoption finds the tree of a child of ours that has no mark: it left the session, cleared its environment, and
// its parent died before any scan saw it. With one tree the answer is certain. With several, byAdoption waits until
// only one tree is left that is older than the orphan, so the last such tree to be stopped ends it. Killing another
// server's process would spoil a measurement, and no orphan may survive.
//
// A child that was ours before, or an orphan in our own session, belongs to no tree. The first process of a container
// also inherits orphans of strangers. Those that a scan saw below a stranger have a mark; the others count as ours,
// because the container is the server's.
func (sc *scan) byAdoption(s stat) (owner *Process, known bool) {
	if sc.direct(s) {
		return nil, !sc.starting() // it may be the leader that is being started
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
	case len(older) > 1 || older[0].record.PID == 0 || !sc.adopted(s):
		return nil, false
	}
	return older[0], true
}

// reap waits for each adopted dead process by its PID. An adopted zombie keeps its PID until we wait for it.
func (sc *scan) reap() {
	for _, s := range sc.all {
		if s.parent == sc.self && s.dead() && sc.adopted(s) {
			_ = unix.Waitid(unix.P_PID, s.pid, nil, unix.WEXITED|unix.WNOHANG, nil) // if it fails, the next scan tries again
		}
	}
}

// heldPidfds returns the processes whose pidfd this process holds, from the Pid line of their fdinfo (proc(5)).
func heldPidfds() (map[int]bool, error) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, fmt.Errorf("list our pidfds: %w", err)
	}
	held := map[int]bool{}
	for _, fd := range fds {
		target, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err != nil || !strings.Contains(target, "pidfd") { // closed meanwhile, or "anon_inode:[pidfd]"
			continue
		}
		info, err := os.ReadFile("/proc/self/fdinfo/" + fd.Name())
		if err != nil {
			continue // closed meanwhile
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
	// idleScanRatio bounds the cost of scans while nothing happens to 1/1000 of a core: the pause after a scan is 1000
	// times as long as the scan. A scan takes about 1 ms for 100 processes.
	idleScanRatio = 1000
	// The pause is at least minPause after a very fast scan, and at most maxPause after a slow one.
	minPause, maxPause = time.Second, 10 * time.Second
	// burstPause is the least pause between two scans when many children die.
	burstPause = 100 * time.Millisecond
)

// startReaper starts to scan when a child dies, and from time to time. The scans reap, and they see processes while
// their parents are alive. stop ends them and returns when the goroutine is gone.
func (h *registry) startReaper() (stop func()) {
	quit := make(chan struct{})
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD) // also sent for an adopted child that is already dead
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
				continue // os/exec was faster, as it mostly is
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

// scanOnce scans, and returns the pause until the next scan and whether the watchdog was seen dead.
func (h *registry) scanOnce() (pause time.Duration, lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	begin := time.Now()
	all, _ := h.scan() // the next scan tries again; Stop and Members report the error
	dead, found := all[h.watchdog.pid()]
	return min(max(minPause, idleScanRatio*time.Since(begin)), maxPause), found && dead.dead()
}

// childWaits reports whether a dead child waits to be reaped. WNOWAIT leaves it unreaped.
func childWaits() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}
