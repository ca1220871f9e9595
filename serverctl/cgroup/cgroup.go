// Package cgroup finds the cgroups that this process is in, of version 1 and 2, and reads their limits and counters.
// It never changes a cgroup.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
)

// A Group is a cgroup that this process is in, or an ancestor of such a cgroup.
type Group struct {
	Dir string // such as /sys/fs/cgroup/user.slice

	root        fs.FS
	v2          bool
	controllers []string // controllers of a group of version 1; a group of version 2 may have the files of any controller
}

// A membership is one line of /proc/self/cgroup, such as "4:cpu,cpuacct:/docker/1f3a" or "0::/user.slice" (cgroups(7)).
type membership struct {
	v2          bool
	controllers []string
	path        string
}

// Groups returns the cgroups of this process and every visible group above them, in all hierarchies. A group comes
// before its parent. In a container only part of a hierarchy is mounted. If our path is outside that part, the root of
// the mount is the nearest visible group. Groups reads the directories proc and sys below root; nil means "/". On a
// kernel without cgroups the result is empty.
func Groups(root fs.FS) ([]Group, error) {
	if root == nil {
		root = os.DirFS("/")
	}
	memberships, err := readMemberships(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	mounts, err2 := readMounts(root)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	var groups []Group
	for _, m := range memberships {
		for _, mount := range mounts {
			if !m.mountedBy(mount) {
				continue
			}
			for dir := path.Join(mount.Mountpoint, pathBelow(m.path, mount.Root)); ; dir = path.Dir(dir) {
				groups = append(groups, Group{dir, root, m.v2, m.controllers})
				if dir == mount.Mountpoint || dir == "/" {
					break
				}
			}
		}
	}
	if len(groups) == 0 {
		return nil, errors.New("no cgroup is mounted, so its limits cannot be read")
	}
	return groups, nil
}

// OwnV2 returns the directory of this process's cgroup of version 2. Unlike Groups, OwnV2 never returns a group above
// that cgroup.
func OwnV2(root fs.FS) (dir string, err error) {
	if root == nil {
		root = os.DirFS("/")
	}
	memberships, err := readMemberships(root)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(memberships, func(m membership) bool { return m.v2 })
	if i < 0 {
		return "", errors.New("this process is in no cgroup v2")
	}
	own := memberships[i]
	if own.path == "/.." || strings.HasPrefix(own.path, "/../") {
		return "", fmt.Errorf("the cgroup v2 of this process, %s, is outside its cgroup namespace", own.path)
	}
	mounts, err := readMounts(root)
	if err != nil {
		return "", err
	}
	for _, mount := range mounts {
		if !own.mountedBy(mount) {
			continue
		}
		if within, err := filepath.Rel(mount.Root, own.path); err == nil && filepath.IsLocal(within) {
			return filepath.Join(mount.Mountpoint, within), nil
		}
	}
	return "", fmt.Errorf("the cgroup v2 of this process, %s, is not mounted", own.path)
}

func readMemberships(root fs.FS) (all []membership, err error) {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // hierarchy, controllers, path
		if len(fields) == 3 {
			all = append(all, membership{fields[1] == "", strings.Split(fields[1], ","), fields[2]})
		}
	}
	return all, nil
}

// readMounts returns the mounts of cgroups. It parses line by line, so one strange line does not hide the others.
func readMounts(root fs.FS) (all []*mountinfo.Info, err error) {
	text, err := fs.ReadFile(root, "proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(line), mountinfo.FSTypeFilter("cgroup", "cgroup2"))
		if err == nil {
			all = append(all, mounts...)
		}
	}
	return all, nil
}

// mountedBy reports whether the mount shows the membership's hierarchy.
func (m membership) mountedBy(mount *mountinfo.Info) bool {
	if m.v2 || mount.FSType == "cgroup2" {
		return m.v2 && mount.FSType == "cgroup2"
	}
	return slices.ContainsFunc(strings.Split(mount.VFSOptions, ","), func(option string) bool {
		return slices.Contains(m.controllers, option)
	})
}

// pathBelow returns the part of a cgroup's path that lies below the root of a mount.
func pathBelow(name, root string) string {
	name, root = path.Clean("/"+name), path.Clean("/"+root)
	rest, ok := strings.CutPrefix(name, strings.TrimSuffix(root, "/"))
	if !ok || rest != "" && rest[0] != '/' {
		return "/"
	}
	return rest
}

func (g Group) has(controller string) bool { return g.v2 || slices.Contains(g.controllers, controller) }

// read returns the text of one of the group's files.
func (g Group) read(name string) (text, file string, err error) {
	file = path.Join(g.Dir, name)
	b, err := fs.ReadFile(g.root, strings.TrimPrefix(file, "/"))
	return string(b), file, err
}

// CPULimit returns how many CPUs the group may use on average, and the file that limits it. 0 CPUs mean that there is
// no limit.
func (g Group) CPULimit() (cpus float64, file string, err error) {
	if !g.has("cpu") {
		return 0, "", nil
	}
	var text string
	if g.v2 {
		text, file, err = g.read("cpu.max") // such as "400000 100000" or "max 100000"
	} else {
		period, _, err1 := g.read("cpu.cfs_period_us")
		text, file, err = g.read("cpu.cfs_quota_us") // -1 means no limit
		text, err = text+" "+period, errors.Join(err, err1)
	}
	if errors.Is(err, fs.ErrNotExist) { // the root group and groups without this controller do not have the file
		return 0, "", nil
	}
	if err != nil {
		return 0, "", err
	}
	fields := strings.Fields(text)
	if len(fields) > 0 && (fields[0] == "max" || fields[0] == "-1") {
		return 0, "", nil
	}
	if len(fields) == 2 {
		quota, err1 := strconv.ParseFloat(fields[0], 64)
		period, err2 := strconv.ParseFloat(fields[1], 64)
		if err1 == nil && err2 == nil && quota > 0 && period > 0 {
			return quota / period, file, nil
		}
	}
	return 0, "", fmt.Errorf("%s: %q is not a quota and a period", file, strings.TrimSpace(text))
}

// MemoryLimit returns the group's limit and use of memory in bytes, and the file that sets the limit. An empty file
// name means no limit. Inactive file pages do not count as used: the kernel drops them before it refuses memory. The
// kubelet also leaves them out.
func (g Group) MemoryLimit() (limit, used int64, file string, err error) {
	if !g.has("memory") {
		return 0, 0, "", nil
	}
	limitFile, usedFile, inactiveKey := "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
	if g.v2 {
		limitFile, usedFile, inactiveKey = "memory.max", "memory.current", "inactive_file"
	}
	text, file, err := g.read(limitFile)
	if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(text) == "max" {
		return 0, 0, "", nil
	}
	if err == nil {
		limit, err = parseBytes(text)
	}
	if err != nil {
		return 0, 0, "", fmt.Errorf("%s: %w", file, err)
	}
	text, _, err = g.read(usedFile)
	if err == nil {
		used, err = parseBytes(text)
	}
	inactive, _, err2 := g.counter("memory.stat", inactiveKey)
	used = max(0, used-inactive)
	if err := errors.Join(err, err2); err != nil {
		return limit, used, file, fmt.Errorf("%s: %w", g.Dir, err)
	}
	return limit, used, file, nil
}

// OOMKills returns how many of the group's processes the kernel killed for lack of memory, and the file that counts
// them. A counter of version 2 includes the groups below; a counter of version 1 does not. An empty file name means
// that no file counts them.
func (g Group) OOMKills() (n int64, file string, err error) {
	if !g.has("memory") {
		return 0, "", nil
	}
	name := "memory.events"
	if !g.v2 {
		name = "memory.oom_control"
	}
	n, file, err = g.counter(name, "oom_kill")
	if errors.Is(err, fs.ErrNotExist) {
		return 0, "", nil
	}
	return n, file, err
}

// Throttled returns for how long CPU limits have stopped this process so far. The result is the longest time that the
// process's cgroup or a group above it has counted. It is 0 if no cgroup counts this time.
func Throttled(root fs.FS) (longest time.Duration) {
	groups, err := Groups(root)
	if err != nil {
		return 0
	}
	for _, g := range groups {
		if !g.has("cpu") {
			continue
		}
		key, unit := "throttled_usec", time.Microsecond
		if !g.v2 {
			key, unit = "throttled_time", time.Nanosecond
		}
		if n, _, err := g.counter("cpu.stat", key); err == nil {
			longest = max(longest, time.Duration(n)*unit)
		}
	}
	return longest
}

// counter returns the number that follows a key in one of the group's files. In the line "oom_kill 3", the key is
// oom_kill and the number is 3. If no line begins with the key, the returned file name is empty.
func (g Group) counter(name, key string) (n int64, file string, err error) {
	text, file, err := g.read(name)
	if err != nil {
		return 0, "", err
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, key+" "); ok {
			n, err := parseBytes(rest)
			return n, file, err
		}
	}
	return 0, "", nil
}

// parseBytes reads a number of bytes, or another count that cannot be negative.
func parseBytes(text string) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err == nil && n < 0 {
		err = fmt.Errorf("%d is negative", n)
	}
	return n, err
}
