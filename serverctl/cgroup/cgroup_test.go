package cgroup

import (
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

func TestOwnV2IsWhereOurCgroupIsMounted(t *testing.T) {
	const (
		pure   = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
		hybrid = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
		part    = "41 31 0:38 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
		strange = `41 31 0:38 / /mnt/my\040groups rw - cgroup2 cgroup2 rw` + "\n"
		old     = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	)
	for _, row := range []struct {
		name, membership, mounts, want, bad string
	}{
		{"a container in its own cgroup namespace", "0::/\n", pure, "/sys/fs/cgroup", ""},
		{"a desktop", "0::/user.slice/a.scope\n", pure, "/sys/fs/cgroup/user.slice/a.scope", ""},
		{"versions 1 and 2 side by side", "4:memory:/x\n0::/y\n", hybrid, "/sys/fs/cgroup/unified/y", ""},
		{"a part of the hierarchy is mounted", "0::/kubepods/pod1/c\n", part, "/sys/fs/cgroup/c", ""},
		{"a mount point with a space", "0::/a\n", strange, "/mnt/my groups/a", ""},
		{"our part is not mounted", "0::/kubepods/pod10\n", part, "", "is not mounted"},
		{"version 1 only", "4:memory:/x\n", old, "", "no cgroup v2"},
		{"version 2 without a mount", "0::/x\n", old, "", "is not mounted"},
		{"a process outside its namespace", "0::/../x\n", pure, "", "outside its cgroup namespace"},
		{"empty", "", "", "", "no cgroup v2"},
	} {
		got, err := OwnV2(fstest.MapFS{"proc/self/cgroup": {Data: []byte(row.membership)}, "proc/self/mountinfo": {Data: []byte(row.mounts)}})
		if got != row.want || (err != nil) != (row.bad != "") || err != nil && !strings.Contains(err.Error(), row.bad) {
			t.Errorf("%s: OwnV2 = %q, %v; want %q, error %q", row.name, got, err, row.want, row.bad)
		}
	}
}

func TestBelow(t *testing.T) {
	for _, row := range []struct{ name, path, root, want string }{
		{"the whole hierarchy is mounted", "/user.slice/a.scope", "/", "/user.slice/a.scope"},
		{"just our group is mounted", "/docker/1f", "/docker/1f", ""},
		{"a group above ours is mounted", "/pods/p/c", "/pods/p", "/c"},
		{"another group with a like name is mounted", "/pods/p10", "/pods/p1", "/"},
		{"our group is outside of a namespace", "/../../other", "/", "/other"},
		{"the root", "/", "/", "/"},
	} {
		if got := pathBelow(row.path, row.root); got != row.want {
			t.Errorf("%s: pathBelow(%q, %q) = %q, want %q", row.name, row.path, row.root, got, row.want)
		}
	}
}

func TestThrottled(t *testing.T) {
	const stat = "usage_usec 10\nnr_periods 3\nnr_throttled 2\nthrottled_usec "
	v2 := map[string]string{"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": "30 25 0:26 / /groups rw - cgroup2 cgroup2 rw\n"}
	v1 := map[string]string{"proc/self/cgroup": "4:cpu,cpuacct:/a\n", "proc/self/mountinfo": "30 25 0:26 / /groups/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"}
	for _, row := range []struct {
		name  string
		proc  map[string]string
		stats map[string]string
		want  time.Duration
	}{
		{"our own group was stopped longest", v2, map[string]string{"groups/a/b/cpu.stat": stat + "2500\n", "groups/a/cpu.stat": stat + "100\n"}, 2500 * time.Microsecond},
		{"the group above ours was stopped longest", v2, map[string]string{"groups/a/b/cpu.stat": stat + "0\n", "groups/a/cpu.stat": stat + "100\n"}, 100 * time.Microsecond},
		{"version 1 counts nanoseconds", v1, map[string]string{"groups/cpu/a/cpu.stat": "nr_periods 3\nthrottled_time 7000\n"}, 7 * time.Microsecond},
		{"nothing counts", v2, nil, 0},
		{"a kernel without cgroups", nil, nil, 0},
	} {
		root := fstest.MapFS{}
		for _, files := range []map[string]string{row.proc, row.stats} {
			for name, text := range files {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
		}
		if got := Throttled(root); got != row.want {
			t.Errorf("%s: Throttled = %s, want %s", row.name, got, row.want)
		}
	}
}
