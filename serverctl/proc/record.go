package proc

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// A Record identifies a process tree, even after the tree's owner has died. It is stored before the server is used.
type Record struct {
	PID       int    `json:"pid"`        // PID of the leader, which is also the session ID
	StartTime uint64 `json:"start_time"` // start time of the leader, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5))
	BootID    string `json:"boot_id"`    // /proc/sys/kernel/random/boot_id
	Token     string `json:"token"`      // a random text in the environment of every descendant
	// PIDNamespace is the PID namespace of the owner, such as "pid:[4026531836]". PIDs are valid only within it: a
	// restarted container has the same boot ID, but other PIDs.
	PIDNamespace string `json:"pid_namespace,omitempty"`
	Cgroup       string `json:"cgroup,omitempty"` // directory of the tree's cgroup v2; empty means it has none
}

// newRecord returns the record of a tree that will be started. The tree has no leader yet.
func newRecord() (Record, error) {
	token := make([]byte, 16)
	rand.Read(token) // never fails: crypto/rand ends the program instead
	r := Record{Token: hex.EncodeToString(token)}
	var err error
	r.BootID, r.PIDNamespace, err = bootAndNamespace()
	return r, err
}

// Reclaim kills what is left of a recorded tree whose owner has died, removes the cgroup, and returns the PIDs that it
// killed. It fails when a process survives SIGKILL for ten seconds. After a reboot it does nothing.
//
// Reclaim has not seen the tree grow, so it kills only processes that are provably members. A member has the token, or
// is in the cgroup whose name contains the token. A process of the recorded session is a member too, if no process has
// the PID of the leader, or if that process is the recorded leader. So processes with a reused PID and other users'
// processes are safe. Two kinds of members can escape Reclaim, but not Stop. One is a daemon that left its session,
// cleared its environment and has no cgroup of ours. The other is a tree without a cgroup that forks faster than /proc
// can be read.
func Reclaim(r Record) (killed []int, err error) {
	if r.PID <= 0 {
		return nil, fmt.Errorf("reclaim a server: its record names no process (pid %d)", r.PID)
	}
	return r.reclaim()
}

// reclaim does the same as Reclaim, for a record that may lack the leader's PID.
func (r Record) reclaim() (killed []int, err error) {
	if r.Token == "" {
		return nil, errors.New("reclaim a server: its record has no token") // an empty token would match every process that has no token
	}
	bootID, namespace, err := bootAndNamespace()
	if err != nil {
		return nil, fmt.Errorf("reclaim server process %d: %w", r.PID, err)
	}
	if r.BootID != bootID {
		return nil, nil
	}
	if r.PIDNamespace != "" && r.PIDNamespace != namespace {
		r.PID = 0 // the PID means nothing here; token and cgroup are the same in every namespace
	}
	killed, err = killAll(r.PID, r.group(), r.state)
	_ = r.group().remove() // this call fails if we may not remove the cgroup, or if it is not empty; err tells about processes that are left
	return killed, err
}

// group returns the recorded cgroup if its name contains the token, and "" otherwise, because any other cgroup may be
// somebody else's.
func (r Record) group() cgroup {
	if filepath.Base(r.Cgroup) != cgroupPrefix+r.Token {
		return ""
	}
	return cgroup(r.Cgroup)
}

// Members returns the living processes that Reclaim would kill, in ascending order.
func (r Record) Members() ([]int, error) {
	f, err := r.state()
	return pidsOf(f.living), err
}

// state returns the processes of the tree. It finds a dead process only if that process was in the session.
func (r Record) state() (treeState, error) {
	all, err := processes()
	if err != nil {
		return treeState{}, fmt.Errorf("list the processes of server %d: %w", r.PID, err)
	}
	grouped := map[int]bool{}
	pids, _ := r.group().pids() // if the cgroup cannot be read, token and session decide
	for _, pid := range pids {
		grouped[pid] = true
	}
	leader, lives := all[r.PID]
	session := r.PID > 0 && (!lives || leader.startTime == r.StartTime) // whether the PID still means the recorded session
	var f treeState
	for pid, s := range all {
		inSession := session && s.session == r.PID
		switch {
		case pid == os.Getpid():
		case s.dead():
			if inSession {
				f.dead = append(f.dead, s)
			}
		case (inSession || grouped[pid] || tokenOf(pid) == r.Token) && ownUser(pid):
			f.living = append(f.living, s)
		}
	}
	sortByPID(f.living)
	return f, nil
}

// bootAndNamespace identifies this boot and our PID namespace. PIDs and start times are valid only within one boot and
// one namespace. If /proc shows another namespace, bootAndNamespace returns an error, because the same PIDs are other
// processes there.
func bootAndNamespace() (bootID, namespace string, err error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", "", fmt.Errorf("read the boot id: %w", err)
	}
	namespace, _ = os.Readlink("/proc/self/ns/pid") // a kernel without namespaces has only one namespace, which has no name
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return "", "", fmt.Errorf("read the PID of the tuner: %w", err)
	}
	if self != strconv.Itoa(os.Getpid()) {
		return "", "", fmt.Errorf("/proc shows the tuner as process %s, but its PID is %d: /proc belongs to another PID namespace; "+
			"mount the right one: mount -t proc proc /proc", self, os.Getpid())
	}
	return strings.TrimSpace(string(b)), namespace, nil
}

// ownUser reports whether the real user of a process is our user; we kill only such processes. The owner of /proc/PID
// does not tell this: it is root for a process that may not be dumped (proc(5)).
func ownUser(pid int) bool {
	status, err := os.ReadFile(procPath(pid, "status"))
	if err != nil {
		return false // the process is gone
	}
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "Uid:"); ok { // real, effective, saved, file system
			fields := strings.Fields(ids)
			return len(fields) > 0 && fields[0] == strconv.Itoa(os.Geteuid())
		}
	}
	return false
}

// tokenOf returns the token in the environment that the process started with; empty means none.
func tokenOf(pid int) string {
	environ, err := os.ReadFile(procPath(pid, "environ"))
	if err != nil {
		return "" // the process is gone, or we may not read its environment because it is not ours
	}
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if token, ok := bytes.CutPrefix(variable, []byte(TokenVariable+"=")); ok {
			return string(token)
		}
	}
	return ""
}

// vanished reports whether an error about a file below /proc/PID, or about a cgroup, means that the process or the
// cgroup is gone.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.ENODEV)
}
