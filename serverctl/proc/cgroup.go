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
	"syscall"
	"time"

	cgroups "vllmtuner/serverctl/cgroup"
)

// The name of a tree's cgroup is cgroupPrefix followed by the tree's token.
const cgroupPrefix = "tuner-"

// groupLimit is how long we try to remove a cgroup. The kernel may refuse for a moment after the last process has died.
const groupLimit = time.Second

// A cgroup is the directory of a cgroup v2 that holds one tree (Documentation/admin-guide/cgroup-v2.rst of Linux). A
// process that a member forks is in the cgroup too, whatever its session, environment and parents. The empty string
// means that there is none.
type cgroup string

// CgroupSupport returns why servers have no cgroup of their own; nil means that we can make one. In most containers and
// on many desktops we may not write to cgroups, which is normal.
func CgroupSupport() error {
	r, err := newRecord()
	if err != nil {
		return err
	}
	group, err := home.newGroup(r.Token)
	return errors.Join(err, group.remove())
}

// newCgroup makes a cgroup below our own cgroup, named after the token.
func newCgroup(token string) (cgroup, error) {
	own, err := cgroups.OwnV2(nil)
	if err != nil {
		return "", fmt.Errorf("find the cgroup of the tuner: %w", err)
	}
	group := cgroup(filepath.Join(own, cgroupPrefix+token))
	if err := os.Mkdir(string(group), 0o755); err != nil {
		return "", fmt.Errorf("make a cgroup for the server: %w", err)
	}
	kind, err := os.ReadFile(group.file("cgroup.type"))
	if text := strings.TrimSpace(string(kind)); err == nil && text != "domain" {
		err = fmt.Errorf("a cgroup in %s is of the type %q, which holds no processes", own, text)
	}
	if err != nil {
		return "", errors.Join(err, group.remove())
	}
	return group, nil
}

func (c cgroup) file(name string) string { return filepath.Join(string(c), name) }

// directories returns the directories of the group and of the groups below it, parents first. It returns none if the
// group does not exist.
func (c cgroup) directories() ([]string, error) {
	if c == "" {
		return nil, nil
	}
	var found []string
	err := filepath.WalkDir(string(c), func(path string, entry fs.DirEntry, err error) error {
		if vanished(err) {
			return nil
		}
		if err == nil && entry.IsDir() {
			found = append(found, path)
		}
		return err
	})
	return found, err
}

// pids returns the processes in the group and in the groups below it, without zombies.
func (c cgroup) pids() ([]int, error) {
	directories, err := c.directories()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, directory := range directories {
		text, err := os.ReadFile(filepath.Join(directory, "cgroup.procs"))
		if vanished(err) || errors.Is(err, syscall.EOPNOTSUPP) { // EOPNOTSUPP: a threaded group; the file of its domain lists the processes
			continue
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil {
				return nil, fmt.Errorf("read cgroup.procs of %s: %w", directory, err)
			}
			pids = append(pids, pid) // a process outside our PID namespace has the PID 0 here, which matches no process
		}
	}
	return pids, nil
}

// kill sends SIGKILL to every process in the group and in the groups below it, even while they fork (Linux 5.14).
func (c cgroup) kill() error {
	if c == "" {
		return nil
	}
	f, err := os.OpenFile(c.file("cgroup.kill"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}

// remove removes the group and the groups below it. These groups must hold no process. It is no error if the group does
// not exist.
func (c cgroup) remove() error {
	for deadline := time.Now().Add(groupLimit); ; time.Sleep(pollEvery) {
		err := c.removeOnce()
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove the server's cgroup %s: %w", c, err)
		}
	}
}

func (c cgroup) removeOnce() error {
	directories, err := c.directories()
	if err != nil {
		return err
	}
	for _, directory := range slices.Backward(directories) {
		// os.Remove would remove files too, if this were not a cgroup.
		if err := syscall.Rmdir(directory); err != nil && !vanished(err) {
			return err
		}
	}
	return nil
}
