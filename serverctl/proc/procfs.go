package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A stat is the part of /proc/PID/stat that we use (proc(5)).
type stat struct {
	pid       int
	state     byte
	parent    int
	session   int
	threads   int
	startTime uint64 // clock ticks since boot
}

// dead reports whether the process has ended and waits to be reaped. If only the main thread of a process has ended,
// the kernel shows the process as a zombie too, but it is alive.
func (s stat) dead() bool {
	return s.state == 'X' || s.state == 'x' || s.state == 'Z' && s.threads <= 1
}

func procPath(pid int, file string) string { return filepath.Join("/proc", strconv.Itoa(pid), file) }

// processes returns every process of our PID namespace by its PID. A process that ends during the call may be missing.
func processes() (map[int]stat, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Close()); err != nil {
		return nil, err
	}
	all := make(map[int]stat, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue // not a PID, so the directory describes no process
		}
		s, err := readStat(pid)
		if vanished(err) || errors.Is(err, fs.ErrPermission) { // hidepid (proc(5)) hides other users' processes
			continue
		}
		if err != nil {
			return nil, err
		}
		all[pid] = s
	}
	return all, nil
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile(procPath(pid, "stat"))
	if err != nil {
		return stat{}, err
	}
	s, err := parseStat(string(b))
	if err != nil {
		return stat{}, fmt.Errorf("read %s: %w", procPath(pid, "stat"), err)
	}
	return s, nil
}

// parseStat parses a line of /proc/PID/stat. The second field is the command in parentheses; the command itself may
// have spaces and parentheses. The fields after the command are the state and numbers.
func parseStat(line string) (stat, error) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return stat{}, fmt.Errorf("no command in %q", line)
	}
	fields := strings.Fields(line[end+1:])
	const needed = 20 // fields 3 to 22 of the line
	if len(fields) < needed || len(fields[0]) != 1 {
		return stat{}, fmt.Errorf("only %d fields after the command in %q", len(fields), line)
	}
	pid, err1 := strconv.Atoi(strings.TrimSpace(line[:open]))
	parent, err2 := strconv.Atoi(fields[1])
	session, err3 := strconv.Atoi(fields[3])
	threads, err4 := strconv.Atoi(fields[17])
	startTime, err5 := strconv.ParseUint(fields[19], 10, 64)
	s := stat{pid: pid, state: fields[0][0], parent: parent, session: session, threads: threads, startTime: startTime}
	return s, errors.Join(err1, err2, err3, err4, err5)
}

// Listens reports whether members of the tree, and no others, listen on a TCP port of the loopback address. At least
// one socket must listen, and members must hold every such socket. A foreign process that shares the port
// (SO_REUSEPORT) would answer some of the requests.
func (p *Process) Listens(port int) (bool, error) {
	wanted := map[string]bool{}
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile("/proc/self/net/" + table)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return false, fmt.Errorf("find the listener of port %d: %w", port, err)
		}
		for _, inode := range listeners(string(b), port) {
			wanted["socket:["+inode+"]"] = true
		}
	}
	if len(wanted) == 0 {
		return false, nil
	}
	members, err := p.Members()
	if err != nil {
		return false, err
	}
	for _, pid := range members {
		if err := dropHeld(wanted, pid); err != nil {
			return false, fmt.Errorf("find the listener of port %d: %w", port, err)
		}
	}
	return len(wanted) == 0, nil
}

// listeners returns the inodes of the sockets that listen on a port. It parses the text of /proc/net/tcp or
// /proc/net/tcp6. Each line has these fields: slot, local address:port in hex, remote, state (0A is LISTEN), queues,
// timer, retransmits, user, timeout, inode.
func listeners(table string, port int) []string {
	suffix := fmt.Sprintf(":%04X", port)
	var inodes []string
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) <= 9 || fields[3] != "0A" {
			continue
		}
		address, ok := strings.CutSuffix(fields[1], suffix)
		if ok && slices.Contains(reachable, address) {
			inodes = append(inodes, fields[9])
		}
	}
	return inodes
}

// reachable lists the local addresses that receive connections to 127.0.0.1, in hex as the kernel writes them. Each
// 32-bit word of an address has the byte order of the machine, which is little-endian wherever vLLM runs.
var reachable = []string{
	"0100007F", "00000000", // 127.0.0.1 and 0.0.0.0 (any address)
	"00000000000000000000000000000000", "0000000000000000FFFF00000100007F", // :: and ::ffff:127.0.0.1
}

// dropHeld removes from the map those sockets that the process holds open.
func dropHeld(sockets map[string]bool, pid int) error {
	fds, err := os.ReadDir(procPath(pid, "fd"))
	if vanished(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, fd := range fds {
		target, err := os.Readlink(procPath(pid, "fd/"+fd.Name()))
		if err != nil && !vanished(err) {
			return err
		}
		delete(sockets, target)
	}
	return nil
}
