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
	PID       int    `json:"pid"`        // of the leader, which is also the number of its session
	StartTime uint64 `json:"start_time"` // of the leader, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5))
	BootID    string `json:"boot_id"`    // /proc/sys/kernel/random/boot_id
	Token     string `json:"token"`      // in the environment of everything that came of the leader
	// PIDNamespace is that of the owner, such as "pid:[4026531836]": process numbers mean something within it only.
	// A restarted container has the boot id of the one before, and other numbers.
	PIDNamespace string `json:"pid_namespace,omitempty"`
	Cgroup       string `json:"cgroup,omitempty"` // directory of the tree's cgroup v2; empty means it has none
}

// newRecord identifies a tree that is yet to be started.
func newRecord() (Record, error) {
	token := make([]byte, 16)
	rand.Read(token) // never fails: crypto/rand ends the program rather than return an error
	r := Record{Token: hex.EncodeToString(token)}
	var err error
	r.BootID, r.PIDNamespace, err = here()
	return r, err
}

// Reclaim kills what is left of a recorded tree whose owner has died, removes its cgroup, and returns the numbers of what
// it killed. It keeps to what can be proved without having seen the tree grow: the token; the cgroup, whose name carries
// the token; and the session, as long as its leader is dead or is the recorded one. So a process that merely got a
// recycled number is left alone, and so are other users' processes; a daemon that has left its session, cleared its
// environment and is in no cgroup of ours is found by Stop alone, and without a cgroup a tree that goes on forking faster
// than /proc can be read may escape. After a reboot nothing is left, and nothing is done. It
// returns an error when a process survives SIGKILL for ten seconds.
func Reclaim(r Record) (killed []int, err error) {
	if r.PID <= 0 {
		return nil, fmt.Errorf("reclaim a server: its record names no process (pid %d)", r.PID)
	}
	return r.reclaim()
}

// reclaim is Reclaim for a record that may lack the leader's number.
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
		r.PID = 0 // the token and the cgroup mean the same everywhere
	}
	killed, err = killAll(r.PID, r.group(), r.family)
	_ = r.group().remove() // it stays when it is not ours to remove, or not empty, which err says
	return killed, err
}

// group is the recorded cgroup, if its name carries the token: then it is nobody else's.
func (r Record) group() cgroup {
	if filepath.Base(r.Cgroup) != cgroupPrefix+r.Token {
		return ""
	}
	return cgroup(r.Cgroup)
}

// Members are the living processes that Reclaim would kill, in ascending order.
func (r Record) Members() ([]int, error) {
	f, err := r.family()
	return numbers(f.living), err
}

// family returns what is there of the tree. Of the dead only those in the session can be told.
func (r Record) family() (family, error) {
	all, err := processes()
	if err != nil {
		return family{}, fmt.Errorf("look for processes of server %d: %w", r.PID, err)
	}
	grouped := map[int]bool{}
	pids, _ := r.group().pids() // what a cgroup cannot tell, the token must
	for _, pid := range pids {
		grouped[pid] = true
	}
	leader, lives := all[r.PID]
	session := r.PID > 0 && (!lives || leader.startTime == r.StartTime) // its number still means the recorded session
	var f family
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
	sortByNumber(f.living)
	return f, nil
}

// here identifies the time since the last boot and our PID namespace: process numbers and start times mean something
// within both only. It is an error when /proc shows another namespace: its numbers would be other processes to us.
func here() (bootID, namespace string, err error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", "", fmt.Errorf("read the boot id: %w", err)
	}
	namespace, _ = os.Readlink("/proc/self/ns/pid") // a kernel without namespaces has one, and no name for it
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return "", "", fmt.Errorf("read our number: %w", err)
	}
	if self != strconv.Itoa(os.Getpid()) {
		return "", "", fmt.Errorf("/proc says we are process %s, but we are %d: it belongs to another PID namespace; "+
			"mount our own there: mount -t proc proc /proc", self, os.Getpid())
	}
	return strings.TrimSpace(string(b)), namespace, nil
}

// ownUser reports whether the process was started by the user that this process runs as: only then is it killed. The
// owner of /proc/PID would not tell: it is root for a process that may not be dumped (proc(5)).
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
		return "" // gone, or closed to us: then it is not ours
	}
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if token, ok := bytes.CutPrefix(variable, []byte(tokenVariable+"=")); ok {
			return string(token)
		}
	}
	return ""
}

// vanished reports whether an error of a file below /proc/PID, or of a cgroup, means that it has gone in the meantime.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.ENODEV)
}
