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

// A Record identifies a process tree beyond the life of its owner. It is stored before the server is used.
type Record struct {
	PID       int    `json:"pid"`        // of the leader, which is also the session ID
	StartTime uint64 `json:"start_time"` // of the leader, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5))
	BootID    string `json:"boot_id"`    // /proc/sys/kernel/random/boot_id
	Token     string `json:"token"`      // in the environment of every descendant
	// PIDNamespace is the owner's, such as "pid:[4026531836]". PIDs mean something only within it: a restarted container
	// has the same boot ID and other PIDs.
	PIDNamespace string `json:"pid_namespace,omitempty"`
	Cgroup       string `json:"cgroup,omitempty"` // directory of the tree's cgroup v2; empty means it has none
}

// newRecord returns the record of a tree that will be started.
func newRecord() (Record, error) {
	token := make([]byte, 16)
	rand.Read(token) // never fails: crypto/rand ends the program instead
	r := Record{Token: hex.EncodeToString(token)}
	var err error
	r.BootID, r.PIDNamespace, err = here()
	return r, err
}

// Reclaim kills what is left of a recorded tree whose owner has died, removes its cgroup, and returns the PIDs that
// it killed. It fails when a process survives SIGKILL for ten seconds. After a reboot it does nothing.
//
// Reclaim kills only what it can prove without having seen the tree grow. A member has the token, or is in the cgroup
// whose name contains the token. A process of the session is a member too if the leader is dead or is the recorded one.
// So processes with a reused PID and other users' processes are safe. Two things can escape Reclaim, but not Stop: a
// daemon that left its session, cleared its environment and has no cgroup of ours; and, without a cgroup, a tree that
// forks faster than /proc can be read.
func Reclaim(r Record) (killed []int, err error) {
	if r.PID <= 0 {
		return nil, fmt.Errorf("reclaim a server: its record names no process (pid %d)", r.PID)
	}
	return r.reclaim()
}

// reclaim is Reclaim for a record that may lack the leader's PID.
func (r Record) reclaim() (killed []int, err error) {
	if r.Token == "" {
		return nil, errors.New("reclaim a server: its record has no token") // most processes have none
	}
	bootID, namespace, err := here()
	if err != nil {
		return nil, fmt.Errorf("reclaim server process %d: %w", r.PID, err)
	}
	if r.BootID != bootID {
		return nil, nil
	}
	if r.PIDNamespace != "" && r.PIDNamespace != namespace {
		r.PID = 0 // the token and the cgroup are the same in every namespace
	}
	killed, err = killAll(r.PID, r.group(), r.state)
	_ = r.group().remove() // it fails when the cgroup is not ours to remove, or not empty, and then err says so
	return killed, err
}

// group is the recorded cgroup if its name carries the token; otherwise it may be somebody else's.
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

// state returns the processes of the tree. It knows the dead ones of the session only.
func (r Record) state() (treeState, error) {
	all, err := processes()
	if err != nil {
		return treeState{}, fmt.Errorf("list the processes of server %d: %w", r.PID, err)
	}
	grouped := map[int]bool{}
	pids, _ := r.group().pids() // if the cgroup cannot be read, the token decides
	for _, pid := range pids {
		grouped[pid] = true
	}
	leader, lives := all[r.PID]
	session := r.PID > 0 && (!lives || leader.startTime == r.StartTime) // its PID still means the recorded session
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

// here identifies this boot and our PID namespace: PIDs and start times mean something only within both. It fails
// when /proc shows another namespace, where the same PIDs are other processes.
func here() (bootID, namespace string, err error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", "", fmt.Errorf("read the boot id: %w", err)
	}
	namespace, _ = os.Readlink("/proc/self/ns/pid") // a kernel without namespaces has only one, without a name
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return "", "", fmt.Errorf("read our PID: %w", err)
	}
	if self != strconv.Itoa(os.Getpid()) {
		return "", "", fmt.Errorf("/proc says we are process %s, but we are %d: it belongs to another PID namespace; "+
			"mount our own there: mount -t proc proc /proc", self, os.Getpid())
	}
	return strings.TrimSpace(string(b)), namespace, nil
}

// ownUser reports whether the process runs as our real user; only such a process is killed. The owner of /proc/PID
// would not do: it is root for a process that may not be dumped (proc(5)).
func ownUser(pid int) bool {
	status, err := os.ReadFile(procPath(pid, "status"))
	if err != nil {
		return false // gone
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
		return "" // gone, or not ours to read: then it is not ours
	}
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if token, ok := bytes.CutPrefix(variable, []byte(tokenVariable+"=")); ok {
			return string(token)
		}
	}
	return ""
}

// vanished reports whether an error of a file below /proc/PID, or of a cgroup, means that it has gone.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.ENODEV)
}
