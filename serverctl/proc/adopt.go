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

// becomeSubreaper makes this process the parent of every descendant whose own parent dies (PR_SET_CHILD_SUBREAPER, Linux
// 3.4, prctl(2)). Children do not inherit it. The first process of a container is that anyway.
var becomeSubreaper = sync.OnceValue(func() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of our orphans: %w", err)
	}
	return nil
})

// SubreaperSupport returns why descendants that lose their parent do not become ours; nil means they do.
func SubreaperSupport() error { return becomeSubreaper() }

// A child of ours is either direct, which means that this program has forked it and will wait for it, or adopted, which
// means that its parent died. The two must not be mixed up: nobody but us reaps an adopted one, and a direct one's status
// belongs to who started it, through this package or any other.
//
// Go's os package tells them apart: it forks with CLONE_PIDFD and keeps the pidfd until the status has arrived
// (ensurePidfd and pidfdWait in os/pidfd_linux.go of Go 1.26), so a direct child has a pidfd in our descriptor table from
// its first to its last moment, and an adopted one never. Where the kernel or a sandbox has no pidfds, which the first
// leader shows, the session tells: a direct child stays in ours, unless it is a leader or the watchdog, whose numbers we
// know; what came of a tree has left ours and cannot come back (setsid(2) only makes new ones). There an orphan that a
// plain child leaves in our session is not reaped: better a zombie than a stolen status.
//
// Only a C library that forks behind Go's back would be taken for adopted; nothing that the tuner links does.
func (l *look) direct(s stat) bool {
	if s.pid == l.home.dog.pid() {
		return true
	}
	for _, p := range l.home.trees {
		if p.record.PID == s.pid {
			return true
		}
	}
	if !l.home.pidfds {
		return s.session == l.all[l.self].session || l.starting()
	}
	held, err := l.held()
	return err != nil || held[s.pid] // in doubt it is not ours to wait for
}

// adopted reports whether a child of ours is an adopted one. The second reading makes it certain: a direct child that was
// reaped between our reading of /proc and that of our pidfds looks adopted, but then it is gone.
func (l *look) adopted(s stat) bool {
	if l.direct(s) {
		return false
	}
	again, err := readStat(s.pid)
	return err == nil && again.startTime == s.startTime
}

// starting reports whether a tree is being forked: its leader's number is not known yet.
func (l *look) starting() bool {
	for _, p := range l.home.trees {
		if p.record.PID == 0 {
			return true
		}
	}
	return false
}

// byAdoption finds whose tree a child of ours came of that bears no mark: it has left the session, cleared its
// environment, and its parent was dead before any look saw it. With one tree there is no doubt. With several it is left
// open until one remains that is older than the orphan, so the last one to be stopped ends it: to kill another server's
// process would spoil a measurement, and an orphan is never left to live. What was a child of ours before, or an orphan
// in our own session, came of none. As the first process of a container we also inherit orphans of strangers; those that
// were seen with a stranger for a parent bear a mark, and the others count as ours: the container is the server's.
func (l *look) byAdoption(s stat) (owner *Process, known bool) {
	if l.direct(s) {
		return nil, !l.starting() // it may be the leader that is being started
	}
	if s.session == l.all[l.self].session {
		return nil, true
	}
	var older []*Process
	for _, p := range l.home.trees {
		if p.record.PID == 0 || p.record.StartTime <= s.startTime {
			older = append(older, p)
		}
	}
	switch {
	case len(older) == 0:
		return nil, true
	case len(older) > 1 || older[0].record.PID == 0 || !l.adopted(s):
		return nil, false
	}
	return older[0], true
}

// reap waits for the adopted dead, for each by its number. An adopted zombie keeps its number until we wait for it.
func (l *look) reap() {
	for _, s := range l.all {
		if s.parent == l.self && s.dead() && l.adopted(s) {
			_ = unix.Waitid(unix.P_PID, s.pid, nil, unix.WEXITED|unix.WNOHANG, nil) // the next look tries again
		}
	}
}

// heldPidfds returns the processes of which this process holds a pidfd, by the Pid line of its fdinfo (proc(5)).
func heldPidfds() (map[int]bool, error) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, fmt.Errorf("look for our pidfds: %w", err)
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
	// lookShare is the share of a core that looks may cost while nothing happens: a pause is that many times the look
	// before it. It takes about 1 ms for 100 processes.
	lookShare = 1000
	// A look that took no time is still not repeated before minPause, and a slow one not later than maxPause.
	minPause, maxPause = time.Second, 10 * time.Second
	// burstPause bounds the looks when many children die.
	burstPause = 100 * time.Millisecond
)

// A reaper looks when a child dies, and now and then: it reaps, and it sees processes while their parents live.
type reaper struct {
	quit, done chan struct{}
}

func startReaper(h *household) *reaper {
	r := &reaper{quit: make(chan struct{}), done: make(chan struct{})}
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD) // also sent for an orphan that is dead when we get it
	go r.run(h, children)
	return r
}

// stop ends the reaper and returns when it is gone.
func (r *reaper) stop() {
	close(r.quit)
	<-r.done
}

func (r *reaper) run(h *household, children chan os.Signal) {
	defer close(r.done)
	defer signal.Stop(children)
	timer := time.NewTimer(minPause)
	defer timer.Stop()
	for {
		select {
		case <-r.quit:
			return
		case <-children:
			if !childWaits() {
				continue // os/exec was faster, as usual
			}
		case <-timer.C:
		}
		pause, lost := h.glance()
		timer.Reset(pause)
		if lost {
			h.dog.replace()
		}
		select {
		case <-r.quit:
			return
		case <-time.After(burstPause):
		}
	}
}

// glance looks once, and returns how long the next look may wait and whether the watchdog was seen dead.
func (h *household) glance() (pause time.Duration, lost bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	begin := time.Now()
	all, _ := h.look() // a look that fails is repeated; that of Stop and Members reports
	dog, found := all[h.dog.pid()]
	return min(max(minPause, lookShare*time.Since(begin)), maxPause), found && dog.dead()
}

// childWaits reports whether any dead child waits to be waited for. WNOWAIT leaves it as it is.
func childWaits() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}
