package host

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A group is the directory of a cgroup that holds this process, our own or one above it.
type group struct {
	dir         string
	v2          bool
	controllers []string // of version 1; version 2 has them all, as far as their files are there
}

// groups returns the cgroups of this process with all that can be seen above them, in all hierarchies (cgroups(7)). In a
// container the mount shows only a part of a hierarchy: where /proc/self/cgroup names a path outside of it, the mount's
// own root is the nearest that can be seen.
func (r Reader) groups() ([]group, error) {
	ours, err := r.read("/proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without cgroups limits nothing
	}
	mounts, err2 := r.read("/proc/self/mountinfo")
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	var all []group
	for line := range strings.Lines(ours) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy, controllers, path
		if len(parts) < 3 {
			continue
		}
		controllers := strings.Split(parts[1], ",")
		for mount := range strings.Lines(mounts) {
			all = append(all, groupsOf(mount, controllers, parts[2])...)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("none is mounted, so that a limit cannot be seen")
	}
	return all, nil
}

// groupsOf returns the directories of a cgroup in one line of mountinfo, empty when that mounts something else. Such a
// line is, proc(5):
//
//	35 31 0:32 /docker/1f3a /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
func groupsOf(mount string, controllers []string, name string) (all []group) {
	left, right, ok := strings.Cut(mount, " - ")
	before, after := strings.Fields(left), strings.Fields(right)
	if !ok || len(before) < 5 || len(after) < 3 {
		return nil
	}
	v2 := controllers[0] == ""
	switch kind := after[0]; {
	case kind == "cgroup2" && v2:
	case kind == "cgroup" && !v2 && slices.ContainsFunc(strings.Split(after[2], ","), func(option string) bool {
		return slices.Contains(controllers, option)
	}):
	default:
		return nil
	}
	root, point := unescape(before[3]), unescape(before[4])
	for dir := path.Join(point, below(name, root)); ; dir = path.Dir(dir) {
		all = append(all, group{dir, v2, controllers})
		if dir == point || dir == "/" {
			return all
		}
	}
}

// below returns the part of a cgroup's path that lies below the root of a mount.
func below(name, root string) string {
	name, root = path.Clean("/"+name), path.Clean("/"+root)
	rest, ok := strings.CutPrefix(name, strings.TrimSuffix(root, "/"))
	if !ok || rest != "" && rest[0] != '/' {
		return "/"
	}
	return rest
}

// unescape undoes the octal escapes of mountinfo.
func unescape(text string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(text)
}

// has reports whether a controller may have files in the group.
func (g group) has(controller string) bool { return g.v2 || slices.Contains(g.controllers, controller) }

// cpuLimit returns the tightest share of CPU time, in CPUs, and the file that sets it, which is empty when none does.
func (r Reader) cpuLimit(groups []group) (limit float64, at string, _ error) {
	var errs []error
	for _, g := range groups {
		if !g.has("cpu") {
			continue
		}
		share, file, err := r.cpuShare(g)
		if err != nil {
			errs = append(errs, err)
		}
		if share > 0 && (at == "" || share < limit) {
			limit, at = share, file
		}
	}
	return limit, at, errors.Join(errs...)
}

// cpuShare reads the limit of one cgroup; 0 means that it sets none.
func (r Reader) cpuShare(g group) (share float64, file string, err error) {
	file = path.Join(g.dir, "cpu.max")
	text, err := r.read(file) // such as "400000 100000" or "max 100000"
	if !g.v2 {
		file = path.Join(g.dir, "cpu.cfs_quota_us") // -1 means none
		quota, err1 := r.read(file)
		period, err2 := r.read(path.Join(g.dir, "cpu.cfs_period_us"))
		text, err = quota+" "+period, errors.Join(err1, err2)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return 0, "", nil // the root has no limit, nor has a cgroup without this controller
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
	return 0, "", fmt.Errorf("%s: %q is no quota and period", file, strings.TrimSpace(text))
}

// memoryLimit returns the tightest limit of memory in bytes, the file that sets it, empty when none does, and the least
// room that is left in any cgroup. A limit of more than the machine has is none: version 1 writes a huge number for it.
func (r Reader) memoryLimit(groups []group, total int64) (limit int64, at string, room int64, _ error) {
	var errs []error
	for _, g := range groups {
		if !g.has("memory") {
			continue
		}
		most, used, file, err := r.memoryOf(g)
		if err != nil {
			errs = append(errs, err)
		}
		if file == "" || total > 0 && most >= total {
			continue
		}
		left := max(0, most-used)
		if at == "" || left < room {
			room = left
		}
		if at == "" || most < limit {
			limit, at = most, file
		}
	}
	return limit, at, room, errors.Join(errs...)
}

// memoryOf reads the limit and the use of one cgroup; an empty file means that it sets none. File pages that have not
// been used lately are not counted: the kernel drops them before it refuses memory, and the kubelet counts so too.
func (r Reader) memoryOf(g group) (most, used int64, file string, err error) {
	names := struct{ most, used, inactive string }{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}
	if g.v2 {
		names = struct{ most, used, inactive string }{"memory.max", "memory.current", "inactive_file "}
	}
	file = path.Join(g.dir, names.most)
	text, err := r.read(file)
	if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(text) == "max" {
		return 0, 0, "", nil
	}
	if err == nil {
		most, err = bytesIn(text)
	}
	if err != nil {
		return 0, 0, "", fmt.Errorf("%s: %w", file, err)
	}
	text, err = r.read(path.Join(g.dir, names.used))
	if err == nil {
		used, err = bytesIn(text)
	}
	stat, err2 := r.read(path.Join(g.dir, "memory.stat"))
	inactive, ok := value(stat, names.inactive)
	if ok {
		n, err3 := bytesIn(inactive)
		used, err2 = used-n, errors.Join(err2, err3)
	}
	if err := errors.Join(err, err2); err != nil {
		return most, max(0, used), file, fmt.Errorf("%s: %w", g.dir, err)
	}
	return most, max(0, used), file, nil
}

func bytesIn(text string) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err == nil && n < 0 {
		err = fmt.Errorf("%d bytes", n)
	}
	return n, err
}
