package proc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
)

// A family is what one look found of a tree.
type family struct {
	living []stat // that run as our user, in ascending order
	dead   []stat // that wait to be reaped, or were by this look
}

// killAll kills the group and sends SIGKILL to every member that look finds, until two looks in a row are quiet. It is not
// enough that they find nobody alive: a process can live when /proc is listed, bear another behind the back of the look,
// and be dead when its turn comes to be read. But then it is one that was not dead before, so a look is quiet when it
// finds nobody alive and nobody newly dead. As long as there are new ones killAll does not pause: what forks as fast as
// it can is caught by being faster. It returns the numbers of what it has killed.
func killAll(leader int, group cgroup, look func() (family, error)) (killed []int, err error) {
	signalled, knownDead := map[int]stat{}, map[int]stat{}
	var refused error
	deadline := time.Now().Add(killLimit)
	for quiet, first := 0, true; quiet < 2; first = false {
		found, err := look()
		if err != nil {
			return killed, err
		}
		if first { // after the look, which tells what there was to kill
			_ = group.kill() // before Linux 5.14 there is no such thing: then signals do it alone
		}
		living := append(found.living, dying(signalled, found.living)...)
		if !takeIn(knownDead, found.dead) && len(living) == 0 {
			quiet++
			continue
		}
		quiet = 0
		if time.Now().After(deadline) {
			return killed, errors.Join(fmt.Errorf("wait for server %d to end: processes %v are alive, or new ones born, %v "+
				"after SIGKILL", leader, numbers(living), killLimit), refused)
		}
		for _, s := range living {
			if err := killOne(s); err != nil {
				refused = err // the others must not live for it
			}
			killed = append(killed, s.pid)
		}
		if !takeIn(signalled, living) && len(living) > 0 {
			time.Sleep(pollEvery)
		}
	}
	slices.Sort(killed)
	return slices.Compact(killed), nil
}

// takeIn adds processes to those that are known, and reports whether any of them was not.
func takeIn(known map[int]stat, found []stat) (news bool) {
	for _, s := range found {
		if known[s.pid].startTime != s.startTime {
			known[s.pid], news = s, true
		}
	}
	return news
}

// dying are those of the signalled that are not dead yet and are no more among the members. A process that ends gives up
// its memory, and with it the environment that has its token, and leaves its cgroup before it closes its files (do_exit in
// kernel/exit.c of Linux): it may still hold a port, and a GPU for seconds.
func dying(signalled map[int]stat, members []stat) []stat {
	var left []stat
	for pid, s := range signalled {
		now, err := readStat(pid)
		if err != nil || now.startTime != s.startTime || now.dead() {
			continue
		}
		if !slices.ContainsFunc(members, func(m stat) bool { return m.pid == pid }) {
			left = append(left, now)
		}
	}
	return left
}

// killOne takes hold of the process and only then looks whether it is still the one that was meant: between the look and
// the signal the number may have changed hands. os.FindProcess holds a pidfd on Linux 5.4 and later, and Kill signals
// through it (pidfdFind and pidfdSendSignal in os/pidfd_linux.go of Go 1.26).
func killOne(meant stat) error {
	p, err := os.FindProcess(meant.pid)
	if err != nil {
		return fmt.Errorf("take hold of process %d: %w", meant.pid, err)
	}
	defer p.Release() // an error would mean that it was released already
	s, err := readStat(meant.pid)
	if err != nil || s.startTime != meant.startTime {
		return nil // gone by itself
	}
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", meant.pid, err)
	}
	return nil
}

// numbers are the process numbers, in the order given.
func numbers(members []stat) []int {
	var pids []int
	for _, s := range members {
		pids = append(pids, s.pid)
	}
	return pids
}
