package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A Record identifies a process tree beyond the life of its owner. It is stored before the server is used.
type Record struct {
	PID       int    `json:"pid"`        // of the leader, which is also the number of its session
	StartTime uint64 `json:"start_time"` // of the leader, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5))
	BootID    string `json:"boot_id"`    // /proc/sys/kernel/random/boot_id
	Token     string `json:"token"`      // in the environment of everything that came of the leader
}

// Reclaim kills what is left of a recorded tree whose owner has died, and returns the numbers of what it killed. It
// matches by the token, or by the session as long as the session's leader is dead or is the recorded one, so a process
// that merely got a recycled number is left alone; so are other users' processes. After a reboot nothing is left, and
// nothing is done. It returns an error when a process survives SIGKILL for ten seconds.
func Reclaim(r Record) (killed []int, err error) {
	if r.PID <= 0 || r.Token == "" {
		return nil, fmt.Errorf("reclaim a server: its record names no process (pid %d)", r.PID)
	}
	bootID, err := currentBootID()
	if err != nil {
		return nil, fmt.Errorf("reclaim server process %d: %w", r.PID, err)
	}
	if r.BootID != bootID {
		return nil, nil
	}
	return r.kill()
}

// members returns the living processes of the tree.
func (r Record) members() ([]int, error) {
	session := r.ownsSession()
	var pids []int
	for s, err := range processes() {
		if err != nil {
			return nil, fmt.Errorf("look for processes of server %d: %w", r.PID, err)
		}
		if r.owns(s, session) {
			pids = append(pids, s.pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// ownsSession reports whether the session's number still means the recorded session. The kernel gives a number away
// again only when no process has it as its session, so a living leader with another start time means a new session.
func (r Record) ownsSession() bool {
	s, err := readStat(r.PID)
	return err != nil || s.startTime == r.StartTime
}

// owns reports whether a process belongs to the tree. This process never does, nor does one of another user.
func (r Record) owns(s stat, session bool) bool {
	if s.dead() || s.pid == os.Getpid() || !ownUser(s.pid) {
		return false
	}
	return session && s.session == r.PID || hasToken(s.pid, r.Token)
}

// kill sends SIGKILL to every member until two readings of /proc in a row show none: a process can be born behind the
// back of one reading, and its parent die before it is reached.
func (r Record) kill() (killed []int, err error) {
	deadline := time.Now().Add(killLimit)
	for clean := 0; clean < 2; {
		members, err := r.members()
		if err != nil {
			return killed, err
		}
		if len(members) == 0 {
			clean++
			continue
		}
		clean = 0
		if time.Now().After(deadline) {
			return killed, fmt.Errorf("wait for processes %v of server %d to end: still alive %v after SIGKILL",
				members, r.PID, killLimit)
		}
		for _, pid := range members {
			if err := r.killOne(pid); err != nil {
				return killed, err
			}
			if !slices.Contains(killed, pid) {
				killed = append(killed, pid)
			}
		}
		time.Sleep(pollEvery)
	}
	slices.Sort(killed)
	return killed, nil
}

// killOne takes hold of the process (a pidfd, where the kernel has them), makes sure that it is still a member, and only
// then kills it: between the reading and the signal the number may have changed hands.
func (r Record) killOne(pid int) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return fmt.Errorf("take hold of process %d: %w", pid, err)
	}
	defer p.Release()
	s, err := readStat(pid)
	if err != nil || !r.owns(s, r.ownsSession()) {
		return nil // gone by itself
	}
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}

// currentBootID identifies the time since the last boot: process numbers and start times mean something within it only.
func currentBootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// ownUser reports whether the process runs as the same user as this one.
func ownUser(pid int) bool {
	info, err := os.Stat(procPath(pid, ""))
	if err != nil {
		return false
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(owner.Uid) == os.Geteuid()
}

// hasToken reports whether the process started with the token in its environment.
func hasToken(pid int, token string) bool {
	environ, err := os.ReadFile(procPath(pid, "environ"))
	if err != nil {
		return false // gone, or closed to us: then it is not ours
	}
	want := []byte(tokenVariable + "=" + token)
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if bytes.Equal(variable, want) {
			return true
		}
	}
	return false
}

// vanished reports whether an error of a file below /proc/PID means that the process has gone in the meantime.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}
