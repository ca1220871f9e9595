package proc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"vllmtuner/render"
)

// A treeState is what one scan found of a tree.
type treeState struct {
	living []stat // processes of our user, in ascending order
	dead   []stat // dead processes that wait to be reaped, or that this scan has reaped
}

// killAll kills the cgroup, and sends SIGKILL to every member that a scan finds, until two scans in a row are quiet. A
// scan is quiet when it finds no living member and no newly dead member. It is not enough to find nobody alive: after
// the scan has listed /proc, a process can fork and die before the scan reads it. While new members appear, killAll
// does not pause, so that it is faster than a process that forks in a loop. It returns the PIDs of the processes that
// it killed.
func killAll(leader int, group cgroup, scan func() (treeState, error)) (killed []int, err error) {
	signalled, knownDead := map[int]stat{}, map[int]stat{}
	var refused error
	deadline := time.Now().Add(killLimit)
	for quiet, first := 0, true; quiet < 2; first = false {
		found, err := scan()
		if err != nil {
			return killed, err
		}
		if first { // the cgroup is killed only after the first scan, which tells which processes there were
			_ = group.kill() // this call fails before Linux 5.14; then the signals must be enough
		}
		living := append(found.living, findDying(signalled, found.living)...)
		if !addNew(knownDead, found.dead) && len(living) == 0 {
			quiet++
			continue
		}
		quiet = 0
		if time.Now().After(deadline) {
			return killed, errors.Join(fmt.Errorf("wait for server %d to end: processes %v are alive, or keep forking, %s "+
				"after SIGKILL", leader, pidsOf(living), render.Took(killLimit)), refused)
		}
		for _, s := range living {
			if err := killOne(s); err != nil {
				refused = err // go on: the other members must be killed too
			}
			killed = append(killed, s.pid)
		}
		if !addNew(signalled, living) && len(living) > 0 {
			time.Sleep(pollEvery)
		}
	}
	slices.Sort(killed)
	return slices.Compact(killed), nil
}

// addNew adds the found processes to a map, and reports whether the map lacked any of them.
func addNew(known map[int]stat, found []stat) (news bool) {
	for _, s := range found {
		if known[s.pid].startTime != s.startTime {
			known[s.pid], news = s, true
		}
	}
	return news
}

// findDying returns the signalled processes that are not dead yet, but no longer look like members. A process that ends
// first frees its memory, which holds the token, and leaves its cgroup. It closes its files only afterwards (do_exit in
// kernel/exit.c of Linux). So it may still hold a port, or, for seconds, a GPU.
func findDying(signalled map[int]stat, members []stat) []stat {
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

// killOne kills a process that a scan found. The PID may have been reused since the scan, so killOne opens the process
// first, and then checks that it is the intended one. os.FindProcess holds a pidfd on Linux 5.4 and later, and Kill
// signals through the pidfd (pidfdFind and pidfdSendSignal in os/pidfd_linux.go of Go 1.26).
func killOne(meant stat) error {
	p, err := os.FindProcess(meant.pid)
	if err != nil {
		return fmt.Errorf("open process %d: %w", meant.pid, err)
	}
	defer p.Release() // Release fails only if it was called before
	s, err := readStat(meant.pid)
	if err != nil || s.startTime != meant.startTime {
		return nil // the process has ended by itself
	}
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", meant.pid, err)
	}
	return nil
}

// pidsOf returns the PIDs of the processes, in the same order.
func pidsOf(members []stat) []int {
	var pids []int
	for _, s := range members {
		pids = append(pids, s.pid)
	}
	return pids
}
