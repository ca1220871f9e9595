package proc

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
)

// home is the registry of this process. There is only one, because it depends on properties of the whole process:
// which orphans become our children, and who may wait for which child.
var home = registry{newGroup: newCgroup, held: heldPidfds}

// A registry holds every tree that this process has started and that has not ended. It also holds what the last scan
// found on the machine.
type registry struct {
	newGroup func(token string) (cgroup, error) // newCgroup, except in tests
	held     func() (map[int]bool, error)       // heldPidfds, except in tests

	mu         sync.Mutex
	trees      []*Process   // trees that have begun and not ended, in the order of their start
	marks      map[int]mark // what the last scan found, by PID
	pidfds     bool         // whether os/exec holds pidfds of its children on this machine
	stopReaper func()       // nil while there are no trees

	watchdog watchdog // its own lock must be taken before mu
}

// A mark is what scans have found out about one process.
type mark struct {
	startTime uint64   // tells the process from a later one with the same PID
	owner     *Process // the tree that the process belongs to; nil means none of ours
}

// begin registers a tree that has no process yet. It makes the cgroup of the tree and tells the watchdog the token. If
// we are killed during the fork, the watchdog finds the new processes by the cgroup or the token.
func (h *registry) begin(p *Process) {
	_ = becomeSubreaper()                  // if it fails, the other marks must find orphans
	group, _ := h.newGroup(p.record.Token) // without a cgroup, the other marks must find the processes
	h.mu.Lock()
	p.record.Cgroup = string(group)
	h.trees = append(h.trees, p)
	if h.stopReaper == nil {
		h.stopReaper = h.startReaper()
	}
	h.mu.Unlock()
	h.watchdog.keep(p.record)
}

// born completes the record of a tree, once its leader exists.
func (h *registry) born(p *Process, leader stat) {
	held, err := h.held()
	h.mu.Lock()
	defer h.mu.Unlock()
	p.record.PID, p.record.StartTime = leader.pid, leader.startTime
	if err == nil && held[leader.pid] {
		h.pidfds = true
	}
}

// end removes an ended tree from the registry. When no tree is left, the scans stop.
func (h *registry) end(p *Process) {
	h.mu.Lock()
	h.trees = slices.DeleteFunc(h.trees, func(other *Process) bool { return other == p })
	stop := func() {}
	if len(h.trees) == 0 {
		stop, h.stopReaper, h.marks = h.stopReaper, nil, nil
	}
	h.mu.Unlock()
	stop() // stop is called without the lock, because a running scan needs the lock
}

// dropGroup removes the cgroup of a tree that could not use it.
func (h *registry) dropGroup(p *Process) {
	h.mu.Lock()
	group := p.record.group()
	p.record.Cgroup = ""
	h.mu.Unlock()
	_ = group.remove() // a cgroup that cannot be removed is empty and harmless
}

// records returns the records of all trees.
func (h *registry) records() []Record {
	h.mu.Lock()
	defer h.mu.Unlock()
	var records []Record
	for _, p := range h.trees {
		records = append(records, p.record)
	}
	return records
}

// state scans /proc and returns the processes of one tree.
func (h *registry) state(p *Process) (treeState, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all, err := h.scan()
	if err != nil {
		return treeState{}, err
	}
	var f treeState
	for pid, m := range h.marks {
		switch s := all[pid]; {
		case m.owner != p:
		case s.dead():
			f.dead = append(f.dead, s)
		case ownUser(pid):
			f.living = append(f.living, s)
		}
	}
	sortByPID(f.living)
	return f, nil
}

func sortByPID(processes []stat) {
	slices.SortFunc(processes, func(a, b stat) int { return cmp.Compare(a.pid, b.pid) })
}

// scan reads /proc, finds the tree of each process, and reaps dead processes that we adopted. The caller holds the
// lock.
func (h *registry) scan() (map[int]stat, error) {
	all, err := processes()
	if err != nil {
		return nil, fmt.Errorf("list the processes of the servers: %w", err)
	}
	sc := scan{
		home: h, self: os.Getpid(), all: all, marks: make(map[int]mark, len(all)), grouped: map[int]*Process{},
		held: sync.OnceValues(h.held), // reads the pidfds after /proc, and only when needed
	}
	for _, p := range h.trees {
		pids, _ := p.record.group().pids() // if the cgroup cannot be read, the other marks decide
		for _, pid := range pids {
			sc.grouped[pid] = p
		}
	}
	for pid := range all {
		sc.owner(pid, len(all))
	}
	h.marks = sc.marks
	sc.reap()
	return all, nil
}

// A scan is one reading of /proc, with the owners found so far.
type scan struct {
	home    *registry
	self    int
	all     map[int]stat
	marks   map[int]mark
	grouped map[int]*Process             // trees by the PIDs in their cgroups
	held    func() (map[int]bool, error) // returns the processes whose pidfds we hold
}

// owner returns the tree of a process, or nil if the process belongs to none of our trees. If the owner is not certain
// yet, known is false. The search follows at most depth parents: /proc is not read in one instant, so reused PIDs could
// form a circle.
func (sc *scan) owner(pid, depth int) (owner *Process, known bool) {
	s, ok := sc.all[pid]
	if !ok || depth == 0 {
		return nil, false // a later scan knows more
	}
	if m, ok := sc.marks[pid]; ok {
		return m.owner, true
	}
	if owner, known = sc.find(s, depth); known {
		sc.marks[pid] = mark{s.startTime, owner}
	}
	return owner, known
}

// find tries the marks of a process, the most reliable first. The result of an earlier scan comes before the marks that
// a process can lose. So a process that changes its session or environment, or whose parent dies, keeps its owner.
func (sc *scan) find(s stat, depth int) (owner *Process, known bool) {
	if p := sc.ownerBySession(s); p != nil {
		return p, true
	}
	if m, ok := sc.home.marks[s.pid]; ok && m.startTime == s.startTime {
		return m.owner, true
	}
	if p := sc.grouped[s.pid]; p != nil {
		return p, true
	}
	if p := sc.ownerByToken(s); p != nil {
		return p, true
	}
	switch s.parent {
	case 0: // the first process, kernel threads, and processes that entered our PID namespace from outside (kubectl exec)
		return nil, true
	case sc.self:
		return sc.ownerByAdoption(s)
	default:
		return sc.owner(s.parent, depth-1)
	}
}

// ownerBySession finds the tree of a process by its session. The kernel reuses a session ID only when no process is
// left in the session, so a living leader with another start time shows that the session is new.
func (sc *scan) ownerBySession(s stat) *Process {
	for _, p := range sc.home.trees {
		if s.session != p.record.PID || s.session == 0 {
			continue
		}
		if leader, ok := sc.all[s.session]; !ok || leader.startTime == p.record.StartTime {
			return p
		}
	}
	return nil
}

func (sc *scan) ownerByToken(s stat) *Process {
	token := tokenOf(s.pid)
	for _, p := range sc.home.trees {
		if p.record.Token == token {
			return p
		}
	}
	return nil
}
