package proc

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
)

// home is the household of this process. There is one, because what it rests on belongs to the process as a whole: whose
// children orphans become, and who may wait for which child.
var home = household{newGroup: newCgroup, held: heldPidfds}

// A household is every tree that this process has started and not ended, with what is known of the machine's processes.
type household struct {
	newGroup func(token string) (cgroup, error) // newCgroup; tests do without
	held     func() (map[int]bool, error)       // heldPidfds; tests do without

	mu       sync.Mutex
	trees    []*Process   // begun and not released, in the order of their start
	marks    map[int]mark // what the last look found, by process number
	pidfds   bool         // os/exec was seen to hold a pidfd of its child
	obstacle error        // why the last tree has no cgroup
	reaper   *reaper      // runs while there are trees

	dog watchdog // takes its own lock before ours
}

// A mark is what is known of one process.
type mark struct {
	startTime uint64   // tells the process from a later one with the same number
	owner     *Process // whose tree it came of; nil: of none of ours
}

// begin takes a tree in before it has a process: it gets its cgroup, and the watchdog its token. If we are killed while
// we fork, what was born is found by these.
func (h *household) begin(p *Process) {
	_ = becomeSubreaper() // without it orphans are known by their other marks
	group, err := h.newGroup(p.record.Token)
	h.mu.Lock()
	p.record.Cgroup, h.obstacle = string(group), err
	h.trees = append(h.trees, p)
	if h.reaper == nil {
		h.reaper = startReaper(h)
	}
	h.mu.Unlock()
	h.dog.keep(p.record)
}

// born completes the tree's record: its leader lives.
func (h *household) born(p *Process, leader stat) {
	held, err := h.held()
	h.mu.Lock()
	defer h.mu.Unlock()
	p.record.PID, p.record.StartTime = leader.pid, leader.startTime
	if err == nil && held[leader.pid] {
		h.pidfds = true
	}
}

// end forgets a tree that is gone, and ends the reaper with the last one.
func (h *household) end(p *Process) {
	h.mu.Lock()
	h.trees = slices.DeleteFunc(h.trees, func(other *Process) bool { return other == p })
	var idle *reaper
	if len(h.trees) == 0 {
		idle, h.reaper, h.marks = h.reaper, nil, nil
	}
	h.mu.Unlock()
	if idle != nil {
		idle.stop()
	}
}

// dropGroup lets a tree go on without its cgroup, for a reason.
func (h *household) dropGroup(p *Process, reason error) {
	h.mu.Lock()
	group := p.record.group()
	p.record.Cgroup, h.obstacle = "", reason
	h.mu.Unlock()
	h.removeGroup(group)
}

// removeGroup removes the cgroup of a tree that is gone. One that stays is empty and harmless, so its reason is for
// doctor alone.
func (h *household) removeGroup(group cgroup) {
	if err := group.remove(); err != nil {
		h.mu.Lock()
		h.obstacle = err
		h.mu.Unlock()
	}
}

// records are those of all trees.
func (h *household) records() []Record {
	h.mu.Lock()
	defer h.mu.Unlock()
	var records []Record
	for _, p := range h.trees {
		records = append(records, p.record)
	}
	return records
}

// family looks and returns what is there of one tree.
func (h *household) family(p *Process) (family, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all, err := h.look()
	if err != nil {
		return family{}, err
	}
	var f family
	for pid, m := range h.marks {
		switch s := all[pid]; {
		case m.owner != p:
		case s.dead():
			f.dead = append(f.dead, s)
		case ownUser(pid):
			f.living = append(f.living, s)
		}
	}
	sortByNumber(f.living)
	return f, nil
}

func sortByNumber(processes []stat) {
	slices.SortFunc(processes, func(a, b stat) int { return cmp.Compare(a.pid, b.pid) })
}

// look reads /proc, finds the tree that each process came of, and reaps the adopted dead. The caller holds the lock.
func (h *household) look() (map[int]stat, error) {
	all, err := processes()
	if err != nil {
		return nil, fmt.Errorf("look for the processes of our servers: %w", err)
	}
	l := look{
		home: h, self: os.Getpid(), all: all, marks: make(map[int]mark, len(all)), grouped: map[int]*Process{},
		held: sync.OnceValues(h.held), // after all was read, and only if it is needed
	}
	for _, p := range h.trees {
		pids, _ := p.record.group().pids() // what a cgroup cannot tell, the other marks must
		for _, pid := range pids {
			l.grouped[pid] = p
		}
	}
	for pid := range all {
		l.owner(pid, len(all))
	}
	h.marks = l.marks
	l.reap()
	return all, nil
}

// A look is one reading of /proc while it is understood.
type look struct {
	home    *household
	self    int
	all     map[int]stat
	marks   map[int]mark
	grouped map[int]*Process             // by cgroup
	held    func() (map[int]bool, error) // the processes of which we hold a pidfd
}

// owner returns whose tree a process came of, nil for none of ours, and whether that is known. It follows the parents for
// depth steps: /proc is not read in one instant, and numbers that changed hands meanwhile could lead in a circle.
func (l *look) owner(pid, depth int) (owner *Process, known bool) {
	s, ok := l.all[pid]
	if !ok || depth == 0 {
		return nil, false // a later look knows more
	}
	if m, ok := l.marks[pid]; ok {
		return m.owner, true
	}
	if owner, known = l.find(s, depth); known {
		l.marks[pid] = mark{s.startTime, owner}
	}
	return owner, known
}

// find applies the marks of a process, the surest first. What an earlier look found comes before what can be shed: a
// process that changes its session or environment stays whose it was, and so does one whose parent has died.
func (l *look) find(s stat, depth int) (owner *Process, known bool) {
	if p := l.bySession(s); p != nil {
		return p, true
	}
	if m, ok := l.home.marks[s.pid]; ok && m.startTime == s.startTime {
		return m.owner, true
	}
	if p := l.grouped[s.pid]; p != nil {
		return p, true
	}
	if p := l.byToken(s); p != nil {
		return p, true
	}
	switch s.parent {
	case 0: // the first process, the kernel's threads, and who entered our PID namespace from outside, as kubectl exec does
		return nil, true
	case l.self:
		return l.byAdoption(s)
	default:
		return l.owner(s.parent, depth-1)
	}
}

// bySession finds the tree whose session a process is in. The kernel gives a session's number away again only when no
// process has it, so a living leader with another start time means a new session.
func (l *look) bySession(s stat) *Process {
	for _, p := range l.home.trees {
		if s.session != p.record.PID || s.session == 0 {
			continue
		}
		if leader, ok := l.all[s.session]; !ok || leader.startTime == p.record.StartTime {
			return p
		}
	}
	return nil
}

func (l *look) byToken(s stat) *Process {
	token := tokenOf(s.pid)
	for _, p := range l.home.trees {
		if p.record.Token == token {
			return p
		}
	}
	return nil
}
